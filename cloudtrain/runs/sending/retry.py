"""Whether a run gets another attempt, and how long to wait before it."""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.events import ENDED, State, Status
from cloudtrain.job.units import seconds_since
from cloudtrain.runs.planning import candidates

if TYPE_CHECKING:
    from cloudtrain.backends.api import Plan
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.history.store import Store

EVENTS = {State.PREEMPTED: "preempted", State.LOST: "lost"}  # of retry.on_events; `capacity` is Status.event
CAPACITY_S, CAPACITY_MAX_S = 60.0, 1800.0  # before the next attempt where there were no machines; doubled each time
OUTAGE_S, OUTAGE_MAX_S = 1.0, 300.0  # before a platform that did not answer is asked again; doubled each time
WITHOUT_CHECKPOINT = 2  # attempts in a row that may be lost without a new checkpoint


def allowed(store: Store, plan: Plan, status: Status) -> bool:
    """Return whether the job asks for another attempt after such an end, and this side is to start it.

    Candidates without capacity count as one attempt of `retry.max_attempts`, once all of them had their turn.
    """
    event = EVENTS.get(status.state) if status.event in ("", ENDED) else status.event
    if event is None:
        return False
    from cloudtrain.job.job import Job

    retry = Job.from_dict(plan.job).retry
    if event not in retry.on_events or rounds(store, plan, status)[0] >= retry.max_attempts:
        return False
    # No platform starts a job again for lack of machines, whatever else it retries.
    return event == "capacity" or plan.retries == "client"


def rounds(store: Store, plan: Plan, status: Status) -> tuple[int, bool]:
    """Return how many of `retry.max_attempts` are used when an attempt ends so, and whether a candidate is left to try."""
    if not plan.candidates:
        return plan.attempt, False
    count = len(candidates.bases(plan))
    earlier = [attempt.status.event for attempt in store.attempts(plan.run_id) if attempt.number < plan.attempt]
    used = refused = 0
    for event in [*earlier, status.event]:
        refused = refused + 1 if event == "capacity" else 0
        used += refused % count == 0
    return used, refused % count > 0


def capacity_pause_s(attempt_id: str, number: int) -> float:
    """Return how long to wait for machines after an attempt, in seconds: doubled each time, different for every run.

    Always the same for one attempt: a watcher that takes over does not wait again from the beginning.
    """
    pause_s = min(CAPACITY_S * 2.0 ** (number - 1), CAPACITY_MAX_S)
    return pause_s * (0.75 + crc32(attempt_id.encode()) % 1000 / 2000)


def waits_for_capacity(store: Store, plan: Plan, status: Status) -> str:
    """Return the reason to show while the next attempt waits for machines; "" once it is due.

    It is due at once where another candidate is left to try.
    """
    if status.event != "capacity" or status.ended_at is None or rounds(store, plan, status)[1]:
        return ""
    pause_s = capacity_pause_s(plan.attempt_id, plan.attempt)
    if seconds_since(status.ended_at, store.clock) >= pause_s:
        return ""
    return f"{status.reason}; another attempt in {pause_s / 60:.0f} min"


def outage_is_over(attempt: AttemptRecord, clock: Clock = SYSTEM) -> bool:
    """Return whether a platform that did not answer may be asked again about an attempt."""
    if attempt.tried_at is None:
        return True
    pause_s = min(OUTAGE_S * 2.0 ** min(attempt.tries - 1, 20), OUTAGE_MAX_S)
    return seconds_since(attempt.tried_at, clock) >= pause_s


def without_progress(store: Store, run_id: str, number: int) -> str:
    """Return why no attempt follows this one, "" where one may; every attempt's end is in the store.

    Two attempts in a row that were lost without a new checkpoint start where they started themselves. A checkpoint is
    an event: the shared trainer and `complete_checkpoint` report it with its step, the launcher where it saw that a
    script wrote into the checkpoint folder.
    """
    last = [attempt for attempt in store.attempts(run_id) if number - WITHOUT_CHECKPOINT < attempt.number <= number]
    if len(last) < WITHOUT_CHECKPOINT or any(attempt.status.state not in EVENTS for attempt in last):
        return ""
    if len({attempt.plan.target for attempt in last}) > 1:
        return ""
    if saved(store, run_id) & {attempt.attempt_id for attempt in last}:
        return ""
    return (
        "no new attempt: the last two attempts were lost before they saved a new checkpoint; save checkpoints more often "
        "(checkpoint.every), then run `cloudtrain resume`"
    )


def saved(store: Store, run_id: str, *, in_folder: bool = False) -> set[str]:
    """Return the attempts of a run that have written a checkpoint; `in_folder`: into the run's folder of checkpoints."""
    events = [event for event in store.events(run_id, "checkpoint") if {"step", "written", "kept"} & event.data.keys()]
    return {event.attempt for event in events if not (in_folder and "kept" in event.data)}
