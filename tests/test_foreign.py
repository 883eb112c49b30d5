"""Files of TensorBoard and W&B, written by these tools themselves, read without them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from cloudtrain import foreign
from cloudtrain.submitter import Submitter
from tests.conftest import WAIT_S

WANDB = """
import sys, wandb
run = wandb.init(project="p", dir=sys.argv[1], mode="offline")
for n in range(300):
    run.log({"wloss": 3.0 - n / 100, "nested": {"acc": n / 300}, "text": "x" * 300}, step=n * 2)
run.finish()
"""


def read(path, name="x"):
    return foreign.Reader(path, name).read()


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
    assert points[0].seq >= foreign.FIRST_SEQ and read(board, "y")[0].seq != points[0].seq


def test_a_file_that_grows_is_read_on_and_a_damaged_one_ends_there(board, tmp_path):
    data = board.read_bytes()
    copy = tmp_path / board.name
    copy.write_bytes(b"")
    reader = foreign.Reader(copy, "x")
    found = []
    for end in (0, 5, 100, 101, 333, len(data) - 1, len(data)):
        copy.write_bytes(data[:end])
        found += reader.read()
    assert found == read(board)
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
    (path,) = foreign.files(tmp_path, 0)
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
    told = {row.name: row for row in run.store.curves.summary(run.run_id)}
    assert (told["train/loss"].points, told["train/loss"].step) == (20, 190) and told["loss"].points == 1
