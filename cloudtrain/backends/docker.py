"""Run docker commands on this machine's engine."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from cloudtrain.errors import BackendError

PROGRAM = "docker"
ASK_S = 120.0  # time limit of one command; a busy engine removes large containers slowly
INSTALL = "install Docker (Debian: docker.io) and start its engine"


class EngineError(BackendError):
    """A Docker command failed, or Docker is not installed."""


def call(*arguments: str, text: str | None = None) -> str:
    """Run a docker command and return its stdout; blocking. Raises EngineError.

    Args:
        arguments: The words behind `docker`.
        text: What the command reads from its standard input, such as a password.
    """
    stdin = {"input": text} if text is not None else {"stdin": subprocess.DEVNULL}
    try:
        done = subprocess.run(
            [PROGRAM, *arguments], capture_output=True, text=True, timeout=ASK_S, check=False, **stdin
        )
    except FileNotFoundError:
        raise _missing() from None
    except subprocess.TimeoutExpired:
        raise EngineError(f"docker {arguments[0]} has not answered for {ASK_S:.0f} s") from None
    if done.returncode == 0:
        return str(done.stdout)
    raise _explain(arguments[0], done.stderr.strip() or done.stdout.strip() or str(done.returncode))


def stream(*arguments: str, report: Callable[[str], None]) -> str:
    """Run a long docker command and return its output; `report` gets each line. Blocking. Raises EngineError."""
    lines = []
    try:
        with subprocess.Popen(
            [PROGRAM, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            for line in process.stdout or ():
                lines.append(line.rstrip())
                report(lines[-1])
    except FileNotFoundError:
        raise _missing() from None
    if process.returncode:
        raise _explain(arguments[0], "\n".join(lines).strip() or str(process.returncode))
    return "\n".join(lines)


def _missing() -> EngineError:
    return EngineError("Docker is not installed on this machine", INSTALL)


def _explain(command: str, output: str) -> EngineError:
    message = output.splitlines()[-1]
    if "daemon" in message and ("connect" in message or "running" in message):
        return EngineError("Docker's engine does not answer", f"start it: {INSTALL}")
    if "permission denied" in message:
        return EngineError("this user may not use Docker's engine", "add the user to the group docker")
    return EngineError(f"docker {command} failed: {message.removeprefix('Error response from daemon: ')}")
