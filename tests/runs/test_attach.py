"""Runs that were submitted elsewhere: real ones, whose submitter's home is gone, from a folder and from object stores."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cloudtrain
from cloudtrain.backends.attached.run import AttachedRun
from cloudtrain.cli.view import runs
from cloudtrain.errors import BadRequest
from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.job.homes import HOME_FILE
from cloudtrain.job.targets import HOME_LABEL
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from cloudtrain.runs.watching.watch import Watcher
from cloudtrain.runs.watching.watch_all import watch_run
from tests.conftest import wait_for
from tests.history import eventfiles
from tests.stores import GCS, S3, running

pytestmark = pytest.mark.usefixtures("census")
SECRET = 'pl4nted/"s3cret"'
# Two nodes say who they are and what they know; the first attempt fails on rank 1, the second one ends well.
SCRIPT = """
import os, pathlib, time
rank, attempt = int(os.environ["RANK"]), os.environ["CLOUDTRAIN_ATTEMPT"]
print("rank", rank, "of", os.environ["WORLD_SIZE"], "knows", os.environ["TOKEN"], flush=True)
for step in range(3):
    print('::cloudtrain::{"kind": "metric", "step": %d, "loss": %f}' % (step, rank + step / 2), flush=True)
gate = os.environ.get("GATE")
end = time.monotonic() + 300
while gate and not os.path.exists(gate) and time.monotonic() < end:
    time.sleep(0.02)
if attempt == "1" and rank == 1 and not gate:
    open("data/missing.txt")
pathlib.Path(os.environ["CLOUDTRAIN_MODEL_DIR"], f"weights-{rank}").write_text("12345")
time.sleep(0 if rank == 1 or attempt == "2" or gate else 300)
"""


@pytest.fixture
def submitted(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Return a function that submits the script with an output and returns its run, which nobody watches."""
    monkeypatch.setenv("PLANTED", SECRET)
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text(SCRIPT)
    git = ["git", "-C", str(source), "-c", "user.name=me", "-c", "user.email=me@example.com"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    (source / "train.py").write_text(SCRIPT + "# changed since\n")

    def submit(output: object, **changes: Any) -> Run:
        job = {"name": "shared", "source": str(source), "entrypoint": "train.py", "output": str(output), "num_nodes": 2,
               "secrets": {"TOKEN": ["env:PLANTED"]}, **changes}  # fmt: skip
        return Submitter("local", home=home, watch=False).submit(job)

    return submit


@pytest.fixture(params=[S3, GCS], ids=["s3", "gs"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3 | GCS]:
    with running(request.param) as started:
        for name, value in started.environ.items():
            monkeypatch.setenv(name, value)
        yield started


def told(run: Run) -> dict[str, Any]:
    """Return all that is shown of a run, without what only the submitting machine knows."""
    shown = json.loads(json.dumps(runs.shown_json(run)))
    for each in (shown, *shown["attempts"]):
        for name in ("handle", "created_at", "attached", "started_at", "ended_at"):
            each.pop(name, None)
    for name in ("client", "configuration", "attached"):
        shown["provenance"].pop(name, None)
    shown["job"]["labels"].pop(HOME_LABEL, None)
    metrics = [row._asdict() if hasattr(row, "_asdict") else vars(row) for row in run.metrics(rank=None)]
    log = [(line.at, line.node, line.rank, line.seq, line.text) for line in run.logs(raw=True)]
    return {
        "shown": shown,
        "metrics": metrics,
        "log": sorted(log),
        "curves": run.store.curves.points(run.run_id, "loss"),
    }


def dump(home: Path) -> list[tuple[Any, ...]]:
    db = sqlite3.connect(home / "history.sqlite3")
    rows = []
    for table in ("runs", "attempts", "events", "metrics", "curves", "provenance"):
        rows += [(table, *row) for row in db.execute(f"SELECT * FROM {table}")]
    db.close()
    return sorted(rows, key=repr)


def ended(run: Run) -> State:
    status = watch_run(run.store, run.run_id)
    assert status is not None
    return status.state


def test_a_run_is_rebuilt_attempt_by_attempt_when_the_laptop_is_gone(submitted, tmp_path: Path, home: Path):
    output, mine = tmp_path / "out", tmp_path / "colleague"
    run = submitted(output)
    assert ended(run) is State.FAILED
    first = cloudtrain.attach(str(output / run.run_id), mine)
    verdict = first.verdict()
    assert verdict is not None and (verdict.label, verdict.rank) == ("missing-file", 1)
    assert told(first) == told(run)
    homes = [each.record.job["labels"].get(HOME_LABEL) for each in (run, first)]
    assert homes == [(home / HOME_FILE).read_text(), None], "the home that submitted it is its own label's only reader"
    assert first.record.status.exit_code == 1 and first.record.attached == str(output / run.run_id)
    assert {row.node for row in first.metrics("loss", rank=None)} == {0, 1}
    origin = first.store.provenance(run.run_id)
    assert origin["commit"] and origin["dirty"] and "+# changed since" in origin["text"]

    run.resume()
    assert ended(run) is State.SUCCEEDED
    known = told(run)
    shutil.rmtree(home)
    assert cloudtrain.attach(str(output / run.run_id / "run.json"), mine).run_id == run.run_id
    again = Run.find(run.run_id, mine)
    assert told(again) == known
    assert [attempt["state"] for attempt in known["shown"]["attempts"]] == ["FAILED", "SUCCEEDED"]
    worlds = [event["world_size"] for event in known["shown"]["events"] if event["kind"] == "world"]
    assert worlds == [2, 2, 2, 2]
    before = dump(mine)
    cloudtrain.attach(f"file://{output / run.run_id}", mine)
    assert dump(mine) == before
    again.fetch(tmp_path / "got", ("model",))
    assert {path.name for path in (tmp_path / "got" / "model").iterdir()} == {"weights-0", "weights-1"}
    texts = [path.read_bytes() for path in output.rglob("*") if path.is_file()]
    assert texts and not [text for text in texts if b"s3cret" in text]
    assert any(b"knows ***" in text for text in texts)


def test_a_running_one_is_attached_and_what_is_new_comes_later(store, submitted, tmp_path: Path):
    gate, mine = tmp_path / "gate", tmp_path / "colleague"
    run = submitted(f"{store.scheme}://bucket/out", env={"GATE": str(gate)})
    watcher = Watcher(run.store, run.run_id)
    watcher.refresh()
    uri = f"{store.scheme}://bucket/out/{run.run_id}"
    wait_for(lambda: any("/run.json" in key for key in store.objects()), "the first word")
    attached = cloudtrain.attach(uri, mine)
    wait_for(lambda: len(attached.metrics("loss", rank=None)) == 6, "the metrics of both nodes")
    wait_for(lambda: attached.state is State.RUNNING, "its state, which travels in another file than the metrics")
    assert not attached.store.watched(run.run_id)
    for forbidden in (attached.cancel, attached.rerun):
        with pytest.raises(BadRequest, match=f"was submitted from another machine.*attached from {uri}"):
            forbidden()
    assert attached.attempts[0].number == 1 and len(attached.attempts) == 1
    gate.touch()
    assert ended(run) is State.SUCCEEDED
    assert attached.state is State.SUCCEEDED
    assert told(attached) == told(run)
    attached.fetch(tmp_path / "got", ("model",))
    assert {path.name for path in (tmp_path / "got" / "model").iterdir()} == {"weights-0", "weights-1"}
    assert not [key for key, data in store.objects().items() if b"s3cret" in data]


def test_the_log_goes_on_behind_every_line(submitted, tmp_path: Path):
    run = submitted(tmp_path / "out")
    ended(run)
    shared = AttachedRun(str(tmp_path / "out" / run.run_id))
    (attempt,) = shared.attempts()
    lines = list(shared.lines(attempt.plan.attempt_id))
    assert len(lines) > 20 and [line.at for line in lines] == sorted(line.at for line in lines)
    for number, line in enumerate(lines):
        behind = [later._replace(cursor="") for later in shared.lines(attempt.plan.attempt_id, line.cursor)]
        assert behind == [later._replace(cursor="") for later in lines[number + 1 :]]
    with pytest.raises(BadRequest, match="is not a log cursor"):
        list(shared.lines(attempt.plan.attempt_id, "1/2"))


def test_what_is_no_run_and_what_is_ones_own(submitted, tmp_path: Path, home: Path):
    run = submitted(tmp_path / "out", env={"GATE": "/"})
    assert ended(run) is State.SUCCEEDED
    before = dump(home)
    assert cloudtrain.attach(str(tmp_path / "out" / run.run_id), home).record.attached is None
    assert dump(home) == before
    with pytest.raises(BadRequest, match="no run history found at") as found:
        cloudtrain.attach(str(tmp_path / "out"), home)
    assert "the run's own folder" in found.value.hint
    for uri in ("ftp://host/x", "s3://bucket", "gs://"):
        with pytest.raises(BadRequest, match="not a folder, s3://"):
            cloudtrain.attach(uri, home)
    mine = tmp_path / "colleague"
    cloudtrain.attach(str(tmp_path / "out" / run.run_id), mine)
    shutil.copytree(tmp_path / "out" / run.run_id, tmp_path / "copy")
    with pytest.raises(BadRequest, match="is attached from .* already"):
        cloudtrain.attach(str(tmp_path / "copy"), mine)
    assert [record.attached for record in Store(mine).runs()] == [str(tmp_path / "out" / run.run_id)]


# Each attempt writes a file of TensorBoard's own writer; the log tells one of its names too.
BOARD = """
import os
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
attempt = int(os.environ["CLOUDTRAIN_ATTEMPT"])
writer = EventFileWriter(os.path.join(os.environ["CLOUDTRAIN_OUTPUT_DIR"], "runs", f"of-{attempt}"))
import time
for step in range(5 * attempt - 5, 5 * attempt):
    for name in ("train/loss", "loss"):
        value = Summary.Value(tag=name, simple_value=attempt + step / 4)
        writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=[value])))
writer.close()
print('::cloudtrain::{"kind": "metric", "step": 1, "loss": 9}', flush=True)
raise SystemExit(2 - attempt)
"""


def test_what_tensorboard_left_is_rebuilt_attempt_by_attempt(submitted, tmp_path: Path, home: Path):
    output, mine = tmp_path / "out", tmp_path / "colleague"
    (tmp_path / "source" / "train.py").write_text(BOARD)
    run = submitted(output, num_nodes=1)
    assert ended(run) is State.FAILED
    first = cloudtrain.attach(str(output / run.run_id), mine)
    assert [row.points for row in first.store.curves.summary(run.run_id) if row.name == "train/loss"] == [5]
    run.resume()
    assert ended(run) is State.SUCCEEDED
    known = [(row.attempt, row.step, row.value) for row in run.metrics("train/loss") if row.attempt == 1]
    shutil.rmtree(home)
    again = cloudtrain.attach(str(output / run.run_id), mine)
    points = [(row.attempt, row.step, row.value) for row in again.metrics("train/loss")]
    assert points == [(1 + step // 5, step, 1 + step // 5 + step / 4) for step in range(10)]
    assert points[:5] == known
    assert {row.value for row in again.metrics("loss")} == {9}, "what the log tells is not taken from a file"
    before = dump(mine)
    cloudtrain.attach(str(output / run.run_id), mine)
    assert dump(mine) == before


def test_no_event_file_ends_the_hearing(submitted, tmp_path: Path):
    run = submitted(tmp_path / "out", num_nodes=1, env={"GATE": "/"})
    assert ended(run) is State.SUCCEEDED
    for kind in eventfiles.HOSTILE:
        folder = tmp_path / kind / "run"
        shutil.copytree(tmp_path / "out" / run.run_id, folder)
        eventfiles.hostile(kind, folder / "outputs")
        found = cloudtrain.attach(str(folder), tmp_path / f"colleague of {kind}")
        assert [(row.step, row.value) for row in found.metrics("told")] == [(7, 1.5)], kind


@pytest.mark.parametrize("store", [S3], ids=["s3"], indirect=True)
def test_what_wandb_left_in_a_store_is_rebuilt(store, submitted, tmp_path: Path):
    pytest.importorskip("wandb")
    write = (
        "import os, wandb\n"
        "run = wandb.init(project='p', dir=os.environ['CLOUDTRAIN_OUTPUT_DIR'], mode='offline')\n"
        "for step in range(40):\n"
        "    run.log({'wloss': 3.0 - step / 100}, step=step * 2)\n"
        "run.finish()\n"
    )
    (tmp_path / "source" / "train.py").write_text(write)
    env = {"WANDB_SILENT": "true", "WANDB_MODE": "offline"}
    run = submitted(f"{store.scheme}://bucket/out", num_nodes=1, env=env)
    assert ended(run) is State.SUCCEEDED
    found = cloudtrain.attach(f"{store.scheme}://bucket/out/{run.run_id}", tmp_path / "colleague")
    points = [(row.step, row.value) for row in found.metrics("wloss")]
    assert points == [(step * 2, pytest.approx(3 - step / 100)) for step in range(40)]
