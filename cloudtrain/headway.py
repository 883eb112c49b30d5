"""Whether a run gets on: an attempt that is lost before it has saved anything leaves the next one where it began itself."""

from __future__ import annotations

from cloudtrain.state import State
from cloudtrain.store import Store

LOST = {State.PREEMPTED, State.LOST}
IN_VAIN = 2  # attempts in a row; one may have had bad luck


def in_vain(store: Store, run_id: str, number: int) -> str:
    """Return why there should be no attempt after this one, "" where there may be; every attempt's end is in the store.

    A checkpoint is what an attempt told as an event: the shared trainer and `complete_checkpoint` with its step, the
    launcher where it saw that a script wrote into the folder of checkpoints.
    """
    last = [attempt for attempt in store.attempts(run_id) if number - IN_VAIN < attempt.number <= number]
    if len(last) < IN_VAIN or any(attempt.status.state not in LOST for attempt in last):
        return ""
    saved = {event.attempt for event in store.events(run_id, "checkpoint") if {"step", "written"} & event.data.keys()}
    if any(attempt.attempt_id in saved for attempt in last):
        return ""
    return (
        "no new attempt: the last two were lost before either had a newer checkpoint; save more often "
        "(checkpoint.every), then `cloudtrain resume` goes on"
    )
