"""A home that was moved to another folder: its local runs have their logs and results, are resumed and deleted there."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from cloudtrain.cli import main
from cloudtrain.events import State
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from tests.conftest import WAIT_S, dismiss_watcher, processes_of, wait_for

SCRIPT = """\
import os
from pathlib import Path
print("attempt", os.environ["CLOUDTRAIN_ATTEMPT"], os.listdir(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"]), flush=True)
Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"], "kept.txt").touch()
Path(os.environ["CLOUDTRAIN_MODEL_DIR"], "model.txt").write_text("trained")
raise SystemExit(os.environ["CLOUDTRAIN_ATTEMPT"] == "1")
"""


def test_local_runs_are_read_fetched_resumed_and_deleted(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text(SCRIPT)
    first = Submitter(target="local").submit({"source": str(project), "entrypoint": "train.py"})
    assert first.wait(WAIT_S).state is State.FAILED
    first.store.database.close()
    wait_for(
        lambda: dismiss_watcher(home) or not processes_of(home), "the end of the watcher"
    )  # it may just be starting
    moved = tmp_path / "disk" / "cloudtrain"
    moved.parent.mkdir()
    home.rename(moved)
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(moved))

    page = (Path(__file__).parents[2] / "docs" / "history.md").read_text()
    (live,) = re.findall(r"`cloudtrain (ls state:\S+)` lists none", page)
    assert main(live.split()) == 0 and capsys.readouterr().out == "no run matches\n"
    named = {
        name.partition("/")[0]
        for row in re.findall(r"^\| (`.+?) \|", page, re.MULTILINE)
        for name in re.findall(r"`(.+?)`", row)
    }
    named |= set(re.findall(r"`(history\.sqlite3-\w+)`", page))  # SQLite's own, while the history is open
    assert {path.name for path in moved.iterdir()} - {".gitignore", "history.lock", "watch.starting"} <= named

    run = Run.find(first.run_id)
    assert [line.text for line in run.logs() if line.rank == 0] == ["attempt 1 []"]
    assert (run.fetch(tmp_path / "out") / "model" / "model.txt").read_text() == "trained"
    resumed = run.resume()
    assert resumed.wait(WAIT_S).state is State.SUCCEEDED
    assert [line.text for line in resumed.logs() if line.rank == 0] == ["attempt 1 []", "attempt 2 ['kept.txt']"]
    dismiss_watcher(moved)
    assert not home.exists(), "nothing was written to the old place"


def test_rm_in_a_copy_leaves_the_original_and_a_log_that_is_gone_is_an_error(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli
):
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("print('begun')")
    run = Submitter(target="local").submit({"source": str(project), "entrypoint": "train.py"})
    assert run.wait(WAIT_S).state is State.SUCCEEDED
    run.store.database.close()
    wait_for(lambda: dismiss_watcher(home) or not processes_of(home), "the end of the watcher")
    copied = tmp_path / "copied"
    shutil.copytree(home, copied, ignore=shutil.ignore_patterns("*.sock"))
    original = home / "runs" / run.run_id

    monkeypatch.setenv("CLOUDTRAIN_HOME", str(copied))
    assert cli("rm", run.run_id, "-y")[0] == 2
    code, shown, _ = cli("rm", run.run_id, "-y", "--take-over")
    assert code == 0 and not (copied / "runs" / run.run_id).exists()
    assert (original / "a1" / "node-0" / "log").exists()
    assert str(copied / "runs" / run.run_id) in shown and re.search(rf"^  kept +{original}$", shown, re.MULTILINE)

    monkeypatch.setenv("CLOUDTRAIN_HOME", str(home))
    assert "begun" in cli("logs", run.run_id)[1]
    shutil.rmtree(original)
    code, printed, said = cli("logs", run.run_id)
    reason = f"the attempt's folder {original / 'a1'} no longer exists"
    assert (code, printed) == (2, "") and f"{run.run_id} has no log any more: {reason}" in said
    assert cli("rm", run.run_id, "-y")[0] == 0
