"""The numbering of a run's starts: each start claims the next number with a file that only one can create.

The launcher, the shared trainer and the runtime of scripts use it, the latter as cloudtrain_fence. Standard library only.

    <checkpoints>/epochs/00000002.json      from which checkpoint start 2 resumes
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    from typing import Any, Callable, Optional

FOLDER = "epochs"


def create(path: str, text: str) -> bool:
    """Create a file with a text; False where there is one already. It has its name when it is whole. Raises OSError."""
    partial = os.path.join(os.path.dirname(path), f".{os.urandom(8).hex()}")
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
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


def numbers(names: Iterable[str], ending: str = ".json") -> list[int]:
    """Return the numbers of the claims among names."""
    stems = (name[: len(name) - len(ending)] for name in names if name.endswith(ending))
    return [int(stem) for stem in stems if stem.isdecimal()]


def newest(checkpoints: str) -> int:
    """Return the newest number claimed below a folder of checkpoints, 0 where none can be read."""
    try:
        return max(numbers(os.listdir(os.path.join(checkpoints, FOLDER))), default=0)
    except OSError:
        return 0


def records(checkpoints: str) -> dict[int, dict[str, Any]]:
    """Return what each start recorded, by its number; {} for a record that cannot be read."""
    folder, read = os.path.join(checkpoints, FOLDER), {}
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    for number in numbers(names):
        try:
            with open(path_of(folder, number), "rb") as file:
                record = json.load(file)
        except (OSError, ValueError, RecursionError):
            record = None
        read[number] = record if isinstance(record, dict) else {}
    return read


def claim(checkpoints: str, given: int, describe: Callable[[int], tuple[int, dict[str, Any]]]) -> int:
    """Claim the next number below a folder of checkpoints, and return it. Raises OSError.

    Args:
        checkpoints: The folder.
        given: The number that the launcher has claimed in the output, 0 for none.
        describe: Takes a number to use, 0 for a free one; returns the number and its record. It is called again after
            another start was faster.
    """
    folder = os.path.join(checkpoints, FOLDER)
    os.makedirs(folder, exist_ok=True)
    while True:
        number, record = describe(given)
        if create(path_of(folder, number), json.dumps(record)):
            return number
        given = 0


def path_of(folder: str, number: int) -> str:
    """Return the path of a claim."""
    return os.path.join(folder, f"{number:08d}.json")


def history(starts: Iterable[int], origins: Mapping[int, Optional[tuple[int, float]]]) -> dict[int, float]:
    """Return up to which step the checkpoints of each start are the run's history; of a start that is missing none is.

    Args:
        starts: The numbers of all starts.
        origins: From which start and step a start resumed; (0, 0) without a checkpoint, None where it is not known.
    """
    ordered = sorted(starts, reverse=True)
    limits: dict[int, float] = {}
    start, limit = (ordered[0] if ordered else 0), float("inf")
    while start and start not in limits:
        limits[start] = limit
        start, limit = origins.get(start) or (next((each for each in ordered if each < start), 0), float("inf"))
    return limits
