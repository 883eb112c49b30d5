"""Runs of 53b05dd that are live during an upgrade: there each run has a watcher process, which knows of no other one.

OLD has the modules of 53b05dd with which a job is submitted to `local` and watched:
git archive 53b05dd $(tar tf OLD | grep -v '/$') | xz -9e > OLD
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import tarfile
from pathlib import Path

import pytest

from tests.conftest import WAIT_S, wait_for
from tests.runs.test_watch_all import Shell, shell, submit, watched_by, watchers  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("census")
OLD = Path(__file__).parent / "cloudtrain_53b05dd.tar.xz"
SCRIPT = """
import pathlib, sys, time
number = 0
while not pathlib.Path(sys.argv[1]).exists():
    print("line", number, flush=True)
    print('::cloudtrain::{"kind":"metric","step":%d,"loss":1.0}' % number, flush=True)
    number += 1
    time.sleep(0.05)
"""


def test_a_run_is_watched_through_an_upgrade_and_taken_over_when_its_old_watcher_dies(
    shell: Shell,  # noqa: F811
    home: Path,
    tmp_path: Path,
) -> None:
    old, gate = tmp_path / "old", tmp_path / "gate"
    with tarfile.open(OLD) as archive:
        archive.extractall(old, filter="data")
    (tmp_path / "project" / "gated.py").write_text(SCRIPT)

    def steps() -> list[int]:
        rows = shell("metrics", run_id, "--name", "loss", "--json").splitlines()
        return [json.loads(row)["step"] for row in rows]

    def goes_on() -> None:
        known = len(steps())
        wait_for(lambda: len(steps()) > known, "further metrics in the history")

    run_id = submit(shell, gate, PYTHONPATH=str(old))
    first = wait_for(lambda: watched_by(home, run_id), "its watcher")
    assert f"cloudtrain.watch\0{run_id}".encode() in Path(f"/proc/{first}/cmdline").read_bytes()
    counted = "SELECT count(*) >= ? FROM metrics"
    with sqlite3.connect(home / "history.sqlite3", timeout=WAIT_S) as history:
        wait_for(lambda: history.execute("SELECT count(cursor) FROM attempts").fetchone() == (1,), "its first lines")
        for least in (1, 40):  # by then it has imported what it needs for metrics, and reads them again and again
            wait_for(lambda least=least: history.execute(counted, (least,)).fetchone() == (1,), "its metrics")
    shutil.rmtree(old)  # pip replaces the package under a process that lives
    another = submit(shell, gate)
    newer = wait_for(lambda: watched_by(home, another), "the watcher of today")
    goes_on()
    assert watched_by(home, run_id) == first, "it goes on with the history of today"
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: watched_by(home, run_id) == newer, "the watcher of today")
    goes_on()
    assert watchers(home) == [newer]
    gate.touch()
    shell("wait", run_id, another)
    lines = shell("logs", run_id).splitlines()
    assert lines == [f"line {number}" for number in range(len(lines))]
    assert steps() == list(range(len(lines))), "none is lost, and none is there twice"
