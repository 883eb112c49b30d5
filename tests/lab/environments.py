"""Environments of packages that cannot be installed beside this project's own; each is made once, below $XDG_CACHE_HOME."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

MAKE_S = 900


def folder_of(name: str, packages: Sequence[str]) -> Path:
    """Return where the environment of these packages is, or will be."""
    digest = hashlib.sha256(" ".join(packages).encode()).hexdigest()[:8]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "cloudtrain-tests"
    return cache / f"{name}-py{sys.version_info[0]}{sys.version_info[1]}-{digest}"


def make_environment(name: str, packages: Sequence[str]) -> Path:
    """Return the interpreter of an environment with these packages; blocking, pip installs them where they are missing."""
    folder = folder_of(name, packages)
    ready = folder / "COMPLETE"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            pip = [folder / "bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            subprocess.run([*pip, *packages], check=True, timeout=MAKE_S)
            ready.touch()
    return folder / "bin/python"
