"""A process that can be told apart from a later one with the same number."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """Host, boot, number and start time of a process: enough to know whether that very process still lives."""

    host: str
    boot_id: str
    pid: int
    started: str  # clock ticks since boot on Linux, a date elsewhere

    @classmethod
    def here(cls) -> Process:
        """Return this process."""
        return cls(os.uname().nodename, boot_id(), os.getpid(), start_time(os.getpid()) or "?")

    @classmethod
    def parse(cls, text: str) -> Process | None:
        """Return the process that `str()` wrote, or None for anything else."""
        parts = text.split("|")
        if len(parts) != 4 or not parts[2].isdigit():
            return None
        return cls(parts[0], parts[1], int(parts[2]), parts[3])

    def __str__(self) -> str:
        return f"{self.host}|{self.boot_id}|{self.pid}|{self.started}"

    @property
    def alive(self) -> bool | None:
        """Whether it lives; None when it belongs to another machine, so that nobody here can know."""
        if self.host != os.uname().nodename:
            return None
        if self.boot_id != boot_id():
            return False
        return start_time(self.pid) == self.started


def detach(
    argv: Sequence[str], *, given: bytes, log: Path, env: Mapping[str, str], cwd: Path, keep: Sequence[int] = ()
) -> None:
    """Start a process that outlives this one and its terminal, with `given` on its standard input; returns at once.

    Its output is appended to `log`; `keep` are descriptors that it inherits. Raises OSError. A shell puts it into the
    background and ends, so that its parent is init and it never is a zombie of ours.
    """
    command = ["/bin/sh", "-c", 'exec 3<&0; "$@" <&3 3<&- &', "sh", *argv]
    kept = [fcntl.fcntl(number, fcntl.F_DUPFD, 10) for number in keep]  # out of the shell's way, which has 3 for itself
    try:
        with log.open("ab") as out:
            shell = subprocess.Popen(
                command,
                cwd=cwd,
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                start_new_session=True,
                pass_fds=tuple(kept),
            )
        shell.communicate(given)
    finally:
        for number in kept:
            os.close(number)


@cache
def boot_id() -> str:
    """Return what changes with every boot of this machine; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def start_time(pid: int) -> str | None:
    """Return when a process started, or None when it is gone; a zombie counts as gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else _start_time_by_ps(pid)
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()  # the name in parentheses may hold anything
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


def _start_time_by_ps(pid: int) -> str | None:
    """Return the start time on systems without /proc (macOS)."""
    command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    state, _, started = shown.stdout.strip().partition(" ")
    return started.strip() or None if not state.startswith("Z") else None
