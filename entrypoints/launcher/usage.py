"""Resource usage of a node's ranks: CPU and memory from /proc, GPUs from nvidia-smi."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from . import processes
from .clock import SYSTEM, Clock
from .health.figures import REASONS, slowdown
from .loop import Loop

EVERY_S = 10.0
IDLE_PERCENT, IDLE_S = 5.0, 1800.0  # GPUs that are used less for so long are reported
# Fields of /proc/PID/stat, counted from the state.
UTIME, STIME, RSS = 11, 12, 21
# Of nvidia-smi: an unknown field fails the whole query, and driver 535 has renamed the reasons. The first that answers.
_BASE = "--query-gpu=index,utilization.gpu,memory.used,memory.total"
QUERIES = (*(f"{_BASE},clocks.sm,clocks.max.sm,{name}.active" for name in REASONS), _BASE)
BUSY_PERCENT = 50.0  # a GPU that is used less lowers its clock


class Usage:
    """Samples the descendants of this process. `sample` returns what an event `usage` says."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._ticks_s = os.sysconf("SC_CLK_TCK")
        self._page = os.sysconf("SC_PAGE_SIZE")
        # What descendants of before have used by now is not counted.
        self._before = {pid: _ticks(stat) for pid, stat in processes.descendants(os.getpid()).items()}
        self._at = self._clock.monotonic()
        self._gpus: dict[int, dict[str, float]] = {}
        self._slowdowns: dict[int, str] = {}  # why a GPU's clock is low
        self._rest = b""
        self._busy_at = self._reported_at = self._at
        self._noticed_at = -IDLE_S

    def sample(self) -> dict[str, object]:
        """Return percent of one processor, resident bytes, number of processes, and GPUs where there are any."""
        now = self._clock.monotonic()
        used: dict[int, int] = {}
        fresh = rss = 0
        for pid, stat in processes.descendants(os.getpid()).items():
            used[pid] = _ticks(stat)
            fresh += used[pid] - self._before.get(pid, 0)
            rss += int(stat[RSS]) * self._page
        elapsed = max(now - self._at, 1e-3)
        self._before, self._at = used, now
        measured: dict[str, object] = {
            "cpu_percent": round(100 * fresh / self._ticks_s / elapsed, 1),
            "rss_bytes": rss,
            "processes": len(used),
        }
        if self._gpus:
            measured["gpus"] = [{"index": index, **self._gpus[index]} for index in sorted(self._gpus)]
        return measured

    @property
    def gpus_idle_s(self) -> float:
        """For how long no GPU of the node was in use, as far as they were reported."""
        return self._reported_at - self._busy_at

    def idle_alarm(self) -> str:
        """Return what to report of GPUs that have been idle for long, once; "" for nothing."""
        if self.gpus_idle_s < IDLE_S or self._noticed_at >= self._busy_at:
            return ""
        self._noticed_at = self._reported_at
        return f"the GPUs were used less than {IDLE_PERCENT:g} % for {IDLE_S / 60:g} minutes"

    @property
    def gpu_clock(self) -> dict[str, object]:
        """The lowest clock of the busy GPUs as a share of their highest, and why it is low where nvidia-smi says it."""
        busy = {
            index: gpu["clock_mhz"] / gpu["clock_max_mhz"]
            for index, gpu in self._gpus.items()
            if gpu.get("clock_max_mhz") and gpu["percent"] >= BUSY_PERCENT
        }
        if not busy:
            return {}
        lowest = min(busy, key=lambda index: busy[index])
        why = self._slowdowns.get(lowest)
        return {"clock": round(busy[lowest], 3), **({"slowdown": f"GPU {lowest} is slowed down: {why}"} if why else {})}

    def watch_gpus(
        self, loop: Loop, chosen: str | None, environ: Mapping[str, str], queries: Sequence[str] = QUERIES
    ) -> None:
        """Let nvidia-smi report the node's GPUs from now on; it is one child that prints every few seconds."""
        command = ["nvidia-smi", queries[0], "--format=csv,noheader,nounits", "-l", str(int(EVERY_S))]
        if chosen:
            command += ["-i", chosen]
        read, write = os.pipe()
        try:
            processes.spawn(command, dict(environ), "/", write)
        except OSError:
            os.close(read)
            return
        finally:
            os.close(write)
        os.set_blocking(read, False)
        self._busy_at = self._reported_at = self._clock.monotonic()

        def next_query() -> None:
            if not self._gpus and queries[1:]:
                self.watch_gpus(loop, chosen, environ, queries[1:])

        loop.watch(read, self._reader(loop, read, next_query))

    def _reader(self, loop: Loop, pipe: int, ended: Callable[[], None]) -> Callable[[], None]:
        def read() -> None:
            try:
                data = os.read(pipe, 65536)
            except BlockingIOError:
                return
            if data:
                self.parse(data)
            else:
                loop.unwatch(pipe)
                os.close(pipe)
                ended()

        return read

    def parse(self, data: bytes) -> None:
        """Parse lines of nvidia-smi: `0, 87, 40211, 81559, 1410, 1980, 0x0000000000000004`."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            first, more = line.split(b",")[:4], line.split(b",")[4:]
            try:
                index, busy, used, total = (float(part) for part in first)
            except ValueError:
                continue  # a warning, or [N/A] on a GPU that does not report it
            self._reported_at = self._clock.monotonic()
            if busy >= IDLE_PERCENT:
                self._busy_at = self._reported_at
            self._gpus[int(index)] = {
                "percent": busy,
                "memory_bytes": int(used) << 20,
                "memory_total_bytes": int(total) << 20,
            }
            if len(more) == 3 and more[0].strip().isdigit() and more[1].strip().isdigit():
                self._gpus[int(index)].update(clock_mhz=int(more[0]), clock_max_mhz=int(more[1]))
                self._slowdowns[int(index)] = slowdown(more[2].decode(errors="replace").strip()) or ""


def _ticks(stat: Sequence[bytes]) -> int:
    """Return the processor time of a process in clock ticks, from its fields of /proc/PID/stat."""
    return int(stat[UTIME]) + int(stat[STIME])
