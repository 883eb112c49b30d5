"""Where a run came from: the patch of a dirty tree, kept beside its bundle, and what of it travels with an attempt.

The patch covers what is packaged: tracked files that have changed, and untracked ones, which it makes anew. Each of them
is searched for credentials as it is and as it was, with the guard's own rules, and left out whole where one is found: a
secret that was removed is a secret still.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import BadSource
from cloudtrain.job.homes import new_file
from cloudtrain.job.targets import HOME_LABEL
from cloudtrain.source import git
from cloudtrain.source import secrets as secret_guard
from cloudtrain.source.bundle import Patch

if TYPE_CHECKING:
    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle

MAX_BYTES = 256 << 10  # of a patch that is kept
MAX_TRAVELLING = 32 << 10  # of one that travels with every attempt
MAX_FILES = 500  # their names go to git as arguments; of untracked ones that are read
MAX_NAMED = 20  # of those that are left out for one reason
_WHOLE = 16 << 20  # of the changed files, as they are and as they were, that are searched
_DIFF = (
    "git", "--literal-pathspecs", "-c", "core.fsmonitor=false", "-c", "core.quotePath=true", "diff", "HEAD", "--relative",
    "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/",
)  # fmt: skip
_FILE = re.compile(rb"^diff --git ", re.MULTILINE)
_MARGIN = re.compile(rb"^[-+ ]", re.MULTILINE)


def keep(bundle: Bundle, secrets: Collection[str] = ()) -> None:
    """Keep the patch of a bundle that was just packaged beside it, once; nothing for a clean tree. Blocking.

    `secrets` are values that it must not hold either, in any form. Raises StoreError when the folder cannot be written.
    """
    if not (bundle.commit and bundle.dirty) or (path := bundle.patch_file).exists():
        return
    patch = changes(Path(bundle.source), {file.path for file in bundle.files}, secrets)
    with new_file(path) as stream:
        stream.write(json.dumps(asdict(patch)).encode())


def about(backend: str, job: Job, bundle: Bundle) -> dict[str, Any]:
    """Return what travels with an attempt for those who attach to its run, as JSON; `patch` where it is short."""
    patch = bundle.patch
    travels = len(patch.text) <= MAX_TRAVELLING
    left_out = [*patch.left_out, *([] if travels else [f"the patch: it is longer than {MAX_TRAVELLING >> 10} KiB"])]
    return {
        "backend": backend,
        # The label of a home is no part of it: two machines send the same request for the same key.
        "job": {**job.to_dict(), "labels": {name: text for name, text in job.labels.items() if name != HOME_LABEL}},
        "bundle": bundle.to_dict(),
        **({"patch": patch.text} if patch.text and travels else {}),
        **({"left_out": left_out} if left_out else {}),
    }


def changes(root: Path, packaged: Collection[str], secrets: Collection[str] = ()) -> Patch:
    """Return what the working tree at `root` changed in its packaged files since its commit; blocking."""
    from cloudtrain.source.node_code import module

    try:
        names = _names(_git(root, ("--name-only", "-z")))
        if len(chosen := [name for name in names if name in packaged]) > MAX_FILES:
            return Patch("", (f"{len(chosen)} files are changed: the patch of {MAX_FILES} at most is kept",))
        values: set[bytes] = set().union(*map(module("launcher.masks").forms, secrets))
        clean, left_out = _searched(root, chosen, values)
        left_out += _bounded([sentence for name in names if (sentence := _elsewhere(root, name, packaged))], "changes")
        patch = _fitting(clean, _pieces(root, clean, "-U3"), left_out) if clean else Patch("", tuple(left_out))
        listing = git.listing(root)
        untracked = sorted(set(packaged) - set(listing.tracked)) if listing else []
        return _with_new(patch, root, untracked, values)
    except (BadSource, _NoPatch) as error:
        return Patch("", (f"git gave no patch: {error}",))


def _elsewhere(root: Path, name: str, packaged: Collection[str]) -> str:
    """Return what is not kept of a change to what is no packaged file: a submodule, a file that is gone."""
    if name in packaged:
        return ""
    if not os.path.lexists(root / name):
        return f"{name}: the removal of this file"
    inside = (root / name).is_dir() and any(path.startswith(f"{name}/") for path in packaged)
    return f"{name}: changes in a submodule" if inside else ""


def _bounded(sentences: list[str], noun: str, more: int = 0) -> list[str]:
    """Return the first MAX_NAMED sentences, and how many others there are."""
    more += len(sentences[MAX_NAMED:])
    return [*sentences[:MAX_NAMED], *([f"and {more} more {noun}"] if more else [])]


class _NoPatch(Exception):
    """Git gave no patch, or one that is not understood."""


def _searched(root: Path, names: Sequence[str], values: Collection[bytes]) -> tuple[list[str], list[str]]:
    """Return the names of the files that hold no credentials, before and after, and a sentence for each other."""
    clean, left_out = [], []
    # With all of its context a patch holds the whole file: what makes a key a key may stand far from the change.
    for name, piece in zip(names, _pieces(root, names, "-U1000000"), strict=True):
        if problem := _problem(name, piece, _MARGIN.sub(b" ", piece), values):
            left_out.append(f"{name}: {problem}")
        else:
            clean.append(name)
    return clean, left_out


def _problem(name: str, data: bytes, plain: bytes, values: Collection[bytes]) -> str:
    """Return why a file is left out, given its patch and the same without its margin, or an empty string."""
    if kind := secret_guard.suspicious_name(name):
        return f"a file with this name usually contains a credential ({kind})"
    if matches := secret_guard.search(plain):
        return f"it seems to contain a credential ({matches[0][1]})"
    if any(value in plain for value in values):
        return "it contains the value of a secret"
    return "it is not text" if b"\0" in data else ""


def _with_new(patch: Patch, root: Path, names: Sequence[str], values: Collection[bytes]) -> Patch:
    """Return a patch that makes untracked files too, as far as MAX_BYTES has room for them."""
    text = [patch.text]
    room = MAX_BYTES - len(patch.text.encode("utf-8", "surrogateescape"))
    left_out = []
    for name in names[:MAX_FILES]:
        try:
            mode, data = _content(root / name, room)
        except OSError as error:
            left_out.append(f"{name}: git does not track it, and it cannot be read: {error.strerror}")
            continue
        piece = _new_file(name, mode, data)
        if problem := _problem(name, data, data, values):
            left_out.append(f"{name}: git does not track it, and {problem}")
        elif len(piece) > room:
            left_out.append(f"{name}: git does not track it, and the patch would be longer than {MAX_BYTES >> 10} KiB")
        else:
            room -= len(piece)
            text.append(piece.decode("utf-8", "surrogateescape"))
    left_out = _bounded(left_out, "untracked files", len(names[MAX_FILES:]))
    return Patch("".join(text), (*patch.left_out, *left_out))


def _content(path: Path, most: int) -> tuple[str, bytes]:
    """Return a file's mode, as git writes it, and its content, of which one byte more than `most` tells enough."""
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return "120000", os.fsencode(path.readlink())
    with path.open("rb") as stream:
        return "100755" if mode & stat.S_IXUSR else "100644", stream.read(max(most, 0) + 1)


def _new_file(name: str, mode: str, data: bytes) -> bytes:
    """Return the patch, as git writes it, that makes a file."""
    old, new = _quoted(f"a/{name}"), _quoted(f"b/{name}")
    head = f"diff --git {old} {new}\nnew file mode {mode}\n".encode()
    if not data:
        return head
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    body = b"".join(b"+%b\n" % line for line in lines)
    tab = "\t" if " " in name and new[0] != '"' else ""  # where else would the name end?
    count = f",{len(lines)}" if len(lines) > 1 else ""
    head += f"--- /dev/null\n+++ {new}{tab}\n@@ -0,0 +1{count} @@\n".encode()
    return head + body + (b"" if data.endswith(b"\n") else b"\\ No newline at end of file\n")


def _quoted(name: str) -> str:
    """Return a name as git's patches have it: between quotes, with its bytes in octal, where it is not plain."""
    if name.isascii() and name.isprintable() and not {'"', "\\"} & set(name):
        return name
    raw = name.encode("utf-8", "surrogateescape")
    parts = [chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\' else f"\\{byte:03o}" for byte in raw]
    return f'"{"".join(parts)}"'


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
        raise _NoPatch("its files could not be separated")
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
        output = process.stdout.read(_WHOLE + 1)
        if len(output) > _WHOLE:
            process.kill()
            raise _NoPatch(f"the changed files have more than {_WHOLE >> 20} MiB")
    if process.returncode:
        raise _NoPatch(f"git diff ended with {process.returncode}")
    return output
