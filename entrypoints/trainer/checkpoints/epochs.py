"""Epochs number the starts of a run; checkpoints of a start that was replaced do not count.

    <checkpoints>/epochs/00000002.json      {"epoch": 2, "attempt": 2, "from": "step-00000010.a1"}

Every start of an attempt, a platform's own restarts included, claims the next epoch, by a write that only one can do,
and says from which checkpoint it resumes. That chain is the run's history: what an older epoch commits after a newer one
went on from it is outside, and never chosen. A start that finds a newer record is replaced: it writes, removes and
publishes nothing any more. Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from launcher import fence

from ..errors import Unsupported
from .files import MARKER, NAME, Checkpoint


def claim(
    folder: Path, attempt: int, given: int, choose: Callable[[], Checkpoint | None]
) -> tuple[int, Checkpoint | None]:
    """Claim the next epoch below a folder of checkpoints; return it and the checkpoint that it resumes from.

    `given` is the number that the launcher has claimed in the output, 0 for none. Raises OSError, and Unsupported where a
    later attempt has begun: this one would take the run from it.
    """
    chosen: Checkpoint | None = None

    def describe(number: int) -> tuple[int, dict[str, Any]]:
        nonlocal chosen
        claimed = fence.records(str(folder))
        later = max((int(record.get("attempt") or 0) for record in claimed.values()), default=0)
        if later > attempt and os.environ.get("CLOUDTRAIN_RUN_ID"):  # by hand there are no attempts
            raise Unsupported(f"attempt {later} of this run has started: attempt {attempt} does not start")
        number = number or max([attempt - 1, *claimed]) + 1
        chosen = choose()
        restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
        record: dict[str, Any] = {"epoch": number, "attempt": attempt, "restart": restart}
        if chosen is not None:
            record["from"] = chosen.path.name
        elif not any(NAME.fullmatch(path.name) for path in folder.iterdir()):
            record["from"] = ""  # there was none at all; else some were damaged, and one of them may be read again
        return number, record

    return fence.claim(str(folder), given, describe), chosen


def newest(folder: Path) -> int:
    """Return the newest epoch that has been claimed below a folder, 0 for none."""
    return fence.newest(str(folder))


class Chain:
    """Which checkpoints below a folder are the run's history: of each epoch those up to the step that a newer one began
    from."""

    def __init__(self, folder: Path, checkpoints: Collection[Checkpoint]) -> None:
        begun = {number: record.get("from") for number, record in fence.records(str(folder)).items()}
        names = {each.path.name for each in checkpoints if (each.path / MARKER).exists()}  # removed without it
        own = {each.attempt for each in checkpoints}
        for number in sorted(begun, reverse=True):
            if number in own or not isinstance(begun[number], str) or begun[number] in (*names, ""):
                break
            del begun[number]  # it was killed before it held its checkpoint, which an older start then removed
        origins = {number: _origin(name) for number, name in begun.items()}
        self._limits = fence.history({*begun, *own}, origins)

    def has(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.step <= self._limits.get(checkpoint.attempt, -1)


def _origin(name: object) -> tuple[int, float] | None:
    """Return epoch and step of the checkpoint that an epoch resumed from: (0, 0) for none, None where that is not known."""
    match = NAME.fullmatch(name) if isinstance(name, str) else None
    return (int(match[2]), int(match[1])) if match else (0, 0) if name == "" else None


def in_vain(folder: Path, attempt: int, number: int) -> bool:
    """Return whether the two starts of this attempt before this one began where it begins: whoever starts it again by
    itself would do so for ever. Restarts in place (retry.restarts, torchrun's) have an end, and do not count."""
    records = fence.records(str(folder))
    if records.get(number, {}).get("restart"):
        return False
    mine = [
        record
        for each, record in sorted(records.items())
        if each <= number and record.get("attempt") == attempt and not record.get("restart")
    ]
    steps = [NAME.sub(r"\1", record["from"]) for record in mine[-3:] if "from" in record]  # each start has its own name
    return len(steps) == 3 and len(set(steps)) == 1
