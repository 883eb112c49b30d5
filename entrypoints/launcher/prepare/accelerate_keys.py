"""Keys of an Accelerate configuration file that the job replaces, and values that say no more than a missing key."""

from __future__ import annotations

# Key -> the value that says nothing else than any job.
WORLD = {
    "num_processes": None, "num_machines": None, "machine_rank": 0, "main_process_ip": None, "main_process_port": None,
    "rdzv_backend": "static", "same_network": True, "gpu_ids": "all", "mpirun_config": {}, "deepspeed_hostfile": None,
    "deepspeed_multinode_launcher": "standard", "deepspeed_inclusion_filter": None, "deepspeed_exclusion_filter": None,
}  # fmt: skip
_NEUTRAL = {"", "0", "no", "none", "false", "[]", "{}"}  # `accelerate config` writes many of them


def is_neutral(value: object) -> bool:
    """Return whether a value, of whatever key, asks for nothing."""
    return written(value) in _NEUTRAL


def written(value: object) -> str:
    """Return a value as it is compared: True, "true" and "TRUE" are the same."""
    return str(value).lower()
