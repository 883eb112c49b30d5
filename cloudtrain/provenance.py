"""Where a run came from: its commit, the patch of a dirty tree, the machine that submitted it.

    <home>/bundles/<sha256>.<commit>.patch     what a tree had changed when it was packaged, JSON

The patch covers tracked files that are packaged. Each of them is searched for credentials as it is and as it was, with
the guard's own rules, and left out whole where one is found: a secret that was removed is a secret still.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain import git, guard
from cloudtrain.errors import BadSource
from cloudtrain.writing import new_file

if TYPE_CHECKING:
    from cloudtrain.bundle import Bundle
    from cloudtrain.job import Job

MAX_BYTES = 256 << 10  # of a patch that is kept
MAX_TRAVELLING = 32 << 10  # of one that travels with every attempt
MAX_FILES = 500  # their names go to git as arguments
_WHOLE = 16 << 20  # of the changed files, as they are and as they were, that are searched
_DIFF = (
    "git", "--literal-pathspecs", "-c", "core.fsmonitor=false", "-c", "core.quotePath=true", "diff", "HEAD", "--relative",
    "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/",
)  # fmt: skip
_FILE = re.compile(rb"^diff --git ", re.MULTILINE)
_MARGIN = re.compile(rb"^[-+ ]", re.MULTILINE)


@dataclass(frozen=True)
class Patch:
    """What a tree changed since its commit; `left_out` says in sentences what of it is not here, and why."""

    text: str = ""
    left_out: tuple[str, ...] = ()


def keep(bundle: Bundle, secrets: Collection[str] = ()) -> None:
    """Keep the patch of a bundle that was just packaged beside it, once; nothing for a clean tree. Blocking.

    `secrets` are values that it must not hold either. Raises StoreError when the folder cannot be written.
    """
    if not (bundle.commit and bundle.dirty) or (path := _path(bundle)).exists():
        return
    patch = changes(Path(bundle.source), {file.path for file in bundle.files}, secrets)
    with new_file(path) as stream:
        stream.write(json.dumps(asdict(patch)).encode())


def of(bundle: Bundle) -> dict[str, Any]:
    """Return what is kept of a run's origin, as JSON: its source, its commit and patch, this machine."""
    from cloudtrain import __version__

    system = os.uname()
    return {
        "source": bundle.source,
        "bundle": bundle.sha256,
        "source_sha256": bundle.source_sha256,
        "commit": bundle.commit,
        "dirty": bundle.dirty,
        **asdict(_kept(bundle)),
        "client": {
            "host": system.nodename,
            "system": f"{system.sysname} {system.release} {system.machine}",
            "python": sys.version.split()[0],
            "cloudtrain": __version__,
        },
    }


def about(backend: str, job: Job, bundle: Bundle) -> dict[str, Any]:
    """Return what travels with an attempt for those who attach to its run, as JSON; `patch` where it is short."""
    patch = _kept(bundle)
    travels = len(patch.text) <= MAX_TRAVELLING
    left_out = [*patch.left_out, *([] if travels else [f"the patch: it is longer than {MAX_TRAVELLING >> 10} KiB"])]
    return {
        "backend": backend,
        "job": job.to_dict(),
        "bundle": bundle.to_dict(),
        **({"patch": patch.text} if patch.text and travels else {}),
        **({"left_out": left_out} if left_out else {}),
    }


def changes(root: Path, packaged: Collection[str], secrets: Collection[str] = ()) -> Patch:
    """Return what the working tree at `root` changed in its packaged files since its commit; blocking."""
    try:
        names = _names(_git(root, ("--name-only", "-z")))
        if len(chosen := [name for name in names if name in packaged]) > MAX_FILES:
            return Patch("", (f"{len(chosen)} files are changed: the patch of {MAX_FILES} at most is kept",))
        clean, left_out = _searched(root, chosen, secrets)
        return _fitting(clean, _pieces(root, clean, "-U3"), left_out) if clean else Patch("", tuple(left_out))
    except (BadSource, _NoPatch) as error:
        return Patch("", (f"git gave no patch: {error}",))


class _NoPatch(Exception):
    """Git gave no patch, or one that is not understood."""


def _searched(root: Path, names: Sequence[str], secrets: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the names of the files that hold no credentials, before and after, and a sentence for each other."""
    clean, left_out = [], []
    hidden = [value.encode() for value in secrets if len(value) >= 4]
    # With all of its context a patch holds the whole file: what makes a key a key may stand far from the change.
    for name, piece in zip(names, _pieces(root, names, "-U1000000"), strict=True):
        found = guard.search(_MARGIN.sub(b" ", piece))
        if kind := guard.suspicious_name(name):
            left_out.append(f"{name}: a file of this name holds a credential ({kind})")
        elif found:
            left_out.append(f"{name}: it holds what looks like a credential ({found[0][1]})")
        elif any(value in piece for value in hidden):
            left_out.append(f"{name}: it holds the value of a secret")
        elif b"\0" in piece:
            left_out.append(f"{name}: it is no text")
        else:
            clean.append(name)
    return clean, left_out


def _fitting(names: Sequence[str], pieces: Sequence[bytes], left_out: list[str]) -> Patch:
    """Return the patch of the files that fit into MAX_BYTES."""
    text, size = [], 0
    for name, piece in zip(names, pieces, strict=True):
        if size + len(piece) > MAX_BYTES:
            left_out.append(f"{name}: the patch would be longer than {MAX_BYTES >> 10} KiB")
            continue
        size += len(piece)
        text.append(piece)
    return Patch(b"".join(text).decode("utf-8", "surrogateescape"), tuple(left_out))


def _pieces(root: Path, names: Sequence[str], context: str) -> list[bytes]:
    """Return the patch of every named file."""
    if not names:
        return []
    whole = _git(root, (context, "--", *names))
    starts = [match.start() for match in _FILE.finditer(whole)]
    if len(starts) != len(names) or whole[: starts[0]].strip():
        raise _NoPatch("its files cannot be told apart")
    return [whole[start:end] for start, end in zip(starts, [*starts[1:], len(whole)], strict=True)]


def _names(listed: bytes) -> list[str]:
    return [name.decode("utf-8", "surrogateescape") for name in listed.split(b"\0") if name]


def _git(root: Path, arguments: Sequence[str]) -> bytes:
    """Return what git says, at most _WHOLE bytes; raises _NoPatch."""
    command = [*_DIFF, *arguments]
    try:
        process = subprocess.Popen(
            command, cwd=root, env=git.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError as error:
        raise _NoPatch(str(error.strerror)) from None
    with process:
        assert process.stdout is not None
        said = process.stdout.read(_WHOLE + 1)
        if len(said) > _WHOLE:
            process.kill()
            raise _NoPatch(f"the changed files have more than {_WHOLE >> 20} MiB")
    if process.returncode:
        raise _NoPatch(f"git diff ended with {process.returncode}")
    return said


def _kept(bundle: Bundle) -> Patch:
    if not (bundle.commit and bundle.dirty):
        return Patch()
    try:
        data = json.loads(_path(bundle).read_bytes())
        return Patch(str(data["text"]), tuple(data["left_out"]))
    except (OSError, ValueError, KeyError):
        return Patch("", ("nothing was kept when it was packaged",))


def _path(bundle: Bundle) -> Path:
    return bundle.path.with_name(f"{bundle.sha256}.{str(bundle.commit)[:16]}.patch")
