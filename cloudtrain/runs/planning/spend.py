"""What attempts have spent so far, and sums of it by target, user, label or month.

Of deleted runs each attempt is a line in `spent.jsonl` of the home, which costs and budgets count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import registry
from cloudtrain.backends.api import TimeLimit
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import CloudtrainError, DiskError
from cloudtrain.events import State
from cloudtrain.job import targets, units
from cloudtrain.runs.planning import cap

if TYPE_CHECKING:
    from cloudtrain.backends.api import Plan
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.history.store import Store

GROUPS = ("target", "user", "month")  # and label.NAME
DELETED = "spent.jsonl"
MOST_LIVE = 100_000  # runs
NONE = "(none)"  # the group of runs without that label


@dataclass(frozen=True)
class Share:
    """What one attempt has spent so far.

    Attributes:
        month: in which it was started (UTC, 2026-11).
        node_s: seconds of all nodes together.
        usd: None where its price is not known.
        estimate: whether its price is one.
        whole_limit: whether its end is not known, so that its whole time limit counts.
    """

    run_id: str
    target: str
    labels: Mapping[str, str]
    month: str
    node_s: float
    usd: float | None
    estimate: bool = False
    whole_limit: bool = False

    def group(self, by: str) -> str:
        """Return which group it is in: its target, user, month or label.NAME."""
        if by in ("target", "month"):
            return str(getattr(self, by))
        if by == "user":
            return targets.submitter(self.labels) or NONE
        return self.labels.get(by.removeprefix("label."), NONE)


_SHARE = tuple(each.name for each in fields(Share))


@dataclass
class Sum:
    """What the runs of a group have spent; `usd` is of those with a known price alone.

    `keys` are its values of all columns that runs are grouped by, `key` is the first.
    """

    key: str
    keys: tuple[str, ...] = ()
    runs: set[str] = field(default_factory=set)
    node_s: float = 0.0
    usd: float = 0.0
    unpriced_s: float = 0.0  # of all nodes, without a known price
    estimate: bool = False
    whole_limit: bool = False

    def add(self, share: Share) -> None:
        self.runs.add(share.run_id)
        self.node_s += share.node_s
        self.usd += share.usd or 0.0
        self.unpriced_s += share.node_s if share.usd is None else 0.0
        self.estimate = self.estimate or share.estimate
        self.whole_limit = self.whole_limit or share.whole_limit


def share_of(attempt: AttemptRecord, home: Path, clock: Clock = SYSTEM) -> Share:
    """Return what an attempt has spent by its billed seconds, else by its measured time; of a live one until now."""
    attempt = _until_now(attempt, clock)
    plan, status, nodes = attempt.plan, attempt.status, attempt.plan.machines
    used = cap.spent([attempt], lambda plan: replace(_limit(plan, home), after_end_s=0.0))  # without a cap's margin
    labels, price = plan.job.get("labels") or {}, plan.price or {}
    target, month = plan.target or plan.backend, attempt.created_at[:7]
    known = status.billable_s is not None or cap.measured_s(status) is not None
    whole_limit = status.state is State.LOST and not known and used.seconds > 0
    return Share(
        attempt.run_id, target, labels, month, used.seconds * nodes, used.usd, bool(price.get("estimate")), whole_limit
    )


def _until_now(attempt: AttemptRecord, clock: Clock = SYSTEM) -> AttemptRecord:
    """Return a live attempt with the seconds until now as billed, any other one as it is."""
    status = attempt.status
    if status.state.final or status.billable_s is not None:
        return attempt
    began_s = units.unix_time(status.started_at) if status.started_at else None
    ran_s = max(0.0, clock.now() - began_s) if began_s else 0.0
    return replace(attempt, status=replace(status, billable_s=round(ran_s * int(attempt.plan.manifest["nodes"]))))


def _limit(plan: Plan, home: Path) -> TimeLimit:
    try:
        return cap.limit_of(registry.create_for(plan, home), plan)
    except (CloudtrainError, LookupError):  # an extra that is not installed any more, a plan of an older version
        return TimeLimit(None)


def shares(store: Store, since: str = "", until: str = "") -> list[Share]:
    """Return what the attempts that were started since a time, and before another, have spent; blocking.

    Attempts of deleted runs are among them. Times are ISO 8601, UTC; "" for no limit.
    """
    attempts = list(store.attempts_since(since, until))
    known = {(attempt.run_id, attempt.number) for attempt in attempts}
    deleted = [
        _stored(row)
        for row in read_deleted(store.home)
        if since <= row["created_at"] and (not until or row["created_at"] < until)
        and (row["run_id"], row["attempt"]) not in known
    ]  # fmt: skip
    return [*(share_of(attempt, store.home, store.clock) for attempt in attempts), *deleted]


def committed(store: Store) -> list[Share]:
    """Return what live runs may cost beyond what they have spent, whenever they were started; none where nothing bounds it.

    Blocking.
    """
    found = []
    for run in store.runs(limit=MOST_LIVE, states=[state for state in State if not state.final]):
        attempts = store.attempts(run.run_id)
        last = max(attempts, key=lambda attempt: attempt.number, default=None)
        most = (last.plan.at_most or {}).get("usd") if last else None
        if last and most is not None and not last.status.state.final:
            used = sum(share_of(attempt, store.home, store.clock).usd or 0.0 for attempt in attempts)
            own = share_of(last, store.home, store.clock)
            found.append(replace(own, node_s=0.0, usd=max(0.0, float(most) - used)))
    return found


def keep(store: Store, run_id: str) -> None:
    """Store what a run's attempts have spent beside the history, before the run is deleted; raises DiskError."""
    rows = []
    for attempt in store.attempts(run_id):
        share = share_of(attempt, store.home, store.clock)
        if share.node_s:
            rows.append({**asdict(share), "attempt": attempt.number, "created_at": attempt.created_at})
    append_deleted(store.home, rows)


def append_deleted(home: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add rows with `run_id`, `attempt`, `created_at` and what was spent; raises DiskError where they cannot be written."""
    lines = "".join(json.dumps(dict(row)) + "\n" for row in rows)
    if not lines:
        return
    path = home / DELETED
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, lines.encode())  # one write: lines of several processes do not mix
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DiskError(path, error) from None


def read_deleted(home: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows, each attempt once; lines that are none are left out."""
    seen: set[tuple[object, object]] = set()
    try:
        text = (home / DELETED).read_text("utf-8", errors="replace")
    except FileNotFoundError:
        return
    except OSError as error:
        raise DiskError(home / DELETED, error) from None
    for line in text.splitlines():
        try:
            row = json.loads(line)
            key = row["run_id"], row["attempt"]
        except (ValueError, KeyError, TypeError):
            continue
        if key not in seen:  # a removal that was interrupted is repeated
            seen.add(key)
            yield row


def total_of_deleted(home: Path, run_ids: Collection[str]) -> Sum:
    """Return what deleted runs have spent together."""
    found = Sum("")
    for row in read_deleted(home) if run_ids else ():
        if row["run_id"] in run_ids:
            found.add(_stored(row))
    return found


def _stored(row: Mapping[str, Any]) -> Share:
    return Share(**{name: row[name] for name in _SHARE})


def sums(shares: Iterable[Share], *by: str) -> list[Sum]:
    """Return the sums of groups, the most expensive first; months in their order, before anything else."""
    groups: dict[tuple[str, ...], Sum] = {}
    for share in shares:
        keys = tuple(share.group(each) for each in by)
        groups.setdefault(keys, Sum(keys[0], keys)).add(share)

    def order(each: Sum) -> tuple[object, ...]:
        months = tuple(key for key, name in zip(each.keys, by, strict=True) if name == "month")
        return months, -each.usd, -each.node_s, each.keys

    return sorted(groups.values(), key=order)


def describe_run(attempts: Sequence[AttemptRecord], home: Path) -> str:
    """Return what a run has spent so far and what it can cost at most; "" where no price is known."""
    used = total(attempts, home)
    if used.unpriced_s or not attempts[-1].plan.price:
        return ""
    case, ended = attempts[-1].plan.at_most or {}, attempts[-1].status.state.final
    text = f"{'about ' if used.estimate else ''}{used.usd:.2f} USD"
    text += f"{'' if ended else ' so far'} ({units.format_duration(used.node_s)} of nodes' time)"
    return text + (f"; at most {case['usd']:.2f} USD" if not ended and case.get("usd") is not None else "")


def describe_attempts(attempts: Sequence[AttemptRecord], home: Path) -> list[str]:
    """Return what each attempt has spent, in USD; empty for a single attempt, or where no price is known."""
    if len(attempts) < 2 or not any(attempt.plan.price for attempt in attempts):
        return []
    found = [share_of(attempt, home).usd for attempt in attempts]
    return ["" if usd is None else f"{usd:.2f}" for usd in found]


def describe_cap(attempts: Sequence[AttemptRecord], home: Path) -> str:
    """Return the cap of a run and what is left of it, as the next attempt is planned; "" without one."""
    limits = attempts[-1].plan.job.get("limits") or {}
    cost, runtime = limits.get("max_cost"), limits.get("max_total_runtime")
    if not cost and not runtime:
        return ""
    used = cap.spent([_until_now(attempt) for attempt in attempts], lambda plan: _limit(plan, home))
    parts = []
    if cost:
        left = "unknown what is" if used.usd is None else f"{max(0.0, units.usd(cost) - used.usd):.2f} USD"
        parts.append(f"{cost} (limits.max_cost), {left} left")
    if runtime:
        left_s = max(0.0, units.duration_s(runtime) - used.seconds)
        parts.append(f"{runtime} (limits.max_total_runtime), {units.format_duration(left_s)} left")
    extra = cap.describe_after_end(attempts, lambda plan: _limit(plan, home))
    if extra and cost and used.usd is not None:  # spent, this and what is left are the cap
        extra += f": {used.usd - total(attempts, home).usd:.2f} USD"
    return "; ".join(parts) + (f" ({extra})" if extra else "")


def total(attempts: Sequence[AttemptRecord], home: Path) -> Sum:
    """Return what the attempts of a run have spent so far together."""
    found = Sum("")
    for attempt in attempts:
        found.add(share_of(attempt, home))
    return found
