"""The corpus of failures: what an entry is, where entries lie, and which of them are set aside."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus"
PARTS = ("known", "held_out", "doubtful", "fresh")
SEED = 10  # of the draw; the number of the issue
SHARE = 3  # one of so many is set aside


@dataclass(frozen=True)
class Entry:
    """One failure: how it was obtained, what a node's log held, how it ended, and what the right verdict is."""

    id: str
    part: str  # known, held_out, doubtful (made against a verdict that sounds certain and has no right to), or fresh
    obtained: str  # real: a script made it; rebuilt: from the library's format string
    script: str | None  # of a real one, below this folder
    thread: str | None  # of a rebuilt one: a public address that shows the message; a doubtful one may have none
    launch: Mapping[str, Any] | None  # of a real one: how the script was started
    backends: tuple[str, ...]  # where it is seen
    versions: str  # of what wrote the message
    end: Mapping[str, Any]  # state, exit_code, reason, by, failed_rank: what is known besides the log
    log: tuple[tuple[int, int, str], ...]  # node, rank (-1: launcher or platform), text
    label: Mapping[str, Any]  # class, deciding, where, rank, change, changes_results
    hard: str | None  # why it is not easy

    @property
    def name(self) -> str:
        """The class that is the right answer."""
        return str(self.label["class"])


def read(path: Path) -> Entry:
    """Return the entry of a file; raises ValueError, TypeError, KeyError when it has another form."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    fields["backends"] = tuple(fields["backends"])
    fields["log"] = tuple((node, rank, text) for node, rank, text in fields["log"])
    entry = Entry(part=path.parent.name, **fields)
    if entry.id != path.stem:
        raise ValueError(f"{path} holds the entry {entry.id}")
    return entry


def load(*parts: str) -> list[Entry]:
    """Return the entries of the parts, or all, by id."""
    return [read(path) for part in parts or PARTS for path in sorted((CORPUS / part).glob("*.json"))]


def draw(classes: Mapping[str, str]) -> set[str]:
    """Return the ids that are set aside: a third of each class at random, and at least one of two; by a fixed seed."""
    chance = random.Random(SEED)
    chosen: set[str] = set()
    for name in sorted(set(classes.values())):
        ids = sorted(entry for entry, its in classes.items() if its == name)
        chosen.update(chance.sample(ids, round(len(ids) / SHARE) or int(len(ids) > 1)))
    return chosen
