"""Files of TensorBoard and W&B, written by these tools themselves, read without them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cloudtrain import events
from cloudtrain.backends import registry
from cloudtrain.events import State
from cloudtrain.history import event_files
from cloudtrain.history.event_files import find_files, resumed_step
from cloudtrain.runs.submit import Submitter
from cloudtrain.runs.watching import watch
from cloudtrain.runs.watching.watch_all import watch_run
from cloudtrain.testing.memory import MemoryBackend
from tests.conftest import WAIT_S
from tests.history import eventfiles

WANDB = """
import sys, wandb
run = wandb.init(project="p", dir=sys.argv[1], mode="offline")
for n in range(300):
    run.log({"wloss": 3.0 - n / 100, "nested": {"acc": n / 300}, "text": "x" * 300}, step=n * 2)
run.finish()
"""


def read(path, name="x"):
    return event_files.Reader(path, event_files.assign_slots([name])[name]).read()


@pytest.fixture
def board(tmp_path):
    """A file of TensorBoard's own writer."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path / "tb"))
    for n in range(20):
        value = Summary.Value(tag="train/loss", simple_value=2 - n / 20)
        writer.add_event(Event(wall_time=1.7e9 + n, step=n * 10, summary=Summary(value=[value])))
    writer.close()
    (path,) = (tmp_path / "tb").iterdir()
    return path


def test_tensorboard(board):
    points = read(board)
    assert [(point.step, point.name) for point in points] == [(n * 10, "train/loss") for n in range(20)]
    assert [point.value for point in points] == pytest.approx([2 - n / 20 for n in range(20)])
    assert points[0].at == "2023-11-14T22:13:20.000000Z" and len({point.seq for point in points}) == 20
    assert points[0].seq >= event_files.FIRST_SEQ and read(board, "y")[0].seq != points[0].seq


def test_a_file_that_grows_is_read_on_and_a_damaged_one_ends_there(board, tmp_path):
    data = board.read_bytes()
    copy = tmp_path / board.name
    copy.write_bytes(b"")
    reader = event_files.Reader(copy, event_files.assign_slots(["x"])["x"])
    points = []
    for end in (0, 5, 100, 101, 333, len(data) - 1, len(data)):
        copy.write_bytes(data[:end])
        points += reader.read()
    assert points == read(board)
    for at in range(0, len(data), 7):
        copy.write_bytes(data[:at] + b"\xff\xfe" + data[at + 2 :])
        assert len(read(copy)) <= 40  # whatever it holds, it is read to an end
    copy.write_bytes(os.urandom(5000))
    assert read(copy) == []


def test_wandb_offline(tmp_path):
    pytest.importorskip("wandb")
    env = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path)}
    subprocess.run(
        [sys.executable, "-c", WANDB, str(tmp_path)], env=env, check=True, timeout=WAIT_S, capture_output=True
    )
    (path,) = find_files(tmp_path, 0).values()
    assert path.stat().st_size > 2 * 32768, "its records go over the edges of blocks"
    points = read(path)
    loss = [point for point in points if point.name == "wloss"]
    assert [point.step for point in loss] == [n * 2 for n in range(300)]
    assert [point.value for point in loss] == pytest.approx([3 - n / 100 for n in range(300)])
    assert {point.name for point in points} >= {"wloss"} and "text" not in {point.name for point in points}


def test_files_in_the_outputs_of_a_local_run_are_its_metrics(board, tmp_path, census):
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(board, source / "events.data")
    (source / "train.py").write_text(
        "import os, shutil\n"
        'print(\'::cloudtrain::{"kind": "metric", "step": 1, "loss": 9}\', flush=True)\n'
        f"with open(os.path.join(os.environ['CLOUDTRAIN_OUTPUT_DIR'], '{board.name}'), 'wb') as out:\n"
        "    out.write(open('events.data', 'rb').read())\n"
    )
    run = Submitter("local").submit({"source": str(source), "entrypoint": "train.py", "name": "x"})
    assert run.wait(WAIT_S).exit_code == 0
    summaries = {row.name: row for row in run.store.curves.summary(run.run_id)}
    assert (summaries["train/loss"].points, summaries["train/loss"].step) == (20, 190) and summaries["loss"].points == 1


def test_folders_of_one_tag_are_told_apart_and_the_first_keeps_its_names():
    def prefixes(*names):
        return [place.prefix for place in event_files.assign_slots(names).values()]

    tail = "/events.out.tfevents.17000000"
    keras = [f"tb/train{tail}01.host.7.0.v2", f"tb/validation{tail}09.host.7.1.v2"]
    assert prefixes(*reversed(keras)) == ["", "validation/"]
    scalars = [f"runs/x{tail}01.host.7.{n}" for n in (0, 9)] + [f"runs/x/loss_{n}{tail}01.host.7.{n}" for n in (10, 11)]
    assert [event_files.assign_slots(scalars)[name].prefix for name in scalars] == ["", "", "loss_10/", "loss_11/"]
    for some in (scalars[:1], scalars[:2], scalars[:3]):  # what appears later changes nothing
        assert event_files.assign_slots(some).items() <= event_files.assign_slots(scalars).items()
    odd = [f"a/t{tail}01", f"a/v{tail}02", f"a/t/v{tail}03", f"b{tail}04", tail[1:] + "05"]
    assert prefixes(*odd) == ["", "v/", "a/t/v/", "b/", "./"]
    for three, last in (
        (("tb/train", "tb/val", "val"), ["", "val/", "./val/"]),
        (("tb/train", "tb", ""), ["", "./", "././"]),
        (("a/b", "a/b/c", "c"), ["", "c/", "./c/"]),
    ):
        assert prefixes(*(f"{folder}{tail}{n:02d}".lstrip("/") for n, folder in enumerate(three))) == last
    unwritable = prefixes(f"tb{tail}01", f"caf\udce8{tail}02", f"caf\udce9{tail}03")
    assert unwritable == ["", "caf?/", "./caf?/"]
    assert prefixes("w/offline-run-20261122_101500-a/run-a.wandb", "w/offline-run-20261122_101501-b/run-b.wandb") == [
        "",
        "",
    ]


def test_files_of_one_folder_are_numbered_in_the_order_in_which_they_were_begun():
    base = "tb/events.out.tfevents.17000000"
    names = [f"{base}{second:02d}.host.7.{number}" for number, second in enumerate((0, 1, 1, 1, 2, 9, 10, 11))]
    names += [f"{base}20.host.{process}.0" for process in range(40)]  # every rank of a node, in one second
    numbers = [event_files.assign_slots(reversed(names))[name].seq for name in names]
    assert numbers[:8] == sorted(numbers[:8]) and max(numbers[:8]) < min(numbers[8:])
    assert len(set(numbers)) == len(names) and all(
        event_files.FIRST_SEQ <= seq < 2**63 - event_files.MOST_RECORDS for seq in numbers
    )
    wandb = [
        f"wandb/offline-run-2026112{day}_101500-{word}/run-{word}.wandb" for day, word in ((1, "z"), (2, "b"), (3, "a"))
    ]
    assert list(event_files.assign_slots(reversed(wandb))) == wandb
    assert (
        len(
            event_files.assign_slots(
                ["events.out.tfevents.x", "events.out.tfevents.9999999999", "offline-run-99999999_000000-a/run-a.wandb"]
            )
        )
        == 3
    )


def test_a_writer_that_is_opened_again_has_its_points_in_order_and_once(tmp_path, census):
    """Two folders, a writer opened again for every epoch, and a watcher that starts anew."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text(
        "import os\n"
        "from tensorboard.compat.proto.event_pb2 import Event\n"
        "from tensorboard.compat.proto.summary_pb2 import Summary\n"
        "from tensorboard.summary.writer.event_file_writer import EventFileWriter\n"
        "for epoch in range(6):\n"
        "    for sign, name in ((1, 'train'), (-1, 'validation')):\n"
        "        writer = EventFileWriter(os.path.join(os.environ['CLOUDTRAIN_OUTPUT_DIR'], 'tb', name))\n"
        "        value = Summary.Value(tag='epoch_loss', simple_value=sign * (10 - epoch))\n"
        "        writer.add_event(Event(wall_time=1.7e9 + epoch, step=epoch, summary=Summary(value=[value])))\n"
        "        writer.close()\n"
    )
    run = Submitter("local").submit({"source": str(source), "entrypoint": "train.py", "name": "x"})
    assert run.wait(WAIT_S).exit_code == 0
    for _ in range(2):
        summaries = {row.name: row for row in run.store.curves.summary(run.run_id)}
        assert {name: (row.points, row.first, row.last, row.step) for name, row in summaries.items()} == {
            "epoch_loss": (6, 10, 5, 5),
            "validation/epoch_loss": (6, -10, -5, 5),
        }
        watch.Watcher(run.store, run.run_id).collector.read_files(run.store, run.attempts[-1], at_once=True)


@pytest.fixture
def remembered(tmp_path, monkeypatch):
    """A run that starts nothing and goes on until it is finished."""
    monkeypatch.setattr(registry, "BUILT_IN", dict(registry.BUILT_IN))
    MemoryBackend.install()
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "train.py").write_text("print(1)\n")
    job = {"name": "x", "source": str(tmp_path / "source"), "entrypoint": "train.py"}
    return Submitter("memory", watch=False).submit(job)


@pytest.mark.parametrize("kind", eventfiles.HOSTILE)
def test_no_file_ends_the_watcher(kind, remembered):
    eventfiles.hostile(kind, remembered.store.home / "runs" / remembered.run_id / "outputs")
    MemoryBackend.finish(remembered.attempts[0].handle, State.SUCCEEDED, 0)
    status = watch_run(remembered.store, remembered.run_id)
    assert status is not None and status.state is State.SUCCEEDED
    assert [(row.step, row.value) for row in remembered.metrics("told")] == [(7, 1.5)], "what stands behind it is heard"


@pytest.mark.parametrize("anew", [False, True])
def test_a_folder_that_appears_later_has_no_part_in_a_curve_that_is_there_whenever_it_was_begun(anew, remembered):
    outputs = remembered.store.home / "runs" / remembered.run_id / "outputs"
    watcher = watch.Watcher(remembered.store, remembered.run_id)
    for node, second in (("n0", 5), ("n1", 3), ("n2", 4)):
        if node == "n2" and anew:  # another watcher takes over, and sees all three at once
            watcher = watch.Watcher(remembered.store, remembered.run_id)
        eventfiles.board(outputs / node / eventfiles.NAME.format(1700000000 + second), (second, "loss", second))
        watcher.collector.read_files(remembered.store, remembered.attempts[0], at_once=True)
    curves = {row.name: (row.points, row.last) for row in remembered.store.curves.summary(remembered.run_id)}
    assert curves == {"loss": (1, 5), "n1/loss": (1, 3), "n2/loss": (1, 4)}


def mlflow(path, *rows):
    """Write what MLflow's file store writes of one metric: time, value, step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        stream.writelines(f"{1_700_000_000_000 + step} {value} {step}\n" for step, value in rows)


def test_mlflows_files_are_read_as_they_grow(tmp_path):
    runs = ["mlruns/0/" + letter * 32 for letter in "ab"]
    mlflow(tmp_path / runs[0] / "metrics" / "eval" / "loss", (10, 2.5))
    (path,) = find_files(tmp_path, 0).items()
    reader = event_files.Reader(path[1], event_files.assign_slots([path[0]])[path[0]])
    assert [point[1:5] for point in reader.read()] == [("2023-11-14T22:13:20.010000Z", 10, "eval/loss", 2.5)]
    mlflow(path[1], (20, 1.5))
    path[1].open("a").write("17000")
    assert [(point.step, point.value) for point in reader.read()] == [(20, 1.5)] and reader.read() == []
    mlflow(tmp_path / runs[1] / "metrics" / "loss", (1, 9.0))
    found = find_files(tmp_path, 0)
    assert [slot.prefix for slot in event_files.assign_slots(found).values()] == ["", "b" * 32 + "/"]


def trainer_state(folder, steps, now=None):
    """Write what Trainer writes into a checkpoint: all rows up to its step."""
    folder.mkdir(parents=True)
    rows = [{"step": step, "epoch": step / 10, "loss": 5 - step / 10, "note": "x"} for step in steps]
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": steps[-1], "log_history": rows}))
    if now is not None:
        os.utime(folder / "trainer_state.json", (now, now))


def test_trainers_state_is_read_once_over_its_checkpoints_and_after_a_resume(tmp_path):
    out = tmp_path / "out"
    trainer_state(out / "checkpoint-10", [5, 10], now=1000)
    assert find_files(tmp_path, 2000) == {}, "it was there before the attempt"
    trainer_state(out / "checkpoint-20", [5, 10, 15, 20], now=3000)
    ((name, path),) = find_files(tmp_path, 2000).items()
    assert (name, resumed_step(path, 2000)) == ("out/trainer_state.json", 10)
    reader = event_files.Reader(path, event_files.assign_slots([name])[name], 10)
    assert [point[2:] for point in reader.read()] == [(15, "loss", 3.5, 1.5), (20, "loss", 3.0, 2.0)]
    trainer_state(out / "checkpoint-30", [5, 10, 15, 20, 25, 30], now=4000)
    (reader.path,) = find_files(tmp_path, 2000).values()
    assert [point.step for point in reader.read()] == [25, 30] and reader.read() == []
    (out / "trainer_state.json").write_text('{"log_history": [{"st')
    reader.path = out / "trainer_state.json"
    assert reader.read() == [], "half of a file that is being written"


def test_environments_caches_and_folders_of_data_are_not_searched(tmp_path, monkeypatch):
    listed = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(os.path.basename(path)) or scandir(path))
    for folder in (".venv/lib", "site-packages/torch", ".git/x", "data", "env/lib", "logs/tb"):
        eventfiles.board(tmp_path / folder / eventfiles.NAME.format(1700000000), (1, "loss", 1.0))
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "data" / "more").mkdir()
    for number in range(event_files.MOST_ENTRIES):
        (tmp_path / "data" / f"{number}.jpg").touch()
    assert list(find_files(tmp_path, 0)) == ["logs/tb/" + eventfiles.NAME.format(1700000000)]
    assert not {"lib", "torch", "x", "more"} & set(listed)
    deep = tmp_path.joinpath(*"abcdefghijklmnop")
    eventfiles.board(deep / eventfiles.NAME.format(1700000000), (1, "loss", 1.0))
    assert len(find_files(tmp_path, 0)) == 1


def test_files_in_the_working_directory_are_metrics_and_those_of_the_source_are_not(tmp_path, census):
    """TensorBoard, MLflow and Trainer beside the script; the log has `lr` already, and `keep` mirrors one folder."""
    source = tmp_path / "source"
    old = source / "old" / eventfiles.NAME.format(1700000000)
    eventfiles.board(old, (1, "ancient", 1.0))
    shutil.copytree(Path(eventfiles.__file__).parent, source / "tests" / "history")
    (source / "train.py").write_text(
        "import json, os, pathlib\n"
        "from tests.history import eventfiles\n"
        "print('step 3 loss 9.5 lr 0.5', flush=True)\n"
        "eventfiles.board(pathlib.Path('runs/a', eventfiles.NAME.format(1700000005)), (7, 'tb/loss', 1.5), (7, 'lr', 0.25))\n"
        "metric = pathlib.Path('mlruns/0/' + 32 * 'c' + '/metrics/accuracy')\n"
        "metric.parent.mkdir(parents=True)\n"
        "metric.write_text('1700000000000 0.75 9\\n')\n"
        "state = pathlib.Path('out/checkpoint-4/trainer_state.json')\n"
        "state.parent.mkdir(parents=True)\n"
        "state.write_text(json.dumps({'log_history': [{'step': 4, 'epoch': 0.5, 'eval_loss': 2.5}]}))\n"
    )
    job = {"source": str(source), "entrypoint": "train.py", "name": "x", "keep": ["runs"]}
    run = Submitter("local").submit(job)
    assert run.wait(WAIT_S).exit_code == 0
    found = {(row.name, row.step, row.value, row.epoch) for row in run.metrics()}
    assert found == {
        ("loss", 3, 9.5, None), ("lr", 3, 0.5, None), ("tb/loss", 7, 1.5, None), ("accuracy", 9, 0.75, None),
        ("eval_loss", 4, 2.5, 0.5),
    }  # fmt: skip
    assert len(run.metrics()) == 5


@pytest.mark.parametrize(
    ("metrics", "found"),
    [("off", {"told"}), ({"*": "off", "mine": r"lr (\S+)"}, {"told", "mine"}), ({}, {"told", "loss", "lr", "tb/loss"})],
)
def test_metrics_off_leaves_what_the_script_reports_and_your_own_expressions(metrics, found, remembered, tmp_path):
    job = {"name": "x", "source": str(tmp_path / "source"), "entrypoint": "train.py", "metrics": metrics}
    run = Submitter("memory", watch=False).submit(job)
    eventfiles.board(
        run.store.home / "runs" / run.run_id / "outputs" / eventfiles.NAME.format(1700000000), (1, "tb/loss", 1.0)
    )
    told = events.format("metric", {"step": 7, "told": 1.5})
    MemoryBackend.say(run.attempts[0].handle, "step 3 loss 9.5 lr 0.5", told)
    MemoryBackend.finish(run.attempts[0].handle, State.SUCCEEDED, 0)
    watch_run(run.store, run.run_id)
    assert {row.name for row in run.metrics()} == found


def test_a_metric_whose_line_is_read_after_its_file_has_the_points_of_the_log_only(remembered):
    """A curve of the file is there until the log has the metric, in any number of blocks; other curves stay."""
    store, attempt = remembered.store, remembered.attempts[0]
    board = store.home / "runs" / remembered.run_id / "outputs" / eventfiles.NAME.format(1700000000)
    eventfiles.board(board, *[(step, "lr", 0.25) for step in range(3000)], (7, "tb/loss", 1.5))
    watcher = watch.Watcher(store, remembered.run_id)
    watcher.collector.read_files(store, attempt, at_once=True)
    assert {row.name: row.points for row in store.curves.summary(remembered.run_id)} == {"lr": 3000, "tb/loss": 1}
    event = events.Event(attempt.attempt_id, 0, 5, "2023-11-14T22:13:20.000000Z", "metric")
    store.record(attempt.attempt_id, metrics=events.rows(event, [events.Point(3, "lr", 0.5)]))
    watcher.collector.read_files(store, attempt, at_once=True)
    assert [(row.name, row.step, row.value) for row in remembered.metrics()] == [("lr", 3, 0.5), ("tb/loss", 7, 1.5)]
    assert {row.name: row.points for row in store.curves.summary(remembered.run_id)} == {"lr": 1, "tb/loss": 1}
