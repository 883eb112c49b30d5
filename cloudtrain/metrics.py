"""Metrics in ordinary log lines: the Trainer's dictionaries, progress bars, a user's regular expressions."""

from __future__ import annotations

import math
import re
from ast import literal_eval
from collections.abc import Iterator, Mapping
from typing import Any

from cloudtrain.events import ESCAPE, STEPS, Point, is_evaluation

# What tqdm writes: ` 50%|###  | 5/10 [00:01<00:01, 9.90it/s, loss=1.23, lr=0.001]`, `1.50ktok [00:03, 498tok/s, loss=1.2]`
_SPEED = re.compile(r"\[\d+:[\d:]+(?:<[\d:?]+)?, ([^,\[\]]{3,80})(?=[,\]])")
_TOLD = re.compile(r", ([^=,\[\](){}]*)(?:=((?:[^,\[\](){}]|\([^()]*\)|\[[^\[\]]*\])*))?")
_COUNT = re.compile(r"(?:^|[\s|])([\d.]+)([kMGTPEZY]?)(?:/([\d.]+)([kMGTPEZY]?)|/\?)?$")
_SCALED = re.compile(
    r"(?:\d\.\d\d|\d\d\.\d|\d{3})[kMGTPEZY] ?([^\s\d].*)/s$"
)  # a speed with `unit_scale`; others have two decimals
_SCALES = {letter: 1000.0**power for power, letter in enumerate(" kMGTPEZY") if power}

# A dictionary of which Python cannot read all is read piece by piece; a string or object without an end goes to the last.
MAX_ROW = 8192  # characters of such a dictionary
_PIECE = re.compile(r"""[()\[\]{},]|'[^'\\]*(?:\\.[^'\\]*)*'?|"[^"\\]*(?:\\.[^"\\]*)*"?|[^()\[\]{},'"]+""", re.DOTALL)
_ENTRY = re.compile(r"\s*'([^'\\]+)':\s*(\S.*)", re.DOTALL)
_WRAPPED = re.compile(  # tensor(1.2, device='cuda:0', grad_fn=<...>), np.float64(1.2), Array(1.2, dtype=float32)
    r"(?:(?:np|numpy|torch)\.)?(?:tensor|[aA]rray|b?float\d*|longdouble|u?int\d+)"
    r"\(\s*([-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf))\s*[,)]"
)


class MetricParser:
    """Finds metrics in ordinary lines: the Trainer's dictionaries, progress bars, the user's own regular expressions.

    The first group of an expression is the value (the form that SageMaker uses); groups named `value`, `step` and `epoch`
    say it in words. A line without a step gets the number of times that its rank has logged the metric. An evaluation
    without a step has the step of its rank's training at that time. A name that has an expression is taken from that alone.

    Args:
        patterns: name -> regular expression, as the job has them.
        seen: rank and name -> step of the attempt's last point, where another parser has read its log up to here.
        earlier: the same of the run's earlier attempts, where a count continues.
    """

    def __init__(
        self,
        patterns: Mapping[str, str],
        seen: Mapping[tuple[int, str], int] | None = None,
        earlier: Mapping[tuple[int, str], int] | None = None,
    ) -> None:
        self._patterns = {name: re.compile(pattern) for name, pattern in patterns.items()}
        self._seen = dict(seen or {})
        self._earlier = dict(earlier or {})
        self._training: dict[int, int] = {}  # rank -> step of its newest point that is of no evaluation
        for (rank, name), step in self._seen.items():
            if not is_evaluation(name):
                self._training[rank] = max(step, self._training.get(rank, step))
        # done and size of the newest bar, steps of those before it
        self._bars: dict[tuple[int, str], tuple[int, int, int]] = {}

    def metrics(self, text: str, rank: int = 0) -> Iterator[Point]:
        """Return the point of every metric in one line of a rank's log."""
        if self._patterns or "{'" in text or ("[" in text and "/" in text and _SPEED.search(text)):
            return self._found(text, rank)
        return iter(())  # most lines: what they cost is what following a log costs

    def _found(self, text: str, rank: int) -> Iterator[Point]:
        if "\x1b" in text:
            text = ESCAPE.sub("", text)
        if "{'" in text or "[" in text:
            for piece in text.split("\r"):
                yield from self._progress(piece, rank)
        for name, pattern in self._patterns.items():
            for match in pattern.finditer(text):
                groups = match.groupdict()
                value = _number(groups["value"] if "value" in groups else _first(match, pattern))
                if value is not None:
                    yield self._point(rank, groups.get("step"), name, value, _number(groups.get("epoch")))

    def _progress(self, text: str, rank: int) -> Iterator[Point]:
        """Yield what a progress bar says, and a dictionary that begins the line or stands right behind a bar."""
        head, brace, rest = text.partition("{'")
        speed = _SPEED.search(head) if "[" in head else None
        if speed and (count := _count(head[: speed.start()], speed[1])):
            yield from self._bar(*count, _told(head, speed.end()), rank)
        head, rest = head.strip(), rest.rstrip()
        if rest.endswith("}") and (not head or (speed and head[-1] == "]")):  # what transformers' Trainer prints
            yield from self._trainer(brace + rest, rank)

    def _trainer(self, literal: str, rank: int) -> Iterator[Point]:
        row = _literal(literal) or _readable(literal[:MAX_ROW])
        step, epoch = row.get("step", row.get("global_step")), _number(row.get("epoch"))
        for name, raw in row.items():
            value = _number(raw)
            named = isinstance(name, str) and name not in ("epoch", "step", "global_step", *self._patterns)
            if named and value is not None:
                yield self._point(rank, step, name, value, epoch)

    def _bar(self, done: int, total: int, fields: list[tuple[str, str]], rank: int) -> Iterator[Point]:
        """Yield what a progress bar tells beside its speed; the bar of the next epoch counts on from the last one."""
        for name, raw in fields:
            value = None if name in self._patterns else _number(raw)
            if value is None:
                continue
            at, size, before = self._bars.get((rank, name), (-1, total, self._seen.get((rank, name), 0)))
            if done == at:
                continue  # drawn again
            before += max(size, at) if done < at else 0
            self._bars[rank, name] = (done, total, before)
            yield self._point(rank, before + done, name, value, None)

    def _point(self, rank: int, step: Any, name: str, value: float, epoch: float | None) -> Point:
        number = _number(step)
        if number is not None and abs(number) < STEPS:
            at = int(number)
        elif is_evaluation(name) and rank in self._training:
            at = self._training[rank]
        else:
            at = self._seen.get((rank, name), self._earlier.get((rank, name), 0)) + 1
        self._seen[rank, name] = at
        if not is_evaluation(name):
            self._training[rank] = at
        return Point(at, name, value, epoch)


def _count(text: str, speed: str) -> tuple[int, int] | None:
    """Return how far a bar is and its size, 0 where it has none, from what stands before its brackets; None for no bar.

    What tqdm has rounded (`unit_scale`) is a rounded step; the letters are powers of 1000, which is tqdm's own choice.
    """
    text = text[-80:].rstrip()
    match = _COUNT.search(text)
    if not match or "/" not in match[0]:  # no size: the unit stands behind, the one that the speed is in
        scaled = _SCALED.match(speed)
        unit = scaled[1] if scaled else speed.lstrip("?. 0123456789").removesuffix("/s").removeprefix("s/")
        match = _COUNT.search(text.removesuffix(unit).rstrip()) if unit and text.endswith(unit) else None
    if not match:
        return None
    try:
        done = round(float(match[1]) * _SCALES.get(match[2], 1.0))
        total = round(float(match[3] or 0) * _SCALES.get(match[4] or "", 1.0))
    except (ValueError, OverflowError):
        return None
    return (done, total) if max(done, total) < STEPS else None


def _told(text: str, at: int) -> list[tuple[str, str]]:
    """Return the names and values in a bar from behind its speed to its closing bracket; none where that is not there."""
    fields = []
    while match := _TOLD.match(text, at):
        at = match.end()
        fields.append((match[1], match[2] or ""))
    return fields if text[at : at + 1] == "]" else []


def _literal(text: str) -> dict[Any, Any] | None:
    try:
        row = literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _readable(text: str) -> dict[Any, Any]:
    """Return the text of every value of a printed dictionary that stands by itself between two commas."""
    row, depth, parts = {}, 0, list[str]()
    for piece in _PIECE.findall(text):
        depth += (piece in ("(", "[", "{")) - (piece in (")", "]", "}"))
        if depth == 0 or (depth == 1 and piece == ","):
            if match := _ENTRY.fullmatch("".join(parts)):
                row[match[1]] = match[2].strip().strip("'\"")
            parts = []
            if depth == 0:
                break
        elif depth > 1 or piece != "{" or parts:
            parts.append(piece)
    return row


def _first(match: re.Match[str], pattern: re.Pattern[str]) -> str:
    """Return the first group that is not the step, or the whole match where there is none."""
    step = pattern.groupindex.get("step")
    numbers = [number for number in range(1, pattern.groups + 1) if number != step]
    return match[numbers[0]] if numbers else match[0]


def _number(raw: Any) -> float | None:
    """Return a finite or non-finite float, or None where there is no number (transformers 5 prints strings)."""
    if isinstance(raw, bool):
        return None
    try:
        value = float(raw)
    except (TypeError, ValueError, OverflowError):
        wrapped = _WRAPPED.match(raw) if isinstance(raw, str) else None
        return _number(wrapped[1]) if wrapped else None
    return value if not math.isnan(value) else math.nan
