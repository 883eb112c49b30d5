"""An unmodified script of the Trainer or of TRL with one line of ours: killed in mid-epoch, it ends as if it had not been."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import cloudtrain
from cloudtrain.events import State
from cloudtrain.job.job import Job
from tests.entrypoints.training import ENTRYPOINTS, WAIT_S, Trainer

pytestmark = pytest.mark.timeout(1200)  # three starts of torch, with up to two ranks each
SCRIPT = Path(__file__).parent / "own_scripts" / "resumed.py"
# 22 samples, 8 a step: an epoch has two whole steps and one of six. Killed after step 5, the second of epoch two.
STEPS, SAVED, KILLED = 9, 4, 5
USUAL = [
    "--output_dir",
    "out",
    "--save_steps",
    "2",
    "--num_train_epochs",
    "3",
    "--seed",
    "3",
    "--logging_nan_inf_filter",
    "false",
]


@pytest.fixture(scope="session", autouse=True)
def _path(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Make the folder of a bundle in which scripts find the runtime."""
    global PATH
    PATH = tmp_path_factory.mktemp("path")
    for file in (ENTRYPOINTS / "path").glob("cloudtrain_*.py"):
        (PATH / file.name).symlink_to(file)
    (PATH / "cloudtrain_fence.py").symlink_to(ENTRYPOINTS / "launcher/fence.py")


def attempt(run: Path, kind: str, world: int, number: int = 1, batches: int = 0, **env: object) -> Trainer:
    """Run an attempt to its end; the ranks' codes are in `ended`."""
    (run / "outputs").mkdir(parents=True, exist_ok=True)
    accumulated = str(batches or 2 // world)
    args = [kind, *USUAL, "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", accumulated]
    with Trainer(run, args, world, {"PYTHONPATH": PATH, **env}, number, SCRIPT) as started:
        started.ended = started.codes()
    return started


def result(run: Path) -> dict:
    return json.loads((run / "outputs" / "result.json").read_text())


def same(one: dict, other: dict, within: float) -> None:
    assert list(one["losses"]) == list(other["losses"]) == [str(step) for step in range(1, STEPS + 1)]
    for name in one["losses"]:
        assert abs(one["losses"][name] - other["losses"][name]) <= within, f"the loss of step {name}"
    assert max(abs(a - b) for a, b in zip(one["weights"], other["weights"], strict=True)) <= within
    assert len(set(one["losses"].values())) > STEPS / 2, "it learns; GRPO's loss is near 0 whenever its advantages are"
    assert one["epoch"] == other["epoch"] == 2, "each epoch has its own order"


@pytest.mark.parametrize(
    ("kind", "before", "after", "dropout"),
    [
        ("classification", 1, 1, 0.1),
        ("classification", 2, 2, 0.1),
        ("classification", 2, 1, 0),
        ("lm", 1, 2, 0),
        ("lm", 2, 1, 0),
        ("sft", 1, 1, 0.1),
        ("sft", 2, 1, 0),
        ("dpo", 2, 2, 0),
        ("dpo", 2, 1, 0),
        ("grpo", 1, 1, 0),
        ("grpo", 2, 2, 0),
    ],
)
def test_a_killed_run_ends_as_the_unbroken_one(kind: str, before: int, after: int, dropout: float, tmp_path: Path):
    unbroken = attempt(tmp_path / "unbroken", kind, before, DROPOUT=dropout)
    assert unbroken.ended == [0] * before, unbroken.everything()
    run = tmp_path / "killed"
    assert -9 in attempt(run, kind, before, DROPOUT=dropout, KILL_AFTER=KILLED).ended
    assert not (run / "outputs/result.json").exists()
    resumed = attempt(run, kind, after, 2, 2 // before, DROPOUT=dropout)  # as before: ours fits it to the ranks
    assert resumed.ended == [0] * after, resumed.everything()
    record = json.loads((run / "checkpoints/epochs/00000002.json").read_text())
    assert (record["from"], record["step"]) == (f"checkpoint-{SAVED}", SAVED)
    same(result(tmp_path / "unbroken"), result(run), 1e-6)


def test_a_key_of_the_job_does_the_same_for_a_script_without_the_line(tmp_path: Path, home: Path):
    batch = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2"]
    job = Job(
        source=str(SCRIPT.parent), entrypoint=SCRIPT.name, args=["lm", *USUAL, *batch], env={"KILL_AFTER": str(KILLED)},
        resources={"accelerators": 0}, checkpoint={"engine": "cloudtrain"}, processes_per_node=1,
    )  # fmt: skip
    run = cloudtrain.submit(job, target="local", home=home)
    assert run.wait(WAIT_S).exit_code == 137, list(run.logs())
    run.resume()
    assert run.wait(WAIT_S).state is State.SUCCEEDED, list(run.logs())
    ended = home / "runs" / run.run_id
    assert json.loads((ended / "checkpoints/epochs/00000002.json").read_text())["from"] == f"checkpoint-{SAVED}"
    assert attempt(tmp_path / "unbroken", "lm", 1).ended == [0]
    same(result(tmp_path / "unbroken"), result(ended), 1e-6)


def test_a_damaged_and_an_unfinished_checkpoint_are_passed_over(tmp_path: Path):
    run = tmp_path / "run"
    first = attempt(run, "lm", 1, KILL_AFTER=5)
    assert first.ended == [-9]
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["checkpoint-2", "checkpoint-4", "epochs"]
    assert [(row["step"], row["path"]) for row in first.events("checkpoint")] == [
        (step, str(run / f"checkpoints/checkpoint-{step}")) for step in (2, 4)
    ]
    weights = run / "checkpoints/checkpoint-4/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-9] ^= 1  # one bit
    weights.write_bytes(data)
    half = run / "checkpoints/.cloudtrain-part-1/checkpoint-6"
    half.mkdir(parents=True)
    (half / "trainer_state.json").write_text("{}")
    second = attempt(run, "lm", 1, 2, CLOUDTRAIN_CHECKPOINT_KEEP=2)
    assert second.ended == [0], second.everything()
    told = [line for line in second.output().splitlines() if "is skipped" in line]
    assert told == [
        "checkpoint checkpoint-6 is skipped: it is incomplete, and is removed",
        "checkpoint checkpoint-4 is skipped: model.safetensors differs from what was written",
    ]
    assert json.loads((run / "checkpoints/epochs/00000002.json").read_text())["from"] == "checkpoint-2"
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["checkpoint-8", "checkpoint-9", "epochs"], "the newest two are kept"


def test_a_run_that_is_asked_to_stop_saves_at_one_step_on_all_ranks(tmp_path: Path):
    unbroken = attempt(tmp_path / "unbroken", "lm", 2)
    assert unbroken.ended == [0, 0], unbroken.everything()
    run = tmp_path / "asked"
    asked = attempt(run, "lm", 2, KILL_AFTER=3, ASK=1, CLOUDTRAIN_CHECKPOINT_EVERY_S=1000)
    assert asked.ended == [75, 75], asked.everything()
    assert sorted(path.name for path in (run / "checkpoints").glob("ch*")) == [f"checkpoint-{n}" for n in (2, 4, 5)]
    assert attempt(run, "lm", 1, 2, 1).ended == [0]
    same(result(tmp_path / "unbroken"), result(run), 1e-6)
