"""A job file, two nodes and nothing else: each family of strategies through the real command line and launcher."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cloudtrain.runs.run import Run
from tests.conftest import WAIT_S

pytestmark = [pytest.mark.train, pytest.mark.timeout(900), pytest.mark.usefixtures("census")]
JOB = """
name: spread
trainer: true
source: .
hyperparameters:
  dataset: python-stdlib
  max_train_bytes: 30000
  max_eval_samples: 5
  tokenizer: bpe:304
  hidden_size: 32
  num_hidden_layers: 2
  num_attention_heads: 2
  block_size: 32
  dropout: 0
  gradient_accumulation_steps: 2
  max_grad_norm: 0.5
  max_steps: 6
  learning_rate: 3e-3
  logging_steps: 1
  sample_tokens: 0
env: {OMP_NUM_THREADS: "1"}
"""
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: 'no'
num_machines: 1
num_processes: 8
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}
"""
# The samples of a rank are such that each takes eight a step in all.
FAMILIES = {
    "fsdp": (2, "{strategy: fsdp}", 2, "FSDP2"),
    "pipeline": (2, "{pp_size: 2}", 4, "PipelineStage"),
    "deepspeed": (2, "{strategy: zero2}", 2, "DeepSpeedEngine"),
    "tensor": (2, "{tp_size: 2}", 4, "DTensor"),
    "context": (2, "{cp_size: 2}", 4, "DistributedDataParallel"),
    "accelerate file": (2, "{accelerate_config: fsdp.yaml}", 2, "FSDP2"),
    "product": (4, "{strategy: fsdp, tp_size: 2}", 2, "FSDP2"),
}


def submitted(project: Path, home: Path, text: str) -> tuple[dict[int, float], list[dict], Path]:
    """Return the losses, the ranks' `world` events and the fetched model of a job."""
    project.mkdir()
    (project / "job.yaml").write_text(text)
    (project / "fsdp.yaml").write_text(ACCELERATE)
    command = [sys.executable, "-m", "cloudtrain.cli", "submit", "job.yaml", "--wait"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=4 * WAIT_S)
    run = Run.find(None, home)
    lines = [line.text for line in run.logs(raw=True)]
    assert done.returncode == 0, done.stdout + done.stderr + "\n".join(lines)
    events = [json.loads(line.removeprefix("::cloudtrain::")) for line in lines if line.startswith("::cloudtrain::")]
    losses = {row.step: row.value for row in run.metrics("loss")}
    return losses, [event for event in events if "wrapper" in event], run.fetch(project / "out")


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_a_job_file_says_how_the_model_is_spread(tmp_path: Path, home: Path, name: str):
    world, parallelism, batch, wrapper = FAMILIES[name]
    alone = JOB.replace("dropout: 0", "dropout: 0\n  per_device_train_batch_size: 4")
    one, _, _ = submitted(tmp_path / "one", home, alone)
    spread = JOB.replace("dropout: 0", f"dropout: 0\n  per_device_train_batch_size: {batch}")
    spread += f"num_nodes: 2\nprocesses_per_node: {world // 2}\nparallelism: {parallelism}\n"
    many, [event], out = submitted(tmp_path / "many", home, spread)
    assert sorted(one) == sorted(many) == list(range(1, 7))
    assert max(abs(one[step] - many[step]) for step in one) < 1e-5
    assert (event["world_size"], event["wrapper"], len(event["parameters_per_rank"])) == (world, wrapper, world)

    from transformers import AutoModel

    assert AutoModel.from_pretrained(out / "model").config.num_hidden_layers == 2
