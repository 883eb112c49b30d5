"""Keys of an Accelerate configuration file that the job replaces, and values that say no more than a missing key."""

from __future__ import annotations

# cloudtrain/runs/strategy_check.py, which shows where a file differs from the job, has the same names.
WORLD = {
    "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend",
    "same_network", "gpu_ids", "mpirun_config", "deepspeed_hostfile", "deepspeed_multinode_launcher",
    "deepspeed_inclusion_filter", "deepspeed_exclusion_filter",
}  # fmt: skip
_NEUTRAL = {"", "0", "no", "none", "false", "[]", "{}"}  # `accelerate config` writes many of them


def is_neutral(value: object) -> bool:
    """Return whether a value, of whatever key, asks for nothing."""
    return written(value) in _NEUTRAL


def written(value: object) -> str:
    """Return a value as it is compared: True, "true" and "TRUE" are the same."""
    return str(value).lower()
