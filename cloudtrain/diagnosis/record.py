"""A run's verdict: judged once when the run has ended, kept in the history, found there by everybody who shows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from cloudtrain.diagnosis.verdict import Verdict, end_of, judge
from cloudtrain.events import ESCAPE, Event, LogLine, Status
from cloudtrain.history.records import AttemptRecord
from cloudtrain.history.store import Store, now
from cloudtrain.source import secrets

NODE = -1  # of the event that keeps it: nodes have numbers from 0 on, so that no job can write one
KIND = "verdict"


def kept(store: Store, attempt: AttemptRecord) -> Verdict | None:
    """Return the verdict that is in the history."""
    event = store.latest(attempt.attempt_id, NODE, KIND)
    try:
        return Verdict.from_dict(event.data) if event else None
    except TypeError:
        return None  # of a version with other fields


def judged(store: Store, attempt: AttemptRecord, status: Status, lines: Iterable[LogLine]) -> Verdict:
    """Judge how an attempt ended, keep the verdict and return it; two who do so at once keep the first."""
    results = [e for e in store.events(attempt.run_id, "result") if e.attempt == attempt.attempt_id]
    told = next((e.data for e in results if isinstance(e.data.get("failed_rank"), int)), None)
    found = judge(end_of(status, told or (results[0].data if results else None)), lines)
    found = replace(found, deciding=shown(found.deciding), raised=shown(found.raised))
    event = Event(attempt.attempt_id, NODE, 0, status.ended_at or now(), KIND, found.to_dict())
    store.record(attempt.attempt_id, events=[event])
    return found


def shown(text: str) -> str:
    """Return a job's line as it may be kept and shown: nothing that a terminal obeys, and no credential."""
    if secrets.search(text.encode("utf-8", "replace")):
        return "(a line that holds what looks like a credential)"
    return "".join(letter for letter in ESCAPE.sub("", text).replace("\t", " ") if letter.isprintable())
