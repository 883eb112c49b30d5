"""Small and read-only disks: mounts that only root makes; fails in CI, which names `mount` in CLOUDTRAIN_REQUIRE."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[Path]:
    """Mount something at a folder, which is made, until the end of the block; skips the test where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", *arguments, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        assert "mount" not in os.environ.get("CLOUDTRAIN_REQUIRE", "").split(","), done.stderr
        pytest.skip(f"only root mounts a disk: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Make a folder a disk of a few megabytes."""
    with mounted(folder, "-t", "tmpfs", "-o", f"size={size}", "none"):
        yield folder


@contextmanager
def read_only(folder: Path, at: Path) -> Iterator[Path]:
    """Show a folder at another place, where nothing can be written, by root neither."""
    with mounted(at, "--bind", str(folder)):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(at)], check=True)
        yield at
