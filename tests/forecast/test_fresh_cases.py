"""Questions about memory, time and price whose answers were written down from public sources before the forecast was read.

fresh_cases.csv has a question in each row, the answer that its source gives, and the job that asks it. `note` says what was
corrected later and why.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends import machines
from cloudtrain.errors import BadJob
from cloudtrain.forecast import devices, fit, memory, models
from cloudtrain.runs.planning.plan import Planner

with (Path(__file__).parent / "fresh_cases.csv").open(encoding="utf-8", newline="") as _file:
    ROWS = list(csv.DictReader(_file))
CASES = [pytest.param(row, id=row["id"]) for row in ROWS]
VERDICTS = {"fits": {fit.FITS, fit.PROBABLY}, "tight": {fit.PERHAPS}, "no": {fit.NOT}, "unknown": {""}}
OPTIONS = {
    "kubernetes": {},
    "sagemaker": {"role": "arn:aws:iam::123456789012:role/r", "bucket": "my-bucket"},
    "vertex": {"project": "project-1", "bucket": "my-bucket"},
}


def planned(said: Mapping[str, Any], folder: Path) -> Any:
    """Return the plan of a case's job."""
    target = said.get("target", "kubernetes")
    (folder / "source").mkdir(parents=True)
    (folder / "source" / "t.py").write_text("import accelerate, deepspeed, transformers\n")
    resources = {"accelerators": said["gpus"]} if "gpus" in said else {"instance_type": said["instance_type"]}
    job = {
        "name": "c", "entrypoint": "t.py", "source": str(folder / "source"), "image": "registry.example/i@sha256:" + "0" * 64,
        "output": "gs://my-bucket/x" if target == "vertex" else "s3://my-bucket/x", "fit": said.get("fit", {}),
        "resources": resources | ({"priced_as": said["priced_as"]} if "priced_as" in said else {}),
        "num_nodes": said.get("num_nodes", 1), "parallelism": said.get("parallelism", {}),
        "options": {target: OPTIONS[target] | ({"region": said["region"]} if "region" in said else {})},
    }  # fmt: skip
    return Planner(target, home=folder / "home").plan(job)


def wrong(row: Mapping[str, str], folder: Path) -> str:
    """Return what is wrong with the answer to a case; "" where it is right."""
    try:
        plan = planned(json.loads(row["job"]), folder)
    except BadJob as refused:  # what it asks for is the answer
        asked = row["verdict"] == "depends" and "fit.batch: is missing" in str(refused)
        return "" if asked else f"refused: {refused}"
    found: tuple[float, float] | None = None
    if row["kind"] == "price":
        found = (plan.price["usd_per_hour"],) * 2 if plan.price else None
    elif row["kind"] == "time" or row["question"].startswith("How long"):
        seconds = plan.time.get("seconds")
        found = (seconds[0] / 3600, seconds[-1] / 3600) if seconds else None
        if row["verdict"] == "unknown":
            return "" if found is None and plan.time["line"].startswith("unknown: ") else plan.time["line"]
    else:
        if row["verdict"] == "depends":
            return "" if "bfloat16" in plan.fit["line"] else plan.fit["line"]
        if plan.fit["answer"] not in set().union(*(VERDICTS[each] for each in row["verdict"].split("|"))):
            return plan.fit["line"]
        found = (plan.fit["low"] / 1e9, plan.fit["high"] / 1e9) if "low" in plan.fit else None
    if not row["low"]:
        return ""
    if found is None:
        return "no figure"
    if found[1] > 7 * found[0]:
        return f"{found} says nothing"
    return "" if found[0] <= float(row["high"]) and found[1] >= float(row["low"]) else f"{found} {row['unit']}"


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.mark.parametrize("row", CASES)
def test_the_forecast_has_the_answer_of_the_source(row: dict, tmp_path: Path):
    assert not wrong(row, tmp_path), (row["question"], row["why"])


def test_each_case_has_a_source_and_a_reason():
    kinds = [row["kind"] for row in ROWS]
    least = {"lora": 10, "full": 8, "time": 5, "price": 4, "unknown": 3}
    assert len(ROWS) >= 30 and all(kinds.count(kind) >= count for kind, count in least.items())
    for row in ROWS:
        assert all(row[name] for name in ("question", "verdict", "why", "address", "opened", "quote", "job")), row["id"]
        assert bool(row["low"]) == bool(row["high"]) and (row["low"] or row["verdict"] != "range"), row["id"]


@pytest.mark.parametrize(
    "name, changes",
    [
        ("L01", {"low": "40", "high": "50"}),
        ("L01", {"verdict": "no"}),
        ("T02", {"low": "100", "high": "200"}),
        ("P03", {"low": "37", "high": "38"}),
        ("U03", {"verdict": "range", "low": "1", "high": "9"}),
    ],
)
def test_a_wrong_answer_is_found(name: str, changes: dict, tmp_path: Path):
    row = next(row for row in ROWS if row["id"] == name)
    assert wrong(row | changes, tmp_path)


NEWER = {"B300", "GB200", "H100-NVL", "MI300X", "RTX-PRO-4500"}  # whose drivers' figure no public text was found with


def test_each_gpu_of_the_machine_tables_has_a_size():
    gpus = {each.accelerator for table in machines.TABLES for each in machines.load(table) if each.accelerator}
    without = {
        gpu for gpu in gpus if devices.size_bytes(gpu) is None and not gpu.startswith(("TPU", "Trainium", "Inferentia"))
    }
    assert without == NEWER and {"V100-16GB", "T4", "H100"} <= gpus


@pytest.mark.parametrize("strategy, left", [("fsdp", 0), ("hsdp", 0), ("zero3", 0), ("zero2", 2), ("zero1", 6)])
def test_what_is_offloaded_is_not_on_the_gpu(strategy: str, left: int):
    """Bytes of a parameter that stay: bfloat16 weights with ZeRO-1 and 2, and float32 gradients with ZeRO-1."""
    shape = models.find("llama-2-7b", Path("/"))
    assert isinstance(shape, models.Shape)
    step = memory.Step(1, 16, "bf16", True, strategy, 8)
    sizes = memory._Sizes(shape, dataclasses.replace(step, offload=True))
    assert sizes.weights + sizes.moments + sizes.gradients == left * shape.parameters
    assert memory.estimate(shape, dataclasses.replace(step, offload=True)).total < memory.estimate(shape, step).total


@pytest.mark.parametrize("strategy, each", [("fsdp", 16), ("hsdp", 16), ("zero3", 18), ("zero2", 16), ("zero1", 12)])
def test_what_is_offloaded_is_in_the_node(strategy: str, each: int):
    """Bytes of a parameter in one node of two; DeepSpeed's own estimate is 18 with ZeRO-3 and 16 with ZeRO-2."""
    shape = models.find("llama-2-7b", Path("/"))
    assert isinstance(shape, models.Shape)
    found = memory.estimate(shape, memory.Step(1, 16, "bf16", True, strategy, 16, offload=True))
    assert found.host * 8 == pytest.approx(each * shape.parameters / 2, rel=1e-6)
    assert memory.estimate(shape, memory.Step(1, 16, "bf16", True, strategy, 16)).host == 0


@pytest.mark.parametrize(
    "said, answer, words",
    [
        (
            {"instance_type": "a2-ultragpu-1g"},
            fit.NOT,
            "offload keeps 218.2 GiB or more in each node's memory of 170.0 GiB",
        ),
        ({"instance_type": "a2-ultragpu-2g"}, fit.PROBABLY, "each node's memory of 340.0 GiB"),
        ({"gpus": "A100-80GB:1"}, fit.PROBABLY, "whose size is not known"),
    ],
)
def test_a_plan_says_whether_the_node_has_room_for_what_is_offloaded(
    said: dict, answer: str, words: str, tmp_path: Path
):
    fields = {"model": "llama-2-13b", "batch": 1, "sequence": 2048, "checkpointing": True}
    job = {"fit": fields, "parallelism": {"strategy": "zero3", "offload": True}}
    found = planned(said | job, tmp_path / "0").fit
    assert found["answer"] == answer and words in found["line"]
    fits = [text for text, _, _ in found["changes"] if text.startswith("fits: ")]
    assert bool(fits) == (answer == fit.NOT) and all("parallelism.offload: false" in text for text in fits)
    assert "offload keeps" not in planned(said | {"fit": fields}, tmp_path / "1").fit["line"]


def test_a_gpu_without_bfloat16_is_named_and_gets_fp16(tmp_path: Path):
    said = {"gpus": "T4:1", "fit": {"model": "llama-3.2-1b", "batch": 8, "sequence": 2048, "precision": "fp32"}}
    hints = [text for text, _, _ in planned(said, tmp_path / "0").fit["changes"]]
    assert "float16" in hints and not any("bf" in text for text in hints)
    said["fit"] |= {"precision": "bf16"}
    assert "bfloat16, which T4 does not have" in planned(said, tmp_path / "1").fit["line"]
    assert "bfloat16" not in planned(said | {"gpus": "L4:1"}, tmp_path / "2").fit["line"]
