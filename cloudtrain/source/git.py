"""What git says about a directory: its files and its commit.

The list is git's own (`git ls-files -co --exclude-standard`) with this machine's configuration switched off, so that
the same working tree gives the same list everywhere. `.git/info/exclude` stays on: it belongs to the repository, what
it excludes is never part of a clone, and whoever wrote a file's name there does not want it sent.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cloudtrain.errors import BadSource

# `git rev-parse --local-env-vars`: set when we are called from a hook, they would name another repository
_LOCAL = {
    "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_COMMON_DIR", "GIT_CONFIG", "GIT_CONFIG_COUNT", "GIT_CONFIG_PARAMETERS",
    "GIT_DIR", "GIT_GRAFT_FILE", "GIT_IMPLICIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_INTERNAL_SUPER_PREFIX",
    "GIT_NAMESPACE", "GIT_NO_REPLACE_OBJECTS", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX", "GIT_REPLACE_REF_BASE",
    "GIT_SHALLOW_FILE", "GIT_WORK_TREE",
}  # fmt: skip
# The machine's configuration off. No repository is unsafe to list: listing runs nothing that its configuration names,
# once the file system monitor is off.
_LIST_ENV = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "GIT_CONFIG_NOSYSTEM": "1",
             "GIT_NO_LAZY_FETCH": "1"}  # fmt: skip
_LIST = ("git", "-c", "safe.directory=*", "-c", f"core.excludesFile={os.devnull}", "-c", "core.ignoreCase=false",
         "-c", "core.fsmonitor=false")  # fmt: skip
_GITLINK = b"160000"


@dataclass(frozen=True)
class Listing:
    """What git knows below a directory; paths are relative to it, bytes that are no UTF-8 are escaped surrogates."""

    tracked: tuple[str, ...]  # a path in conflict up to three times
    untracked: tuple[str, ...]  # not ignored
    submodules: tuple[str, ...]  # checked out, at any depth
    absent_submodules: tuple[str, ...]  # recorded, their folder is there, but nothing is checked out in it
    nested: tuple[str, ...]  # repositories that are no submodules


@dataclass(frozen=True)
class Head:
    """The commit of a working tree, None before the first; dirty when a tracked file differs from it."""

    commit: str | None
    dirty: bool


class HeadQuery:
    """Asks for the commit in a process of its own, so that it costs no time beside the listing."""

    def __init__(self, root: Path) -> None:
        self._root = root
        # With the user's configuration: core.autocrlf decides what counts as changed.
        self._process = _start(
            ["git", "-c", "core.fsmonitor=false", "status", "--porcelain=v2", "--branch", "-z", "--untracked-files=no",
             "--ignore-submodules=none", "--", "."], root,
        )  # fmt: skip

    def answer(self) -> Head:
        """Wait for git, and return what it said; a tree that it does not trust counts as dirty."""
        output, _ = self._process.communicate()
        if self._process.returncode:
            process = run([*_LIST, "rev-parse", "--verify", "--quiet", "HEAD"], self._root, _LIST_ENV)
            return Head(process.stdout.decode().strip() or None, True)
        commit, dirty = None, False
        for record in output.split(b"\0"):
            if record.startswith(b"# branch.oid "):
                name = record.removeprefix(b"# branch.oid ").decode()
                commit = None if name == "(initial)" else name
            elif record and not record.startswith(b"# "):
                dirty = True
        return Head(commit, dirty)

    def close(self) -> None:
        """End the process if its answer was not read."""
        if self._process.returncode is None:
            self._process.kill()
            self._process.communicate()


def listing(root: Path) -> Listing | None:
    """Return the files below a directory as git lists them, submodules included; None outside of any repository.

    Raises BadSource when git refuses, or is not installed.
    """
    process = run([*_LIST, "ls-files", "-t", "-s", "-c", "-o", "--exclude-standard", "-z"], root, _LIST_ENV)
    if process.returncode:
        text = process.stderr.decode(errors="replace")
        if "not a git repository (or any" in text and not os.path.lexists(root / ".git"):
            return None
        raise BadSource(f"git cannot list {root}: {last_line(text)}", f"git -C '{root}' status shows more")
    return _collect(root, process.stdout)


def ignored(root: Path, submodules: Sequence[str]) -> list[str]:
    """Return the files that git's rules ignore, in the repository and its submodules."""
    paths = []
    for prefix in ("", *(f"{name}/" for name in submodules)):
        folder = root / prefix if prefix else root
        process = run([*_LIST, "ls-files", "-o", "-i", "--exclude-standard", "-z"], folder, _LIST_ENV)
        paths += [prefix + path for path in _text(process.stdout).split("\0") if path]
    return paths


def rule(root: Path, path: str) -> str:
    """Return the rule that ignores a file, as `.gitignore:3: *.log`, or an empty string."""
    process = run([*_LIST, "check-ignore", "-v", "--no-index", "--", path], root, _LIST_ENV)
    match = re.match(r"(?>(.*?):(\d+):)(.*)\t", _text(process.stdout))
    return "{}:{}: {}".format(*match.groups()) if match else ""


def _collect(root: Path, output: bytes) -> Listing:
    tracked: list[str] = []
    untracked: list[str] = []
    submodules: list[str] = []
    absent: list[str] = []
    nested: list[str] = []
    for record in output.split(b"\0"):
        if not record:
            continue
        tag, _, rest = record.partition(b" ")
        if tag == b"?":
            path = _text(rest)
            (nested if path.endswith("/") else untracked).append(path.rstrip("/"))
            continue
        facts, _, name = rest.partition(b"\t")
        path = _text(name)
        if not facts.startswith(_GITLINK):
            tracked.append(path)
        elif (root / path / ".git").exists():
            inner = listing(root / path)
            assert inner is not None, path
            submodules.append(path)
            for ours, theirs in ((tracked, inner.tracked), (untracked, inner.untracked), (nested, inner.nested),
                                 (submodules, inner.submodules), (absent, inner.absent_submodules)):  # fmt: skip
                ours += [f"{path}/{name}" for name in theirs]
        elif (root / path).is_dir():
            absent.append(path)
    return Listing(tuple(tracked), tuple(untracked), tuple(submodules), tuple(absent), tuple(nested))


def run(command: Sequence[str], cwd: Path, extra: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run git to its end; raises BadSource when it is not installed."""
    process = _start(command, cwd, extra)
    output, errors = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def last_line(text: str) -> str:
    """Return the line of git's complaint that says most."""
    lines = [line.removeprefix("fatal: ") for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "dubious" in line or "unsafe" in line), lines[-1] if lines else "no reason")


def environment(**extra: str) -> dict[str, str]:
    """Return the environment for git: of no other repository, in English, asking nothing, writing no index."""
    kept = {name: value for name, value in os.environ.items() if name not in _LOCAL}
    return {**kept, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", **extra}


def _start(command: Sequence[str], cwd: Path, extra: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command, cwd=cwd, env=environment(**(extra or {})), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
    except FileNotFoundError as error:
        if error.filename != command[0]:
            raise
        raise BadSource(f"git is not installed, and the source {cwd} needs it", "install git") from None


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
