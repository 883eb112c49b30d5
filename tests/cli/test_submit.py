"""cloudtrain submit, with the real local backend behind it."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from cloudtrain.history.store import Store
from cloudtrain.runs.run import Run
from tests.cli.conftest import start
from tests.cli.test_jobs import HOSTILE
from tests.conftest import WAIT_S
from tests.source.trees import git, repository

pytestmark = pytest.mark.usefixtures("census")


def test_submit_prints_the_id_first_then_limits_and_what_to_do_next(shell, project, home):
    shown = shell("submit", "train.py", "--nodes", "2", "--set", "limits.max_runtime=90m")
    assert shown.code == 0, shown
    run_id = shown.out.split()[0]
    assert run_id.startswith("train-")
    for text in (
        "submitted to local", "2 nodes x 1 process", "at most 1h 30m", str(project), "2 nodes run as groups of processes",
        str(home / "runs" / run_id), f"cloudtrain logs -f {run_id}", f"cloudtrain cancel {run_id}",
    ):  # fmt: skip
        assert text in shown.out
    assert Run.find(run_id).record.acknowledged
    assert shell("wait", run_id).code == 0


def test_submit_json(shell, project):
    shown = shell("submit", "train.py", "--json")
    data = shown.json
    assert list(data) == ["run_id", "backend", "handle", "state", "reused"] and data["reused"] is False
    assert data["backend"] == "local" and data["handle"]
    assert data["state"] in ("QUEUED", "STARTING", "RUNNING", "SUCCEEDED")
    assert shell("wait").code == 0


def test_a_script_that_exits_3_makes_wait_exit_3_with_its_traceback(shell, project):
    shown = shell("submit", "train.py", "--wait", "--", "--raise")
    assert shown.code == 1
    assert "Traceback (most recent call last):" in shown.out
    assert "ValueError: boom" in shown.out
    assert "FAILED with exit code 1" in shown.out
    shown = shell("submit", "train.py", "--wait", "--", "--exit", "3")
    assert shown.code == 3
    assert "FAILED with exit code 3" in shown.out
    assert "args ['--exit', '3']" in shown.out  # what it said last
    assert "args ['--exit', '3']" in shell("logs").out  # and the log is kept


def test_follow_prints_lines_then_the_end(shell, project, home):
    shown = shell("submit", "train.py", "--follow")
    lines = shown.out.splitlines()
    run_id = lines[0].split()[0]
    assert shown.code == 0
    assert lines.index("args []") < lines.index("rank 0 of 1") < lines.index("done")
    assert "::cloudtrain::" not in shown.out
    end = [line for line in lines[lines.index("done") + 1 :] if line]
    assert end[0].startswith(f"{run_id}  SUCCEEDED")
    assert str(home / "runs" / run_id / "model") in end[1]
    assert [line.split(maxsplit=1) for line in end[2:]] == [["next", f"cloudtrain fetch {run_id}"]]


def test_an_end_names_no_model_that_the_script_did_not_write(shell, project, tmp_path):
    (project / "prints.py").write_text("print(1)\n")
    for script, names in (("train.py", ["model", "next"]), ("prints.py", ["next"])):
        shown = shell("submit", script, "--follow", "--set", f"output={tmp_path / 'results'}")
        run_id = shown.out.split()[0]
        rows = [line.split() for line in shown.out.partition("  SUCCEEDED")[2].splitlines()[1:]]
        assert [row[0] for row in rows if row[0] != "cloudtrain"] == names, shown.out
        assert names == ["next"] or rows[0][1] == str(tmp_path / "results" / run_id / "model")


TOGETHER = """
import os, pathlib, sys, time

print("args", sys.argv[1:], flush=True)
said = pathlib.Path(sys.argv[1])
(said / os.environ["RANK"]).touch()
while len(list(said.iterdir())) < int(os.environ["WORLD_SIZE"]):  # the first one to fail would end the others
    time.sleep(0.01)
sys.exit(4)
"""


def test_follow_names_node_and_rank_where_there_are_several(shell, project, tmp_path):
    (project / "together.py").write_text(TOGETHER)
    (said := tmp_path / "said").mkdir()
    shown = shell("submit", "together.py", "-f", "--nodes", "2", "--processes", "2", "--", str(said))
    assert shown.code == 4
    for node, rank in ((0, 0), (0, 1), (1, 2), (1, 3)):
        assert f"[{node}:{rank}] args ['{said}']" in shown.out
    assert "--- the last lines of node " in shown.out


def test_follow_as_json_is_one_object_a_line(shell, project):
    shown = shell("submit", "train.py", "-f", "--json", "--", "--exit", "5")
    first, *lines, last = shown.rows
    assert shown.code == 5
    assert list(first) == ["run_id", "backend", "handle", "state", "reused"]
    assert [line["text"] for line in lines if line["rank"] == 0][:2] == ["args ['--exit', '5']", "rank 0 of 1"]
    assert (last["state"], last["exit_code"], last["phase"]) == ("FAILED", 5, "run")
    assert last["error"]


def test_wait_as_json_is_one_object(shell, project):
    shown = shell("submit", "train.py", "--wait", "--json", "--", "--raise")
    assert shown.code == 1
    assert (shown.json["state"], shown.json["exit_code"], shown.json["phase"]) == ("FAILED", 1, "run")
    assert "ValueError: boom" in shown.err  # for the person who reads the log of CI
    shown = shell("submit", "train.py", "--wait", "--json")
    assert (shown.code, shown.json["state"]) == (0, "SUCCEEDED")
    assert "error" not in shown.json


ARGUMENTS = ["--lr", "3.0e-4", "a b", 'q"q', "q'q", "new\nline", "$HOME", "ü", "", "--", "--json", "-f", "*"]


def test_arguments_arrive_as_written(shell, project):
    shown = shell("submit", "train.py", "--follow", "--", *ARGUMENTS)
    assert f"args {ARGUMENTS!r}" in shown.out
    assert shown.code == 0


@pytest.mark.parametrize("name", HOSTILE)
def test_a_source_in_any_folder(shell, tmp_path, monkeypatch, name):
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "train.py").write_text("import os; print('here', os.listdir('.'))\n")
    shown = shell("submit", "train.py", "--wait")
    assert shown.code == 0, shown
    assert "SUCCEEDED" in shown.out


def test_a_plan_file_is_sent_as_it_is_and_once(shell, project):
    planned = shell("plan", "train.py", "-o", "plan.json", "--json", "--", "--tag", "x").json
    first = shell("submit", "plan.json", "--wait")
    assert first.out.startswith(f"{planned['run_id']}  submitted to local")
    assert Run.find(planned["run_id"]).attempts[0].plan.request == planned["request"]
    again = shell("submit", "plan.json", "--wait")
    assert again.code == 0
    assert again.out.startswith(f"{planned['run_id']}  was already submitted to local")
    assert len(shell("ls", "--json").json) == 1


def test_a_plan_whose_source_has_changed_is_refused(shell, project, home):
    shell("plan", "train.py", "-o", "plan.json")
    (project / "train.py").write_text("print('changed')\n")
    shutil.rmtree(home / "bundles")
    shown = shell("submit", "plan.json")
    assert shown.code == 2
    assert "changed since the plan was made" in shown.err


@pytest.mark.parametrize("more", [["-t", "local"], ["--key", "k"], ["--new"]])
def test_a_plan_takes_no_other_wishes(cli, project, more):
    cli("plan", "train.py", "-o", "plan.json")
    shown = cli("submit", "plan.json", *more)
    assert shown.code == 2 and "unchanged" in shown.err


def test_a_key_is_one_run_even_when_two_submit_at_once(shell, project):
    both = [start("submit", "train.py", "--wait", "--json", "--key", "commit 1") for _ in range(2)]
    said = [json.loads(process.communicate(timeout=WAIT_S)[0]) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert said[0]["run_id"] == said[1]["run_id"]
    assert said[0]["handle"] == said[1]["handle"]
    assert len(shell("ls", "--json").json) == 1
    assert "was already submitted" in shell("submit", "train.py", "--key", "commit 1").out


def test_a_key_of_jobs_with_two_names_cancels_none_of_both_live_runs(shell, project, tmp_path):
    words = ("submit", "train.py", "--key", "k", "--json")
    runs = [shell(*words, "--name", name, "--", "--gate", tmp_path / "gate").json["run_id"] for name in ("a", "b")]
    refused = shell("cancel", "--key", "k")
    assert refused.code == 2 and all(run in refused.err for run in runs), refused
    assert shell("cancel", runs[1]).code == 0
    assert shell("cancel", "--key", "k").out.startswith(f"{runs[0]}  CANCELLED")


def test_two_submits_at_once_without_a_key_are_two_runs(shell, project):
    both = [start("submit", "train.py", "--wait", "--json") for _ in range(2)]
    said = [json.loads(process.communicate(timeout=WAIT_S)[0]) for process in both]
    assert said[0]["run_id"] != said[1]["run_id"]
    assert {run["state"] for run in shell("ls", "--json").json} == {"SUCCEEDED"}


def test_the_environment_of_the_job_has_no_history(shell, project):
    """What a job sees of its submitter is its own: no variable of ours leads it to the history."""
    (project / "look.py").write_text("import os; print('home', os.environ.get('CLOUDTRAIN_HOME'))\n")
    assert "home None" in shell("submit", "look.py", "-f", env=os.environ).out


def test_a_source_in_a_git_repository_is_fetched_and_runs_as_its_commit(shell, project, home, tmp_path):
    remote = repository(
        tmp_path / "remote repo", {"job/train.py": "import lib; print('from', lib.NAME)", "job/lib.py": "NAME = 'git'"}
    )
    commit = git(remote, "rev-parse", "HEAD").strip()
    (project / "job.yaml").write_text(f"source: git+file://{remote}@main#subdirectory=job\nentrypoint: train.py\n")
    shown = shell("submit", "job.yaml", "--wait")
    assert shown.code == 0, shown
    assert "from git" in shell("logs").out
    plan = Store(home).attempts(Run.find(shown.out.split()[0]).run_id)[-1].plan
    assert plan.job["source"] == f"git+file://{remote}@{commit}#subdirectory=job"
    assert (plan.bundle["commit"], plan.bundle["dirty"]) == (commit, False)
