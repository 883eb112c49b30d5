"""Epochs number the starts of a run; checkpoints of a start that was replaced do not count.

    <checkpoints>/epochs/00000002.json      {"epoch": 2, "attempt": 2, "from": "step-00000010.a1"}

Every start of an attempt, a platform's own restarts included, claims the next epoch, by a write that only one can do,
and says from which checkpoint it resumes. That chain is the run's history: what an older epoch commits after a newer one
went on from it is outside, and never chosen. A start that finds a newer record is replaced: it writes, removes and
publishes nothing any more. Standard library only.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from ..errors import Unsupported
from .files import MARKER, NAME, Checkpoint

FOLDER = "epochs"


def claim(
    folder: Path, attempt: int, given: int, choose: Callable[[], Checkpoint | None]
) -> tuple[int, Checkpoint | None]:
    """Claim the next epoch below a folder of checkpoints; return it and the checkpoint that it resumes from.

    `given` is the number that the launcher has claimed in the output, 0 for none. Raises OSError, and Unsupported where a
    later attempt has begun: this one would take the run from it.
    """
    records = folder / FOLDER
    records.mkdir(parents=True, exist_ok=True)
    while True:
        claimed = _read(folder)
        later = max((int(record.get("attempt") or 0) for record in claimed.values()), default=0)
        if later > attempt and os.environ.get("CLOUDTRAIN_RUN_ID"):  # by hand there are no attempts
            raise Unsupported(f"attempt {later} of this run has started: attempt {attempt} does not start")
        number = given or max([attempt - 1, *claimed]) + 1
        chosen = choose()
        record: dict[str, Any] = {"epoch": number, "attempt": attempt}
        if chosen is not None:
            record["from"] = chosen.path.name
        elif not any(NAME.fullmatch(path.name) for path in folder.iterdir()):
            record["from"] = ""  # there was none at all; else some were damaged, and one of them may be read again
        if _created(records / f"{number:08d}.json", json.dumps(record)):
            return number, chosen
        given = 0  # another start was faster, and may have gone on: look again


def newest(folder: Path) -> int:
    """Return the newest epoch that has been claimed below a folder, 0 for none."""
    return max(_records(folder), default=0)


class Chain:
    """Which checkpoints below a folder are the run's history: of each epoch those up to the step that a newer one began
    from."""

    def __init__(self, folder: Path, checkpoints: Collection[Checkpoint]) -> None:
        records = _records(folder)
        self._limits: dict[int, float] = {}  # epoch -> last step of it that counts
        names = {each.path.name for each in checkpoints if (each.path / MARKER).exists()}  # removed without it
        own = {each.attempt for each in checkpoints}
        for number in sorted(records, reverse=True):
            if number in own or records[number] in (*names, "", None):
                break
            del records[number]  # it was killed before it held its checkpoint, which an older start then removed
        numbers = sorted({*records, *(each.attempt for each in checkpoints)}, reverse=True)
        epoch, limit = (numbers[0] if numbers else 0), float("inf")
        while epoch and epoch not in self._limits:
            self._limits[epoch] = limit
            begun = records.get(epoch)
            name = NAME.fullmatch(begun or "")
            if begun == "":
                break
            if name:
                epoch, limit = int(name[2]), int(name[1])
            else:  # it was written by a version that kept no record
                epoch, limit = next((each for each in numbers if each < epoch), 0), float("inf")

    def has(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.step <= self._limits.get(checkpoint.attempt, -1)


def in_vain(folder: Path, attempt: int, number: int) -> bool:
    """Return whether the two starts of this attempt before this one began where it begins: whoever starts it again by
    itself would do so for ever."""
    records = _read(folder)
    mine = [record for each, record in sorted(records.items()) if each <= number and record.get("attempt") == attempt]
    steps = [NAME.sub(r"\1", record["from"]) for record in mine[-3:] if "from" in record]  # each start has its own name
    return len(steps) == 3 and len(set(steps)) == 1


def _records(folder: Path) -> dict[int, str | None]:
    """Return epoch -> name of the checkpoint that it went on from: "" for none, None where that is not known."""
    begun = {number: record.get("from") for number, record in _read(folder).items()}
    return {number: name if isinstance(name, str) else None for number, name in begun.items()}


def _read(folder: Path) -> dict[int, dict[str, Any]]:
    """Return what each start recorded; {} for one that cannot be read."""
    records: dict[int, dict[str, Any]] = {}
    try:
        names = os.listdir(folder / FOLDER)
    except OSError:
        return records
    for name in names:
        number, _, kind = name.partition(".")
        if kind != "json" or not number.isdigit():
            continue
        try:
            record = json.loads((folder / FOLDER / name).read_bytes())
        except (OSError, ValueError):
            record = None
        records[int(number)] = record if isinstance(record, dict) else {}
    return records


def _created(path: Path, text: str) -> bool:
    """Create a file with this text; False where there is one already. It has its name when it is whole."""
    handle, partial = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(partial, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without links: then a reader may see it empty for a moment
            with open(path, "x") as file:
                file.write(text)
    except FileExistsError:
        return False
    finally:
        os.unlink(partial)
    return True
