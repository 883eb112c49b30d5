"""Derive an attempt's Status from the files in its folder (see request.py) and from Slurm's state of the job."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cloudtrain.backends.slurm import reasons
from cloudtrain.backends.slurm.client import QueueEntry
from cloudtrain.events import ENDED, EXIT_REFUSED, State, Status
from cloudtrain.job.units import format_time
from cloudtrain.nodes import directory

OUT_OF_MEMORY = "Slurm: OUT_OF_MEMORY: the job used more memory than it requested (resources.memory)"
FILES = ("job", "owner", "begun", "state", "cancel", "stop", "node-*/status.json")


def is_settled(files: Mapping[str, str], queue_entry: QueueEntry | None, nodes_status: Status | None) -> bool:
    """Return whether the files of a job that has ended are its last ones.

    A job that ended by itself has written its status, which a shared file system may show a little late.
    """
    script_ended = ScriptState.of(files).name == "ENDED" or (nodes_status is not None and nodes_status.state.final)
    return script_ended or not (queue_entry is not None and queue_entry.state in ("COMPLETED", "FAILED"))


class ScriptState:
    """What the batch script wrote to `state`: name, exit code and details."""

    def __init__(self, name: str, code: int | None, phase: str) -> None:
        self.name, self.code, self.phase = name, code, phase

    @classmethod
    def of(cls, files: Mapping[str, str]) -> ScriptState:
        """Parse the file `state`; the name is "" before it was written."""
        name, _, code, phase = [*files.get("state", "").split(), "", "", "", ""][:4]
        return cls(name, int(code) if code.isdigit() else None, phase)


def _parse_node(text: str) -> tuple[Mapping[str, Any], Status] | None:
    try:
        raw = json.loads(text)
        state = State[raw["state"]]
    except (ValueError, KeyError, TypeError):
        return None
    code = None if state in (State.CANCELLED, State.TIMED_OUT, State.PREEMPTED) else raw.get("exit_code")
    event = ENDED if state is State.LOST else ""
    return raw, Status(state, code, raw.get("reason") or "", raw.get("started_at"), raw.get("ended_at"), event=event)


def merge_nodes(files: Mapping[str, str]) -> Status | None:
    """Merge the nodes' status files, None before there are any; a node that lost a peer decides for all."""
    node_statuses = [_parse_node(text) for name, text in sorted(files.items()) if name.endswith("/status.json")]
    reported = [pair for pair in node_statuses if pair is not None]
    if not reported:
        return None
    lost = [status for _, status in reported if status.state is State.LOST]
    if lost and any(not status.state.final for _, status in reported):
        return replace(lost[0], event="")  # when the others ended is not known
    script = ScriptState.of(files)
    count = int(script.phase) if script.name == "STARTED" and script.phase.isdigit() else len(reported)
    missing: list[tuple[None, None]] = [(None, None)] * (count - len(reported))
    status = directory.merge_statuses([*reported, *missing])
    return replace(status, started_at=begun_at(files) or status.started_at)


def end_of(files: Mapping[str, str]) -> Status | None:
    """Return the end that an attempt's files have and that Slurm cannot change; None where Slurm is to be asked.

    Where any node was preempted, the job starts again; it moves the files of its nodes away one by one, so that those
    that are left do not speak for all.
    """
    found = merge_nodes(files)
    if found is None or not found.state.final:
        return None
    nodes = [_parse_node(text) for name, text in files.items() if name.endswith("/status.json")]
    if any(node is not None and node[1].state is State.PREEMPTED for node in nodes):
        return None
    return None if ScriptState.of(files).name in ("", "REQUEUED") and found.state is not State.LOST else found


def begun_at(files: Mapping[str, str]) -> str | None:
    """Return when the job got its nodes, which Slurm counts from; None before that. The launcher starts after the setup."""
    text = files.get("begun", "").strip()
    return format_time(int(text)) if text.isdigit() else None


def stopped_status(files: Mapping[str, str], job_state: str, nodes_status: Status) -> Status:
    """Return the final status of a job whose ranks were asked to stop; `job_state` is Slurm's state of the job."""
    if "cancel" in files or job_state.startswith("CANCELLED"):
        reason = nodes_status.reason if "cancel" in files else "cancelled with scancel"
        return Status(State.CANCELLED, None, reason, nodes_status.started_at, nodes_status.ended_at)
    if job_state.startswith("TIMEOUT"):
        return Status(
            State.TIMED_OUT, None, "the job reached Slurm's time limit", nodes_status.started_at, nodes_status.ended_at
        )
    if job_state.startswith("OUT_OF_MEMORY") and nodes_status.state is State.FAILED:
        reason = f"{nodes_status.reason}; {OUT_OF_MEMORY}".lstrip("; ")
        return replace(nodes_status, exit_code=137, reason=reason)
    return nodes_status


def attempt_status(
    files: Mapping[str, str],
    queue_entry: QueueEntry | None,
    nodes_status: Status | None,
    last_output: Callable[[], str],
) -> Status:
    """Return an attempt's status from its files and Slurm's state; `last_output` reads the last line of the job's output."""
    script = ScriptState.of(files)
    started = nodes_status.started_at if nodes_status else begun_at(files)
    if queue_entry is not None and not queue_entry.ended:
        if "cancel" in files:
            return Status(State.STOPPING, started_at=started)
        if queue_entry.pending or script.name == "REQUEUED":
            reason = reasons.describe(queue_entry.reason)
            if script.name == "REQUEUED" and script.phase.startswith("slice-"):  # of max_runtime
                reason = f"{script.phase.replace('-', ' ')} waits. {reason}"
            return Status(State.QUEUED, None, reason, started)
        if nodes_status is None or queue_entry.state == "CONFIGURING":
            return Status(State.STARTING, started_at=started)
        if nodes_status.state.final:  # the ranks were asked to stop; the script has not written its state yet
            return Status(State.STOPPING, started_at=started)
        return nodes_status
    job_state = queue_entry.state if queue_entry is not None else script.phase
    if nodes_status is not None and nodes_status.state.final:
        return stopped_status(files, job_state, nodes_status)
    if "cancel" in files or job_state == "CANCELLED":
        reason = "cancelled" if "cancel" in files else "cancelled with scancel"
        return Status(State.CANCELLED, None, reason, started)
    explanation = f"Slurm: {job_state}" + (
        f" ({queue_entry.reason})" if queue_entry is not None and queue_entry.reason else ""
    )
    if job_state in ("TIMEOUT", "DEADLINE"):
        return Status(State.TIMED_OUT, None, "the job reached Slurm's time limit", started)
    if job_state == "PREEMPTED" or (script.name == "ENDED" and script.phase == "restarts"):
        return Status(State.PREEMPTED, None, explanation, started)
    if job_state in ("NODE_FAIL", "BOOT_FAIL", "REVOKED"):
        return Status(State.LOST, None, explanation, started)
    if job_state == "OUT_OF_MEMORY":
        return Status(State.FAILED, 137, OUT_OF_MEMORY, started)
    if script.name == "ENDED" and script.phase == "setup":
        return Status(State.FAILED, EXIT_REFUSED, last_output() or "a setup line failed", started)
    if script.name == "ENDED" and script.code:
        return Status(State.FAILED, script.code, f"the launcher did not start: {last_output()}", started)
    if not script.name and queue_entry is not None:
        hint = "check that its folder is on a file system that the nodes share"
        return Status(State.FAILED, EXIT_REFUSED, f"{explanation}: the job printed nothing; {hint}", started)
    return Status(
        State.LOST,
        None,
        f"{explanation}: the job ended without an exit report" if job_state else "Slurm no longer knows the job",
        started,
    )
