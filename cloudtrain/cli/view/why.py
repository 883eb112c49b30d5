"""Why a run failed, in a few lines: what happened, what was said and where, what to try."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloudtrain.diagnosis.verdict import Verdict

LONGEST = 400  # characters of a job's line


def rows(verdict: Verdict | None) -> list[tuple[str, str]]:
    """Return labels and values to print of a verdict; none for none."""
    if verdict is None:
        return []
    said = verdict.deciding if len(verdict.deciding) <= LONGEST else verdict.deciding[: LONGEST - 3] + "..."
    place = f"node {verdict.node}, line {verdict.seq}: " if verdict.where == "log" else ""
    return [
        ("why", f"{verdict.sentence} ({verdict.label})"),
        ("said", place + said if place else ""),  # a reason stands there already
        *([("at", verdict.raised)] if verdict.raised else []),
        ("try", verdict.advice),
    ]
