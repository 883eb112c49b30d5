"""Commands that read a run start another watcher where its own has ended, hangs or is not up yet."""

from __future__ import annotations

import os
import signal
import sqlite3
from pathlib import Path

from cloudtrain.nodes.process import Process
from tests.conftest import WAIT_S, wait_for


def test_a_watcher_that_was_started_but_is_not_up_yet_is_given_time(shell, project, home, tmp_path, census):
    """On a busy machine every reader would start another one, which makes it busier."""
    run_id = shell("submit", "train.py", "--json", "--", "--gate", tmp_path / "gate").json["run_id"]
    starting = home / "watch.starting"
    wait_for(lambda: watched_by(home, run_id) and not starting.exists(), "a watcher that is up")
    kill_watchers(home)
    starting.touch()
    for _ in range(3):
        assert shell("show", run_id, "--json").json["state"] in ("QUEUED", "PENDING", "RUNNING")
    assert watchers(home) == []
    os.utime(starting, (0, 0))  # it has never come up
    shell("show", run_id)
    second = wait_for(lambda: not starting.exists() and watched_by(home, run_id), "another watcher")
    with sqlite3.connect(home / "history.sqlite3", timeout=WAIT_S) as history:
        history.execute("BEGIN IMMEDIATE")  # it is stopped outside its own transactions: they would lock us out
        os.kill(second, signal.SIGSTOP)
        history.execute("UPDATE leases SET expires_at = 0")
        history.execute("UPDATE watchers SET expires_at = 0")
    shell("show", run_id)
    wait_for(lambda: watched_by(home, run_id) not in (None, second), "one instead of that which hangs")
    os.kill(second, signal.SIGCONT)
    wait_for(lambda: second not in watchers(home), "the end of that which hung")
    (tmp_path / "gate").touch()
    assert shell("wait", run_id, "--json").json["state"] == "SUCCEEDED"


def watchers(home: Path) -> list[int]:
    """Return the processes that watch all runs of a home."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"cloudtrain.runs.watching.watch_all" in words and str(home).encode() in words:
            found.append(int(entry.parent.name))
    return found


def watched_by(home: Path, run_id: str) -> int | None:
    """Return the process that holds a run's lease, if it is a watcher."""
    with sqlite3.connect(home / "history.sqlite3", timeout=WAIT_S) as history:
        row = history.execute("SELECT owner FROM leases WHERE run_id = ?", (run_id,)).fetchone()
    owner = Process.parse(row[0]) if row else None
    return owner.pid if owner and owner.pid in watchers(home) else None


def kill_watchers(home: Path) -> None:
    for pid in watchers(home):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not watchers(home), "the watcher's end")
