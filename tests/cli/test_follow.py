"""Ctrl-C, SIGTERM, cancel and wait: what happens to a run that somebody looks at."""

from __future__ import annotations

import getpass
import json
import os
import signal
import subprocess
import time

import pytest

from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.job import targets
from cloudtrain.runs.run import Run
from tests.cli.conftest import read_until, start
from tests.conftest import WAIT_S, wait_for

pytestmark = pytest.mark.usefixtures("census")


def press_ctrl_c(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Interrupt a whole process group, as the terminal does, and return what it said until its end."""
    os.killpg(process.pid, signal.SIGINT)
    return process.communicate(timeout=WAIT_S)


@pytest.mark.parametrize("how", ["--follow", "--wait"])
def test_ctrl_c_detaches_and_the_run_goes_on(project, shell, tmp_path, how):
    gate = tmp_path / "gate"
    process = start("submit", "train.py", how, "--", "--gate", gate)
    run_id = read_until(process, "rank 0 of 1" if how == "--follow" else "submitted to")[0].split()[0]
    _, err = press_ctrl_c(process)
    assert process.returncode == 130
    assert f"detached: {run_id} continues" in err
    assert f"cloudtrain logs -f {run_id}" in err
    assert "Traceback" not in err
    assert not Run.find(run_id).record.status.state.final
    gate.touch()
    assert shell("wait", run_id).code == 0
    assert "through the gate" in shell("logs", run_id).out


def test_the_cursor_that_is_named_neither_repeats_nor_skips(project, shell, tmp_path):
    gate = tmp_path / "gate"
    process = start("submit", "train.py", "-f", "--", "--gate", gate)
    before = read_until(process, "rank 0 of 1")
    out, err = press_ctrl_c(process)
    before += out.splitlines()
    (command,) = [line for line in err.splitlines() if "follow again" in line]
    gate.touch()
    words = command.split("cloudtrain ")[1].split()
    rest = shell(*words).out.splitlines()
    assert "args []" not in " ".join(rest)
    told = before[before.index(f"args ['--gate', '{gate}']") :] + rest
    assert told == shell("logs").out.splitlines()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("how", ["--follow", "--wait"])
def test_on_interrupt_cancel_ends_the_run(project, how, signum):
    process = start("submit", "train.py", how, "--on-interrupt", "cancel", "--", "--gate", "/nowhere")
    run_id = read_until(process, "rank 0 of 1" if how == "--follow" else "submitted to")[0].split()[0]
    os.killpg(process.pid, signum)
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert f"{run_id}  CANCELLED" in err
    assert Run.find(run_id).record.status.state is State.CANCELLED


@pytest.mark.parametrize(
    ("moment", "signum"),
    [
        ("bundles/*.tar.gz", signal.SIGTERM),
        ("history.sqlite3", signal.SIGINT),
        ("runs/*/a1", signal.SIGINT),
        ("runs/*/a1/node-0/started", signal.SIGTERM),
        ("watch.log", signal.SIGINT),
    ],
)
def test_on_interrupt_cancel_at_any_moment_of_a_submit(project, shell, home, moment, signum):
    process = start("submit", "train.py", "--wait", "--on-interrupt", "cancel", "--", "--gate", "/nowhere")
    wait_for(lambda: list(home.glob(moment)), moment)
    os.killpg(process.pid, signum)
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, err
    assert "Traceback" not in err and "internal error" not in err
    for run in shell("ls", "--json").json:  # none, when the interrupt came before the intent was stored
        assert run["state"] == "CANCELLED"
        assert run["run_id"] in err


@pytest.mark.parametrize("moment", ["bundles/*.tar.gz", "runs/*/a1", "runs/*/a1/node-0/started"])
def test_ctrl_c_at_any_moment_of_a_submit_loses_nothing(project, shell, home, moment):
    process = start("submit", "train.py")
    wait_for(lambda: list(home.glob(moment)), moment)
    _, err = press_ctrl_c(process)
    faster = process.returncode in (0, -signal.SIGINT)  # it was done: -SIGINT is Python's own, while it shuts down
    assert faster or process.returncode == 130, err
    assert "Traceback" not in err and "internal error" not in err
    again = shell("submit", "train.py", "--wait")
    assert again.code == 0, again
    ids = [run["run_id"] for run in shell("ls", "--json").json]
    assert shell("wait", *ids).code == 0
    known = faster or "continues" in err  # the person was told of it: the second submit is a new wish
    assert len(ids) == (2 if known else 1)


def test_the_timeout_of_wait_is_for_all_runs_together(project, cli, monkeypatch):
    """The second run gets what the first has left."""
    from cloudtrain.cli import wait

    ids = [cli("submit", "train.py", "--wait", "--json").json["run_id"] for _ in range(2)]
    given, wait_quietly = [], wait.wait_quietly

    def slow(run, timeout_s):
        given.append(timeout_s)
        time.sleep(0.01)
        return wait_quietly(run, timeout_s)

    monkeypatch.setattr(wait, "wait_quietly", slow)
    assert cli("wait", *ids, "--timeout", "15m").code == 0
    assert "'soon'" in cli("wait", *ids, "--timeout", "soon").err
    assert given[0] <= 900 and given[1] <= given[0] - 0.01


def test_a_killed_follower_leaves_the_run_alone(project, shell, tmp_path):
    gate = tmp_path / "gate"
    process = start("submit", "train.py", "-f", "--", "--gate", gate)
    run_id = read_until(process, "rank 0 of 1")[0].split()[0]
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=WAIT_S)
    gate.touch()
    assert shell("wait", run_id).code == 0


def test_cancel_ends_a_run_and_says_so(project, shell):
    run_id = shell("submit", "train.py", "--json", "--", "--gate", "/nowhere").json["run_id"]
    unnamed = shell("cancel")
    assert unnamed.code == 2 and f"these have not ended: {run_id}" in unnamed.err
    shown = shell("cancel", run_id, "--json")
    assert shown.code == 0
    assert list(shown.json) == ["run_id", "backend", "handle", "state", "confirmed"]
    assert (shown.json["state"], shown.json["confirmed"]) == ("CANCELLED", True)
    waited = shell("wait", run_id, "--json")
    assert waited.code == 130
    assert (waited.json["state"], waited.json["phase"]) == ("CANCELLED", "run")
    timeline = " ".join(shell("show", run_id).out.split())
    assert "result launcher_exit=75 state=CANCELLED" in timeline
    assert f"cancel asked for by {getpass.getuser()}@" in timeline
    again = shell("cancel", run_id)
    assert again.code == 0
    assert "had already ended CANCELLED" in again.out


def test_cancel_of_several_cancels_none_when_an_id_is_wrong(project, shell):
    run_id = shell("submit", "train.py", "--json", "--", "--gate", "/nowhere").json["run_id"]
    assert shell("cancel", run_id, "nothing").code == 2
    assert not shell("show", run_id, "--json").json["cancel_requested"]
    assert shell("cancel", run_id[:-1]).code == 0


def test_wait_gives_up_after_its_timeout_and_the_run_goes_on(project, shell, tmp_path):
    gate = tmp_path / "gate"
    run_id = shell("submit", "train.py", "--json", "--", "--gate", gate).json["run_id"]
    shown = shell("wait", "--timeout", "0.2", "--json")
    assert shown.code == 124
    assert shown.json["phase"] == "client"
    assert f"{run_id} is still" in shown.err
    gate.touch()
    assert shell("wait", run_id).code == 0


def test_wait_for_several_exits_with_the_last_code_that_is_not_0(project, shell):
    ids = [shell("submit", "train.py", "--json", "--", "--exit", code).json["run_id"] for code in ("0", "3", "0")]
    shown = shell("wait", *ids, "--json")
    assert shown.code == 3
    assert [row["exit_code"] for row in shown.rows] == [0, 3, 0]


def test_ctrl_c_while_reading_logs_only_detaches(project, shell, tmp_path):
    gate = tmp_path / "gate"
    shell("submit", "train.py", "--", "--gate", gate)
    process = start("logs", "-f")
    read_until(process, "rank 0 of 1")
    _, err = press_ctrl_c(process)
    assert process.returncode == 130
    assert "continues; follow it again: cloudtrain logs -f" in err and "--after" in err
    gate.touch()
    assert shell("wait").code == 0


def test_wait_in_the_foreground_stands_by_takes_over_and_ends_with_the_runs_code(project, shell, tmp_path):
    gate = tmp_path / "gate"
    shell("submit", "train.py", "--", "--gate", gate, "--exit", "6")
    run_id = shell("ls", "--json").json[0]["run_id"]
    wait_for(lambda: Store(targets.home()).watched(run_id), "the watcher that submit has started")
    process = start("wait", "--foreground", "--json")
    assert process.stderr is not None
    assert "another process already watches this run; waiting to take over" in process.stderr.readline()
    gate.touch()
    out, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 6
    assert json.loads(out)["exit_code"] == 6
    assert shell("wait", "--foreground").code == 6  # of a run that has ended


def test_resume_is_the_next_attempt_and_its_log_alone_is_followed(project, shell):
    (project / "once.py").write_text(
        "import os, sys\nn = os.environ['CLOUDTRAIN_ATTEMPT']\nprint('attempt', n)\nsys.exit(9 if n == '1' else 0)\n"
    )
    assert shell("submit", "once.py", "--wait").code == 9
    run_id = shell("ls", "--json").json[0]["run_id"]
    resumed = shell("resume", run_id, "-f")
    assert resumed.code == 0
    assert "resumed on local" in resumed.out
    assert "attempt 2" in resumed.out and "attempt 1\n" not in resumed.out
    assert [attempt["state"] for attempt in shell("show", "--json").json["attempts"]] == ["FAILED", "SUCCEEDED"]
    assert [line for line in shell("logs").out.splitlines() if line.startswith("attempt")] == ["attempt 1", "attempt 2"]
    refused = shell("resume", run_id)
    assert refused.code == 2 and "has succeeded" in refused.err


def test_rerun_is_a_new_run_with_the_old_source(project, shell):
    first = shell("submit", "train.py", "--wait", "--json").json["run_id"]
    (project / "train.py").write_text("print('changed')\n")
    again = shell("rerun", first, "--set", "args=[--tag, x]", "-f")
    assert again.code == 0
    assert "args ['--tag', 'x']" in again.out and "changed" not in again.out
    shown = shell("show", "--json").json
    assert shown["parent"] == first and shown["run_id"] != first
    assert "changed" in shell("rerun", first, "--source", ".", "-f").out


def test_wait_for_several_returns_the_first_code_that_is_not_0(project, shell):
    ids = []
    for code in (0, 3, 4):
        (project / "train.py").write_text(f"raise SystemExit({code})\n")
        ids.append(shell("submit", "train.py", "--wait").out.split()[0])
    assert shell("wait", *ids).code == 3
    assert shell("wait", *reversed(ids)).code == 4
