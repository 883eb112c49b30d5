"""Nodes that ended an attempt by their hardware, as the history of this home has them: attempts avoid them for a week."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from cloudtrain.events import UNFIT
from cloudtrain.job.units import format_count

if TYPE_CHECKING:
    from cloudtrain.backends.api import Backend, Plan
    from cloudtrain.events import Event
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.history.store import Store

DAYS = 7
CLEARED = "node-cleared"  # event of an attempt: a person uses its node again
_LABEL = "gpu-hardware"
_FAILED = re.compile(rf"^node \d+ \((?P<name>[\w@.:\[\]-]{{1,253}})\) {UNFIT}: (?P<why>.*)", re.MULTILINE)


class BadNode(NamedTuple):
    """A node by the name that its platform, or the target's list of hosts, has for it."""

    target: str
    name: str
    why: str
    at: str
    attempt_id: str


def bad_nodes(store: Store) -> list[BadNode]:
    """Return the nodes that failed in the last 7 days and were not cleared since, one row for each, the newest first."""
    failures = sorted(_failures(store), key=lambda node: node.at)
    return list({(node.target, node.name): node for node in failures}.values())[::-1]


def avoid(store: Store, backend: Backend, plan: Plan) -> Plan:
    """Return the plan of an attempt that avoids the bad nodes of its target, where the platform gives a choice.

    A note says which ones, or that there is no choice.
    """
    names = [node.name for node in bad_nodes(store) if node.target == (plan.target or plan.backend)]
    if not names:
        return plan
    plan, before = backend.avoid(plan, names), plan
    what = f"{format_count(len(names), 'node')} whose hardware failed in the last {DAYS} days ({', '.join(names[:5])}"
    what += f" and {len(names) - 5} more)" if len(names) > 5 else ")"
    if plan is before:
        note = f"the target has {what}, and other machines cannot be chosen there"
    else:
        note = f"avoids {what}; cloudtrain doctor --nodes lists and clears them"
    return replace(plan, notes=(*plan.notes, note))


def clear(store: Store, name: str) -> int:
    """Use a node again; return on how many targets it was avoided."""
    nodes = [node for node in _failures(store) if node.name == name]
    for attempt_id in {node.attempt_id for node in nodes}:
        store.add_event(attempt_id, CLEARED, {"name": name})
    return len({node.target for node in nodes})


def _failures(store: Store) -> Iterator[BadNode]:
    """Yield each failure of the last 7 days that was not cleared."""
    since = (store.clock.utc() - timedelta(days=DAYS)).strftime("%Y-%m-%dT%H:%M:%SZ")
    for attempt, events in store.ends_of_nodes(since, (UNFIT, f'"{_LABEL}"')):
        cleared = {
            event.data.get("name"): event.at
            for event in store.events(attempt.run_id, CLEARED)
            if event.attempt == attempt.attempt_id
        }
        for node in _of_attempt(store, attempt, events):
            if node.at >= max(since, cleared.get(node.name, "")):
                yield node


def _of_attempt(store: Store, attempt: AttemptRecord, events: Sequence[Event]) -> Iterator[BadNode]:
    """Yield the nodes whose hardware ended an attempt or an earlier start of it.

    By the check before a start, or by what a rank printed.
    """
    place, ended_at = attempt.plan.target or attempt.plan.backend, attempt.status.ended_at or attempt.created_at
    ends = {str(event.data.get("reason")): event.at for event in events if event.kind == "result"}
    for reason, at in {**ends, attempt.status.reason: ended_at}.items():
        if match := _FAILED.search(reason):
            yield BadNode(place, match["name"], match["why"], at, attempt.attempt_id)
    if all(event.data.get("label") != _LABEL for event in events):
        return
    from cloudtrain.diagnosis.record import load_verdict

    verdict = load_verdict(store, attempt)
    if verdict is not None and verdict.node is not None and verdict.certain:
        world = store.latest(attempt.attempt_id, verdict.node, "world")
        if world is not None and (name := str(world.data.get("name") or "")):
            yield BadNode(place, name, verdict.deciding, ended_at, attempt.attempt_id)
