"""Check this machine for `cloudtrain doctor`: Python, git, disk, history, packages."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cloudtrain.errors import CloudtrainError, install_command
from cloudtrain.job.units import format_size

FREE_BYTES = 1 << 30


class Finding(NamedTuple):
    """The outcome of one check."""

    what: str
    ok: bool | None  # None: information, neither good nor bad
    message: str
    hint: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as `doctor --json` prints it."""
        return {"what": self.what, "ok": self.ok, "said": self.message, "hint": self.hint}


def check_machine() -> Iterator[Finding]:
    from cloudtrain.__about__ import __version__
    from cloudtrain.job import targets

    yield Finding("cloudtrain", True, f"{__version__}, in {Path(__file__).parents[2]}")
    fits = sys.version_info >= (3, 11)
    yield Finding(
        "python",
        fits,
        f"{sys.version.split()[0]}, {sys.executable}",
        "" if fits else "cloudtrain needs Python 3.11 or newer",
    )
    yield _check_git()
    home = targets.home()
    yield _check_disk(home)
    yield _check_history(home)
    for package, extra in (("torch", "train"), ("accelerate", "train"), ("transformers", "train")):
        yield _check_package(package, extra)
    gpus = sorted(path.name for path in Path("/proc/driver/nvidia/gpus").glob("*")) if sys.platform == "linux" else []
    yield Finding("accelerators", None, f"{len(gpus)} NVIDIA" if gpus else f"none; {os.cpu_count()} CPUs")


def _check_git() -> Finding:
    import subprocess

    git = shutil.which("git")
    if git is None:
        return Finding("git", False, "not found", "install git: cloudtrain uses it to decide which files to package")
    completed = subprocess.run([git, "--version"], capture_output=True, text=True, check=False, timeout=60)
    return Finding("git", completed.returncode == 0, completed.stdout.strip() or completed.stderr.strip())


def _check_disk(home: Path) -> Finding:
    parent = next((folder for folder in (home, *home.parents) if folder.exists()), Path("/"))
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        return Finding("home", False, f"{home} cannot be written", "set CLOUDTRAIN_HOME")
    free = shutil.disk_usage(parent).free
    hint = "" if free >= FREE_BYTES else "less than 1 GiB: free some space or set CLOUDTRAIN_HOME"
    return Finding("home", free >= FREE_BYTES, f"{home}, {format_size(free)} free", hint)


def _check_history(home: Path) -> Finding:
    if not (home / "history.sqlite3").exists():
        return Finding("history", None, "none yet")
    from cloudtrain.history.store import Store

    store = Store(home)
    try:
        store.check()
        count = len(store.names())
    except CloudtrainError as error:
        return Finding("history", False, error.message, error.hint)
    warnings = store.warnings
    return Finding("history", not warnings, "; ".join([f"{count} run{'s' * (count != 1)}", *warnings]))


def _check_package(package: str, extra: str) -> Finding:
    """Check the version of a package without importing it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return Finding(package, True, version(package))
    except PackageNotFoundError:
        return Finding(
            package, None, "not installed", f"{install_command(f'cloudtrain[{extra}]')} for the shared trainer on local"
        )
