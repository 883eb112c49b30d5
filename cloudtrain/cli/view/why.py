"""Format the verdict on a failed run: cause, evidence and where it was logged, fix."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloudtrain.diagnosis.verdict import Verdict

LONGEST = 400  # characters of a log line


def verdict_rows(verdict: Verdict | None) -> list[tuple[str, str]]:
    """Return the labels and values of a verdict to print; empty for None, and where the reason states the cause."""
    if verdict is None or verdict.only_reason:
        return []
    excerpt = verdict.deciding if len(verdict.deciding) <= LONGEST else verdict.deciding[: LONGEST - 3] + "..."
    location = f"line {verdict.seq} of node {verdict.node}: " if verdict.where == "log" else ""
    return [
        ("why", f"{verdict.sentence} ({verdict.label})"),
        ("log", location + excerpt if location else ""),  # the reason is printed already
        *([("at", verdict.raised)] if verdict.raised else []),
        ("try", verdict.advice),
    ]
