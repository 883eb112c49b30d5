"""Keep an index of the runs below an output, so that a list of a team's runs reads few files.

    <output>/.index/new/<run>.a<attempt>.<start>.<begin|end>.json    one record, as in the run's run.json
    <output>/.index/packed/<level>-<digest>.jsonl                    records of many runs, one a line

Each start adds its record when it has ended. One that follows an earlier start adds it when it begins, too: the run is live
again. Who adds one packs those that lie there, once they are PER_PACK, and merges packs once they are PER_MERGE. What is
packed is deleted only after the pack was written, and a pack is named by its content: of two writers at the same time
each may pack the same records, and none is lost. A reader takes the newest record of a run, and run.json where there is none.
"""

from __future__ import annotations

import hashlib
import json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FOLDER = ".index"
PER_PACK, PER_MERGE = 64, 16
MOST = 16 << 10  # bytes of a record; a longer one is read from its run


def add(place: Any, record: bytes, mark: str) -> None:
    """Add a record to the index of an output, and pack what lies there; blocking. Raises Failed and OSError.

    `place` is the output: a Store, or a Folder.
    """
    if len(record) > MOST:
        return
    fields = json.loads(record)
    name = f"{fields['run_id']}.a{fields['attempt']}.{fields['start']}.{mark}.json"
    place.write(f"{FOLDER}/new/{name}", record)
    _pack(place, "new", ".json", PER_PACK, 0)
    _pack(place, "packed", ".jsonl", PER_MERGE, 1)


def _pack(place: Any, folder: str, ending: str, count: int, level: int) -> None:
    """Write the records of the first `count` files of a folder as one pack, and delete the files."""
    names = [name for name in place.list(f"{FOLDER}/{folder}") if name.endswith(ending)]
    names = sorted(name for name in names if level == 0 or name.startswith("0-"))
    if len(names) < count:
        return
    chosen, lines = [], []
    for name in names[:count]:
        data = place.read(f"{FOLDER}/{folder}/{name}")
        if data is not None:  # another writer has packed and deleted it
            chosen.append(name)
            lines += [line for line in data.splitlines() if line.strip()]
    if not lines:
        return
    content = b"\n".join(lines) + b"\n"
    digest = hashlib.sha256(content).hexdigest()[:32]
    place.write(f"{FOLDER}/packed/{level}-{digest}.jsonl", content)
    for name in chosen:
        place.delete(f"{FOLDER}/{folder}/{name}")
