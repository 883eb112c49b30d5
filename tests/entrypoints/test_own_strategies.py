"""Unmodified Accelerate and Trainer scripts run the strategy that the job names: seen in their models, not in their words."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.entrypoints.launching import Attempt

pytestmark = [pytest.mark.train, pytest.mark.timeout(900)]
SCRIPTS = Path(__file__).with_name("own_scripts")
TRAINER = ("--output_dir", "out", "--max_steps", "4", "--per_device_train_batch_size", "2", "--save_strategy", "no",
           "--report_to", "none", "--logging_steps", "1")  # fmt: skip
ARGUMENTS = {"plain": (), "trainer": TRAINER}
LAYERS = {"plain": ("Linear", 4), "trainer": ("LlamaDecoderLayer", 3)}  # what becomes units of FSDP


def spread(
    tmp_path: Path, script: str, ranks: int = 2, more: tuple[str, ...] = (), **parallelism
) -> tuple[list, Attempt]:
    """Run a script of own_scripts on ranks that have a GPU as far as anybody can see; return each rank's facts."""
    tools = tmp_path / "tools"
    tools.mkdir()
    cards = "".join(f"echo 'GPU {n}: NVIDIA H100 80GB HBM3 (UUID: GPU-{n:08d}-aaaa)'\n" for n in range(ranks))
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\n{cards}")
    (tools / "nvidia-smi").chmod(0o755)
    gpus = ",".join(str(number) for number in range(ranks))
    with Attempt(
        tmp_path,
        (SCRIPTS / f"{script}.py").read_text(),
        processes=ranks,
        gpus_per_node=0 if parallelism["strategy"] == "ddp" else ranks,
        argv=("train.py", *ARGUMENTS[script], *more),
        parallelism=parallelism,
        env={"PYTHONPATH": str(SCRIPTS / "shim"), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        environ={
            "CLOUDTRAIN_GPUS": "" if parallelism["strategy"] == "ddp" else gpus,
            "PATH": f"{tools}:{os.environ['PATH']}",
        },
    ) as attempt:
        assert attempt.run() == [0], "\n".join(text for _, _, _, text in attempt.lines())
        marked = [[text for text in attempt.texts(rank) if text.startswith("FACTS ")] for rank in range(ranks)]
        return [json.loads(last.removeprefix("FACTS ")) for *_, last in marked], attempt


def check_whole(attempt: Attempt, script: str, parameters: int) -> None:
    """The saved model loads, has every parameter, and is trained."""
    from safetensors.torch import load_file

    folder = attempt.root / "run" / "model"
    if script == "trainer":
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder)
        assert sum(each.numel() for each in model.parameters()) == parameters
    state = load_file(folder / "model.safetensors")
    tied = 128 * 64 if "lm_head.weight" in state and "model.embed_tokens.weight" in state else 0
    assert sum(each.numel() for each in state.values()) - tied == parameters
    assert all(each.isfinite().all() and each.abs().sum() > 0 for each in state.values())


CASES = [(script, strategy) for script in ARGUMENTS for strategy in ("ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3")]
SAMPLE = (("plain", "fsdp"),)


@pytest.mark.parametrize(
    ("script", "strategy"),
    [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.long) for case in CASES],
)
def test_a_script_runs_the_strategy_of_its_job(tmp_path: Path, script: str, strategy: str, figure):
    ranks = 4 if strategy == "hsdp" else 2
    sizes = {"dp_replicate_size": 2} if strategy == "hsdp" else {}
    facts, attempt = spread(tmp_path, script, ranks, strategy=strategy, **sizes)
    first, whole = facts[0], facts[0]["parameters"]
    local = [each.get("local", whole) for each in facts]
    wrapper = "DistributedDataParallel"
    if strategy in ("fsdp", "hsdp"):
        wrapper = "FSDP2"
        layer, count = LAYERS[script]
        assert [each["units"].count(layer) for each in facts] == [count] * ranks
        assert first["mesh"] == ([2, 2] if strategy == "hsdp" else [2])
        assert sum(local) == whole * ranks // 2 and max(local) < 0.6 * whole
    if strategy.startswith("zero"):
        wrapper = "DeepSpeedEngine"
        assert {each["stage"] for each in facts} == {int(strategy[4:])}
        parts = [each["optimizer"] for each in facts]
        assert max(parts) < 0.6 * whole and sum(parts) >= whole  # padded to equal lengths
        if strategy == "zero3":
            assert max(local) < 0.6 * whole and sum(local) >= whole
        else:
            assert {each["gradients_in_parts"] for each in facts} == {strategy == "zero2"}
    assert {each["wrapper"] for each in facts} == {wrapper}
    check_whole(attempt, script, whole)
    optimizer = max(each.get("optimizer", each.get("local", whole)) for each in facts)
    shares = {"parameters": max(local) / whole, "optimizer": optimizer / whole}
    figure(
        "own strategy",
        {"name": f"{script} {strategy}", "script": script, "strategy": strategy, "ranks": ranks, "wrapper": wrapper,
         "units": len(first.get("units", ())), "mesh": first.get("mesh"), **shares},
    )  # fmt: skip
