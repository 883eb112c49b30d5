"""Free memory of this machine or container."""

from __future__ import annotations

from pathlib import Path

MACHINE, CONTAINER = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def free_bytes(machine: Path = MACHINE, container: Path = CONTAINER) -> float:
    """Return the bytes that may still be taken without swapping; infinite where it is not known."""
    free = float("inf")
    try:
        lines = dict(line.split(":", 1) for line in machine.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        pass
    try:
        limit, used = ((container / name).read_text().strip() for name in ("memory.max", "memory.current"))
        parts = dict(line.split() for line in (container / "memory.stat").read_text().splitlines())
        if limit != "max":  # files that were read long ago make room
            free = min(free, int(limit) - int(used) + int(parts.get("inactive_file", 0)))
    except (OSError, ValueError):
        pass
    return free
