"""Lets the tests import the entrypoints as they import each other on a node."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "entrypoints"))


@pytest.fixture
def machine_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that gives this machine a driver's tool that lists so many GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    path = os.environ["PATH"]

    def make(count: int) -> None:
        tools = tmp_path / f"tools-{count}"
        tools.mkdir(exist_ok=True)
        cards = "".join(f"echo 'GPU {n}: NVIDIA H100 (UUID: GPU-{n:08x}-0000)'\n" for n in range(count))
        (tools / "nvidia-smi").write_text(f'#!/bin/sh\n[ "$1" = -L ] || exit 1\n{cards}')
        (tools / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tools}:{path}")

    return make
