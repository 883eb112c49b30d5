"""Translate an Accelerate configuration file for the shared trainer: every key is honoured, or refused by its name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from launcher.prepare.accelerate_keys import WORLD, is_neutral, written

from ..errors import Unsupported

if TYPE_CHECKING:
    from ..arguments import Arguments

SECTIONS = {"FSDP": "fsdp", "DEEPSPEED": "deepspeed"}  # of a distributed_type, beside parallelism_config
KINDS = ("NO", "MULTI_CPU", "MULTI_GPU", *SECTIONS)
# What the trainer does, by section and key: the values that may be written. Neutral ones may always.
HONOURED: Mapping[str, tuple[str, ...]] = {
    "compute_environment": ("local_machine",),
    "main_training_function": ("main",),
    "mixed_precision": ("bf16", "fp16"),
    "fsdp.version": ("2",),
    "fsdp.sharding_strategy": ("full_shard", "1"),
    "fsdp.reshard_after_forward": ("true", "full_shard"),
    "fsdp.auto_wrap_policy": ("transformer_based_wrap",),
    "fsdp.offload_params": ("true",),
    "fsdp.state_dict_type": ("full_state_dict", "sharded_state_dict"),  # the model is saved whole, checkpoints in parts
    "fsdp.backward_prefetch": ("backward_pre",),
    "fsdp.use_orig_params": ("true",),  # version 2 has no other way, and none to sync_module_states
    "fsdp.sync_module_states": ("true",),
    "deepspeed.zero_stage": ("1", "2", "3"),
    "deepspeed.offload_optimizer_device": ("cpu",),
    "deepspeed.offload_param_device": ("cpu",),
    "deepspeed.zero3_save_16bit_model": ("true",),
    "parallelism.cp_backend": ("torch",),
    "parallelism.sp_size": ("1",),
}
SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size")
WRAPPED = "fsdp.transformer_layer_cls_to_wrap"
HINTS = {
    "fsdp.activation_checkpointing": "write gradient_checkpointing: true among hyperparameters too",
    "fsdp.cpu_ram_efficient_loading": "each rank first creates the whole model in CPU memory",
    "fsdp.version": "write 2",
    "deepspeed.gradient_accumulation_steps": "it must be equal to the value in hyperparameters",
    "deepspeed.gradient_clipping": "it must be equal to max_grad_norm in hyperparameters",
    "deepspeed.config_file": "the shared trainer creates DeepSpeed's configuration itself",
    "dynamo": "write torch_compile: true among hyperparameters",
}


def resolve(parallelism: Mapping[str, Any], arguments: Arguments) -> Mapping[str, Any]:
    """Return a job's `parallelism` with what its Accelerate file says in it, and set the file's precision in `arguments`.

    Raises Unsupported for what the trainer would not do.
    """
    file = parallelism.get("accelerate_config")
    if not file:
        return parallelism
    import yaml

    try:
        with open(str(file), encoding="utf-8") as stream:  # ranks start in the job's source
            config = yaml.safe_load(stream)
        if not isinstance(config, dict):
            raise ValueError("it has no keys")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise Unsupported(f"the Accelerate file {file} cannot be read: {error}") from None
    precision = written(config.get("mixed_precision") or "no")
    made = translate(config, arguments)
    if arguments.mixed_precision == "no" and precision in ("bf16", "fp16"):
        setattr(arguments, precision, True)
    return {**parallelism, "strategy": None, **made}


def translate(config: Mapping[str, Any], arguments: Arguments) -> dict[str, Any]:
    """Return the `parallelism` that an Accelerate file stands for; raises Unsupported with the first key that is refused."""
    kind = str(config.get("distributed_type") or "NO")
    if kind not in KINDS:
        raise Unsupported(f"the Accelerate file has distributed_type {kind}; the shared trainer has {', '.join(KINDS)}")
    values: dict[str, Any] = {}
    for written_name, name, value in _keys(config):
        if not _honours(name, value, kind, arguments):
            hint = HINTS.get(name) or HINTS.get(name.partition(".")[0]) or "remove it"
            raise Unsupported(
                f"the Accelerate file has {written_name}: {value}, which the shared trainer does not support; {hint}"
            )
        if written(value) == "0" or not is_neutral(value):
            values[name] = value
    made: dict[str, Any] = {
        size: int(values[f"parallelism.{size}"]) for size in SIZES if int(values.get(f"parallelism.{size}") or 1) > 1
    }
    both = "dp_replicate_size" in made and "dp_shard_size" in made
    if kind == "DEEPSPEED":
        stage = values.get("deepspeed.zero_stage", 2)  # as `accelerate launch` has it
        made["strategy"] = f"zero{stage}" if int(stage) else "ddp"
        devices = ("deepspeed.offload_optimizer_device", "deepspeed.offload_param_device")
        made["offload"] = any(written(values.get(device)) == "cpu" for device in devices)
    elif kind == "FSDP":
        made |= {
            "strategy": "hsdp" if both else "fsdp",
            "offload": written(values.get("fsdp.offload_params")) == "true",
        }
        if values.get(WRAPPED):
            made["wrapped"] = str(values[WRAPPED])
    elif "dp_shard_size" in made:
        made["strategy"] = "hsdp" if both else "fsdp"
    elif made:
        made["strategy"] = "ddp"
    return made


def _keys(config: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield each key as it is written, its name in the tables above, and its value; without those of the world."""
    for section, content in config.items():
        if section in WORLD or section == "distributed_type":
            continue
        if not isinstance(content, dict):
            yield section, section, content
            continue
        short = section.removesuffix("_config")
        for key, value in content.items():
            if key not in WORLD:
                bare = key.removeprefix("parallelism_config_" if short == "parallelism" else f"{short}_")
                yield f"{section}.{key}", f"{short}.{bare}", value


def _honours(name: str, value: Any, kind: str, arguments: Arguments) -> bool:
    """Return whether the trainer does what a key says."""
    section, _, key = name.rpartition(".")
    if is_neutral(value) and name != "fsdp.reshard_after_forward":
        return True
    if section in SECTIONS.values() and SECTIONS.get(kind) != section:
        return False  # of another type than the file's
    if name == "use_cpu":
        return os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if name == "fsdp.activation_checkpointing":
        return arguments.gradient_checkpointing
    if name == "deepspeed.gradient_accumulation_steps":
        return written(value) == str(arguments.gradient_accumulation_steps)
    if name == "deepspeed.gradient_clipping":
        return written(value) in (str(arguments.max_grad_norm), f"{arguments.max_grad_norm:g}")
    if section == "parallelism" and key in SIZES:
        return written(value).isdigit()
    return name == WRAPPED or written(value) in HONOURED.get(name, ())
