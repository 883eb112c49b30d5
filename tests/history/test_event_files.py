"""Files of TensorBoard and W&B, written by these tools themselves, read without them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from cloudtrain.backends import registry
from cloudtrain.events import State
from cloudtrain.history import event_files
from cloudtrain.runs import watch
from cloudtrain.runs.submit import Submitter
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
    (path,) = event_files.list_files(tmp_path, 0)
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
        watch.Watcher(run.store, run.run_id)._read_files(run.attempts[-1], at_once=True)


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
    status = watch.Watcher(remembered.store, remembered.run_id).run()
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
        watcher._read_files(remembered.attempts[0], at_once=True)
    curves = {row.name: (row.points, row.last) for row in remembered.store.curves.summary(remembered.run_id)}
    assert curves == {"loss": (1, 5), "n1/loss": (1, 3), "n2/loss": (1, 4)}
