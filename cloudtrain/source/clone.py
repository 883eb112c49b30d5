"""Copies of remote repositories: `git+https://host/repo@rev#subdirectory=dir` becomes a directory and a commit.

    <cache>/<digest of the address>/<commit>/     one checkout, complete as soon as it is there, used again

A branch is asked for its commit every time; a full commit id that already exists needs no network. Whoever is asked
for credentials is git (its credential helpers, the SSH agent): an address that holds some is refused, since addresses
are stored and shown.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cloudtrain.errors import BadSource
from cloudtrain.source import git

SCHEMES = ("git+https://", "git+ssh://", "git+http://", "git+file://")
_FORM = "git+https://host/repo@rev, git+ssh://git@host/repo@rev"
_REV = re.compile(r"\w[\w./+-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_USER = re.compile(r"(https?://)[^/@\s']+@")


@dataclass(frozen=True)
class Remote:
    """A parsed address; an empty `rev` is the remote's HEAD."""

    address: str
    rev: str
    subdirectory: str

    @classmethod
    def parse(cls, url: str) -> Remote:
        """Return the parts of a `git+...` address; raises BadSource, which never repeats a password."""
        safe = hide(url)
        if not url.startswith(SCHEMES):
            raise BadSource(f"{safe} is not an address of a git repository", f"use {_FORM}")
        try:
            parts = urlsplit(url.removeprefix("git+"))
            secret = bool(parts.password or (parts.username and parts.scheme in ("http", "https")))
        except ValueError as error:
            raise BadSource(f"{safe} is not a valid address: {error}", f"use {_FORM}") from None
        if secret:
            raise BadSource(f"{safe} contains credentials, which would be stored with the run",
                            "remove them and use git's credential helper or the SSH agent")  # fmt: skip
        path, at, rev = parts.path.rpartition("@")
        if not at:
            path, rev = parts.path, ""
        if (at and not _REV.fullmatch(rev)) or path.strip("/") == "" or (parts.hostname or "").startswith("-"):
            raise BadSource(f"{safe} is not an address of a git repository", f"use {_FORM}")
        subdirectory = parts.fragment.removeprefix("subdirectory=") if parts.fragment else ""
        inside = not subdirectory.startswith("/") and ".." not in subdirectory.split("/")
        if parts.fragment and not (parts.fragment.startswith("subdirectory=") and subdirectory and inside):
            raise BadSource(f"{safe} has an unknown part after #; only #subdirectory=DIR is allowed", f"use {_FORM}")
        return cls(f"{parts.scheme}://{parts.netloc}{path}", rev, subdirectory)


def fetch_git(url: str, into: Path) -> tuple[Path, str]:
    """Return the directory of a checkout in the cache `into`, submodules included, and its full commit id.

    Blocks as long as git does; raises BadSource when git cannot get the commit.
    """
    remote = Remote.parse(url)
    folder = into / hashlib.sha256(remote.address.encode()).hexdigest()[:16]
    commit = remote.rev if _COMMIT.fullmatch(remote.rev) else _ask(remote, into)
    if commit is None or not (folder / commit).is_dir():
        commit = _check_out(remote, commit, folder)
    path = folder / commit / remote.subdirectory if remote.subdirectory else folder / commit
    if not path.is_dir():
        raise BadSource(f"{remote.address} has no folder {remote.subdirectory} at {commit[:12]}")
    return path, commit


def pin(url: str, commit: str) -> str:
    """Return the address of the same source at one commit."""
    remote = Remote.parse(url)
    return f"git+{remote.address}@{commit}" + (f"#subdirectory={remote.subdirectory}" if remote.subdirectory else "")


def hide(text: str) -> str:
    """Return a text without the user names and passwords of the addresses in it."""
    return re.sub(r"(ssh://[^/@:\s]*):[^@/\s]*@", r"\1:***@", _USER.sub(r"\1***@", text))


def _ask(remote: Remote, into: Path) -> str | None:
    """Return the commit of a branch or tag, or None for what may be an abbreviated commit."""
    into.mkdir(parents=True, exist_ok=True)
    rev = remote.rev or "HEAD"
    output = _git(["ls-remote", "--", remote.address, rev, f"{rev}^{{}}"], into, remote)
    lines = [line.split("\t", 1) for line in output.splitlines() if "\t" in line]
    commits = {name: commit for commit, name in lines}
    names = (f"refs/tags/{rev}^{{}}", f"refs/tags/{rev}", f"refs/heads/{rev}", rev)
    return next((commits[name] for name in names if name in commits), None)


def _check_out(remote: Remote, commit: str | None, folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f".{os.getpid()}-{time.perf_counter_ns():x}.tmp"
    try:
        _git(["init", "--quiet", "--template=", str(fresh)], folder, remote)
        _git(["remote", "add", "origin", remote.address], fresh, remote)
        _git(["config", "core.autocrlf", "false"], fresh, remote)  # the same bytes on every machine
        commit = _fetch(remote, commit, fresh)
        _git(["checkout", "--quiet", "--detach", commit], fresh, remote)
        if (fresh / ".gitmodules").exists():
            local = ["-c", "protocol.file.allow=always"] if remote.address.startswith("file:") else []
            _git([*local, "submodule", "--quiet", "update", "--init", "--recursive"], fresh, remote)
        try:
            fresh.rename(folder / commit)
        except OSError:
            if not (folder / commit).is_dir():  # else somebody else was faster
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return commit


def _fetch(remote: Remote, commit: str | None, fresh: Path) -> str:
    """Fetch one commit, or everything where the server does not hand out single ones; return its full id."""
    if commit is not None:
        try:
            _git(["fetch", "--quiet", "--no-tags", "--depth=1", "origin", commit], fresh, remote)
            return commit
        except BadSource:
            pass
    _git(["fetch", "--quiet", "origin", "+refs/heads/*:refs/remotes/origin/*", "+refs/tags/*:refs/tags/*"], fresh,
         remote)  # fmt: skip
    wanted = commit or remote.rev
    process = git.run(["git", "rev-parse", "--verify", "--quiet", f"{wanted}^{{commit}}"], fresh)
    if process.returncode:
        raise BadSource(
            f"{remote.address} has no branch, tag or commit {wanted}", "check the name after the last @ in source"
        )
    return process.stdout.decode().strip()


def _git(arguments: Sequence[str], cwd: Path, remote: Remote) -> str:
    ssh = os.environ.get("GIT_SSH_COMMAND", "ssh -o BatchMode=yes")  # no prompt: the process may have no terminal
    done = git.run(["git", "-c", f"core.hooksPath={os.devnull}", *arguments], cwd, {"GIT_SSH_COMMAND": ssh})
    if done.returncode:
        reason = hide(git.last_line(done.stderr.decode(errors="replace")))
        raise BadSource(f"git cannot fetch {remote.address}: {reason}", f"git ls-remote {remote.address} shows more")
    return done.stdout.decode(errors="replace")
