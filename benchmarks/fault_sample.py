"""Faults that the operators of mutmut can make in files of the package: which ones a seed chooses."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import sha256
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

from measure import PEERS, ROOT

MUTMUT = ("mutmut==3.8.1", "libcst==1.9.0")


class Fault(NamedTuple):
    """A file's text with one change. `line` is the first one that differs, `what` the lines before and after."""

    place: str
    file: Path
    line: int
    what: str
    source: str
    text: str

    @property
    def key(self) -> str:
        return f"{self.file.relative_to(ROOT)}: {self.what}"


def choose_faults(place: str, seed: int) -> Iterator[Fault]:
    """Yield the faults of a place that mutmut's operators can make, in an order that a change elsewhere does not shift."""
    if not (peer := PEERS / "mutmut").exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(peer), *MUTMUT]
        subprocess.run(command, check=True)
    sys.path.append(str(peer))
    from libcst import Module
    from mutmut.mutation.file_mutation import create_mutations

    files = [file for part in place.split("+") for file in sorted((ROOT / part).rglob("*.py")) or [ROOT / part]]
    changes, print_node, same = [], Module([]).code_for_node, Counter[str]()
    for file in files:
        module, possible, *_ = create_mutations(str(file), file.read_text())
        parts = list(map(print_node, module.body))  # a change prints one of them anew
        head, body, tail = file.read_text().partition("".join(parts))
        assert body, f"{file}: its statements are printed in another way than they are written"
        at: dict[int, int] = {}
        for number, statement in enumerate(module.body):
            nodes = [statement]
            while nodes:
                at[id(node := nodes.pop())] = number
                nodes += node.children
        for change in possible:
            shown = f"{seed} {file.name} {print_node(change.original_node)} {print_node(change.mutated_node)}"
            same[shown] += 1
            places = (head, parts, tail, module, at[id(change.original_node)])
            changes.append((sha256(f"{shown} {same[shown]}".encode()).digest(), file, places, change))
    seen: set[str] = set()
    for _, file, (head, parts, tail, module, number), change in sorted(changes, key=lambda each: each[0]):
        part = print_node(module.body[number].deep_replace(change.original_node, change.mutated_node))
        fault = fault_of(place, file, head + "".join([*parts[:number], part, *parts[number + 1 :]]) + tail)
        if fault and fault.key not in seen:
            seen.add(fault.key)
            yield fault


def chosen(places: Sequence[str], seed: int, count: int, kept: Path) -> list[Fault]:
    """Return the faults of a sample, one of each place in turn; as they are kept where no file has changed since."""
    if kept.exists():
        of_seed, rows = json.loads(kept.read_text())
        faults = [Fault(place, Path(file), *rest) for place, file, *rest in rows if of_seed == seed]
        same = [fault for fault in faults if fault.file.exists() and fault.file.read_text() == fault.source]
        if len(same) == len(faults) == count and {fault.place for fault in faults} == set(places):
            return faults
    of_place = {place: choose_faults(place, seed) for place in places}
    turns = islice(cycle(of_place.values()), count)
    faults = [fault for possible in turns for fault in islice(possible, 1)]
    kept.write_text(json.dumps((seed, [(fault.place, str(fault.file), *fault[2:]) for fault in faults])))
    return faults


def fault_of(place: str, file: Path, text: str) -> Fault | None:
    """Return a fault whose file has a text, None where that is no Python, or the same."""
    source = file.read_text()
    try:
        if ast.dump(ast.parse(text)) == _dump(source):
            return None
    except SyntaxError:
        return None
    before, after = source.splitlines(), text.splitlines()
    most = min(len(before), len(after))
    begin = next(at for at in range(most + 1) if at == most or before[at] != after[at])
    same = next(at for at in range(most - begin + 1) if at == most - begin or before[-1 - at] != after[-1 - at])
    changed = before[begin : len(before) - same], after[begin : len(after) - same]
    return Fault(
        place, file, begin + 1, " => ".join(" ".join(" ".join(lines).split()) for lines in changed), source, text
    )


@cache
def _dump(source: str) -> str:
    return ast.dump(ast.parse(source))
