"""One watcher for all runs of a home: the real command line, kills, hangs, upgrades, and each run's own environment."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cloudtrain.history.store import Store
from cloudtrain.nodes.process import Process
from cloudtrain.runs.sending import handover
from tests.conftest import WAIT_S, processes_of, wait_for

pytestmark = pytest.mark.usefixtures("census")
PROGRAM = [sys.executable, "-m", "cloudtrain.cli"]
ROOT = Path(__file__).parents[2]
# Ends when the test says so; says what it sees of its environment.
GATED = """
import hashlib, os, pathlib, sys, time
token = os.environ.get("TOKEN", "")
print("token", hashlib.sha256(token.encode()).hexdigest()[:8], os.environ.get("COLOUR"), flush=True)
while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)
"""
RETRY = ["--set", "retry.max_attempts=3"]
Shell = Callable[..., str]


@pytest.fixture
def shell(tmp_path: Path, home: Path) -> Shell:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "gated.py").write_text(GATED)

    def run(*words: str, **env: str) -> str:
        done = subprocess.run(
            [*PROGRAM, *words], cwd=folder, env=os.environ | env, capture_output=True, text=True, timeout=WAIT_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def submit(shell: Shell, gate: Path, *words: str, **env: str) -> str:
    return str(json.loads(shell("submit", "gated.py", *words, "--json", "--new", "--", str(gate), **env))["run_id"])


def watchers(home: Path) -> list[int]:
    return [
        int(line.partition(":")[0])
        for line in processes_of(home)
        if "runs.watching.watch_all" in line and "--worker" not in line
    ]  # fmt: skip


def watched_by(home: Path, run_id: str) -> int | None:
    """Return the process that holds a run's lease."""
    with sqlite3.connect(home / "history.sqlite3", timeout=WAIT_S) as history:
        row = history.execute("SELECT owner FROM leases WHERE run_id = ?", (run_id,)).fetchone()
    owner = Process.parse(row[0]) if row else None
    return owner.pid if owner and owner.alive else None


def tokens(shell: Shell, run_id: str) -> list[list[str]]:
    """Return what each attempt's script saw: the digest of its secret, and a variable."""
    return [line.split()[1:] for line in shell("logs", run_id).splitlines() if line.startswith("token")]


def preempt(run_id: str, home: Path, attempt: int = 1) -> None:
    status = home / "runs" / run_id / f"a{attempt}" / "node-0" / "status.json"
    os.kill(json.loads(status.read_text())["pid"], signal.SIGTERM)  # what a platform does


def test_one_process_for_all_runs_of_a_home(shell, home, tmp_path):
    gate = tmp_path / "gate"
    ids = [submit(shell, gate) for _ in range(3)]
    (pid,) = {wait_for(lambda run_id=run_id: watched_by(home, run_id), "a watcher") for run_id in ids}
    wait_for(lambda: watchers(home) == [pid], "the end of those that found it there")
    other = tmp_path / "other"
    run_id = submit(shell, gate, CLOUDTRAIN_HOME=str(other))
    assert wait_for(lambda: watched_by(other, run_id), "its watcher") != pid, "two homes have two"
    gate.touch()
    assert shell("wait", *ids)
    shell("wait", run_id, CLOUDTRAIN_HOME=str(other))
    wait_for(lambda: not watchers(home) and not watchers(other), "the end of the watchers")
    assert Store(home).watcher() is None


def test_each_run_keeps_the_environment_of_its_shell(shell, home, tmp_path):
    """The next attempts of two runs, of one watcher, get the secret and the variables that their own shells had."""
    gate, secret = tmp_path / "gate", ["--set", 'secrets={"TOKEN": "env:MINE"}']
    ids = [submit(shell, gate, *RETRY, *secret, MINE=f"{word}-secret", COLOUR=word) for word in ("red", "blue")]
    for run_id in ids:
        wait_for(lambda run_id=run_id: len(tokens(shell, run_id)) == 1, "attempt 1")
        preempt(run_id, home)
    for run_id in ids:
        wait_for(lambda run_id=run_id: len(tokens(shell, run_id)) == 2, "attempt 2")
    gate.touch()
    shell("wait", *ids)
    seen = [tokens(shell, run_id) for run_id in ids]
    assert [one for one, _ in seen] == [two for _, two in seen]
    assert [two[1] for _, two in seen] == ["red", "blue"] and seen[0][0][0] != seen[1][0][0]


def test_after_a_take_over_the_next_shell_that_has_a_secret_hands_it_over(shell, home, tmp_path):
    gate = tmp_path / "gate"
    run_id = submit(
        shell, gate, *RETRY, "--set", 'secrets={"TOKEN": "env:MINE"}', MINE="red-secret", AWS_PROFILE="work"
    )
    first = wait_for(lambda: watched_by(home, run_id), "a watcher")
    wait_for(lambda: len(tokens(shell, run_id)) == 1, "attempt 1")
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: shell("show", run_id) and watched_by(home, run_id) not in (None, first), "another watcher")
    record = wait_for(lambda: Store(home).environments([run_id]).get(run_id), "what is stored of it")
    assert record.pointers["AWS_PROFILE"] == "work" and record.lacking == ("MINE",)
    assert "red-secret" not in json.dumps(dict(record.pointers))
    assert "a next attempt needs MINE, which the watcher does not have" in shell("show", run_id)
    shell("show", run_id, MINE="red-secret")
    assert Store(home).environments([run_id])[run_id].lacking == ()
    assert "which the watcher does not have" not in shell("show", run_id)
    preempt(run_id, home)
    wait_for(lambda: len(tokens(shell, run_id)) == 2, "attempt 2")
    gate.touch()
    shell("wait", run_id)
    one, two = tokens(shell, run_id)
    assert one == two


def test_a_newer_cloudtrain_replaces_the_watcher_of_an_older_one(shell, home, tmp_path):
    """The older one gives away what only its memory has: the secret of a run's next attempt."""
    old = tmp_path / "old"
    shutil.copytree(ROOT / "cloudtrain", old / "cloudtrain", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (old / "cloudtrain").rglob("*.py"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    (old / "entrypoints").symlink_to(ROOT / "entrypoints")
    gate, secret = tmp_path / "gate", ["--set", 'secrets={"TOKEN": "env:MINE"}']
    run_id = submit(shell, gate, *RETRY, *secret, MINE="red-secret", PYTHONPATH=str(old))
    first = wait_for(lambda: watched_by(home, run_id), "a watcher")
    holder = Store(home).watcher()
    assert holder is not None and handover.is_newer(handover.own_version(), holder.version)
    another = submit(shell, gate)
    for name in (run_id, another):
        wait_for(lambda name=name: watched_by(home, name) not in (None, first), "the newer one")
    wait_for(lambda: first not in watchers(home), "the end of the older one")
    older = submit(shell, gate, PYTHONPATH=str(old))
    second = wait_for(lambda: watched_by(home, older), "its watcher")
    assert second == watched_by(home, run_id) and watchers(home) == [second], "an older one replaces no newer one"
    wait_for(lambda: len(tokens(shell, run_id)) == 1, "attempt 1")
    preempt(run_id, home)
    wait_for(lambda: len(tokens(shell, run_id)) == 2, "attempt 2")
    gate.touch()
    shell("wait", run_id, another, older)
    one, two = tokens(shell, run_id)
    assert one == two


def test_the_socket_is_its_users_alone(shell, home, tmp_path):
    gate = tmp_path / "gate"
    run_id = submit(shell, gate)
    wait_for(lambda: watched_by(home, run_id), "a watcher")
    holder = Store(home).watcher()
    assert holder is not None
    path = Path(holder.address)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert handover.call(holder.address, {"do": "look", "run": run_id}) == {"ok": True}
    assert handover.call(holder.address, {"do": "look"}) == {"ok": False}, "a message that is wrong ends nothing"
    gate.touch()
    shell("wait", run_id)


def test_a_home_with_a_long_path_has_a_socket(shell, tmp_path):
    long = tmp_path / ("x" * 120)
    run_id = submit(shell, tmp_path / "gate", CLOUDTRAIN_HOME=str(long))
    wait_for(lambda: watched_by(long, run_id), "a watcher")
    holder = Store(long).watcher()
    assert holder is not None and handover.call(holder.address, {"do": "look", "run": run_id}) == {"ok": True}
    (tmp_path / "gate").touch()
    shell("wait", run_id, CLOUDTRAIN_HOME=str(long))
    wait_for(lambda: not watchers(long), "its end")
