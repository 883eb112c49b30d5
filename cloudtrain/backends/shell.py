"""How a program on a node of an attempt is reached: Shell, what Backend.shell returns, and a call of it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from cloudtrain.errors import BackendError

CALL_S = 120.0  # for a program that is run to its end
OWN = "cloudtrain: "  # how a line of cloudtrain.nodes.inside begins
SSH_FAILED = 255  # ssh's own exit code; a command may have the same

# (standard input or -1, standard output, standard error, terminal) -> the program's exit code; blocking
Stream = Callable[[int, int, int, bool], int]


@dataclass(frozen=True)
class Shell:
    """One of three: a command of this machine that stands for the program, a stream to it, or only an address.

    Attributes:
        argv: its standard streams and exit code are those of the program on the node.
        stream: called with descriptors, it copies them to and from the program and returns its exit code.
        host: the machine to which ssh connects for argv; "" where no connection can be lost.
        address: a page or a command of the vendor's, for a person.
        note: what must be switched on, or installed, before that works; "" for nothing.
    """

    argv: tuple[str, ...] = ()
    stream: Stream | None = None
    host: str = ""
    address: str = ""
    note: str = ""

    def explain(self, code: int) -> str:
        """Return what an exit code of argv may mean beside the program's own, "" for nothing else."""
        if code != SSH_FAILED or not self.host:
            return ""
        return (
            f"ssh exited with {code}: the connection to {self.host} was lost, or the command itself exited with {code}"
        )

    def failure(self, code: int, errors: bytes) -> str:
        """Return why a program of cloudtrain.nodes.inside has failed: its own words, which srun follows with others."""
        lines = errors.decode("utf-8", "replace").strip().splitlines()
        own = [line.removeprefix(OWN) for line in lines if line.startswith(OWN)]
        return (own or lines or [self.explain(code) or f"exit code {code}"])[-1]


class Completed(NamedTuple):
    """What a program on a node printed, and its exit code."""

    code: int
    out: bytes
    err: bytes


def program(what: str, attempt_id: str, node: int, *words: str) -> tuple[str, ...]:
    """Return the arguments of a node's Python for a program of cloudtrain.nodes.inside, which is sent as text."""
    spec = find_spec("cloudtrain.nodes.inside")
    assert spec is not None and spec.origin is not None, "it is a file of this package"
    return ("-c", Path(spec.origin).read_text("utf-8"), what, attempt_id, str(node), *words)


def call(shell: Shell, given: bytes | None = None, timeout_s: float = CALL_S) -> Completed:
    """Run a program on a node to its end; blocking. `given` is its standard input, None for none.

    Raises BackendError where it cannot be started, or does not end in time.
    """
    if shell.stream is not None:
        return _call_stream(shell.stream, given)
    if not shell.argv:
        raise BackendError("no program can be started on this node", shell.note)
    try:
        done = subprocess.run(
            shell.argv,
            input=given,
            stdin=subprocess.DEVNULL if given is None else None,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BackendError(f"{shell.argv[0]} has not ended within {timeout_s:g} s") from None
    except OSError as error:
        raise BackendError(f"{shell.argv[0]} cannot be started: {error.strerror or error}") from None
    return Completed(done.returncode if done.returncode >= 0 else 128 - done.returncode, done.stdout, done.stderr)


def _call_stream(stream: Stream, given: bytes | None) -> Completed:
    """Give a stream temporary files, of which no side waits for the other."""
    import tempfile

    with tempfile.TemporaryFile() as read, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        read.write(given or b"")
        read.flush()
        os.lseek(read.fileno(), 0, os.SEEK_SET)
        code = stream(-1 if given is None else read.fileno(), out.fileno(), err.fileno(), False)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
        return Completed(code, *texts)
