"""How long a training takes: published trainings against the forecast, and what is claimed where."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from cloudtrain.forecast import duration, network, speed, training
from cloudtrain.forecast.memory import Step
from cloudtrain.forecast.models import Shape, find
from cloudtrain.job.job import Job
from cloudtrain.runs.planning.plan import Planner
from cloudtrain.source.texts import Texts

DOCS = Path(__file__).parents[2] / "docs"
FOUR = {"model": "meta-llama/Llama-3.1-8B", "dataset": "python-stdlib", "bf16": True, "block_size": 4096,
        "per_device_train_batch_size": 1,
        "max_steps": 1000, "global_batch_size": 64}  # fmt: skip


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.fixture
def planned(tmp_path: Path):
    """Return a function that plans a job of the shared trainer and returns what the plan says of its time."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "t.py").write_text("")

    def plan(
        gpus: str = "H100:8", nodes: int = 1, machine: str | None = None, fields: dict | None = None, **more
    ) -> dict:
        job = {"name": "t", "trainer": True, "source": str(source), "image": "i:1", "output": "s3://b/x",
               "hyperparameters": {name: value for name, value in (FOUR | more).items() if value is not None},
               "parallelism": {"strategy": "fsdp"}, "num_nodes": nodes,
               "resources": {"accelerators": gpus, "usd_per_hour": 50} | ({"priced_as": machine} if machine else {})}  # fmt: skip
        planner = Planner("kubernetes", home=tmp_path / "home")
        planner.force = True
        found = planner.plan(job | (fields or {})).time
        assert found is not None
        return dict(found)

    return plan


def published() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published", DOCS / "published.py")
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_published_trainings_lie_in_the_band_and_the_page_says_how_many():
    whole = list(published().compared())
    assert [each.number for each in whole] == list(range(1, 151))
    page = (DOCS / "tables-evidence.md").read_text()
    for name, apart, least in (("all", False, 104), ("kept apart", True, 0)):
        found = [each for each in whole if each.apart == apart]
        inside = sum(each.inside for each in found)
        assert len(found) == (20 if apart else 130) and inside >= least
        assert f"| {name} | {len(found)} | {inside} |" in page
    faster = sum(each.over.middle < 1 for each in whole if not each.apart)
    assert 130 / 3 < faster < 130 * 2 / 3, "as many are faster as are slower"
    # a band that held everything would say nothing
    assert all(each.over.low / each.over.high < (9 if each.group == "QLoRA" else 7) for each in whole)


@pytest.mark.parametrize(
    "text, kind",
    [
        ("from transformers import Trainer\n", "eager"),
        ("import torch\nmodel = torch.compile(model)\n", "fused"),
        ("import helper\n", "fused"),
        ("args = dict(torch_compile=True)\n", "fused"),
        ("args = dict(torch_compile=False)\n# torch.compile(x)\n", "eager"),
    ],
)
def test_a_scripts_source_says_which_trainings_it_is_compared_with(text: str, kind: str, tmp_path: Path):
    (tmp_path / "t.py").write_text(text)
    (tmp_path / "helper.py").write_text("import flash_attn\n")
    (tmp_path / "other.py").write_text("import unsloth\n")
    assert duration.program(Texts(tmp_path, ["t.py", "helper.py", "other.py"], "t.py")) == kind


def test_a_plan_says_time_and_cost(planned):
    found = planned(max_eval_samples=100)
    low, middle, high = found["seconds"]
    assert low < middle < high and found["tokens"] == 64 * 4096 and found["steps"] == 1000
    assert found["usd"] == pytest.approx([low / 3600 * 50, high / 3600 * 50], abs=0.02)
    assert f"{found['usd'][0]:.2f} to {found['usd'][1]:.2f} USD" in found["line"] and "without" not in found["line"]
    assert planned(max_eval_samples=100_000)["seconds"][0] > low, "evaluations take time"
    twice = planned(max_eval_samples=100, max_steps=2000)["seconds"]
    assert twice[0] == pytest.approx(2 * low - duration.START_S.low, rel=0.01)
    assert "limits.max_runtime ends" in planned(fields={"limits": {"max_runtime": "5m"}})["line"]


def test_with_lora_steps_take_up_to_as_long_and_begin_at_half(planned):
    whole, lora = planned(), planned(use_peft=True)
    assert whole["steps"] == lora["steps"]
    assert lora["step_s"][0] < whole["step_s"][0] and lora["step_s"][1] < whole["step_s"][1]


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"max_steps": None}, "max_steps"),
        ({"gpus": "L4:8"}, "no published training on L4 "),
        ({"gpus": "Trainium:16"}, "Neuron's compiler"),
        ({"gpus": "v5p:8"}, "XLA's compiler"),
        ({"gpus": "V100:8", "bf16": True}, "fp16"),
        ({"gpus": "H100-PCIE:8"}, "no published training on H100-PCIE "),
        ({"bf16": None}, "bf16"),
        ({"model": "gpt2", "block_size": 64}, "so small a micro-batch"),
        ({"model": None, "tokenizer": "bpe:4096"}, "0.1 billion"),
        ({"model": "me/unknown"}, "are unknown: there is no config.json"),
        ({"nodes": 2}, "network"),
    ],
)
def test_nothing_is_claimed_where_it_is_not_known(planned, changes: dict, why: str):
    found = planned(**changes)
    assert found["line"].startswith("unknown: ") and why in found["line"] and "seconds" not in found


def test_the_network_of_the_machine_counts(planned):
    fast = planned(nodes=2, machine="aws/us-east-1/p5.48xlarge")["seconds"]
    slow = planned(nodes=2, machine="vertex/us-central1/a3-highgpu-2g")["seconds"]  # 50 Gb/s
    assert slow[0] > 1.5 * fast[0]
    assert network.network("sagemaker/us-east-1/ml.g5.48xlarge") == pytest.approx([7.5e9, 8.75e9, 10e9])
    assert network.network("sagemaker/us-east-1/ml.nothing") is None


@pytest.mark.parametrize(
    "gpus, model, precision, why",
    [
        ("V100-16GB:1", "bert-large-uncased", "fp16", ""),
        ("V100-16GB:1", "bert-large-uncased", "bf16", "in fp16 only"),
        ("A100-80GB:1", "bert-large-uncased", "fp16", "in bf16 only"),
        ("A100-80GB:1", "t5-large", "bf16", "an encoder and a decoder"),
        ("A100-80GB:1", "vit-large-patch16-224", "bf16", "images"),
    ],
)
def test_of_scripts_the_gpu_and_the_kind_of_model_decide(
    gpus: str, model: str, precision: str, why: str, tmp_path: Path
):
    fields = {"model": model, "batch": 8, "sequence": 197, "precision": precision, "steps": 100}
    job = {"name": "s", "entrypoint": "t.py", "source": str(tmp_path), "image": "i:1", "output": "s3://b/x",
           "resources": {"accelerators": gpus}, "fit": fields}  # fmt: skip
    (tmp_path / "t.py").write_text("")
    found = Planner("kubernetes", home=tmp_path / "home").plan(job).time
    assert found is not None and ("seconds" in found) == (not why) and why in found["line"]
    assert why or "(p10 to p90 of eager scripts; " in found["line"]


def test_communication_is_what_the_ring_passes_on():
    """Figures by hand, without overlap: 8 GPUs of one node, 100 GB/s each."""
    rate = network.Band(1e11, 1e11, 1e11)
    shape = find("llama-3.1-8b", Path("/"))
    assert isinstance(shape, Shape)

    def seconds(step: Step, ranks: int, nodes: int = 1) -> float:
        made = speed.of_step(shape, step, network.Pool("H100", nodes, 8, rate, network.Band(1e10, 1e10, 1e10)), ranks)
        assert made
        return made.communication.middle

    parameters = shape.parameters
    ddp = Step(1, 8192, "bf16", strategy="ddp")
    assert seconds(ddp, 8) == pytest.approx(7 / 8 * 8 * parameters / 1e11)
    fsdp = Step(1, 8192, "bf16", strategy="fsdp", shards=8, accumulation=3)
    assert seconds(fsdp, 8) == pytest.approx(3 * 7 / 8 * 8 * parameters / 1e11)
    across = Step(1, 8192, "bf16", strategy="fsdp", shards=16)
    assert seconds(across, 16, nodes=2) == pytest.approx(15 / 16 * 8 * parameters / 1e10), "the slower of both"
    split = Step(1, 8192, "bf16", tensor=8)
    assert seconds(split, 1) == pytest.approx(7 / 8 * 8 * 2 * 8192 * 4096 * 32 / 1e11)


def test_a_script_says_its_steps_itself():
    job = Job(name="s", source="/", entrypoint="t.py", resources={"accelerators": "H100:8"},
              fit={"model": "llama-3.1-8b", "batch": 2, "sequence": 4096, "accumulation": 4})  # fmt: skip
    found = training.of_job(job, {"strategy": "fsdp"}, 8, 1)
    assert (
        isinstance(found, training.Training) and found.length == "fit.steps is not set" and found.step.accumulation == 4
    )
    said = training.of_job(job.replace(fit={**job.fit.model_dump(), "steps": 500}), {"strategy": "fsdp"}, 8, 1)
    assert isinstance(said, training.Training) and isinstance(said.length, training.Length) and said.length.steps == 500
