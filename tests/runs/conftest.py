"""A submitter over a backend that starts nothing, and a job for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from cloudtrain.backends import registry
from cloudtrain.cli.view import follow
from cloudtrain.clock import SYSTEM
from cloudtrain.job.job import Job
from cloudtrain.nodes.process import Process, start_time
from cloudtrain.runs.sending import retry
from cloudtrain.runs.submit import Submitter
from cloudtrain.testing.clock import VirtualClock
from cloudtrain.testing.memory import MemoryBackend
from tests.runs.platform import Platform


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "BUILT_IN", dict(registry.BUILT_IN))  # other tests in this process do not know it
    MemoryBackend.install()


@pytest.fixture
def quick_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is room: histories write thousands of small files, and wait for each on a disk."""
    memory = Path("/dev/shm")
    roomy = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 1 << 30
    folder = Path(tempfile.mkdtemp(dir=memory if roomy else tmp_path))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "my source"
    folder.mkdir()
    (folder / "train.py").write_text("print(1)\n")
    return folder


@pytest.fixture
def job(source: Path) -> Job:
    return Job.from_dict({"name": "mine", "source": str(source), "entrypoint": "train.py"})


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(SYSTEM.now())


@pytest.fixture
def submitter(clock: VirtualClock) -> Submitter:
    return Submitter("memory", watch=False, clock=clock)


@pytest.fixture
def dead() -> Process:
    """A process that has died: the owner of what a killed submit left behind."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = replace(Process.here(), pid=child.pid, started=start_time(child.pid))
    child.kill()
    child.wait()
    return process


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "BUILT_IN", dict(registry.BUILT_IN))
    monkeypatch.setattr(Platform, "attempts", {})
    monkeypatch.setattr(Platform, "fails", {})
    monkeypatch.setattr(Platform, "calls", [])
    monkeypatch.setattr(Platform, "after_commit", False)
    monkeypatch.setattr(retry, "OUTAGE_S", 0.0)
    monkeypatch.setattr("cloudtrain.runs.sending.handover.start", lambda *_, **__: None)
    monkeypatch.setattr(follow, "cancel", partial(follow.cancel, wait_s=0.2))  # 10 s for whoever waits for an answer
    Platform.install()
    return Platform
