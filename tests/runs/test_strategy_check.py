"""A strategy that a user's script would not have is refused at plan."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cloudtrain.errors import BadJob
from cloudtrain.runs.submit import Submitter

JOB = {"name": "x", "entrypoint": "train.py", "resources": {"accelerators": "A100:2"}}
SHARDED = ["fsdp", "hsdp", "zero1", "zero2", "zero3"]
FSDP = {"distributed_type": "FSDP", "num_machines": 1, "machine_rank": 0, "rdzv_backend": "static", "use_cpu": False}


def plan(folder: Path, **job):
    return Submitter().plan({**JOB, "source": str(folder), **job})


def refused(folder: Path, **job) -> list[str]:
    with pytest.raises(BadJob) as error:
        plan(folder, **job)
    return [f"{problem.path}: {problem.message}" for problem in error.value.problems]


@pytest.fixture
def source(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source that uses Accelerate, on a machine that shows eight GPUs."""
    (tmp_path / "bin").mkdir()
    cards = "".join(f"echo 'GPU {n}: NVIDIA H100 80GB HBM3 (UUID: GPU-{n:08d}-aaaa)'\n" for n in range(8))
    (tmp_path / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\n{cards}")
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "train.py").write_text("from accelerate import Accelerator\n")
    return folder


@pytest.mark.parametrize("strategy", SHARDED)
def test_without_gpus_a_sharded_strategy_is_refused(source: Path, strategy: str):
    job = {
        "num_nodes": 4,
        "parallelism": {"strategy": strategy, "dp_replicate_size": 2 if strategy == "hsdp" else None},
    }
    [sentence] = refused(source, **job, resources={})
    assert sentence.startswith(
        f"parallelism.strategy: is {strategy}, but the job requests no GPU: without GPUs Accelerate"
    )
    assert plan(source, **job).manifest["parallelism"]["strategy"] == strategy


def test_ddp_and_the_shared_trainer_need_no_gpu(source: Path):
    plan(source, num_nodes=2, parallelism={"strategy": "ddp"}, resources={})
    plan(source, num_nodes=2, parallelism={"strategy": "fsdp"}, resources={}, entrypoint=None, trainer=True,
         hyperparameters={"dataset": "python-stdlib"})  # fmt: skip


@pytest.mark.parametrize("library", ["accelerate", "transformers", "trl", "deepspeed"])
def test_a_source_that_mentions_no_library_is_refused(source: Path, library: str):
    (source / "train.py").write_text("import torch, accelerated, sqltrl\n")
    [sentence] = refused(source, parallelism={"strategy": "fsdp"})
    assert sentence.startswith("parallelism.strategy: is fsdp, which needs Accelerate, but no file and no requirement")
    (source / "requirements.txt").write_text(f"torch\n{library}>=1\n")
    plan(source, parallelism={"strategy": "fsdp"})
    (source / "requirements.txt").unlink()
    (source / "model.py").write_text(f"import {library}\n")
    plan(source, parallelism={"strategy": "fsdp"})


def test_a_script_that_declares_the_strategy_does_it_itself(source: Path):
    (source / "train.py").write_text("# cloudtrain: fsdp hsdp\nimport torch\n")
    plan(source, parallelism={"strategy": "fsdp"}, resources={}, num_nodes=2)
    assert len(refused(source, parallelism={"strategy": "zero2"}, resources={}, num_nodes=2)) == 2


def test_a_source_that_was_not_read_to_its_end_gets_the_benefit_of_the_doubt(source: Path, monkeypatch):
    (source / "train.py").write_text("import torch\n" + "#" * 200)
    monkeypatch.setattr("cloudtrain.source.texts.LONGEST", 100)
    plan(source, parallelism={"strategy": "fsdp"})


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
def test_an_accelerate_file_is_held_to_the_same(source: Path, kind: str):
    (source / "a.yaml").write_text(json.dumps({**FSDP, "distributed_type": kind}))
    asked = {"parallelism": {"accelerate_config": "a.yaml"}, "num_nodes": 2}
    [sentence] = refused(source, **asked, resources={})
    assert sentence.startswith(f"parallelism.accelerate_config: is of type {kind}, but the job requests no GPU")
    with pytest.raises(BadJob) as error:
        plan(source, **asked, resources={})
    assert error.value.problems[0].hint.endswith("write parallelism: {strategy: ddp} in place of accelerate_config")
    plan(source, num_nodes=2, resources={}, parallelism={"strategy": "ddp"})  # what the hint says works
    plan(source, **asked)
    (source / "a.yaml").write_text("distributed_type: MULTI_GPU\n")
    plan(source, **asked, resources={})
    (source / "a.yaml").write_text("- 1\n")
    assert refused(source, **asked) == [
        "parallelism.accelerate_config: a.yaml is not a valid Accelerate configuration: it has no keys"
    ]


def test_the_keys_of_the_world_that_differ_are_said(source: Path):
    asked = {"parallelism": {"accelerate_config": "a.yaml"}, "num_nodes": 2}
    (source / "a.yaml").write_text(json.dumps({**FSDP, "num_processes": 4, "num_machines": 2, "gpu_ids": "all"}))
    assert not [note for note in plan(source, **asked).notes if "a.yaml" in note]
    other = {"num_processes": 8, "machine_rank": 1, "main_process_ip": "10.0.0.1", "rdzv_backend": "c10d"}
    nested = {"deepspeed_config": {"zero_stage": 2, "deepspeed_hostfile": "hosts"}}
    (source / "a.yaml").write_text(json.dumps({**FSDP, **other, **nested}))
    [note] = [note for note in plan(source, **asked).notes if "a.yaml" in note]
    assert note == (
        "a.yaml: cloudtrain's own settings replace num_processes 8 (the job's is 4), num_machines "
        "1 (the job's is 2), machine_rank 1, "
        "main_process_ip 10.0.0.1, rdzv_backend c10d, deepspeed_hostfile hosts"
    )


def test_the_job_of_the_page_is_planned(source: Path):
    page = (Path(__file__).parents[2] / "docs/strategies.md").read_text()
    text = page.partition("```yaml\n")[2].partition("```")[0]
    (source / "job.yaml").write_text(text)
    assert Submitter().plan(source / "job.yaml").manifest["parallelism"]["strategy"] == "fsdp"
