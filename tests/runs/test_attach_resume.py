"""An attached run that is resumed by a colleague, while its older attempt may be alive."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

import cloudtrain
from cloudtrain.backends import records
from cloudtrain.backends.local import backend as local
from cloudtrain.cli import main
from cloudtrain.errors import BadRequest
from cloudtrain.events import State
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from cloudtrain.runs.watching.watch_all import watch_run
from tests.conftest import wait_for
from tests.stores import GCS, S3, running

pytestmark = pytest.mark.usefixtures("census")
# Both save and wait, and would then write their model; the second one says what it finds.
SCRIPT = """
import os, pathlib, sys, time
import helper.words
attempt, saved = os.environ["CLOUDTRAIN_ATTEMPT"], pathlib.Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"], "saved.txt")
print("FOUND", saved.exists(), helper.words.TEXT, len(os.environ["TOKEN"]), flush=True)
saved.write_text(attempt)
end = time.monotonic() + 300
while not os.path.exists(os.environ["GATE"] + attempt) and time.monotonic() < end:
    time.sleep(0.02)
pathlib.Path(os.environ["CLOUDTRAIN_MODEL_DIR"], "weights").write_text(attempt)
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLANTED", "pl4nted-s3cret")
    environment = local._base_environment  # of its launchers: no variable of ours comes along
    quickly = {"CLOUDTRAIN_SYNC_EVERY_S": "0.2"}
    monkeypatch.setattr(local, "_base_environment", lambda plan: environment(plan) | quickly)
    folder = tmp_path / "source"
    (folder / "helper").mkdir(parents=True)
    (folder / "train.py").write_text(SCRIPT)
    (folder / "helper" / "words.py").write_text("TEXT = 'hello'\n")
    (folder / "helper" / "run.sh").write_text("true\n")
    (folder / "helper" / "run.sh").chmod(0o755)
    (folder / "link.py").symlink_to("helper/words.py")
    (folder / ".gitignore").write_text("*.log\n")
    return folder


@pytest.fixture(params=[None, S3, pytest.param(GCS, marks=pytest.mark.long)], ids=["folder", "s3", "gs"])
def output(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with running(request.param) if request.param else nullcontext() as store:
        for name, value in (store.environ if store else {}).items():
            monkeypatch.setenv(name, value)
        yield f"{store.scheme}://bucket/out" if store else str(tmp_path / "out")


def submitted(source: Path, output: str, home: Path, gate: Path) -> Run:
    job = {"name": "shared", "source": str(source), "entrypoint": "train.py", "output": output,
           "secrets": {"TOKEN": ["env:PLANTED"]}, "env": {"GATE": str(gate)}}  # fmt: skip
    return Submitter("local", home=home, watch=False).submit(job)


def watched(run: Run) -> State:
    status = watch_run(run.store, run.run_id)
    assert status is not None
    return status.state


def test_the_older_attempt_is_harmless(source, output, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch):
    """It is alive, and its launcher seems to be silent: it ends when the newer one has begun."""
    gate, mine = tmp_path / "gate", tmp_path / "colleague"
    run = submitted(source, output, home, gate)
    reader = records.SILENT_S
    attached = wait_for(lambda: tried(lambda: cloudtrain.attach(f"{output}/{run.run_id}", mine)), "its first record")
    wait_for(lambda: "saved.txt" in saved_files(attached, tmp_path), "its checkpoint in the output")
    wait_for(lambda: attached.state and found(attached), "its log in the output")
    with pytest.raises(BadRequest, match="is still") as live:
        attached.resume()
    assert "without output for an hour" in live.value.hint

    shutil.rmtree(source)  # of the other machine
    monkeypatch.setattr(records, "SILENT_S", -1.0)
    assert attached.state is State.LOST
    monkeypatch.setattr(records, "SILENT_S", reader)
    asked: list[str] = []
    attached.watch = False
    attached.resume(confirm=asked.append)
    assert asked and f"its job and source from {output}/{run.run_id} run on local" in asked[0]
    assert "the secrets TOKEN" in asked[0]
    assert attached.record.attached is None
    assert watched(run) is State.FAILED
    assert " 2 of this run " in run.record.status.reason, "it was replaced"

    Path(f"{gate}1").touch()
    Path(f"{gate}2").touch()
    assert watched(attached) is State.SUCCEEDED, attached.record.status
    assert found(attached) == ["FOUND False hello 14", "FOUND True hello 14"]
    model = attached.fetch(tmp_path / "got", ("model",)) / "model" / "weights"
    assert model.read_text() == "2"
    third = cloudtrain.attach(f"{output}/{run.run_id}", tmp_path / "third")
    assert [attempt.number for attempt in third.attempts] == [1, 2]
    assert third.record.status.state is State.SUCCEEDED


def found(run: Run) -> list[str]:
    return [line.text for line in run.logs() if line.text.startswith("FOUND")]


def tried(call):
    try:
        return call()
    except BadRequest:
        return None


def saved_files(run: Run, tmp_path: Path) -> set[str]:
    run.fetch(tmp_path / "seen", ("checkpoints",))
    return {path.name for path in (tmp_path / "seen").rglob("*")}


def failed(source: Path, output: Path, home: Path) -> Run:
    (source / "train.py").write_text("import os\nraise SystemExit(2 - int(os.environ['CLOUDTRAIN_ATTEMPT']))\n")
    run = submitted(source, str(output), home, output)
    assert watched(run) is State.FAILED
    return run


def test_the_command_asks_before_anything_runs(source, tmp_path: Path, home: Path, monkeypatch, capsys):
    run = failed(source, tmp_path / "out", home)
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(tmp_path / "colleague"))
    assert main(["attach", str(tmp_path / "out" / run.run_id)]) == 0
    assert f"cloudtrain resume {run.run_id}" in capsys.readouterr().out
    assert main(["resume", run.run_id]) == 2
    printed = capsys.readouterr().err
    assert (
        "was submitted from another machine: its job and source" in printed
        and "use --yes to submit without asking" in printed
    )
    assert len(Run.find(run.run_id).attempts) == 1
    assert main(["resume", run.run_id, "--yes", "--wait"]) == 0
    found = Run.find(run.run_id)
    assert [attempt.status.state for attempt in found.attempts] == [State.FAILED, State.SUCCEEDED]
    assert cloudtrain.attach(str(tmp_path / "out" / run.run_id)).record.attached is None, "it is this history's own"


@pytest.mark.parametrize("kind", ["absent", "damaged", "other"])
def test_a_source_that_is_not_the_runs_is_refused(kind: str, source, tmp_path: Path, home: Path):
    run = failed(source, tmp_path / "out", home)
    (packed,) = (tmp_path / "out" / run.run_id / "source").iterdir()
    if kind == "other":
        (source / "helper" / "words.py").write_text("TEXT = 'evil'\n")
        failed(source, tmp_path / "evil", home)
        packed.write_bytes(next((tmp_path / "evil").glob("*/source/*")).read_bytes())
    else:
        packed.unlink()
        if kind == "damaged":
            packed.write_bytes(b"\x1f\x8b no archive")
    attached = cloudtrain.attach(str(tmp_path / "out" / run.run_id), tmp_path / "colleague")
    expected = {"absent": "has no source of", "damaged": "archive is damaged", "other": "does not have the same files"}[
        kind
    ]
    with pytest.raises(BadRequest, match=expected):
        attached.resume()
    assert len(attached.attempts) == 1 and attached.record.attached


def test_a_source_with_secrets_that_were_let_pass_stays_where_it_is(source, tmp_path: Path, home: Path):
    (source / "train.py").write_text("raise SystemExit(1)\n")
    job = {"name": "shared", "source": str(source), "entrypoint": "train.py", "output": str(tmp_path / "out"),
           "allow_secrets": ["*.pem"]}  # fmt: skip
    run = Submitter("local", home=home, watch=False).submit(job)
    assert watched(run) is State.FAILED
    assert (tmp_path / "out" / run.run_id / "run.json").exists()
    assert not (tmp_path / "out" / run.run_id / "source").exists()
