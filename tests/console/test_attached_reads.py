"""How often the console reads the outputs of live attached runs while a page is open."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cloudtrain.backends.attached.backend import AttachedBackend
from cloudtrain.console import runrows
from cloudtrain.history.store import Store
from cloudtrain.history.table import Query
from cloudtrain.runs.attach import attach_all
from cloudtrain.testing.clock import VirtualClock
from tests.runs.test_attach_all import name, write, write_history


def test_a_poll_reads_each_live_attached_run_as_rarely_as_a_watcher_asks(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        for make in (write, write_history):
            make(tmp_path / "runs", number, state="SUCCEEDED" if number == 0 else "RUNNING")
    attach_all(str(tmp_path / "runs"), home)
    read: list[str] = []
    attempts = AttachedBackend.attempts
    monkeypatch.setattr(AttachedBackend, "attempts", lambda self, uri: (read.append(uri), attempts(self, uri))[1])
    clock = VirtualClock(time.time())
    store = Store(home, clock)
    runrows.read(store, Query("", "", ""), 0)
    assert {Path(uri).name for uri in read} == {name(1), name(2)}
    read.clear()
    for _ in range(5):
        shown = runrows.read(store, Query("", "", ""), 0)
    assert read == [] and [line.cells[1][1] for line in shown.lines] == ["RUNNING", "RUNNING", "SUCCEEDED"]
    for make in (write, write_history):
        make(tmp_path / "runs", 2, final=True)
    clock.sleep(31)
    shown = runrows.read(store, Query("", "", ""), 0)
    assert [line.cells[1][1] for line in shown.lines] == ["SUCCEEDED", "RUNNING", "SUCCEEDED"]
