"""What every layer speaks: the state of a run, a line of its log, an event of its log."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

# They turn the direction of a text round or are not seen: with them a name looks like another one.
_MARKS = re.compile(r"[\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff]")


def show_marks(text: str) -> str:
    """Return a text with direction marks and zero-width characters as escapes, such as \\u202e."""
    return text if text.isprintable() else _MARKS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class State(StrEnum):
    """The life of a run or an attempt.

    QUEUED -> STARTING -> RUNNING -> SUCCEEDED | FAILED | TIMED_OUT | PREEMPTED | LOST
                             └─> STOPPING -> CANCELLED

    For an attempt every state below the arrows' ends is final. A run whose attempt ends PREEMPTED or LOST continues
    with another attempt while retries are left, and is in that state itself only when none are.
    """

    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    PREEMPTED = "PREEMPTED"
    TIMED_OUT = "TIMED_OUT"
    LOST = "LOST"

    @property
    def final(self) -> bool:
        return self in FINAL


FINAL = frozenset(
    {State.SUCCEEDED, State.FAILED, State.CANCELLED, State.PREEMPTED, State.TIMED_OUT, State.LOST},
)

# Exit codes of the launcher inside a job (design: the exit-code contract).
EXIT_RESUMABLE = 75  # checkpointed and left on request
EXIT_REFUSED = 78  # refused before training
ENDED = "ended"  # Status.event of a LOST attempt: its platform or launcher reported when all its nodes had stopped

# What `submit --wait`, `--follow` and `wait` exit with when the run has no code of its own to pass on.
CLI_EXIT = {
    State.SUCCEEDED: 0,
    State.CANCELLED: 130,
    State.TIMED_OUT: 124,
    State.PREEMPTED: EXIT_RESUMABLE,
    State.LOST: 69,
}


@dataclass(frozen=True)
class Status:
    """A run's or attempt's state at one moment; times are UTC, ISO 8601."""

    state: State
    exit_code: int | None = None  # the script's own; None while it runs or when it is not known
    reason: str = ""
    started_at: str | None = None
    ended_at: str | None = None
    url: str | None = None
    billable_s: int | None = None  # what the platform bills, the seconds of all nodes together
    event: str = ""  # of retry.on_events, where the state does not say it: capacity; or ENDED

    @property
    def failed(self) -> bool:
        """Whether it has ended, neither well nor because a person wanted it: such an end has a verdict."""
        return self.state.final and self.state not in (State.SUCCEEDED, State.CANCELLED)

    @property
    def cli_exit_code(self) -> int:
        """What the command line exits with: 0, the script's own code, or the state's."""
        if self.state in CLI_EXIT:
            return CLI_EXIT[self.state]
        return self.exit_code if self.exit_code else 1


class LogLine(NamedTuple):
    """One line of a run's log.

    `rank` is -1 for the launcher's own lines; `seq` counts from 0 on each node, at the source; `cursor` is opaque,
    and `logs(after=cursor)` continues behind that line on every node.
    """

    at: str
    node: int
    rank: int
    seq: int
    text: str
    cursor: str


REASON_CHARS = 300  # of a reason that may change while a run waits
UNFIT = "failed the health check"  # in a reason, after the node: what entrypoints/launcher/health/verdict.py writes
PLATFORM = -1  # the node of an event that no node reported but the platform's status
MARK = "::cloudtrain::"
MAX_BYTES = 8192  # a longer marked line is ordinary text
MAX_DEPTH = 64  # so is one whose values lie deeper in one another
STEPS = 1 << 63  # what the history can hold: steps whose amount is below
OFF = "off"  # in a job's metrics: this name is not looked for; of "*": only the job's own expressions are, in no file
KINDS = frozenset(
    {
        "metric",
        "checkpoint",
        "state",
        "usage",
        "world",
        "health",
        "role",
        "alarm",
        "result",
        "requirements",
        "media",
        "evaluation",
    }
)
_BEHIND_BAR = "]" + MARK

_EVALUATION = re.compile(r"(?:^|[^a-z])(?:eval|evaluation|val|valid|validation|dev|test)(?:[^a-z]|$)", re.IGNORECASE)

# What tqdm moves a terminal's cursor with, and colours; of one that is cut off what is there
ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]?|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.?)")


@dataclass(frozen=True)
class Event:
    """One event of a run: where and when it happened, its kind and its data."""

    attempt: str
    node: int
    seq: int
    at: str
    kind: str
    data: Mapping[str, Any] = field(default_factory=dict)


def parse(text: str) -> tuple[str, dict[str, Any]] | None:
    """Return (kind, data) of a marked line, or None when the line is ordinary text.

    A progress bar does not end its line: what comes right behind its closing bracket is a marked line too, whatever moves
    the cursor in between.
    """
    if MARK not in text:
        return None
    if "\x1b" in text:
        text = ESCAPE.sub("", text)
    if _BEHIND_BAR in text:
        text = text[text.index(_BEHIND_BAR) + 1 :]
    if not text.startswith(MARK) or len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        return None
    try:
        body = json.loads(text[len(MARK) :])
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict) or not is_shallow(body):
        return None
    if "\\u" in text or not text.isascii():  # half of a character is none that can be written down
        body = json.loads(json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"))
    kind = body.pop("kind", None)
    return (kind, body) if isinstance(kind, str) and kind in KINDS else None


def without_event(text: str) -> str | None:
    """Return what a person reads of a line: None of an event, and of one right behind a progress bar the bar."""
    if MARK not in text or parse(text) is None:
        return text
    before = text.partition(MARK)[0]
    return before if ESCAPE.sub("", before).strip() else None


def short_reason(text: str) -> str:
    """Return a platform's reason on one line, without escape sequences and control characters, of limited length."""
    words = " ".join(ESCAPE.sub("", text[: 4 * REASON_CHARS]).split())
    line = words if words.isprintable() else "".join(letter for letter in words if letter.isprintable())
    return line if len(line) <= REASON_CHARS else line[: REASON_CHARS - 1] + "…"


def is_shallow(body: Any) -> bool:
    """Return whether the values of plain data are nested at most MAX_DEPTH deep."""
    level = [body]
    for _ in range(MAX_DEPTH):
        inner = [value for each in level for value in (each.values() if isinstance(each, dict) else each)]
        level = [value for value in inner if isinstance(value, (dict, list))]
        if not level:
            return True
    return False


def format(kind: str, data: Mapping[str, Any]) -> str:
    """Return the marked line for an event; the inverse of `parse`."""
    return MARK + json.dumps({"kind": kind, **data}, separators=(",", ":"), ensure_ascii=False)


class Point(NamedTuple):
    """One value of a metric, as a line or a file has it."""

    step: float
    name: str
    value: float
    epoch: float | None = None  # None where it is not known


class Row(NamedTuple):
    """One value of a metric, as the history holds it: with node, number and time of its line."""

    node: int
    seq: int
    at: str
    step: int
    name: str
    value: float
    rank: int = 0
    epoch: float | None = None


def rows(line: Event | LogLine, points: Iterable[Point], rank: int = 0) -> list[Row]:
    """Return a rank's points of a line as the history can hold them.

    A step that is not a number or too large is 0, an epoch that is none is not known, a character that cannot be stored is
    a question mark. A negative rank is 0.
    """
    node, seq, at, rank = line.node, line.seq, line.at, max(rank, 0)
    return [
        Row(
            node,
            seq,
            at,
            int(step) if abs(step) < STEPS else 0,  # not so for NaN
            name if name.isascii() else name.encode("utf-8", "replace").decode(),
            value,
            rank,
            epoch if epoch is not None and math.isfinite(epoch) else None,
        )
        for step, name, value, epoch in points
    ]


def is_evaluation(name: str) -> bool:
    """Return whether a metric is of an evaluation, by its name: eval_loss, val/acc, test.f1, top1_validation."""
    return _EVALUATION.search(name) is not None


MOST_GPUS = 64  # of one node that are listened to


@dataclass(frozen=True)
class Gpu:
    """The use of one GPU; None is what was not told."""

    index: int
    percent: float | None
    memory_bytes: float | None
    memory_total_bytes: float | None


@dataclass(frozen=True)
class Usage:
    """The use of one node, in percent of one processor and in bytes; None is what was not told."""

    cpu_percent: float | None
    rss_bytes: float | None
    gpus: tuple[Gpu, ...]

    def __bool__(self) -> bool:
        return self != _NOTHING


_NOTHING = Usage(None, None, ())


def read_usage(data: Mapping[str, Any]) -> Usage:
    """Return what a usage event's data say: finite numbers that are not negative, and GPUs that tell any of theirs."""
    gpu_rows = data.get("gpus")
    rows = [row for row in gpu_rows if isinstance(row, Mapping)] if isinstance(gpu_rows, list) else []
    gpus = [_gpu(at, row) for at, row in enumerate(rows[:MOST_GPUS])]
    measured_gpus = tuple(
        gpu for gpu in gpus if (gpu.percent, gpu.memory_bytes, gpu.memory_total_bytes) != (None, None, None)
    )
    return Usage(_amount(data, "cpu_percent"), _amount(data, "rss_bytes"), measured_gpus)


def _gpu(at: int, row: Mapping[str, Any]) -> Gpu:
    index = _amount(row, "index")
    amounts = (_amount(row, name) for name in ("percent", "memory_bytes", "memory_total_bytes"))
    return Gpu(int(index) if index is not None and index < 1000 else at, *amounts)


def _amount(data: Mapping[str, Any], name: str) -> float | None:
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        amount = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return amount if math.isfinite(amount) and amount >= 0 else None
