"""Read the metric points of one attempt from the lines of its log."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from cloudtrain import events
from cloudtrain.events import Event, LogLine, Point, Row
from cloudtrain.metrics.parser import MetricParser

if TYPE_CHECKING:
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.history.store import Store

RANK = "_rank"  # in a metric event: the rank that logged it, where several print through one process


class MetricLines:
    """Finds metrics in the lines of one attempt; counts continue from the steps that the history has."""

    def __init__(self, store: Store, attempt: AttemptRecord) -> None:
        self._attempt_id = attempt.attempt_id
        steps = store.curves.last_steps(attempt.run_id)
        epochs = store.curves.last_epochs(attempt.run_id)
        seen = steps.pop(attempt.number, {})
        earlier: dict[tuple[int, str], int] = {}
        per_epoch: dict[tuple[int, str], float] = {}
        for number in sorted(number for number in steps if number < attempt.number):
            earlier |= steps[number]
            per_epoch |= {
                key: steps[number][key] / epoch for key, epoch in epochs[number].items() if epoch and epoch > 0
            }
        first_epoch = store.curves.first_epoch(attempt.run_id) if earlier else None
        patterns = dict(attempt.plan.job.get("metrics") or {})
        self._parser = MetricParser(patterns, seen, earlier, first_epoch, per_epoch)
        self._patterns = patterns
        self._shared_trainer = bool(attempt.plan.job.get("trainer"))  # it logs every number that it prints
        self._logged = set[tuple[int, str]]()  # rank and name of what the script logs by metric events
        self._last: dict[int, LogLine] = {}  # of each rank

    def rows(self, line: LogLine) -> list[Row]:
        """Return the points that an ordinary line holds or completes, without what the script logs by metric events."""
        rank = max(line.rank, 0)
        self._last[rank] = line
        points = list(self._parser.metrics(line.text, rank))
        return self._rows(line, points) if points else []

    def rest(self) -> list[Row]:
        """Return the points that waited for another line: the log has ended."""
        return [row for rank, points in self._parser.flush() for row in self._rows(self._last[rank], points)]

    def _rows(self, line: LogLine, points: list[Point]) -> list[Row]:
        rank = max(line.rank, 0)
        points = [point for point in points if self._is_wanted(rank, point.name)]
        return events.rows(Event(self._attempt_id, line.node, line.seq, line.at, "metric"), points, line.rank)

    def _is_wanted(self, rank: int, name: str) -> bool:
        if name in self._patterns:
            return True
        return not self._shared_trainer and (rank, name) not in self._logged

    def event_rows(self, event: Event, rank: int) -> list[Row]:
        """Return the points of a metric event of a rank: every number but step and epoch is a point of a curve."""
        told = event.data.get(RANK)
        rank = told if isinstance(told, int) and 0 <= told < 1 << 31 else rank
        points = list(_event_points(event))
        self._logged.update((rank, point.name) for point in points)
        return events.rows(event, points, rank)


def _event_points(event: Event) -> Iterable[Point]:
    step, epoch = event.data.get("step", 0), event.data.get("epoch")
    at = step if isinstance(step, (int, float)) else 0
    for name, value in event.data.items():
        if name not in ("step", "epoch", RANK) and (number := _number(value)) is not None:
            yield Point(at, name, number, _number(epoch))


def _number(value: object) -> float | None:
    """Return a number as a float, None where there is none or no float can be made of it."""
    if isinstance(value, float):
        return value
    return float(value) if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 1000 else None
