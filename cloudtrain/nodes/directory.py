"""The run directory on a node: prepare it, start its supervisor, read its state, end what is left.

    <node>/source/        the bundle, extracted; `.cloudtrain/launch.py` in it is the supervisor
    <node>/status.json    the supervisor's word on itself, replaced atomically
    <node>/log            numbered lines: `<seq> <rank> <at> <text>`
    <node>/launcher.out   what the supervisor itself printed (empty unless it broke)
    <node>/started        made before the supervisor is started
    <node>/lock           held (flock) by the supervisor as long as it lives, so that it is never started twice
    <node>/cancel         a person asked to cancel

Shared by local, ssh and slurm. What is done in the folder itself is supervisor.py's, here or on another machine (agent.py);
what is made of it is here: states of several nodes in one (logs: logs.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cloudtrain.errors import BackendError
from cloudtrain.events import State, Status
from cloudtrain.nodes import supervisor
from cloudtrain.nodes.supervisor import begun, left, read_status, reap, stop, supervised

__all__ = ["begun", "given_secrets", "left", "merge", "node_status", "read_status", "reap", "start",
           "status_of", "stop", "supervised"]  # fmt: skip


def start(node: Path, argv: Sequence[str], env: Mapping[str, str], secrets: Mapping[str, Any]) -> bool:
    """Start a node's supervisor, detached from this process and its terminal; False when it runs or ran already.

    `secrets` goes over standard input. Raises BackendError.
    """
    try:
        return supervisor.start(node, argv, env, secrets)
    except OSError as error:
        raise BackendError(f"the supervisor of {node} cannot be started: {error.strerror or error}") from None


def given_secrets(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of `env:` sources that this process has, by source; they go over standard input only."""
    sources = {source for found in manifest["secrets"].values() for source in found if source.startswith("env:")}
    return {source: os.environ[source[4:]] for source in sorted(sources) if source[4:] in os.environ}


def node_status(node: Path) -> Status | None:
    """Return the true state of a node, LOST when its supervisor died without a last word; None when never started."""
    return status_of(supervisor.state(node))


def status_of(found: Mapping[str, Any] | None) -> Status | None:
    """Return what `supervision.state` said as a Status."""
    if found is None:
        return None
    return Status(State[found["state"]], found["exit_code"], found["reason"], found["started_at"], found["ended_at"])


def merge(statuses: Sequence[tuple[Mapping[str, Any] | None, Status | None]]) -> Status:
    """Return an attempt's state from its nodes' (status.json, true state): it is final when all of them are."""
    known = [(raw or {}, status) for raw, status in statuses if status is not None]
    if not known:
        return Status(State.QUEUED)
    started = min((status.started_at for _, status in known if status.started_at), default=None)
    live = [status for _, status in known if not status.state.final]
    if live or len(known) < len(statuses):
        stages = {status.state for _, status in known}
        ending = any(status.state.final and status.state is not State.SUCCEEDED for _, status in known)
        running = State.RUNNING if State.RUNNING in stages and not ending else State.STARTING
        return Status(State.STOPPING if ending or State.STOPPING in stages else running, started_at=started)
    ended = max((status.ended_at for _, status in known if status.ended_at), default=None)
    # The first failure by time is the cause; what the other nodes say is its consequence.
    _, worst = min(known, key=lambda pair: (_RANK[pair[1].state], pair[0].get("failed_at") or "~"))
    return Status(worst.state, worst.exit_code, worst.reason, started, ended)


_RANK = {
    State.CANCELLED: 0,
    State.FAILED: 1,
    State.TIMED_OUT: 2,
    State.PREEMPTED: 3,
    State.LOST: 4,
    State.SUCCEEDED: 9,
}
