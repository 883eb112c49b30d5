"""How good the verdicts are: the corpus is judged, and what is right, wrong and left open is counted."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass

from cloudtrain.diagnosis.judge import judge
from cloudtrain.diagnosis.tail import Tail
from cloudtrain.diagnosis.verdict import End, Verdict
from cloudtrain.events import LogLine, State
from tests.diagnosis.entries import Entry, load


@dataclass(frozen=True)
class Score:
    """Counts over some entries; precision is over those with a verdict, recall over those that have a class."""

    entries: int
    classed: int  # entries whose right answer is a class
    answered: int  # entries that got a class
    right: int  # with the right class
    wrong: tuple[str, ...]  # ids with a wrong class
    certain: int  # with a class of which the verdict does not say "probably"
    certain_wrong: tuple[str, ...]  # ids of those with a wrong one: confident and wrong
    lines: int  # of the right ones: with the right deciding line
    ranks: int  # of all entries: with the right rank

    @property
    def precision(self) -> float:
        return self.right / self.answered if self.answered else 1.0

    @property
    def recall(self) -> float:
        return self.right / self.classed

    def __str__(self) -> str:
        return (
            f"{self.entries} entries: precision {self.precision:.3f} ({self.right} of {self.answered}), recall {self.recall:.3f}"
            f" ({self.right} of {self.classed}), of {self.certain} certain ones {len(self.certain_wrong)} wrong,"
            f" deciding line {self.lines} of {self.right}, rank {self.ranks} of {self.entries}"
        )


def verdict_on(entry: Entry) -> Verdict:
    """Return what verdict.py makes of an entry."""
    tail = Tail()
    for seq, (node, rank, text) in enumerate(entry.log):
        tail.add(LogLine("", node, rank, seq, text, ""))
    end = entry.end
    return judge(
        End(State[end["state"]], end["exit_code"], end["reason"] or "", end["by"] or "", end["failed_rank"]),
        tail.lines(),
    )


def score(entries: list[Entry]) -> Score:
    """Judge entries and count."""
    counts: Counter[str] = Counter()
    wrong, certain_wrong = [], []
    for entry in entries:
        verdict = verdict_on(entry)
        answered, classed = verdict.label != "unknown", entry.name != "unknown"
        right = answered and verdict.label == entry.name
        counts.update(answered=answered, classed=classed, right=right)
        counts["certain"] += answered and verdict.certain
        counts["lines"] += right and verdict.deciding == entry.label["deciding"]
        counts["ranks"] += entry.label["rank"] in ("any", verdict.rank)
        if answered and not right:
            wrong.append(entry.id)
            if verdict.certain:
                certain_wrong.append(entry.id)
    return Score(
        len(entries),
        counts["classed"],
        counts["answered"],
        counts["right"],
        tuple(wrong),
        counts["certain"],
        tuple(certain_wrong),
        counts["lines"],
        counts["ranks"],
    )


if __name__ == "__main__":
    part = load("known")
    print(score(part))
    for entry in part:
        found = verdict_on(entry)
        bad = found.label != entry.name
        if bad or found.deciding != (entry.label["deciding"] or "") or entry.label["rank"] not in ("any", found.rank):
            print("CLASS" if bad else "line/rank", entry.id, "->", found.label, found.rank, "|", found.deciding[:150])
    sys.exit(0)
