"""What the folder of a batch job says (request.py wrote it there), and the state that follows with Slurm's word."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from cloudtrain.backends.slurm.client import Reading
from cloudtrain.events import EXIT_REFUSED, State, Status
from cloudtrain.nodes import directory

FILES = ("job", "owner", "state", "cancel", "stop", "node-*/status.json")


class Word:
    """The batch script's word on itself: name, restart, exit code, what it knew."""

    def __init__(self, name: str, code: int | None, phase: str) -> None:
        self.name, self.code, self.phase = name, code, phase

    @classmethod
    def of(cls, files: Mapping[str, str]) -> Word:
        """Return what the file `state` says; a word without a name before it was written."""
        name, _, code, phase = [*files.get("state", "").split(), "", "", "", ""][:4]
        return cls(name, int(code) if code.isdigit() else None, phase)


def _node(text: str) -> tuple[Mapping[str, Any], Status] | None:
    try:
        raw = json.loads(text)
        state = State[raw["state"]]
    except (ValueError, KeyError, TypeError):
        return None
    code = None if state in (State.CANCELLED, State.TIMED_OUT, State.PREEMPTED) else raw.get("exit_code")
    return raw, Status(state, code, raw.get("reason") or "", raw.get("started_at"), raw.get("ended_at"))


def merge_nodes(files: Mapping[str, str]) -> Status | None:
    """Return what the nodes say together, None before anyone spoke; one that has lost a peer speaks for all."""
    known = [_node(text) for name, text in sorted(files.items()) if name.endswith("/status.json")]
    spoken = [pair for pair in known if pair is not None]
    if not spoken:
        return None
    lost = [status for _, status in spoken if status.state is State.LOST]
    if lost and any(not status.state.final for _, status in spoken):
        return lost[0]
    word = Word.of(files)
    count = int(word.phase) if word.name == "STARTED" and word.phase.isdigit() else len(spoken)
    silent: list[tuple[None, None]] = [(None, None)] * (count - len(spoken))
    return directory.merge_statuses([*spoken, *silent])


def left(files: Mapping[str, str], phase: str, merged: Status) -> Status:
    """Return the end of a job whose ranks were asked to leave; `phase` is Slurm's word for it then."""
    if "cancel" in files or phase.startswith("CANCELLED"):
        reason = merged.reason if "cancel" in files else "cancelled with scancel"
        return Status(State.CANCELLED, None, reason, merged.started_at, merged.ended_at)
    if phase.startswith("TIMEOUT"):
        return Status(State.TIMED_OUT, None, "Slurm's time limit was over", merged.started_at, merged.ended_at)
    return merged


def judge(
    files: Mapping[str, str],
    reading: Reading | None,
    merged: Status | None,
    last_words: Callable[[], str],
) -> Status:
    """Return an attempt's state from its files and Slurm's word; `last_words` reads what the job printed last."""
    word = Word.of(files)
    started = merged.started_at if merged else None
    if reading is not None and not reading.ended:
        if "cancel" in files:
            return Status(State.STOPPING, started_at=started)
        if reading.pending or word.name == "REQUEUED":
            return Status(State.QUEUED, None, reading.reason, started)
        if merged is None or reading.state == "CONFIGURING":
            return Status(State.STARTING, started_at=started)
        if merged.state.final:  # asked to leave; the script is about to say what follows
            return Status(State.STOPPING, started_at=started)
        return merged
    phase = reading.state if reading is not None else word.phase
    if merged is not None and merged.state.final:
        return left(files, phase, merged)
    if "cancel" in files or phase == "CANCELLED":
        reason = "cancelled" if "cancel" in files else "cancelled with scancel"
        return Status(State.CANCELLED, None, reason, started)
    why = f"Slurm: {phase}" + (f" ({reading.reason})" if reading is not None and reading.reason else "")
    if phase in ("TIMEOUT", "DEADLINE"):
        return Status(State.TIMED_OUT, None, "Slurm's time limit was over", started)
    if phase == "PREEMPTED" or (word.name == "ENDED" and word.phase == "restarts"):
        return Status(State.PREEMPTED, None, why, started)
    if phase in ("NODE_FAIL", "BOOT_FAIL", "REVOKED"):
        return Status(State.LOST, None, why, started)
    if phase == "OUT_OF_MEMORY":
        return Status(State.FAILED, 137, f"{why}: the job took more memory than it was given", started)
    if word.name == "ENDED" and word.phase == "setup":
        return Status(State.FAILED, EXIT_REFUSED, last_words() or "a setup line failed", started)
    if word.name == "ENDED" and word.code:
        return Status(State.FAILED, word.code, f"the launcher did not start: {last_words()}", started)
    if not word.name and reading is not None:
        hint = "is its folder on a file system that the nodes see?"
        return Status(State.FAILED, EXIT_REFUSED, f"{why}: the job never wrote a word; {hint}", started)
    return Status(
        State.LOST, None, f"{why}: the job ended without a word" if phase else "Slurm knows it no more", started
    )
