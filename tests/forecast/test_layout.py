"""`parallelism: auto`: what is chosen fits, is the fastest by the forecast, keeps the global batch, and is frozen."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from cloudtrain.cli import main
from cloudtrain.errors import BadJob
from cloudtrain.forecast import layout, training
from cloudtrain.job.job import Job

EIGHT_B = {"model": "meta-llama/Llama-3.1-8B", "bf16": True, "block_size": 4096, "global_batch_size": 64}


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def asking(gpus: str | None = "H100:8", fields: dict | None = None, **more) -> Job:
    values = {name: value for name, value in (EIGHT_B | more).items() if value is not None}
    resources = {"accelerators": gpus} if gpus else {}
    return Job(**{"name": "t", "trainer": True, "source": "/", "parallelism": "auto", "hyperparameters": values,
                  "resources": resources} | (fields or {}))  # fmt: skip


def spread(job: Job) -> training.Training:
    """Return the training of a frozen job, as the trainer itself would read it."""
    found = training.of_job(
        job, job.parallelism.model_dump(mode="json", exclude_none=True), job.world_size, job.num_nodes
    )
    assert isinstance(found, training.Training)
    return found


@pytest.mark.parametrize(
    "gpus, more, strategy, checkpointing",
    [
        ("H100:8", {}, "fsdp", False),
        ("A100-40GB:8", {}, "fsdp", True),
        ("A100-80GB:8", {"model": "gpt2", "block_size": 1024}, "ddp", False),
        ("A100-80GB:1", {"model": "Qwen/Qwen2.5-0.5B"}, "none", False),
    ],
)
def test_the_plainest_of_the_fastest_is_chosen(gpus: str, more: dict, strategy: str, checkpointing: bool):
    job, notes = layout.freeze(asking(gpus, **more))
    step = spread(job).step
    assert (job.parallelism.strategy, step.checkpointing, step.tensor * step.pipeline) == (strategy, checkpointing, 1)
    assert notes[0].startswith(f"parallelism auto: {strategy}, micro-batch {step.batch} x {step.accumulation}")


@pytest.mark.parametrize("gpus, nodes", [("H100:8", 1), ("H100:8", 4), ("A100-40GB:4", 2), ("L4:8", 2), ("T4:1", 1)])
@pytest.mark.parametrize(
    "batch", [{}, {"global_batch_size": None}, {"global_batch_size": None, "global_batch_tokens": 1 << 19}]
)
def test_the_global_batch_stays(gpus: str, nodes: int, batch: dict):
    asked = asking(gpus, {"num_nodes": nodes}, model="Qwen/Qwen2.5-1.5B", per_device_train_batch_size=None, **batch)
    job, notes = layout.freeze(asked)
    step, found = spread(job).step, spread(job)
    by_hand = 8 * nodes * asked.resources.gpus  # the trainer's own batch on each rank
    wanted = 128 if "global_batch_tokens" in batch else by_hand if batch else 64
    assert step.batch * step.accumulation * found.ranks == found.samples == wanted
    assert job.parallelism.strategy != "auto" and Job.from_dict(job.to_dict()) == job
    assert len([note for note in notes if note.startswith("next best layout: ")]) in (1, 2)


def test_it_shows_two_runners_up_and_why():
    _, notes = layout.freeze(asking())
    first, second, third, out = notes
    assert "of 79.6 GiB; the fastest of" in first and out.startswith("does not fit: ddp") and "GiB" in out
    assert all(note.startswith("next best layout: ") and note.endswith("slower") for note in (second, third))


def test_no_layout_that_fits_is_faster():
    asked = asking("A100-40GB:8")
    found, most = layout._asked(asked, 1, 8)
    everything = list(layout._layouts(asked, found, 1, 8, ""))
    fitting = [each for each in everything if each.high <= most]
    job, _ = layout.freeze(asked)
    (chosen,) = [each for each in fitting if each.step == spread(job).step]
    assert len(everything) > 50 and chosen.seconds <= min(each.seconds for each in fitting) * 1.02


def test_a_slow_network_keeps_the_parameters_within_a_node():
    def strategy(machine: str) -> str:
        asked = asking("H100:8", {"num_nodes": 2}, model="Qwen/Qwen2.5-1.5B", block_size=2048, global_batch_size=512,
                       per_device_train_batch_size=4, gradient_checkpointing=True)  # fmt: skip
        found, _ = layout._asked(asked, 2, 8)
        made = {str(each.parallelism): each for each in layout._layouts(asked, found, 2, 8, machine)}
        fsdp, hsdp = made["{'strategy': 'fsdp'}"], made["{'strategy': 'hsdp', 'dp_replicate_size': 2}"]
        return "hsdp" if hsdp.seconds < fsdp.seconds * 0.98 else "alike"

    assert (strategy("vertex/us-central1/a3-highgpu-2g"), strategy("aws/us-east-1/p5.48xlarge")) == ("hsdp", "alike")


def test_what_the_job_writes_itself_stays():
    job, _ = layout.freeze(asking("H100:8", per_device_train_batch_size=2, gradient_checkpointing=True))
    step = spread(job).step
    assert (step.batch, step.checkpointing) == (2, True)
    job, _ = layout.freeze(asking("H100:8", {"args": ["--per_device_train_batch_size", "1"]}))
    assert spread(job).step.batch == 1 and "per_device_train_batch_size" not in job.hyperparameters


def test_without_gpus_the_nodes_memory_bounds_it():
    small = {"model": None, "tokenizer": "bpe:300", "bf16": None, "block_size": 16, "global_batch_size": 8}
    two = {"processes_per_node": 2, "resources": {"memory": "16GB"}}
    job, _ = layout.freeze(asking(None, two, **small))
    assert job.parallelism.strategy == "ddp" and spread(job).step.batch == 4
    with pytest.raises(BadJob, match=r"resources\.memory"):
        layout.freeze(asking(None, {"processes_per_node": 2}, **small))


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"fields": {"trainer": False, "entrypoint": "t.py", "hyperparameters": {}}}, "shared trainer"),
        ({"fields": {"parallelism": {"strategy": "auto", "tp_size": 2}}}, "tp_size"),
        ({"fields": {"min_nodes": 1, "num_nodes": 2}}, "number of nodes"),
        ({"model": "me/unknown"}, "are unknown: there is no config.json"),
        ({"gpus": "TPU:8"}, "memory of TPU"),
        ({"block_size": "x"}, "block_size"),
        ({"global_batch_size": 7, "per_device_train_batch_size": 2}, "divides the global batch"),
    ],
)
def test_what_cannot_be_chosen_is_refused(changes: dict, why: str):
    with pytest.raises(BadJob, match=why):
        layout.freeze(asking(**changes))


def test_the_pages_show_what_plan_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """docs/auto.md has the job, its lines and the line of docs/time.md."""
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "auto.md").read_text()
    job, shown = page.split("```yaml\n")[1].split("```")[0], page.split("prints the choice")[1].split("```\n")[1]
    (tmp_path / "job.yaml").write_text(job)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "job.yaml", "-t", "slurm", "--set", f"options.slurm.folder={tmp_path}"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in shown.splitlines() if line not in printed] == [] and len(shown.splitlines()) == 6
    time_page = (docs / "time.md").read_text()
    assert shown.splitlines()[1] in time_page.splitlines()
    assert main(["plan", "job.yaml", "-t", "slurm", "--set", f"options.slurm.folder={tmp_path}", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    tokens, steps = plan["time"]["tokens"], plan["time"]["steps"]
    assert (
        f"4,096 x 1 x 4 x 16 = {tokens:,} tokens in a step, and {tokens * steps:,} in its {steps:,} steps" in time_page
    )
    assert f"10,000,000,000 / {tokens:,} = {math.ceil(10**10 / tokens):,} steps" in time_page
