"""Check the number of GPUs with nvidia-smi, or count those that are there."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..errors import Refused
from ..log import Log

TABLE = ("--format=csv,noheader,nounits",)
# A GPU with a desktop on it shows some hundred MiB.
FILLED_MIB, FILLED_PERCENT = 1024, 10


def check(asked: int, chosen: str | None, environ: Mapping[str, str]) -> None:
    """Refuse a node with another number of visible GPUs than was asked for; `chosen` is CLOUDTRAIN_GPUS."""
    present = visible()
    if chosen is None:
        chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        if len(present) != asked:
            raise Refused(f"{asked} GPUs per node were requested, {len(present)} are visible")
        return
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    valid = {str(number) for number in range(len(present))} | set(present)
    absent = [name for name in names if name not in valid and not any(gpu.startswith(name) for gpu in present)]
    if len(names) != asked or absent:
        if not present:
            raise Refused(f"{asked} GPUs per node were requested, but this machine has none (nvidia-smi)")
        raise Refused(
            f"{asked} GPUs per node were requested; this node may use {chosen or 'none'} of the machine's {len(present)}"
        )


def take(processes: int, environ: Mapping[str, str], log: Log) -> int:
    """Return how many GPUs the ranks of a job that names none see: those that are there, none where they are too few."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    present = len(visible()) if chosen is None else len([name for name in chosen.split(",") if name.strip()])
    if 0 < present < processes:
        log.say(
            f"{processes} processes and only {present} GPU{'s' * (present > 1)}: the ranks run on CPU, because each rank needs"
            f" its own GPU. Set processes_per_node to {present} to use the GPU{'s' * (present > 1)}"
        )
    return present if present >= processes else 0


def visible() -> list[str]:
    """Return the UUIDs of the GPUs that nvidia-smi lists; none where it is absent."""
    return [line.rpartition("UUID: ")[2].rstrip(") ") for line in _ask("-L") if line.startswith("GPU ")]


def filled() -> dict[str, str]:
    """Return the GPUs that some program uses, by UUID, and how; blocking (nvidia-smi)."""
    found = {}
    for line in _ask("--query-gpu=uuid,memory.used,utilization.gpu", *TABLE):
        uuid, memory, busy = [part.strip() for part in f"{line},,".split(",")[:3]]
        if memory.isdigit() and int(memory) >= FILLED_MIB:
            found[uuid] = f"{int(memory):,} MiB in use"
        elif busy.isdigit() and int(busy) >= FILLED_PERCENT:
            found[uuid] = f"{busy} % in use"
    for line in _ask("--query-compute-apps=gpu_uuid,pid,process_name", *TABLE):
        uuid, pid, name = [part.strip() for part in f"{line},,".split(",")[:3]]
        if pid.isdigit() and not name.endswith("nvidia-cuda-mps-server"):  # that one only hands work on
            found[uuid] = f"in use by process {pid}"
    return found


def _ask(*arguments: str) -> list[str]:
    """Return the lines that nvidia-smi prints; none where it is absent or fails."""
    program = next(filter(os.path.exists, (f"{place}/nvidia-smi" for place in os.get_exec_path())), None)
    if program is None:
        return []
    import subprocess  # only here: it costs every job some milliseconds

    try:
        shown = subprocess.run(
            [program, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            timeout=60,
            text=True,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return shown.stdout.splitlines() if shown.returncode == 0 else []
