"""The strategy of a user's own script, in the form of an Accelerate configuration file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cloudtrain.backends.manifest import Manifest
from tests.entrypoints.launching import CLEAN

from launcher.errors import Refused  # isort: skip
from launcher.manifest import Manifest as Received  # isort: skip
from launcher.prepare import accelerate_config, own_strategy  # isort: skip


def manifest(**parallelism) -> Received:
    made = Manifest(
        run_id="r", attempt=1, argv=("t.py",), nodes=1, processes_per_node=4, gpus_per_node=4, parallelism=parallelism
    )
    return Received(made.to_dict())


def test_the_nodes_of_other_roles_are_no_replicas_of_hsdp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    configs = []

    def read(python, path, *_):
        configs.append(json.loads(Path(path).read_text()))
        return {}

    monkeypatch.setattr(accelerate_config, "environment", read)
    job = manifest(strategy="hsdp")
    job.nodes, job.roles = 5, ({"name": "trainer", "nodes": 2}, {"name": "server", "nodes": 3})
    job.take_role(0)
    own_strategy.environment(sys.executable, job, str(tmp_path), CLEAN)
    [config] = configs
    assert (
        config["parallelism_config"]
        == own_strategy.configuration({"strategy": "hsdp"}, 2, 8, False, {})["parallelism_config"]
    )


def test_blocks_of_transformers_or_a_size_bound_the_units():
    fsdp = {"strategy": "fsdp"}
    assert (
        own_strategy.configuration(fsdp, 1, 2, True, {})["fsdp_config"]["fsdp_auto_wrap_policy"]
        == "TRANSFORMER_BASED_WRAP"
    )
    plain = own_strategy.configuration(fsdp, 1, 2, False, {})["fsdp_config"]
    assert plain["fsdp_auto_wrap_policy"] == "SIZE_BASED_WRAP" and plain["fsdp_min_num_params"] > 0
    assert (plain["fsdp_version"], plain["fsdp_state_dict_type"]) == (2, "FULL_STATE_DICT")


@pytest.mark.parametrize(
    ("parallelism", "nodes", "sizes"),
    [({}, 2, (2, 4)), ({"dp_shard_size": 2}, 2, (4, 2)), ({"dp_replicate_size": 4}, 1, (4, 2))],
)
def test_hsdp_has_a_replica_for_each_node_or_the_sizes_that_are_asked_for(parallelism: dict, nodes: int, sizes: tuple):
    made = own_strategy.configuration({"strategy": "hsdp", **parallelism}, nodes, 8, False, {})["parallelism_config"]
    assert tuple(made.values()) == sizes


@pytest.mark.parametrize(
    ("text", "argv", "expected"),
    [
        ("import accelerate", ["--gradient_accumulation_steps", "4", "--mixed_precision=bf16"], ("4", "bf16")),
        ("import accelerate", ["gradient-accumulation-steps=4"], ("4", None)),
        ("import accelerate", [], (None, None)),
        ("import transformers\nx = transformers.Trainer(", ["--gradient_accumulation_steps", "4"], (None, None)),
        ("from trl import SFTTrainer\nSFTTrainer (model)", ["--mixed_precision", "bf16"], (None, None)),
    ],
)
def test_accumulation_and_precision_are_for_plain_accelerate_where_the_job_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, argv: list, expected: tuple
):
    """The launch command always sets both: the first would override the script's own, and make Trainer with ZeRO raise."""
    (tmp_path / "t.py").write_text(text)
    asked = manifest(strategy="zero2")
    asked.argv = ["t.py", *argv]
    always = {"ACCELERATE_MIXED_PRECISION": "always", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "always", "OTHER": "x"}
    configs = []

    def made(python, path, *_):
        configs.append(json.loads(Path(path).read_text()))
        return dict(always)

    monkeypatch.setattr(accelerate_config, "environment", made)
    env = own_strategy.environment(sys.executable, asked, str(tmp_path), CLEAN)
    [config] = configs
    named = (config["deepspeed_config"].get("gradient_accumulation_steps"), config.get("mixed_precision"))
    assert named == (expected[0] and int(expected[0]), expected[1])
    assert ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS" in env, "ACCELERATE_MIXED_PRECISION" in env, env["OTHER"]) == (
        bool(expected[0]), bool(expected[1]), "x",
    )  # fmt: skip


def test_on_cpu_a_sharded_strategy_is_refused_on_the_node_too(tmp_path: Path):
    asked = manifest(strategy="fsdp")
    asked.gpus_per_node = 0
    with pytest.raises(Refused, match="strategy fsdp needs GPUs"):
        own_strategy.environment(sys.executable, asked, str(tmp_path), CLEAN)
