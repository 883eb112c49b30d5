"""Every key of an Accelerate file is honoured by the shared trainer, or refused by its name."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.entrypoints.training import ENTRYPOINTS

from trainer.arguments import parse  # isort: skip
from trainer.errors import Unsupported  # isort: skip
from trainer.strategies import accelerate_file, mesh  # isort: skip

assert ENTRYPOINTS
# What `accelerate config` writes into every file
USUAL = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "downcast_bf16": "no", "enable_cpu_affinity": False,
    "machine_rank": 0, "main_training_function": "main", "mixed_precision": "no", "num_machines": 1, "num_processes": 8,
    "rdzv_backend": "static", "same_network": True, "tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False,
    "use_cpu": False,
}  # fmt: skip
FULL = {
    "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_reshard_after_forward": True,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_activation_checkpointing": False, "fsdp_offload_params": False,
    "fsdp_cpu_ram_efficient_loading": False,
}  # fmt: skip


def resolved(folder: Path, monkeypatch: pytest.MonkeyPatch, config: dict, argv: tuple[str, ...] = ()):
    monkeypatch.chdir(folder)
    (folder / "a.yaml").write_text(yaml.safe_dump({**USUAL, **config}))
    arguments = parse(["--dataset", "x", *argv])
    return accelerate_file.resolve({"strategy": "ddp", "accelerate_config": "a.yaml"}, arguments), arguments


@pytest.mark.parametrize(
    "config, world, described",
    [
        ({"distributed_type": "MULTI_GPU"}, 2, "ddp (replicate 2)"),
        ({"distributed_type": "FSDP", "fsdp_config": FULL}, 2, "fsdp (shard 2)"),
        (
            {"distributed_type": "DEEPSPEED",
             "deepspeed_config": {"zero_stage": 3, "deepspeed_multinode_launcher": "pdsh", "gradient_clipping": 1.0,
                                  "gradient_accumulation_steps": 1, "zero3_save_16bit_model": True}},
            2, "zero3 (shard 2)",
        ),
        (
            {"distributed_type": "MULTI_GPU",
             "parallelism_config": {"parallelism_config_dp_shard_size": 2, "parallelism_config_tp_size": 2,
                                    "parallelism_config_dp_replicate_size": 1}},
            4, "fsdp (shard 2 x tensor 2)",
        ),
        (
            {"distributed_type": "FSDP", "fsdp_config": FULL,
             "parallelism_config": {"parallelism_config_dp_shard_size": 2, "parallelism_config_dp_replicate_size": 2}},
            4, "hsdp (replicate 2 x shard 2)",
        ),
        (
            {"distributed_type": "NO",
             "parallelism_config": {"parallelism_config_dp_shard_size": 2, "parallelism_config_cp_size": 2}},
            4, "fsdp (shard 2 x context 2)",
        ),
    ],
)  # fmt: skip
def test_a_file_is_honoured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict, world: int, described: str):
    parallelism, _ = resolved(tmp_path, monkeypatch, config)
    assert mesh.choose_plan(parallelism, world).described == described


def test_offload_precision_and_the_class_of_layers_are_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fsdp = {"fsdp_offload_params": True, "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
    config = {"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": fsdp}
    parallelism, arguments = resolved(tmp_path, monkeypatch, config)
    plan = mesh.choose_plan(parallelism, 2)
    assert (plan.offload, plan.wrapped, arguments.mixed_precision) == (True, "LlamaDecoderLayer", "bf16")
    zero = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "cpu"}}
    assert mesh.choose_plan(resolved(tmp_path, monkeypatch, zero)[0], 2).offload
    _, arguments = resolved(tmp_path, monkeypatch, config, ("--fp16",))
    assert arguments.mixed_precision == "fp16"  # the job's own word counts


@pytest.mark.parametrize(
    "kind, key, value, argv",
    [
        ("FSDP", "fsdp_auto_wrap_policy", "SIZE_BASED_WRAP", ()),
        ("FSDP", "fsdp_min_num_params", 2000, ()),
        ("FSDP", "fsdp_reshard_after_forward", False, ()),
        ("FSDP", "fsdp_activation_checkpointing", True, ()),
        ("FSDP", "fsdp_cpu_ram_efficient_loading", True, ()),
        ("FSDP", "fsdp_sharding_strategy", "SHARD_GRAD_OP", ()),
        ("FSDP", "fsdp_version", 1, ()),
        ("FSDP", "fsdp_ignored_modules", "head", ()),
        ("FSDP", "fsdp_no_such_key", 1, ()),
        ("DEEPSPEED", "deepspeed_config_file", "ds.json", ()),
        ("DEEPSPEED", "offload_param_device", "nvme", ()),
        ("DEEPSPEED", "gradient_accumulation_steps", 4, ()),
        ("DEEPSPEED", "gradient_clipping", 0.5, ()),
        ("MULTI_GPU", "dynamo_backend", "INDUCTOR", ()),
        ("MULTI_GPU", "fsdp_version", 2, ()),  # of another type than the file's
        ("MULTI_GPU", "megatron_lm_tp_degree", 2, ()),
    ],
)
def test_a_key_that_it_does_not_do_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, key: str, value: object, argv: tuple[str, ...]
):
    section = {"DEEPSPEED": "deepspeed", "FSDP": "fsdp"}.get(kind) or key.partition("_")[0]
    config = {"distributed_type": kind, f"{section}_config": {key: value}}
    with pytest.raises(Unsupported, match=f"the Accelerate file has {section}_config.{key}: {value}, which the shared"):
        resolved(tmp_path, monkeypatch, config, argv)


@pytest.mark.parametrize(
    "kind, key, value, argv",
    [
        ("FSDP", "fsdp_activation_checkpointing", True, ("--gradient_checkpointing",)),
        ("DEEPSPEED", "gradient_accumulation_steps", 4, ("--gradient_accumulation_steps", "4")),
        ("DEEPSPEED", "gradient_clipping", 0.5, ("--max_grad_norm", "0.5")),
    ],
)
def test_a_key_that_the_hyperparameters_repeat_is_honoured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, key: str, value: object, argv: tuple[str, ...]
):
    resolved(tmp_path, monkeypatch, {"distributed_type": kind, f"{kind.lower()}_config": {key: value}}, argv)


@pytest.mark.parametrize(
    "config, sentence",
    [
        ({"distributed_type": "MEGATRON_LM"}, "distributed_type MEGATRON_LM; the shared trainer has NO, "),
        ({"distributed_type": "MULTI_GPU", "use_cpu": True}, "use_cpu: True"),
        ({"distributed_type": "MULTI_GPU", "mixed_precision": "fp8"}, "mixed_precision: fp8"),
        ({"distributed_type": "MULTI_GPU", "debug": True}, "debug: True"),
    ],
)
def test_so_is_a_key_at_the_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict, sentence: str):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(Unsupported, match=sentence):
        resolved(tmp_path, monkeypatch, config)


def test_a_file_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for text in (None, "- 1", "a: ["):
        if text:
            (tmp_path / "a.yaml").write_text(text)
        with pytest.raises(Unsupported, match=r"the Accelerate file a\.yaml cannot be read: "):
            accelerate_file.resolve({"accelerate_config": "a.yaml"}, parse(["--dataset", "x"]))
