"""The environment of a user's script is what the real `accelerate launch` gives its processes, variable by variable."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.entrypoints.launcher.prepare.test_own_strategy import manifest
from tests.entrypoints.launching import CLEAN

from launcher.errors import Refused  # isort: skip
from launcher.prepare import accelerate_config, own_strategy  # isort: skip

BASE = CLEAN | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # which importing DeepSpeed would set
pytestmark = [pytest.mark.train, pytest.mark.timeout(900)]
# What `accelerate config` writes into every file
USUAL = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "downcast_bf16": "no", "enable_cpu_affinity": False,
    "machine_rank": 0, "main_training_function": "main", "mixed_precision": "no", "num_machines": 1, "num_processes": 1,
    "rdzv_backend": "static", "same_network": True, "tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False,
    "use_cpu": False,
}  # fmt: skip
FSDP2 = {
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_state_dict_type": "FULL_STATE_DICT",
}
FILES = {
    "ddp": {"distributed_type": "MULTI_GPU", "gpu_ids": "all", "mixed_precision": "bf16", "debug": True},
    "one process": {"distributed_type": "NO", "num_processes": 1, "mixed_precision": "fp16"},
    "cpu": {"distributed_type": "MULTI_CPU", "use_cpu": True, "num_processes": 1},
    "dynamo": {
        "distributed_type": "MULTI_GPU",
        "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "max-autotune", "dynamo_use_dynamic": True},
    },
    "fsdp 1": {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "fsdp_backward_prefetch": "BACKWARD_POST",
            "fsdp_cpu_ram_efficient_loading": False, "fsdp_sync_module_states": False, "fsdp_use_orig_params": False,
            "fsdp_offload_params": True,
        },
    },
    "fsdp 2": {
        "distributed_type": "FSDP", "mixed_precision": "bf16",
        "fsdp_config": {
            "fsdp_version": 2, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 5000,
            "fsdp_reshard_after_forward": False, "fsdp_activation_checkpointing": True,
        },
    },
    "hsdp": {
        "distributed_type": "FSDP", "fsdp_config": FSDP2,
        "parallelism_config": {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 1},
    },
    "zero2": {
        "distributed_type": "DEEPSPEED", "mixed_precision": "fp16",
        "deepspeed_config": {
            "zero_stage": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 0.5, "zero3_init_flag": False,
            "offload_optimizer_device": "cpu", "deepspeed_multinode_launcher": "standard",
        },
    },
    "zero3": {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"zero_stage": 3, "zero3_init_flag": True, "zero3_save_16bit_model": True,
                             "offload_param_device": "cpu"},
    },
    "deepspeed file": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}},
    "megatron": {"distributed_type": "MEGATRON_LM", "megatron_lm_config": {"megatron_lm_tp_degree": 2}},
}  # fmt: skip
STRATEGIES = {
    "fsdp": {"strategy": "fsdp"},
    "fsdp offload": {"strategy": "fsdp", "offload": True},
    "hsdp sizes": {"strategy": "hsdp", "dp_replicate_size": 2},
    "zero1": {"strategy": "zero1"},
    "zero2 offload": {"strategy": "zero2", "offload": True},
    "zero3 strategy": {"strategy": "zero3"},
}
# It runs each file with the real launch command, which starts the real torchrun, whose processes print their environment.
REAL = """
import json, os, sys
from accelerate.commands import launch
from torch.distributed import run
DUMP = "import json, os; json.dump(dict(os.environ), open(os.environ['DUMP'], 'w'))"
open("dump.py", "w").write(DUMP)
os.environ["DUMP"] = "torchrun.json"
run.run(run.get_args_parser().parse_args(["--nproc-per-node", "1", "--standalone", "dump.py"]))
for name in sys.argv[1:]:
    os.environ["DUMP"] = name + ".json"
    launch.launch_command(launch.launch_command_parser().parse_args(["--config_file", name + ".yaml", "dump.py"]))
"""


def real(folder: Path, names: list[str], environ: dict[str, str]) -> dict[str, dict[str, str]]:
    """Return what `accelerate launch` adds for each file to what torchrun alone would give."""
    done = subprocess.run([sys.executable, "-c", REAL, *names], cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    plain = json.loads((folder / "torchrun.json").read_text())
    found = {}
    for name in names:
        env = json.loads((folder / f"{name}.json").read_text())
        found[name] = {
            key: value for key, value in env.items() if key not in plain and key not in accelerate_config.OURS
        }
        if found[name].get("ACCELERATE_USE_CPU") == "False":
            del found[name]["ACCELERATE_USE_CPU"]  # the job says where it runs
    return found


def compare(folder: Path, environ: dict[str, str], sample: tuple[str, ...] = (*FILES, *STRATEGIES)) -> None:
    sources = folder / "source"
    sources.mkdir()
    (sources / "t.py").write_text("from transformers import Trainer\nTrainer()\n")
    configs = {name: {**USUAL, **keys} for name, keys in FILES.items()}
    for name, parallelism in STRATEGIES.items():
        configs[name] = {**own_strategy.configuration(parallelism, 1, 4, True, {}), "num_processes": 1}
    for name in sample:
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(configs[name], sort_keys=False))
    wanted = real(folder, list(sample), environ)
    for name in sample:
        if name in FILES:
            made = accelerate_config.environment(sys.executable, str(folder / f"{name}.yaml"), 1, environ)
        else:
            made = own_strategy.environment(sys.executable, manifest(**STRATEGIES[name]), str(sources), environ)
            for unnamed in own_strategy.NAMED:
                wanted[name].pop(unnamed, None)
        assert made == wanted[name] and made, name
    said = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_DEBUG_MODE": "true"}  # by the file
    silent = {value.lower() for key, value in wanted["ddp"].items() if said.get(key) != value}
    assert silent == {"no", "default", "false"}, "ddp needs no variable"


def test_the_variables_are_those_of_the_real_launch_command(tmp_path: Path):
    compare(tmp_path, BASE, ("ddp", "fsdp 2", "zero3 strategy"))


@pytest.mark.long
@pytest.mark.parametrize("version", ["", "1.10.1"], ids=["pinned", "1.10.1"])
def test_the_whole_matrix(tmp_path: Path, version: str):
    (tmp_path / "work").mkdir()
    if version:
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", tmp_path / "old"]
        subprocess.run([*install, f"accelerate=={version}"], check=True)
    compare(tmp_path / "work", BASE | ({"PYTHONPATH": str(tmp_path / "old")} if version else {}))


def test_keys_that_accelerate_would_ignore_are_refused_by_their_names(tmp_path: Path):
    ignored = {"fsdp_sharding_strategy": "HYBRID_SHARD", "fsdp_forward_prefetch": True}  # version 2 has neither
    config = {**USUAL, "distributed_type": "FSDP", "fsdp_config": {**FSDP2, **ignored, "fsdp_no_such_key": 2}}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({**config, "use_cpu": True, "num_processes": 8, "machine_rank": 3}))
    with pytest.raises(Refused) as refused:
        accelerate_config.environment(sys.executable, str(tmp_path / "a.yaml"), 2, BASE)
    assert str(refused.value).endswith(
        "ignores fsdp_config.fsdp_forward_prefetch, fsdp_config.fsdp_no_such_key, "
        "fsdp_config.fsdp_sharding_strategy, use_cpu: remove it"
    )


def test_what_accelerate_starts_itself_or_is_too_old_is_refused(tmp_path: Path):
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({**USUAL, "distributed_type": "XLA"}))
    with pytest.raises(Refused, match=r"Accelerate cannot use a\.yaml: ValueError: it is for TPUs or SageMaker"):
        accelerate_config.environment(sys.executable, str(tmp_path / "a.yaml"), 2, BASE)
    (tmp_path / "old" / "accelerate").mkdir(parents=True)
    (tmp_path / "old" / "accelerate" / "__init__.py").write_text("__version__ = '1.9.0'\n")
    with pytest.raises(Refused, match=r"version 1\.9\.0 is installed, 1\.10 is the oldest supported version"):
        accelerate_config.environment(
            sys.executable, str(tmp_path / "a.yaml"), 2, BASE | {"PYTHONPATH": str(tmp_path / "old")}
        )
