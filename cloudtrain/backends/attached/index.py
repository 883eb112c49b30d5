"""Read the index of the runs below an output, which their launchers keep (entrypoints/launcher/output/index.py).

Whoever can write there can have written anything: sizes and names are bounded, and a line that is no record is left out.
A run without a usable record is read from its own folder.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

from cloudtrain.backends.store.files import Files
from cloudtrain.errors import BackendError

FOLDER = ".index"
MOST_PACK = 64 << 20  # bytes
READERS = 16  # files that are read at once
ROUNDS = 3  # looks for packs whose parts were deleted while they were read
_NAME = re.compile(r"new/[\w.-]{1,250}\.json|packed/\d-[0-9a-f]{32}\.jsonl")
Version = tuple[int, str, bool]


def read_index(files: Files) -> dict[str, bytes]:
    """Return run id -> the newest record of each run that had ended; {} without an index that can be read. Blocking."""
    newest: dict[str, tuple[Version, bytes]] = {}
    done: set[str] = set()

    def read(name: str) -> bytes | None:
        try:
            return files.read(f"{FOLDER}/{name}", MOST_PACK)
        except BackendError:
            return b""

    for _ in range(ROUNDS):
        try:
            names = [name for name in files.sizes(FOLDER) if _NAME.fullmatch(name) and name not in done]
        except BackendError:
            return {}
        done.update(names)
        gone = False
        with ThreadPoolExecutor(READERS) as pool:
            for data in pool.map(read, names):
                gone = gone or data is None
                for line in (data or b"").splitlines():
                    if found := _parse(line):
                        run_id, version = found
                        newest[run_id] = max(newest.get(run_id, (version, line)), (version, line))
        if not gone:
            break
    return {run_id: line for run_id, ((_, _, final), line) in newest.items() if final}


def _parse(line: bytes) -> tuple[str, Version] | None:
    """Return a record's run, and what orders the records of one run; None for a line that is no record."""
    try:
        record = json.loads(line)
        run_id, attempt, start, final = (record.get(name) for name in ("run_id", "attempt", "start", "final"))
    except (ValueError, RecursionError, AttributeError):
        return None
    if not isinstance(run_id, str) or type(attempt) is not int or not isinstance(start, str):
        return None
    return run_id, (attempt, start, final is True)
