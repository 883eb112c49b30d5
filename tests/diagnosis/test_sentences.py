"""The rows with `certain = true`: each pattern has a failure that bears it out, and none that two readers see differently."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from cloudtrain.diagnosis.patterns import Pattern, classes, tables
from cloudtrain.diagnosis.ranks import clean_text
from cloudtrain.diagnosis.verdict import Verdict
from cloudtrain.events import LogLine
from tests.diagnosis.entries import CORPUS, Entry, load
from tests.diagnosis.leaving_out import alternatives
from tests.diagnosis.scoring import verdict_on

SECOND: Mapping[str, Mapping[str, Any]] = json.loads((CORPUS / "second.json").read_text(encoding="utf-8"))
CERTAIN = [(row, name) for name, table in tables().items() for row in table if row.certain]


def agreed(entry: Entry) -> bool:
    """Return whether the second reader saw the label's class, was sure, and saw no other that could be defended."""
    answer = SECOND.get(entry.id)
    return answer is not None and answer["sure"] and (answer["class"], answer["also"]) == (entry.name, [])


@cache
def verdicts() -> list[tuple[Entry, Verdict]]:
    pairs = [(entry, verdict_on(entry)) for entry in load("known", "fresh")]
    return [(entry, verdict) for entry, verdict in pairs if verdict.label != "unknown"]


def decided_by(label: str, pattern: str, table: str) -> list[tuple[Entry, Verdict]]:
    """Return the failures that have a class by a line that matches a pattern; of a state: by its reason."""

    def text_of(entry: Entry, verdict: Verdict) -> str:
        if table == "state":
            return str(entry.end["reason"]) if entry.end["state"] in ("TIMED_OUT", "PREEMPTED") else ""
        return clean_text(LogLine("", 0, 0, 0, verdict.deciding, ""))

    return [
        (entry, verdict)
        for entry, verdict in verdicts()
        if verdict.label == label
        and (verdict.where == "log") == (table in ("log", "system"))
        and re.search(pattern, text_of(entry, verdict))
    ]


@pytest.mark.parametrize(("row", "table"), CERTAIN, ids=lambda value: getattr(value, "label", value))
def test_a_certain_pattern_has_a_witness_and_no_second_meaning(row: Pattern, table: str):
    for pattern in alternatives(row.regex.pattern):
        decided = decided_by(row.label, f"(?i:{pattern})" if row.regex.flags & re.IGNORECASE else pattern, table)
        assert any(verdict.certain and agreed(entry) for entry, verdict in decided), f"no entry is decided by {pattern}"
        against = [entry.id for entry, _ in decided if entry.id in SECOND and not agreed(entry)]
        assert not against, f"{row.label}, {pattern}: another class can be defended in {against}"


def test_what_is_certain_was_read_twice_and_alike():
    # `refused` is no rule's guess: the trainer's own exit code and its own sentence.
    for entry, verdict in ((entry, verdict) for entry, verdict in verdicts() if verdict.label != "refused"):
        assert not verdict.certain or entry.id in SECOND, (
            f"{entry.id} is certain and has no second reader: let one who sees its log, its end and the list"
            " of classes, but neither label nor rule, answer for corpus/second.json"
        )
        assert not verdict.certain or agreed(entry) and verdict.label == entry.name, (
            f"{entry.id} is certain, and the second reader is not: set `certain = false` in patterns.toml for the pattern"
            f" that decides it ({verdict.deciding})"
        )


def test_the_second_readers_answers_are_of_this_corpus():
    entries = {entry.id for entry in load("known", "fresh")}
    for name, answer in SECOND.items():
        assert name in entries and {answer["class"], *answer["also"]} <= set(classes()), name
        assert set(answer) == {"class", "also", "sure"} | ({"why"} if answer["also"] else set()), name


PROVEN = "RuntimeError: Expected to mark a variable ready only once."
# Where the line that is put in is what the process died of, with nothing else beside it.
BORNE_OUT = ("rank-other-never-started", "survived-batches-skipped")
MISPLACED = [
    entry
    for entry in load("doubtful")
    if entry.id.startswith(("chained-", "end-", "survived-", "rank-", "words-own-", "words-bad-"))
]


@pytest.mark.parametrize("entry", MISPLACED, ids=lambda entry: entry.id)
def test_a_sentence_that_proves_does_not_where_a_doubtful_one_stands(entry: Entry):
    """What was survived, came of another rank or was the script's own word proves nothing, however good the sentence."""
    deciding = verdict_on(entry).deciding
    log = tuple((node, rank, PROVEN if text == deciding else text) for node, rank, text in entry.log)
    verdict = verdict_on(replace(entry, log=log))
    if entry.id in BORNE_OUT:
        assert (verdict.label, verdict.certain, verdict.deciding) == ("ddp-misuse", True, PROVEN)
    else:
        assert verdict.label == "unknown" or not verdict.certain, f"{verdict.label}: {verdict.deciding}"
