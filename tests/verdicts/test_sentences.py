"""What is said without "probably" has witnesses: of each sentence that proves two failures of the corpus, none against it."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

from cloudtrain.backend import LogLine
from cloudtrain.verdictranks import bare
from cloudtrain.verdictrules import Rule
from cloudtrain.verdictsentences import BESIDE, CODES, SENTENCES
from tests.verdicts.entries import Entry, load
from tests.verdicts.leaving_out import alternatives
from tests.verdicts.scoring import verdict_on

ROWS = [*((rule, "log") for rule in (*SENTENCES, *BESIDE)), *((rule, "reason") for rule in CODES)]


def plain(text: str | None) -> str:
    return bare(LogLine("", 0, 0, 0, text or "", ""))


@cache
def understood() -> list[tuple[Entry, str]]:
    """Return the failures that can bear a sentence out, and the line that decided: not made up, and of the right class."""
    found = [(entry, verdict_on(entry)) for entry in load("known", "fresh")]
    return [
        (entry, plain(told.deciding))
        for entry, told in found
        if (told.label, told.where) == (entry.name, entry.label["where"])
    ]


def witnesses(label: str, wording: str, where: str) -> dict[str, str]:
    """Return the failures that bear a wording out, by their script or thread: two of one origin are one witness."""
    return {
        str(entry.script or (entry.thread or "").partition("#")[0]): entry.id
        for entry, line in understood()
        if (entry.name, entry.label["where"]) == (label, where) and re.search(wording, line)
    }


@pytest.mark.parametrize(("rule", "where"), ROWS, ids=lambda value: value[0] if isinstance(value, tuple) else "")
def test_a_sentence_that_proves_has_two_witnesses_and_none_against_it(rule: Rule, where: str):
    label, pattern = rule
    found = {wording: witnesses(label, wording, where) for wording in alternatives(pattern.pattern)}
    assert len({origin for each in found.values() for origin in each}) >= 2, f"{label} rests on {found}"
    assert all(found.values()), f"a wording of {label} that nobody has seen: {found}"
    for entry in load("known", "fresh", "doubtful"):
        said = entry.label["where"] == where and pattern.search(plain(entry.label["deciding"]))
        assert not said or entry.name == label, f"{entry.id} is {entry.name}, and decided by a sentence of {label}"


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
