"""What a followed run does, below its scrolling log: state, step, loss, speed, the use of its nodes, and when it ends.

Drawn with a few escape sequences, once a second and with the lines that come: less than importing a library for it
would cost. Everything in it comes from the history, so it works for every backend.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cloudtrain import events
from cloudtrain.cli.view import chart, columns, runs, terminal
from cloudtrain.cli.view.terminal import Lines, clean
from cloudtrain.history.curves import LOSSES

if TYPE_CHECKING:
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.history.store import Store
    from cloudtrain.runs.run import Run

EVERY_S = 1.0  # how often the history is asked
DELAY_S = 0.1  # how long a line may wait for others, with which it is drawn at once
NODES = 8  # that are shown at most
CURVE = 24  # columns
ROOM = 10  # lines that a terminal must have
LOG = 4  # of them that are left to the log
SPEEDS = ("tokens_per_s", "samples_per_s", "train_samples_per_second", "steps_per_s")
_BAR = re.compile(r"\d+%\|.*\| *\d\S*/\d\S* \[|\d+it \[\d+:\d+, ")  # what tqdm writes, again and again
_DONE = re.compile(r"\b100%\|")
_STEP = re.compile(r"\bstep (\d+)/(\d{1,15})(?!\d)")
_ERASE = "\r\x1b[J"


def wanted() -> bool:
    """Return whether standard output is a terminal that a panel can be drawn on."""
    return terminal.obeys() and terminal.height() >= ROOM


class Live(Lines):
    """Lines of a log with a panel below them; a progress bar's lines go into the panel until it is full.

    A panel that fails is given up: the log goes on without it, and at its end one sentence says so.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._panel = Panel(run.run_id, run.store)
        self._drawn: list[str] = []
        self._failure = ""  # why there is no panel any more
        self._asked = 0.0
        self._full = False  # the last bar was, and it is often written twice

    def add(self, line: str) -> None:
        """Take one line, without its end."""
        if "%|" in line or "it [" in line:
            full = bool(_DONE.search(line))
            if _BAR.search(line) and (not full or self._full):
                # the bar has no end of its line: an event may stand right behind it
                self._panel.bar = "" if full else clean(line.partition(events.MARK)[0])
                self._full = full
                return
            self._panel.bar, self._full = "", full
        super().add(line)

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._out.write(_ERASE)
        self._out.flush()
        if self._failure:
            terminal.note(f"the view below the log was given up: {self._failure}")

    def _serve(self) -> None:
        pause = self._pause
        while not self._closed:
            if self._some.wait(max(0.0, self._asked + EVERY_S - time.monotonic())):
                self._some.clear()
                pause.wait(DELAY_S)
            if self._closed:
                return
            if time.monotonic() - self._asked >= EVERY_S:
                self._ask()
                self._asked = time.monotonic()
            try:
                self.flush()
                self._draw()
            except OSError as error:
                self._error = error
                return

    def _ask(self) -> None:
        with self._spared():
            self._drawn = [] if self._failure else self._panel.lines(terminal.width(), terminal.height() - LOG)

    @contextmanager
    def _spared(self) -> Iterator[None]:
        """Spare the log what goes wrong in the panel."""
        try:
            yield
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            self._drawn = []

    def _write(self, lines: list[str]) -> None:
        with self._spared():
            self._panel.hear(lines[-20:])
        self._out.write(_ERASE + "\n".join(lines) + "\n" + self._below())

    def _draw(self) -> None:
        """Draw the panel again where no line came."""
        with self._lock:
            self._out.write(_ERASE + self._below())
            self._out.flush()

    def _below(self) -> str:
        """Return what draws the panel and leaves the cursor at its first line."""
        drawn = self._drawn  # another thread may put other lines there
        if not drawn or self._closed:
            return ""
        up = len(drawn) - 1
        return "\n".join(drawn) + (f"\x1b[{up}A\r" if up else "\r")


class Panel:
    """A run in a few lines; used in one thread, over a connection of its own."""

    def __init__(self, run_id: str, store: Store) -> None:
        self.bar = ""
        self._run_id, self._home = run_id, store.home
        self._store: Store | None = None
        self._total = 0
        self._first: tuple[int, float, int] | None = None  # attempt, time, step: where an estimate begins

    def hear(self, lines: list[str]) -> None:
        """Take from lines of the log how many steps there are."""
        for line in reversed(lines):
            if "step " in line and (found := _STEP.search(line)):
                self._total = int(found[2])
                return

    def lines(self, width: int, height: int) -> list[str]:
        """Return the panel's lines, at most `height` and none longer than the terminal; asks the history."""
        if self._store is None:
            from cloudtrain.history.store import Store

            self._store = Store(self._home)
        attempt = self._store.attempts(self._run_id)[-1]
        above = [line for line in ("-" * (width - 1), self._state(attempt), self._speed()) if line]
        below = [self.bar] if self.bar else []
        found = [*above, *self._nodes(attempt, height - len(above) - len(below)), *below][: max(height, 1)]
        colour = {"green": 32, "cyan": 36, "yellow": 33, "red": 31}.get(runs.STYLES.get(attempt.status.state.value, ""))
        cut = [columns.cut(clean(line), width - 1) for line in found]
        if colour and terminal.colours() and len(cut) > 1:
            cut[1] = f"\x1b[{colour}m{cut[1]}\x1b[0m"
        return cut

    def _state(self, attempt: AttemptRecord) -> str:
        assert self._store is not None
        status = attempt.status
        since = runs.between(status.started_at or attempt.created_at, status.ended_at)
        parts = [str(status.state), since, *([f"attempt {attempt.number}"] if attempt.number > 1 else [])]
        last = self._store.curves.last([self._run_id]).get(self._run_id)
        if last:
            total = self._total or self._asked_for(attempt.plan.job)
            parts.append(f"step {last.step}" + (f"/{total} ({100 * last.step // total}%)" if total else ""))
            parts += [f"ETA {left}"] if total and (left := self._left(attempt.number, last.step, total)) else []
        return "  ".join([*parts, self._run_id])

    def _left(self, attempt: int, step: int, total: int) -> str:
        """Return in words how long the rest takes, at the speed since this view began to look."""
        now = time.monotonic()
        if self._first is None or self._first[0] != attempt:
            self._first = (attempt, now, step)
        _, began, first = self._first
        return runs.duration((now - began) / (step - first) * (total - step)) if step > first and step <= total else ""

    def _asked_for(self, job: Mapping[str, Any]) -> int:
        """Return how many steps the hyperparameters name, 0 where they do not."""
        text = str((job.get("hyperparameters") or {}).get("max_steps", ""))
        return int(text) if text.isdecimal() and len(text) <= 15 else 0

    def _speed(self) -> str:
        assert self._store is not None
        known = {row.name: row for row in self._store.curves.newest(self._run_id)}
        parts = []
        loss = next((name for name in LOSSES if name in known), None)
        if loss:
            tail = self._store.curves.tail(self._run_id, loss, CURVE)
            parts.append(f"{loss} {known[loss].last:.4g}  {chart.spark(tail, CURVE)}")
        for name in SPEEDS:
            if name in known and math.isfinite(known[name].last):
                parts.append(f"{known[name].last:,.0f} {name.replace('_per_s', '/s')}")
                break
        if "mfu" in known and math.isfinite(known["mfu"].last):
            parts.append(f"MFU {known['mfu'].last:.0%}")
        return "   ".join(parts)

    def _nodes(self, attempt: AttemptRecord, most: int) -> list[str]:
        """Return the use of the nodes, as it was last told, in at most so many lines."""
        assert self._store is not None
        count = int(attempt.plan.manifest.get("nodes") or 1)
        shown = count if count <= min(NODES, most) else max(0, min(NODES, most - 1))
        found = []
        for node in range(shown):
            event = self._store.latest(attempt.attempt_id, node, "usage")
            if event is not None and (told := events.read_usage(event.data)):
                found.append(f"node {node}  {used(told)}")
        if found and count > shown:
            more = count - shown
            found.append(f"... and {more} more node{'s' if more > 1 else ''}")
        return found


def used(told: events.Usage) -> str:
    """Return what a usage event says, in words."""
    parts = [] if told.cpu_percent is None else [f"cpu {told.cpu_percent:.0f}%"]
    parts += [] if told.rss_bytes is None else [f"memory {runs.size(told.rss_bytes)}"]
    for gpu in told.gpus:
        busy = "" if gpu.percent is None else f" {gpu.percent:.0f}%"
        memory = "" if gpu.memory_bytes is None else f" {gpu.memory_bytes / 1e9:.0f}"
        total = "" if gpu.memory_total_bytes is None else f"/{gpu.memory_total_bytes / 1e9:.0f}"
        parts.append(f"gpu{gpu.index}{busy}" + (f"{memory}{total} GB" if memory else ""))
    return "  ".join(parts)
