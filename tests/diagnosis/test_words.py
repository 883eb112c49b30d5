"""Single messages beyond the corpus: what each says, and that words of another class do not mislead."""

from __future__ import annotations

import pytest

from cloudtrain.diagnosis.judge import judge
from cloudtrain.diagnosis.verdict import End, Verdict
from cloudtrain.events import LogLine, State
from tests.diagnosis.entries import HERE

HEAD = (
    "Traceback (most recent call last):",
    '  File "/runs/job/source/train.py", line 214, in <module>',
    "    main()",
)
# What ends a traceback whose innermost frame says nothing.
RAISED = "exceptions.txt"
# What a platform says of a run that it ended, or never began.
REASONS = "reasons.txt"


def said(table: str) -> list[list[str]]:
    """Return the rows of a table: a class, a state where the table has one, a message."""
    rows = (HERE / table).read_text(encoding="utf-8").splitlines()
    return [[part.strip() for part in row.split(" | ", 2)] for row in rows]


def verdict(
    texts: tuple[str, ...], state: str = "FAILED", code: int | None = 1, reason: str = "", rank: int = 0
) -> Verdict:
    lines = [LogLine("", 0, 0, seq, text, "") for seq, text in enumerate(texts)]
    by = "script" if not reason else "platform"
    return judge(
        End(State[state], code, reason or f"rank {rank} exited with code {code}", by, rank if not reason else None),
        lines,
    )


@pytest.mark.parametrize(("label", "text"), [line[:2] for line in said(RAISED)])
def test_an_exception_is_understood(label: str, text: str):
    found = verdict((*HEAD, text))
    assert found.label == label
    assert found.deciding == text or (label, found.deciding) == ("unknown", "")


@pytest.mark.parametrize(("label", "state", "reason"), said(REASONS))
def test_a_platforms_sentence_is_understood(label: str, state: str, reason: str):
    found = verdict((), state, None, reason)
    assert (found.label, found.deciding, found.where, found.rank) == (label, reason, "reason", None)
