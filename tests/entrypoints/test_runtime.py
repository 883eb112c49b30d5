"""What scripts say and ask: under a launcher and without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import cloudtrain_runtime as runtime
import pytest

from cloudtrain import events
from tests.entrypoints.launching import Attempt


def test_outside_of_cloudtrain_everything_has_a_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    found = runtime.context({})
    assert (found.run_id, found.attempt, found.rank, found.world_size, found.is_main, found.num_nodes) == (
        "local",
        1,
        0,
        1,
        True,
        1,
    )
    assert found.checkpoint_dir == str(tmp_path / "runs" / "local" / "checkpoints")
    assert os.path.isdir(found.output_dir) and os.path.isdir(found.model_dir)
    assert found.inputs == {} and found.checkpoint_every_s is None


def test_under_a_launcher_it_knows_its_place(tmp_path: Path):
    (tmp_path / "data").mkdir()
    script = """
# cloudtrain: fsdp
import cloudtrain_runtime as runtime, json
from dataclasses import asdict
run = runtime.context()
print(json.dumps(asdict(run)))
print(run.input("My-Data"), run.is_main)
try: run.input("absent")
except KeyError as error: print(error)
"""
    with Attempt(
        tmp_path,
        script,
        processes=2,
        inputs={"my-data": {"uri": str(tmp_path / "data")}},
        parallelism={"strategy": "fsdp"},
        checkpoint={"every_s": None, "every_steps": 50, "keep": 2},
    ) as attempt:
        assert attempt.run() == [0]
        found = json.loads(attempt.texts(1)[0])
        assert (found["run_id"], found["rank"], found["local_rank"], found["world_size"], found["node_rank"]) == (
            "run",
            1,
            1,
            2,
            0,
        )
        assert (found["checkpoint_every_steps"], found["checkpoint_keep"], found["checkpoint_every_s"]) == (50, 2, None)
        assert found["parallelism"] == {"strategy": "fsdp"} and found["checkpoint_dir"] == str(
            tmp_path / "run" / "checkpoints"
        )
        assert attempt.texts(1)[1:] == [f"{tmp_path / 'data'} False", "\"no input 'absent'; there are: my_data\""]


def said(capsys: pytest.CaptureFixture[str]) -> list[tuple[str, dict]]:
    return [events.parse(line) for line in capsys.readouterr().out.split("\n")[:-1]]


def test_events_are_what_the_parser_reads(capsys: pytest.CaptureFixture[str]):
    runtime.emit("alarm", text="ü\n☃ \u2028", path=Path("a") / "b", deep={"x": [1, None, True]})
    runtime.log_metrics(step=3, loss=0.5, **{"eval/loss": 2})
    runtime.log_checkpoint(step=3, path="checkpoints/3", size_bytes=10)
    assert said(capsys) == [
        ("alarm", {"text": "ü\n☃ \u2028", "path": "a/b", "deep": {"x": [1, None, True]}}),
        ("metric", {"step": 3, "loss": 0.5, "eval/loss": 2.0}),
        ("checkpoint", {"step": 3, "path": "checkpoints/3", "size_bytes": 10}),
    ]


def test_tensors_are_sent_as_their_number(capsys: pytest.CaptureFixture[str]):
    class Tensor:
        def item(self) -> float:
            return 1.5

        def __float__(self) -> float:
            return 1.5

    runtime.emit("metric", step=1, loss=Tensor())
    runtime.log_metrics(step=2, loss=Tensor())
    assert [data["loss"] for _, data in said(capsys)] == [1.5, 1.5]


def test_what_cannot_be_sent_is_a_value_error():
    with pytest.raises(ValueError, match="not a kind of event"):
        runtime.emit("metrics", step=1)
    with pytest.raises(ValueError, match="at most 8,192 are allowed"):
        runtime.emit("alarm", text="x" * 9000)
    with pytest.raises(ValueError, match="named kind"):
        runtime.emit("alarm", **{"kind": "x"})
    with pytest.raises(TypeError, match="cannot hold a object"):
        runtime.emit("alarm", text=object())


def test_the_largest_event_is_an_event_everywhere(capsys: pytest.CaptureFixture[str]):
    room = runtime.MAX_BYTES - len('::cloudtrain::{"kind":"alarm","text":""}')
    runtime.emit("alarm", text="x" * room)
    assert said(capsys)[0][0] == "alarm"
    with pytest.raises(ValueError, match="8,193 bytes"):
        runtime.emit("alarm", text="x" * (room + 1))


def test_a_request_sets_a_flag_and_the_script_leaves_resumable(tmp_path: Path):
    script = """
import cloudtrain_runtime as runtime, time
runtime.install()
print("up", flush=True)
while not runtime.stop_requested(): time.sleep(0.01)
runtime.log_checkpoint(step=1, path="c")
runtime.exit_resumable()
"""
    with Attempt(tmp_path, script) as attempt:
        attempt.start().heard("up")
        attempt.launchers[0].terminate()
        assert attempt.wait() == [75]
        assert attempt.status()["state"] == "PREEMPTED" and "::cloudtrain::" in attempt.texts(0)[-1]


def test_import_needs_no_torch():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import cloudtrain_runtime; "
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(runtime.__file__).parent)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]
