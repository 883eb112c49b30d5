"""Find the log lines that come nearest to a metric, with the expression that would read it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cloudtrain.events import ESCAPE, MARK, LogLine
from cloudtrain.metrics.parser import MetricParser

MOST_LINES = 50_000  # of a log that are read
MOST_CHARS = 2000  # of a line that are looked at
SHOWN = 3
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_PAIR = re.compile(  # words, what separates them, a number that is no part of a version, path, time or size
    rf"(?P<words>[A-Za-z][\w/-]*+(?: [A-Za-z][\w/-]*+){{0,2}})(?P<between>\s*[:=]\s*|\s+(?:is\s+|of\s+)?|\s*\|\s*)"
    rf"(?P<number>{_NUMBER})(?![\w./:-]*[\w:])"
)
_METRICS = re.compile(
    r"loss|acc|ppl|perplexity|\bf1|auc|bleu|rouge|reward|return|score|error|\bmse|\bmae|rmse|\biou|\bmap|precision"
    r"|recall|top.?[15]|\bwer|\bcer|\bfid|grad|\blr\b|learning.rate|/s\b|per_s",
    re.IGNORECASE,
)
_STEP = re.compile(r"(?:step|epoch|iter|iteration|batch)\W{0,3}\d", re.IGNORECASE)
_COUNTS = re.compile(
    r"(?:^|\W)(?:step|epoch|iter|iteration|batch|rank|seed|port|version|pid|size|line)s?$", re.IGNORECASE
)


@dataclass(frozen=True)
class NearLine:
    """A line with a number beside words, and what the key `metrics` of the job needs for it."""

    node: int
    seq: int
    text: str
    name: str
    pattern: str

    @property
    def entry(self) -> str:
        """The entry below `metrics:` in a job file."""
        quoted = self.pattern.replace("'", "''")
        return f"{self.name}: '{quoted}'"


def nearest_lines(lines: Iterable[LogLine]) -> list[NearLine]:
    """Return the three lines of a log that look most like a metric, the best first; each of another form."""
    best: dict[str, tuple[float, NearLine]] = {}  # form of a line -> its score and first line
    for number, line in enumerate(lines):
        if number >= MOST_LINES:
            break
        if line.rank < 0 or line.text.startswith(MARK):
            continue
        text = ESCAPE.sub("", line.text[:MOST_CHARS])
        form = re.sub(r"\d+", "0", text[:200])
        if form in best:
            score, near = best[form]
            best[form] = (score + 0.001, near)  # what is printed again and again is rather a metric
        elif candidate := max(_candidates(text), default=None):
            score, name, pattern = candidate
            best[form] = (score, NearLine(line.node, line.seq, text, name, pattern))
    ranked = sorted(best.values(), key=lambda pair: (-min(pair[0], int(pair[0]) + 0.9), pair[1].seq))
    return [near for _, near in ranked[:SHOWN]]


def _candidates(text: str) -> Iterator[tuple[float, str, str]]:
    """Yield score, name and expression for each number beside words."""
    for match in _PAIR.finditer(text):
        words = match["words"]
        if _COUNTS.search(words):
            continue
        score = 1.0 + 4 * bool(_METRICS.search(words)) + 2 * bool(_STEP.search(text)) + ("." in match["number"])
        name = re.sub(r"\W+", "_", re.sub(" (?:is|of)$", "", words)).strip("_").lower()
        pattern = _literal(words) + re.sub(r"\s+", r"\\s+", _literal(match["between"])) + "([-+0-9.eE]+|nan|inf)"
        found = [point.value for point in MetricParser({name: pattern}).metrics(text)]
        if float(match["number"]) in found:
            yield score, name, pattern


def _literal(text: str) -> str:
    """Return text as a regular expression that a person can read."""
    return re.sub(r"([\\.^$*+?{}\[\]|()])", r"\\\1", text)


def describe(log: Iterable[LogLine]) -> list[str]:
    """Return what to say of an ended run without metrics: the nearest lines of its log, and what to write to read them."""
    shown = nearest_lines(log)
    if not shown:
        return [
            "no metrics were found: no line of the log looks like one; write an expression below `metrics` in the job file"
        ]
    told = [
        "no metrics were found in the log. The log lines most like metrics, and the entry for the job file that reads them:"
    ]
    for line in shown:
        told += [
            f"log line {line.seq} of node {line.node}: {line.text.strip()[:160]}",
            f"    metrics: {{{line.entry}}}",
        ]
    return told
