"""Live status panel below a followed log: state, step, loss, speed, usage of the nodes, estimated time left.

It is drawn with a few escape sequences, once a second and with every batch of lines: importing a library would take
longer. All values come from the history, so it works for every backend.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cloudtrain import events
from cloudtrain.cli.view import chart, columns, runs, terminal
from cloudtrain.cli.view.terminal import LineWriter, clean
from cloudtrain.history.curves import LOSSES
from cloudtrain.job.units import format_duration, format_number, format_size

if TYPE_CHECKING:
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.history.store import Store
    from cloudtrain.runs.run import Run

REFRESH_S = 1.0  # how often the history is read
DELAY_S = 0.1  # how long a line may wait for more lines, to be drawn with them
MAX_NODES = 8  # shown in the panel
SPARKLINE_WIDTH = 24  # columns
MIN_HEIGHT = 10  # lines; no panel on a smaller terminal
LOG_HEIGHT = 4  # lines that the panel leaves for the log
SPEEDS = ("tokens_per_s", "samples_per_s", "train_samples_per_second", "steps_per_s")
_PROGRESS_BAR = re.compile(r"^(?>.*?\d%\|).*\| *\d[^\s/|]*/\d[^\s|]* \[|\dit \[\d+:\d+, ")  # as tqdm writes it
_FULL_BAR = re.compile(r"\b100%\|")
_STEP = re.compile(r"\bstep (\d+)/(\d{1,15})(?!\d)")
_ERASE = "\r\x1b[J"


def is_supported() -> bool:
    """Return whether a panel can be drawn on standard output."""
    return terminal.supports_escapes() and terminal.height() >= MIN_HEIGHT


class LiveView(LineWriter):
    """Write log lines with a panel below them. A progress bar is shown in the panel until it is full.

    When the panel fails, the log continues without it, and a note at the end says why.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._clock = run.store.clock
        self._panel = Panel(run.run_id, run.store)
        self._panel_lines: list[str] = []
        self._failure = ""  # why the panel was given up
        self._refreshed_at = 0.0
        self._bar_full = False  # the last bar was full; tqdm often writes that line twice

    def add(self, line: str) -> None:
        """Add one line, without its newline."""
        if "%|" in line or "it [" in line:
            full = bool(_FULL_BAR.search(line))
            if _PROGRESS_BAR.search(line) and (not full or self._bar_full):
                # a bar has no newline: an event may follow on the same line
                self._panel.bar = "" if full else clean(line.partition(events.MARK)[0])
                self._bar_full = full
                return
            self._panel.bar, self._bar_full = "", full
        super().add(line)

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._out.write(_ERASE)
        self._out.flush()
        if self._failure:
            terminal.note(f"the status view below the log stopped, the run continues: {self._failure}")

    def _serve(self) -> None:
        pause = self._pause
        while not self._closed:
            if self._clock.wait(self._some, max(0.0, self._refreshed_at + REFRESH_S - self._clock.monotonic())):
                self._some.clear()
                self._clock.wait(pause, DELAY_S)
            if self._closed:
                return
            if self._clock.monotonic() - self._refreshed_at >= REFRESH_S:
                self._refresh()
                self._refreshed_at = self._clock.monotonic()
            try:
                self.flush()
                self._draw()
            except OSError as error:
                self._error = error
                return

    def _refresh(self) -> None:
        with self._catch_panel_error():
            self._panel_lines = (
                [] if self._failure else self._panel.lines(terminal.width(), terminal.height() - LOG_HEIGHT)
            )

    @contextmanager
    def _catch_panel_error(self) -> Iterator[None]:
        """Give up the panel on an error, so that the log continues."""
        try:
            yield
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            self._panel_lines = []

    def _write(self, lines: list[str]) -> None:
        with self._catch_panel_error():
            self._panel.read_total_steps(lines[-20:])
        self._out.write(_ERASE + "\n".join(lines) + "\n" + self._panel_text())

    def _draw(self) -> None:
        """Draw the panel again without new log lines."""
        with self._lock:
            self._out.write(_ERASE + self._panel_text())
            self._out.flush()

    def _panel_text(self) -> str:
        """Return the text that draws the panel and moves the cursor back to its first line."""
        panel_lines = self._panel_lines  # read once: another thread may replace it
        if not panel_lines or self._closed:
            return ""
        up = len(panel_lines) - 1
        return "\n".join(panel_lines) + (f"\x1b[{up}A\r" if up else "\r")


class Panel:
    """The status of a run in a few lines. Use it in one thread: it has its own connection to the history."""

    def __init__(self, run_id: str, store: Store) -> None:
        self.bar = ""
        self._run_id, self._home, self._clock = run_id, store.home, store.clock
        self._store: Store | None = None
        self._total = 0
        self._first: tuple[int, float, int] | None = None  # attempt, time and step at the start of the estimate

    def read_total_steps(self, lines: list[str]) -> None:
        """Find the total number of steps in log lines (`step 10/500`)."""
        for line in reversed(lines):
            if "step " in line and (match := _STEP.search(line)):
                self._total = int(match[2])
                return

    def lines(self, width: int, height: int) -> list[str]:
        """Return the panel's lines, at most `height`, cut to `width`; reads the history."""
        if self._store is None:
            from cloudtrain.history.store import Store

            self._store = Store(self._home, self._clock)
        attempt = self._store.attempts(self._run_id)[-1]
        above = [line for line in ("-" * (width - 1), self._state_line(attempt), self._speed_line()) if line]
        below = [self.bar] if self.bar else []
        all_lines = [*above, *self._usage_lines(attempt, height - len(above) - len(below)), *below][: max(height, 1)]
        colour = {"green": 32, "cyan": 36, "yellow": 33, "red": 31}.get(runs.STYLES.get(attempt.status.state.value, ""))
        visible = [columns.cut(clean(line), width - 1) for line in all_lines]
        if colour and terminal.colours() and len(visible) > 1:
            visible[1] = f"\x1b[{colour}m{visible[1]}\x1b[0m"
        return visible

    def _state_line(self, attempt: AttemptRecord) -> str:
        assert self._store is not None
        status = attempt.status
        since = runs.elapsed(status.started_at or attempt.created_at, status.ended_at)
        parts = [str(status.state), since, *([f"attempt {attempt.number}"] if attempt.number > 1 else [])]
        last = self._store.curves.last([self._run_id]).get(self._run_id)
        if last:
            total = self._total or self._max_steps(attempt.plan.job)
            parts.append(f"step {last.step}" + (f"/{total} ({100 * last.step // total}%)" if total else ""))
            parts += [f"ETA {left}"] if total and (left := self._time_left(attempt.number, last.step, total)) else []
        return "  ".join([*parts, self._run_id])

    def _time_left(self, attempt: int, step: int, total: int) -> str:
        """Return the estimated time left, from the speed since this panel began."""
        now = self._clock.monotonic()
        if self._first is None or self._first[0] != attempt:
            self._first = (attempt, now, step)
        _, began, first = self._first
        return (
            format_duration((now - began) / (step - first) * (total - step)) if step > first and step <= total else ""
        )

    def _max_steps(self, job: Mapping[str, Any]) -> int:
        """Return the hyperparameter max_steps, 0 where it is not set."""
        text = str((job.get("hyperparameters") or {}).get("max_steps", ""))
        return int(text) if text.isdecimal() and len(text) <= 15 else 0

    def _speed_line(self) -> str:
        assert self._store is not None
        newest = {row.name: row for row in self._store.curves.newest(self._run_id)}
        parts = []
        loss = next((name for name in LOSSES if name in newest), None)
        if loss:
            tail = self._store.curves.tail(self._run_id, loss, SPARKLINE_WIDTH)
            parts.append(f"{loss} {format_number(newest[loss].last)}  {chart.sparkline(tail, SPARKLINE_WIDTH)}")
        for name in SPEEDS:
            if name in newest and math.isfinite(newest[name].last):
                parts.append(f"{newest[name].last:,.0f} {name.replace('_per_s', '/s')}")
                break
        if "mfu" in newest and math.isfinite(newest["mfu"].last):
            parts.append(f"MFU {newest['mfu'].last:.0%}")
        return "   ".join(parts)

    def _usage_lines(self, attempt: AttemptRecord, most: int) -> list[str]:
        """Return the last reported usage of the nodes, in at most `most` lines."""
        assert self._store is not None
        count = int(attempt.plan.manifest.get("nodes") or 1)
        visible = count if count <= min(MAX_NODES, most) else max(0, min(MAX_NODES, most - 1))
        node_lines = []
        for node in range(visible):
            event = self._store.latest(attempt.attempt_id, node, "usage")
            if event is not None and (usage := events.read_usage(event.data)):
                node_lines.append(f"node {node}  {format_usage(usage)}")
        if node_lines and count > visible:
            hidden = count - visible
            node_lines.append(f"... and {hidden} more node{'s' if hidden > 1 else ''}")
        return node_lines


def format_usage(usage: events.Usage) -> str:
    """Return a usage event as text: CPU, memory, GPUs."""
    parts = [] if usage.cpu_percent is None else [f"cpu {usage.cpu_percent:.0f}%"]
    parts += [] if usage.rss_bytes is None else [f"memory {format_size(usage.rss_bytes)}"]
    for gpu in usage.gpus:
        busy = "" if gpu.percent is None else f" {gpu.percent:.0f}%"
        memory = "" if gpu.memory_bytes is None else f" {gpu.memory_bytes / 1e9:.0f}"
        total = "" if gpu.memory_total_bytes is None else f"/{gpu.memory_total_bytes / 1e9:.0f}"
        parts.append(f"gpu{gpu.index}{busy}" + (f"{memory}{total} GB" if memory else ""))
    return "  ".join(parts)
