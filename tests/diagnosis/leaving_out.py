"""The rules without the words that know one failure: what is said of a message that nobody has seen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from types import ModuleType

from cloudtrain.diagnosis import certainty, ranks, rules, signs, verdict
from cloudtrain.diagnosis.rules import Rule
from tests.diagnosis.entries import Entry

TABLES = (
    *((module, "SIGNS", signs.SIGNS) for module in (verdict, ranks, certainty)),
    (certainty, "REASONS", rules.REASONS),
    *((rules, name, getattr(rules, name)) for name in ("REASONS", "PLATFORM", "OURS")),
)


def without(entry: Entry) -> Iterator[tuple[ModuleType, str, tuple[Rule, ...]]]:
    """Yield (module, name, rules) of every table, without the alternatives of its class that match its deciding line."""
    for module, name, table in TABLES:
        rules: list[Rule] = []
        for label, pattern in table:
            deciding = str(entry.label["deciding"] or "")
            known = label == entry.name and bool(deciding) and pattern.search(deciding) is not None
            parts = _parts(pattern) if known else [pattern]
            rules += [(label, part) for part in parts if not (known and part.search(deciding))]
        yield module, name, tuple(rules)


@cache
def _parts(pattern: re.Pattern[str]) -> list[re.Pattern[str]]:
    return [re.compile(part, pattern.flags) for part in alternatives(pattern.pattern)]


def alternatives(pattern: str) -> list[str]:
    """Return what stands between the outermost | of a regular expression."""
    found, depth, inside, at = [""], 0, False, 0
    while at < len(pattern):
        word = pattern[at : at + 2] if pattern[at] == "\\" else pattern[at]
        at += len(word)
        if word == "|" and not depth and not inside:
            found.append("")
            continue
        found[-1] += word
        if inside:
            inside = word != "]"
        else:
            inside = word == "["
            depth += (word == "(") - (word == ")")
    return found
