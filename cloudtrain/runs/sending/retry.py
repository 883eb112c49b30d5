"""Whether a run gets another attempt, when, and where: on its own target, or on its next candidate.

An attempt is gone before the next one is sent, and what it left on machines goes with it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from zlib import crc32

from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.events import ENDED, Event, State, Status
from cloudtrain.job.units import now, seconds_since, unix_time
from cloudtrain.runs.planning import attempts, bad_nodes, candidates

if TYPE_CHECKING:
    from cloudtrain.backends.api import Backend, Plan
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.history.store import Store

EVENTS = {State.PREEMPTED: "preempted", State.LOST: "lost"}  # of retry.on_events; `capacity` is Status.event
CAPACITY_S, CAPACITY_MAX_S = 60.0, 1800.0  # before the next attempt where there were no machines; doubled each time
WAITS = "capacity"  # event: the next attempt waits for machines from now on
OUTAGE_S, OUTAGE_MAX_S = 1.0, 300.0  # before a platform that did not answer is asked again; doubled each time
WITHOUT_CHECKPOINT = 2  # attempts in a row that may be lost without a new checkpoint
_PENDING = (State.QUEUED, State.STARTING)
_GONE = (State.CANCELLED, State.TIMED_OUT, State.PREEMPTED, State.LOST)
UNSEEN_S = 60.0  # for so long, besides the time that the machine did not answer, an attempt may have run unseen


def allowed(store: Store, plan: Plan, status: Status) -> bool:
    """Return whether the job asks for another attempt after such an end, and this side is to start it.

    Candidates without capacity count as one attempt of `retry.max_attempts`, once all of them had their turn.
    """
    event = EVENTS.get(status.state) if status.event in ("", ENDED) else status.event
    if event is None:
        return False
    retry = plan.stored_job.retry
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

    It is due at once where another candidate is left to try. The pause begins when the end is first seen here, which is
    stored as an event: the platform's clock may be another one.
    """
    if status.event != "capacity" or status.ended_at is None or rounds(store, plan, status)[1]:
        return ""
    pause_s = capacity_pause_s(plan.attempt_id, plan.attempt)
    seen = [event.at for event in store.events(plan.run_id, WAITS) if event.attempt == plan.attempt_id]
    if not seen:
        store.add_event(plan.attempt_id, WAITS, {"seconds": round(pause_s)})
    elif seconds_since(seen[0], store.clock) >= pause_s:
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
    """Return the attempts of a run that have saved a checkpoint; `in_folder`: into the run's folder of checkpoints."""
    return {event.attempt for event in checkpoints(store, run_id) if not (in_folder and "kept" in event.data)}


def checkpoints(store: Store, run_id: str) -> list[Event]:
    """Return the reports of the checkpoints that a next attempt would find, oldest first.

    A rank reports a checkpoint that is whole on its node. Where that is uploaded it counts once it is reported as stored;
    what a launcher reports of a script's own files (`written`, `kept`) is stored by then.
    """
    events = store.events(run_id, "checkpoint")
    if not any("step" in event.data for event in events):
        return [event for event in events if {"written", "kept"} & event.data.keys()]
    uploading = {attempt.attempt_id for attempt in store.attempts(run_id) if attempts.uploads(attempt.plan)}
    stored = {_name(event.data["stored"]) for event in events if "stored" in event.data}
    return [
        event
        for event in events
        if {"written", "kept"} & event.data.keys()
        or ("step" in event.data and (event.attempt not in uploading or _name(event.data.get("path")) in stored))
    ]


def _name(path: object) -> str:
    return str(path).rstrip("/").rpartition("/")[2]


def has_checkpoint(store: Store, run_id: str) -> bool:
    """Return whether a run's next attempt would find a checkpoint: one was reported, or is here as its run ended soon."""
    folder = store.home / "runs" / run_id / "checkpoints"
    return bool(saved(store, run_id)) or (folder.is_dir() and any(folder.iterdir()))


def has_candidates(plan: Plan) -> bool:
    """Return whether a run may go elsewhere."""
    return len(candidates.bases(plan)) > 1


def next_plans(store: Store, plan: Plan, status: Status) -> tuple[list[Plan], str]:
    """Return what the next attempt may be planned from, in the order to try it, and why there is none ("" otherwise).

    After insufficient capacity these are the other candidates and then the same one; where spot machines were lost twice
    without a new checkpoint the later candidates; else the same one. With checkpoints only candidates that reach them.
    """
    bases = candidates.bases(plan)
    at = next((number for number, base in enumerate(bases) if candidates.is_of(base, plan)), 0)
    here, later, before = [plan], bases[at + 1 :], bases[:at]
    stuck = ""
    if status.event == "capacity":
        found = [*later, *before, *here]
    else:
        stuck = without_progress(store, plan.run_id, plan.attempt)
        found = later if stuck else here
    written = saved(store, plan.run_id)
    plans = [attempt.plan for attempt in store.attempts(plan.run_id) if attempt.attempt_id in written]
    old = plans[-1] if plans else plan
    found = [
        base if base is plan else _carried(base, old, bool(plans))
        for base in found
        if not plans or attempts.reaches(base, old)
    ]
    return (
        found,
        "" if found else stuck or "no new attempt: none of the job's other targets can read the run's checkpoints",
    )


def _carried(base: Plan, old: Plan, saved: bool) -> Plan:
    """Return a candidate whose node finds the checkpoints of `old`; where one was saved it refuses to begin anew."""
    checkpoint = attempts.carry_checkpoints(base.job["checkpoint"], base.backend, old, saved)
    return replace(base, job={**base.job, "checkpoint": checkpoint})


def why_withdrawn(store: Store, attempt: AttemptRecord, status: Status) -> str:
    """Return why a request for machines is to be withdrawn for the next candidate; "" where it may go on.

    The decision is stored as the event `capacity` of an attempt that has not ended: the next watcher continues with it.
    """
    if not has_candidates(attempt.plan):
        return ""
    if attempt.status.event == "capacity":
        return attempt.status.reason
    limits = attempt.plan.stored_job.limits
    pending = status.state in _PENDING and status.started_at is None
    if not pending or limits.max_wait_s is None or seconds_since(attempt.created_at, store.clock) <= limits.max_wait_s:
        return ""
    refused = Status(State.FAILED, event="capacity")
    reason = f"cancelled: no machines within {limits.max_wait} (limits.max_wait)"
    return reason if allowed(store, attempt.plan, refused) else ""


def ended(attempt: AttemptRecord, status: Status, withdrawn: str) -> Status:
    """Return the status of an attempt as its run sees it: one that never got machines is the event `capacity`."""
    if withdrawn and status.state in _GONE:
        began = State.PREEMPTED if status.started_at or attempt.status.started_at else State.FAILED
        state = State.LOST if status.state is State.LOST else began  # of what had begun the time counts
        return replace(status, state=state, exit_code=None, reason=withdrawn, event="capacity")
    if withdrawn and not status.state.final:
        return replace(status, reason=withdrawn, event="capacity")
    if status.state is State.TIMED_OUT and not status.started_at and has_candidates(attempt.plan):
        return replace(status, event="capacity")
    return status


def plan_after(store: Store, backend: Backend, plan: Plan) -> Plan:
    """Return the plan of a run's next attempt: on other nodes than those whose hardware has failed, where there is a choice.

    It goes to any machine where no earlier one has left files.
    """
    plan = bad_nodes.avoid(store, backend, plan)
    if (lost_after_s := backend.lost_after_s) is None:
        return plan
    earlier = [
        attempt
        for attempt in store.attempts(plan.run_id)
        if attempt.number < plan.attempt and attempt.handle is not None and attempt.plan.backend == plan.backend
    ]
    has_checkpoint = bool(saved(store, plan.run_id)) or bool(plan.job["checkpoint"]["required"])
    left = has_checkpoint or any(_may_have_left(store, attempt, lost_after_s) for attempt in earlier)
    return backend.plan_after(plan, earlier[-1].number if left and earlier else 0)


def _may_have_left(store: Store, attempt: AttemptRecord, lost_after_s: float) -> bool:
    """Return whether an attempt that reported no checkpoint has files in the run's folders, or ran on without being seen."""
    seen_at = attempt.created_at
    for node in range(int(attempt.plan.manifest["nodes"])):
        if (usage := store.latest(attempt.attempt_id, node, "usage")) is not None:
            if usage.data.get("files") is not False:  # an older launcher does not report it
                return True
            seen_at = max(seen_at, usage.at)
    return unix_time(attempt.status.ended_at or now(store.clock)) - unix_time(seen_at) > lost_after_s + UNSEEN_S
