"""Reads the progress bars of tqdm (so Lightning's, Trainer's and diffusers') and of Keras."""

from __future__ import annotations

import re
from typing import NamedTuple

from cloudtrain.events import STEPS

# What tqdm writes: ` 50%|###  | 5/10 [00:01<00:01, 9.90it/s, loss=1.23, lr=0.001]`, `1.50ktok [00:03, 498tok/s, loss=1.2]`
_SPEED = re.compile(r"\[\d+:[\d:]+(?:<[\d:?]+)?, ([^,\[\]]{3,80})(?=[,\]])")
_TIMES = re.compile(r"\[\d\d+:\d\d[:\d]*[<,]")
_TOLD = re.compile(r", ([^=,\[\](){}]*)(?:=((?:[^,\[\](){}]|\([^()]*\)|\[[^\[\]]*\])*))?")
_COUNT = re.compile(r"(?:^|[\s|])([\d.]+)([kMGTPEZY]?)(?:/([\d.]+)([kMGTPEZY]?)|/\?)?$")
_SCALED = re.compile(
    r"(?:\d\.\d\d|\d\d\.\d|\d{3})[kMGTPEZY] ?([^\s\d].*)/s$"
)  # a speed with `unit_scale`; others have two decimals
_SCALES = {letter: 1000.0**power for power, letter in enumerate(" kMGTPEZY") if power}
_RATE = re.compile(r"\s*([\d.]+)")
# What Keras writes: ` 412/1500 [====>....] - ETA: 9s - loss: 0.11`, `31/157 ━━━━━ 2s 22ms/step - loss: 1.4`
_KERAS = re.compile(r"\s*(\d+)/(\d+|Unknown) (?:\[[=>.]+\] |[━╸╺ ]+|)- ?|\s*(\d+)/(\d+) ━+ ")


class Bar(NamedTuple):
    """A progress bar: how far it is, its size (0 where it has none), what stands before and the fields behind its speed."""

    done: int
    size: int
    title: str
    fields: list[tuple[str, str]]
    is_slow: bool  # fewer than two steps a second: tqdm draws each of them
    end: int  # where it ends in the text


def parse_bar(text: str) -> Bar | None:
    """Return the tqdm bar in a piece of a line, None where there is none."""
    speed = _SPEED.search(text) if "[" in text else None
    if speed is None or (count := _count(text[: speed.start()], speed[1])) is None:
        return None
    rate = _RATE.match(speed[1])
    slow = "s/" in speed[1] or (rate is not None and _is_below(rate[1], 2.0))
    fields, end = _fields(text, speed.end())
    return Bar(*count, text[: speed.start()], fields, slow, end)


def is_part_of_bar(text: str) -> bool:
    """Return whether a text holds what tqdm writes behind a bar: it is none, or was cut off."""
    return "[" in text and _TIMES.search(text) is not None


def parse_keras_bar(text: str) -> tuple[int, int, int] | None:
    """Return how far a bar of Keras is, its size, and where its fields begin; None where there is none."""
    match = _KERAS.match(text)
    if match is None:
        return None
    done, size = (match[1], match[2]) if match[1] else (match[3], match[4])
    return (int(done), int(size) if size.isdigit() else 0, match.end()) if len(done) < 19 > len(size) else None


def _is_below(text: str, most: float) -> bool:
    try:
        return float(text) < most
    except ValueError:
        return False


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


def _fields(text: str, at: int) -> tuple[list[tuple[str, str]], int]:
    """Return the names and values from behind a bar's speed to its closing bracket, none where that is not there; its end."""
    fields = []
    while match := _TOLD.match(text, at):
        at = match.end()
        fields.append((match[1], match[2] or ""))
    return (fields, at + 1) if text[at : at + 1] == "]" else ([], at)
