"""Law 7 where the model lies in parts: killed and started again on the same layout, bit-equal, dropout on."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.entrypoints.training import TINY, Trainer, texts, train
from tests.seed import first_seed

from trainer.checkpoints import state  # isort: skip
from trainer.errors import Unsupported  # isort: skip

pytestmark = [pytest.mark.train, pytest.mark.timeout(900)]

STEPS = 9
SIZES = ["--tokenizer", "bpe:304", "--num_hidden_layers", "2", "--dropout", "0.2", "--max_steps", str(STEPS)]
CASES = {
    "fsdp": (2, {"strategy": "fsdp"}),
    "pp": (2, {"pp_size": 2}),
    "tp": (2, {"tp_size": 2}),
    "cp": (2, {"cp_size": 2}),
    "zero1": (2, {"strategy": "zero1"}),
    "zero2": (2, {"strategy": "zero2"}),
    "zero3": (2, {"strategy": "zero3"}),
    "hsdp": (4, {"strategy": "hsdp", "dp_replicate_size": 2}),
    "fsdp x tp": (4, {"strategy": "fsdp", "tp_size": 2}),
    "fsdp x pp": (4, {"strategy": "fsdp", "pp_size": 2}),
    "dp x cp": (4, {"strategy": "ddp", "cp_size": 2}),
    "fsdp x cp": (4, {"strategy": "fsdp", "cp_size": 2}),
    "pp interleaved": (2, {"pp_size": 2, "virtual_stages": 2, "num_layers": 4}),
}
NAMES = [name if name in ("fsdp", "pp") else pytest.param(name, marks=pytest.mark.long) for name in CASES]


def arguments(folder: Path, *more: str) -> list[str]:
    data = ["--dataset", str(texts(folder)), "--max_train_samples", "35", "--max_eval_samples", "5"]
    return [*TINY, *SIZES, *data, "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", *more]


def world(name: str) -> tuple[int, dict[str, str], list[str]]:
    ranks, said = CASES[name]
    layers = ["--num_hidden_layers", str(said["num_layers"])] if "num_layers" in said else []
    parallelism = {key: value for key, value in said.items() if key != "num_layers"}
    env = {"CLOUDTRAIN_PARALLELISM": json.dumps(parallelism), "CLOUDTRAIN_CHECKPOINT_EVERY_STEPS": "3"}
    return ranks, {**env, "CLOUDTRAIN_CHECKPOINT_KEEP": "9"}, layers


@pytest.mark.parametrize("name", NAMES)
def test_what_lies_in_parts_goes_on_to_the_bit(tmp_path: Path, name: str, figure: Callable):
    ranks, env, more = world(name)
    args = arguments(tmp_path / "texts", *more)
    run = tmp_path / "run"
    unbroken = train(run, args, ranks, **env)
    first = load_file(run / "model" / "model.safetensors")
    for step in (6, 9):  # as if it had been killed after step 3: what it wrote later is not complete
        (run / "checkpoints" / f"step-{step:08d}.a1" / "COMPLETE").unlink()
    resumed = train(run, args, ranks, attempt=2, **env)
    assert f"resumed from {run}/checkpoints/step-00000003.a1" in resumed.output()
    assert resumed.losses() == {step: loss for step, loss in unbroken.losses().items() if step > 3}
    assert resumed.norms() == {step: norm for step, norm in unbroken.norms().items() if step > 3}
    assert len(resumed.losses()) == STEPS - 3
    second = load_file(run / "model" / "model.safetensors")
    assert all((first[key] == second[key]).all() for key in first | second)
    if "cp" in name:  # the ranks of a sequence have other tokens, and drop out others
        kept = [torch.load(file) for file in sorted((run / "checkpoints" / "step-00000003.a1").glob("rank-*.pt"))]
        assert len({bytes(one["random"]["torch"].tolist()) for one in kept}) == len(kept) == ranks
    figure("resume", {"written": f"{name} ({ranks} ranks)"})


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_killed_at_random_steps_what_lies_in_parts_goes_on_to_the_bit(tmp_path: Path, name: str, figure: Callable):
    """SIGKILL of all ranks, three times; a checkpoint every third step, written by a thread or at once. The seed is printed."""
    ranks, env, more = world(name)
    args = arguments(tmp_path / "texts", *more, "--max_steps", "30")
    unbroken = train(tmp_path / "unbroken", args, ranks, **env)
    reference = unbroken.losses()
    assert sorted(reference) == list(range(1, 31))
    draw, run, reached = random.Random(first_seed()), tmp_path / "run", 0
    for attempt in (1, 2, 3):
        with Trainer(run, args, ranks, env, attempt) as broken:
            broken.wait_for_step(min(reached + draw.randint(1, 8), 24))
            broken.kill()
        losses = broken.losses()
        assert losses == {step: reference[step] for step in losses}
        assert min(losses) > reached - 9, "more than what two checkpoints under way may cost"
        reached = max(losses)
    resumed = train(run, args, ranks, attempt=4, **env)
    again = resumed.losses()
    assert again == {step: reference[step] for step in range(min(again), 31)}
    assert resumed.norms() == {step: norm for step, norm in unbroken.norms().items() if step in again}
    assert min(again) > reached - 9
    one, other = (load_file(tmp_path / place / "model" / "model.safetensors") for place in ("unbroken", "run"))
    assert all((one[key] == other[key]).all() for key in one | other)
    figure("resume", {"written": f"{name} ({ranks} ranks, killed)"})


@pytest.mark.parametrize(
    "written, asked, sentence",
    [
        (
            ("deepspeed", "zero2 (shard 2)"),
            ("deepspeed", "zero3 (shard 2)"),
            "ZeRO can resume only with the same strategy and world size, not zero3",
        ),
        (("deepspeed", "zero2 (shard 2)"), ("", "ddp (replicate 2)"), "which ddp .replicate 2. cannot resume from"),
        (("", "none"), ("deepspeed", "zero1 (shard 2)"), "is of none, which zero1 .shard 2. cannot resume from"),
        (("", "ddp (replicate 2)"), ("sharded", "fsdp (shard 2)"), None),
        (("pipeline", "ddp (pipeline 2, 1f1b)"), ("pipeline", "ddp (pipeline 4, 1f1b)"), None),
        (("sharded", "fsdp (shard 2)"), ("pipeline", "ddp (pipeline 2, 1f1b)"), None),
        (("sharded", "fsdp (shard 2)"), ("sharded", "fsdp (shard 2 x tensor 2)"), None),
        (("", "ddp (replicate 2)"), ("", "none"), None),
    ],
)
def test_which_layouts_go_on_from_which(tmp_path: Path, written: tuple, asked: tuple, sentence: str | None):
    (tmp_path / "COMPLETE").write_text(json.dumps({"parts": written[0], "layout": written[1]}))
    training = state.TrainingState(None, None, None, parts=asked[0], layout=asked[1])
    if sentence is None:
        state.check_layout(tmp_path, training)
        return
    with pytest.raises(Unsupported, match=sentence):
        state.check_layout(tmp_path, training)


@pytest.mark.long
def test_another_layout_is_refused_where_the_format_does_not_allow_it(tmp_path: Path):
    args = arguments(tmp_path / "texts", "--max_steps", "2")
    train(tmp_path / "run", args, 2, CLOUDTRAIN_PARALLELISM='{"strategy": "zero2"}')
    env = {"CLOUDTRAIN_PARALLELISM": '{"strategy": "zero3"}'}
    with Trainer(tmp_path / "run", args, 2, env, attempt=2) as refused:
        assert refused.codes() == [78, 78], refused.everything()
    assert (
        "is of zero2 (shard 2): ZeRO can resume only with the same strategy and world size, not zero3 (shard 2)"
    ) in refused.output()
    env = {"CLOUDTRAIN_PARALLELISM": '{"strategy": "ddp"}'}
    with Trainer(tmp_path / "run", args, 2, env, attempt=2) as refused:
        assert refused.codes() == [78, 78], refused.everything()
    assert "which ddp (replicate 2) cannot resume from: use the strategy that wrote it" in refused.output()


LAYOUTS = {
    "none": (1, {}),
    "ddp 2": (2, {"strategy": "ddp"}),
    "ddp 3": (3, {"strategy": "ddp"}),
    "fsdp 1": (1, {"strategy": "fsdp"}),
    "fsdp 2": (2, {"strategy": "fsdp"}),
    "fsdp 4": (4, {"strategy": "fsdp"}),
    "tp 2": (2, {"tp_size": 2}),
    "fsdp x tp": (4, {"strategy": "fsdp", "tp_size": 2}),
    "pp 2": (2, {"pp_size": 2}),
    "fsdp x pp": (4, {"strategy": "fsdp", "pp_size": 2}),
    "cp 2": (2, {"cp_size": 2}),
    "fsdp x cp": (4, {"strategy": "fsdp", "cp_size": 2}),
}
ELASTIC = [  # written by the first, read by each of the others
    ("pp 2", ["none"]),
    ("fsdp 2", ["pp 2"]),
    ("ddp 3", ["ddp 2"]),  # a node is lost, and min_nodes allows to go on
    pytest.param("fsdp 2", ["none", "fsdp 1", "fsdp 4", "tp 2", "fsdp x tp", "ddp 2"], marks=pytest.mark.long),
    pytest.param("pp 2", ["fsdp 2", "tp 2", "fsdp x pp", "ddp 2"], marks=pytest.mark.long),
    pytest.param("ddp 2", ["none", "fsdp 2", "tp 2", "pp 2"], marks=pytest.mark.long),
    pytest.param("fsdp x tp", ["none", "ddp 2", "fsdp 2", "tp 2", "pp 2"], marks=pytest.mark.long),
    pytest.param("cp 2", ["none", "ddp 2", "fsdp x cp"], marks=pytest.mark.long),
    pytest.param("fsdp x cp", ["none", "cp 2", "fsdp 2"], marks=pytest.mark.long),
    pytest.param("none", ["ddp 2", "fsdp 2", "pp 2"], marks=pytest.mark.long),
]


@pytest.mark.parametrize("written, read", ELASTIC)
def test_another_layout_goes_on_within_a_tolerance(tmp_path: Path, written: str, read: list[str], figure: Callable):
    """Dropout off: the same order of data, and losses within 1e-5 of the run that was not interrupted."""
    args = arguments(tmp_path / "texts", "--dropout", "0", "--per_device_train_batch_size", "4")
    at = args.index("--gradient_accumulation_steps")
    args[at : at + 2] = ["--global_batch_size", "24" if written == "ddp 3" else "16"]
    ranks, parallelism = LAYOUTS[written]
    env = {"CLOUDTRAIN_CHECKPOINT_EVERY_STEPS": "3", "CLOUDTRAIN_CHECKPOINT_KEEP": "9"}
    before = train(tmp_path / "run", args, ranks, CLOUDTRAIN_PARALLELISM=json.dumps(parallelism), **env).losses()
    for step in (6, 9):
        (tmp_path / "run" / "checkpoints" / f"step-{step:08d}.a1" / "COMPLETE").unlink()
    for name in read:
        ranks, parallelism = LAYOUTS[name]
        run = tmp_path / name
        shutil.copytree(tmp_path / "run" / "checkpoints", run / "checkpoints")
        resumed = train(run, args, ranks, attempt=2, CLOUDTRAIN_PARALLELISM=json.dumps(parallelism), **env)
        assert f"resumed from {run}/checkpoints/step-00000003.a1" in resumed.output()
        again = resumed.losses()
        assert sorted(again) == list(range(4, STEPS + 1)), name
        difference = max(abs(again[step] - before[step]) for step in again)
        assert difference < 1e-5, name
        figure("resume", {"written": written, "read": name, "loss": difference})


def test_a_model_in_parts_needs_a_folder_that_all_nodes_see(tmp_path: Path):
    """Each rank has a checkpoint folder of its own here, as nodes without a common disk have."""
    args = arguments(tmp_path / "texts")
    for rank in (0, 1):
        (tmp_path / "disks" / str(rank)).mkdir(parents=True)
    script = tmp_path / "own_disk.py"
    script.write_text(
        "import os, sys, train\n"
        "os.environ['CLOUDTRAIN_CHECKPOINT_DIR'] += '/' + os.environ['RANK']\n"
        "sys.exit(train.main())\n"
    )
    env = {"CLOUDTRAIN_PARALLELISM": '{"strategy": "fsdp"}', "CLOUDTRAIN_CHECKPOINT_DIR": tmp_path / "disks"}
    with Trainer(tmp_path / "run", args, 2, env, script=script) as refused:
        assert refused.codes() == [78, 78], refused.everything()
    assert "rank 1 does not see rank 0's checkpoints" in refused.output()
    assert refused.losses() == {}


def test_parts_on_the_disks_of_two_nodes_are_resumed_when_every_disk_has_all(tmp_path: Path):
    """Two nodes without a common folder, whose launchers bring all parts to every disk: the losses are the same."""
    args = [*arguments(tmp_path / "texts"), "--max_steps", "4"]
    disks = tmp_path / "disks"
    for rank in (0, 1):
        (disks / str(rank)).mkdir(parents=True)
    script = tmp_path / "own_disk.py"
    script.write_text(
        "import os, sys, train\n"
        "os.environ['CLOUDTRAIN_CHECKPOINT_DIR'] += '/' + os.environ['RANK']\n"
        "os.environ['LOCAL_RANK'] = '0'\n"
        "sys.exit(train.main())\n"
    )
    env = {"CLOUDTRAIN_PARALLELISM": '{"strategy": "fsdp"}', "CLOUDTRAIN_CHECKPOINT_DIR": disks}
    env |= {"CLOUDTRAIN_CHECKPOINT_EVERY_STEPS": "1", "CLOUDTRAIN_CHECKPOINT_KEEP": "2"}
    with Trainer(tmp_path / "run", args, 2, {**env, "CLOUDTRAIN_EPOCH": "1"}, script=script) as first:
        assert first.codes() == [0, 0], first.everything()
    kept = {path.name for path in (disks / "0").glob("step-*")}
    assert len(kept) == 2 == len(list((disks / "1").glob("step-*"))), "both disks keep the same two"
    last = max(kept)
    named = json.loads((disks / "0" / last / "COMPLETE").read_text())["files"].values()
    assert {file.get("node", 0) for file in named} == {0, 1}, (
        "node 0's launcher uploads it when node 1's parts are there"
    )
    shutil.copytree(disks / "1", disks / "0", dirs_exist_ok=True)
    shutil.copytree(disks / "0", disks / "1", dirs_exist_ok=True)
    next((disks / "1" / last / "state").glob("*.distcp")).unlink()  # one disk lacks a part: the one before is resumed
    with Trainer(tmp_path / "again", args, 2, {**env, "CLOUDTRAIN_EPOCH": "2"}, script=script) as second:
        assert second.codes() == [0, 0], second.everything()
    assert f"resumed from {disks / '0' / min(kept)}" in second.output()
    assert second.losses() == {4: first.losses()[4]}
