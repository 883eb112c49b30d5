"""What is said without "probably": each sentence has a failure that bears it out, and none that two readers see differently."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from cloudtrain.diagnosis.ranks import bare
from cloudtrain.diagnosis.rules import CLASSES, Rule
from cloudtrain.diagnosis.sentences import BESIDE, CODES, SENTENCES, STATES
from cloudtrain.diagnosis.verdict import Verdict
from cloudtrain.events import LogLine
from tests.diagnosis.entries import CORPUS, Entry, load
from tests.diagnosis.leaving_out import alternatives
from tests.diagnosis.scoring import verdict_on

SECOND: Mapping[str, Mapping[str, Any]] = json.loads((CORPUS / "second.json").read_text(encoding="utf-8"))
TABLES = {"log": (*SENTENCES, *BESIDE), "reason": CODES, "state": STATES}
ROWS = [(rule, where) for where, table in TABLES.items() for rule in table]


def agreed(entry: Entry) -> bool:
    """Return whether the second reader saw the label's class, was sure, and saw no other that could be defended."""
    told = SECOND.get(entry.id)
    return told is not None and told["sure"] and (told["class"], told["also"]) == (entry.name, [])


@cache
def judged() -> list[tuple[Entry, Verdict]]:
    return [(entry, found) for entry in load("known", "fresh") if (found := verdict_on(entry)).label != "unknown"]


def decided(label: str, wording: str, where: str) -> list[tuple[Entry, Verdict]]:
    """Return the failures that have a class from a line with such words; of a state: from that and its reason's."""

    def words(entry: Entry, found: Verdict) -> str:
        if where == "state":
            return str(entry.end["reason"]) if entry.end["state"] in ("TIMED_OUT", "PREEMPTED") else ""
        return bare(LogLine("", 0, 0, 0, found.deciding, ""))

    return [
        (entry, found)
        for entry, found in judged()
        if found.label == label
        and (found.where == "log") == (where == "log")
        and re.search(wording, words(entry, found))
    ]


@pytest.mark.parametrize(("rule", "where"), ROWS, ids=lambda value: value[0] if isinstance(value, tuple) else "")
def test_a_sentence_that_proves_has_a_witness_and_no_second_meaning(rule: Rule, where: str):
    label, pattern = rule
    for wording in alternatives(pattern.pattern):
        found = decided(label, wording, where)
        assert any(verdict.certain and agreed(entry) for entry, verdict in found), f"{label}: nobody has seen {wording}"
        against = [entry.id for entry, _ in found if entry.id in SECOND and not agreed(entry)]
        assert not against, f"{label}, {wording}: another class can be defended in {against}"


def test_what_is_certain_was_read_twice_and_alike():
    for entry, found in judged():
        assert not found.certain or entry.id in SECOND, (
            f'{entry.id} is said without "probably" and has no second reader: let one who sees its log, its end and the list'
            " of classes, but neither label nor rule, answer for corpus/second.json"
        )
        assert not found.certain or agreed(entry) and found.label == entry.name, (
            f'{entry.id} is said without "probably", and the second reader would not: take the sentence that decides it'
            f" ({found.deciding}) out of verdictsentences.py"
        )


def test_the_second_readers_answers_are_of_this_corpus():
    entries = {entry.id for entry in load("known", "fresh")}
    for name, told in SECOND.items():
        assert name in entries and {told["class"], *told["also"]} <= set(CLASSES), name
        assert set(told) == {"class", "also", "sure"} | ({"why"} if told["also"] else set()), name


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
    said = verdict_on(entry).deciding
    put = replace(entry, log=tuple((node, rank, PROVEN if text == said else text) for node, rank, text in entry.log))
    found = verdict_on(put)
    if entry.id in BORNE_OUT:
        assert (found.label, found.certain, found.deciding) == ("ddp-misuse", True, PROVEN)
    else:
        assert found.label == "unknown" or not found.certain, f"{found.label}: {found.deciding}"
