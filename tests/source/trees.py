"""Small source trees for tests: files written from a mapping, and real git repositories around them."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

_WHO = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "protocol.file.allow=always")


def write(root: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write files below a folder and return it; a name that ends in / makes a folder."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir(exist_ok=True)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
    root.mkdir(parents=True, exist_ok=True)
    return root


def tick(root: Path) -> None:
    """Wait until the file system's clock has moved on from every change below a folder (some milliseconds)."""
    last = max(path.lstat().st_ctime_ns for path in (root, *root.rglob("*")))
    probe = root.parent / f".{root.name}.tick"
    deadline = time.monotonic() + 60
    while True:
        probe.write_text("")
        if probe.stat().st_ctime_ns > last:
            break
        assert time.monotonic() < deadline
    probe.unlink()


def git(root: Path, *arguments: str) -> str:
    """Run git without this machine's configuration, and return what it printed."""
    env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(["git", *_WHO, *arguments], cwd=root, env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode("utf-8", "surrogateescape")


def repository(root: Path, files: Mapping[str, str | bytes] | None = None, *, commit: bool = True) -> Path:
    """Make a repository that holds these files, committed or new."""
    write(root, files or {})
    git(root, "init", "-q", "-b", "main")
    if commit:
        save(root)
    return root


def save(root: Path, message: str = "work") -> str:
    """Commit everything, and return the commit."""
    git(root, "add", "-A")
    git(root, "commit", "-q", "--allow-empty", "-m", message)
    return git(root, "rev-parse", "HEAD").strip()
