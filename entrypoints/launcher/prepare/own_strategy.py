"""The strategy of a user's own script: the environment that Accelerate and the Trainer read."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from ..errors import Refused
from ..manifest import Manifest
from . import accelerate_config

MIN_PARAMETERS = 1_000_000  # of a unit of FSDP, where no transformer block shows the bounds: 4 MB in fp32
LONGEST = 1 << 20  # bytes of a file that are read
FROM_TRANSFORMERS = re.compile(r"^[^\S\n]*(?:from|import)\s+(?:transformers|trl|peft)\b", re.MULTILINE)
TRAINER = re.compile(r"\b[A-Z]\w*Trainer\s*\(|\bTrainer\s*\(")
# Accelerate's launch command always sets these; a script's own Accelerator or Trainer has its own.
NAMED = {
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
}


def environment(python: str, manifest: Manifest, source: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what a job's strategy or Accelerate configuration adds to the ranks' environment; blocking.

    Raises Refused for what the node cannot do.
    """
    if file := manifest.parallelism.get("accelerate_config"):
        path = os.path.join(source, str(file))
        made = accelerate_config.environment(python, path, manifest.world_size, environ)
        if not manifest.gpus_per_node and {"ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"} & made.keys():
            raise Refused(
                f"{file} requests a sharded strategy, which Accelerate supports on GPUs only, and the job has no GPU"
            )
        return made
    strategy = str(manifest.parallelism["strategy"])
    if not manifest.gpus_per_node:
        raise Refused(f"strategy {strategy} needs GPUs: without GPUs Accelerate silently uses plain data parallel")
    texts = list(_texts(source))
    transformers = any(FROM_TRANSFORMERS.search(text) for text in texts)
    named = {}
    if not (transformers and any(TRAINER.search(text) for text in texts)):  # plain Accelerate
        named = _named(manifest.argv)
    nodes = manifest.world_size // manifest.processes_per_node
    config = configuration(manifest.parallelism, nodes, manifest.world_size, transformers, named)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "config.json")
        with open(path, "w", encoding="utf-8") as stream:
            json.dump(config, stream)
        made = accelerate_config.environment(python, path, manifest.world_size, environ, f"strategy {strategy}")
    for variable, key in NAMED.items():
        if key not in named:
            made.pop(variable, None)
    return made


def configuration(
    parallelism: Mapping[str, object], nodes: int, world: int, transformers: bool, named: Mapping[str, str]
) -> dict[str, object]:
    """Return a strategy in the form of an Accelerate configuration file.

    Args:
        parallelism: the job's.
        nodes: number of nodes; each is a replica of hsdp, unless sizes are given.
        world: number of processes in all.
        transformers: whether the source imports transformers.
        named: mixed_precision and gradient_accumulation_steps, where the job names them.
    """
    strategy, offload = str(parallelism["strategy"]), bool(parallelism.get("offload"))
    made: dict[str, object] = {"compute_environment": "LOCAL_MACHINE", "num_processes": world}
    if "mixed_precision" in named:
        made["mixed_precision"] = named["mixed_precision"]
    if strategy.startswith("zero"):
        device = "cpu" if offload else "none"
        zero: dict[str, object] = {"zero_stage": int(strategy[4:]), "offload_optimizer_device": device}
        if strategy == "zero3":
            zero.update(offload_param_device=device, zero3_save_16bit_model=True)  # so that a saved model is whole
        if "gradient_accumulation_steps" in named:
            zero["gradient_accumulation_steps"] = int(named["gradient_accumulation_steps"])
        return {**made, "distributed_type": "DEEPSPEED", "deepspeed_config": zero}
    wrap: dict[str, object] = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    if not transformers:
        wrap = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": MIN_PARAMETERS}
    fsdp = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_offload_params": offload,
        **wrap,
    }
    made.update(distributed_type="FSDP", fsdp_config=fsdp)
    if strategy == "hsdp":
        replicas = int(str(parallelism.get("dp_replicate_size") or 0))
        replicas = replicas or world // int(str(parallelism.get("dp_shard_size") or world // nodes))
        made["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": replicas,
            "parallelism_config_dp_shard_size": world // replicas,
        }
    return made


def _named(argv: Sequence[str]) -> dict[str, str]:
    """Return what the job's arguments say of precision and accumulation, as --name value, --name=value or name=value."""
    found = {}
    for number, word in enumerate(argv):
        option, equals, value = word.partition("=")
        name = option.lstrip("-").replace("-", "_")
        if not equals and word.startswith("--"):
            value = "".join(argv[number + 1 : number + 2])
        if (name == "mixed_precision" and value) or (name == "gradient_accumulation_steps" and value.isdigit()):
            found[name] = value
    return found


def _texts(source: str) -> Iterator[str]:
    """Yield the text of the source's Python files."""
    for folder, folders, names in os.walk(source):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.endswith(".py"):
                with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
                    yield file.read(LONGEST)
