"""Identify processes across reuse of PIDs (host, boot, start time), and start detached processes."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """Host, boot id, PID and start time of a process: enough to check whether that process still lives."""

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
        """Parse what `str()` returns; None for anything else."""
        parts = text.split("|")
        if len(parts) != 4 or not parts[2].isdigit():
            return None
        return cls(parts[0], parts[1], int(parts[2]), parts[3])

    def __str__(self) -> str:
        return f"{self.host}|{self.boot_id}|{self.pid}|{self.started}"

    @property
    def alive(self) -> bool | None:
        """Whether the process lives; None if it runs on another machine, where we cannot check."""
        if self.host != os.uname().nodename:
            return None
        if self.boot_id != boot_id():
            return False
        return start_time(self.pid) == self.started


def detach(
    argv: Sequence[str], *, given: bytes, log: Path, env: Mapping[str, str], cwd: Path, keep: Sequence[int] = ()
) -> None:
    """Start a process that outlives this one and its terminal, with `given` on its standard input; returns at once.

    Its output is appended to `log`; it inherits the descriptors in `keep`. Raises OSError. A shell starts it in the
    background and exits, so that init is its parent and it never becomes our zombie.
    """
    command = ["/bin/sh", "-c", 'exec 3<&0; "$@" <&3 3<&- &', "sh", *argv]
    inherited = [fcntl.fcntl(number, fcntl.F_DUPFD, 10) for number in keep]  # not 3: the shell uses that itself
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
                pass_fds=tuple(inherited),
            )
        shell.communicate(given)
    finally:
        for number in inherited:
            os.close(number)


@cache
def boot_id() -> str:
    """Return the id of this boot of the machine; "" if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def start_time(pid: int) -> str | None:
    """Return the start time of a process, or None if it has ended; a zombie counts as ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else _start_time_by_ps(pid)
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()  # the process name in parentheses may contain anything
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


def describe(pid: int) -> str:
    """Return a process in words: its PID, the first words of its command, and since when it runs.

    The rest of the command is left out: it may hold a secret.
    """
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        booted = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
        started = int(booted.split()[1]) + int(start_time(pid) or 0) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, StopIteration):
        return f"process {pid}"
    command = " ".join(Path(word).name for word in words[:3] if word)
    return f"process {pid} ({command}, since {datetime.fromtimestamp(started, UTC):%Y-%m-%d %H:%M:%SZ})"


def _start_time_by_ps(pid: int) -> str | None:
    """Return the start time on systems without /proc (macOS)."""
    command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    state, _, started = completed.stdout.strip().partition(" ")
    return started.strip() or None if not state.startswith("Z") else None
