"""Curves drawn with characters: a chart with axes, and a small curve in one line."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

from cloudtrain.history.curves import share

COLOURS = ("cyan", "yellow", "green", "red")
_MARKS = "*o+x#@"
_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = "_.-=^"
# bit of a dot in a braille cell, by row and column
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))

Curve = Sequence[tuple[float, float]]


def spark(values: Sequence[float], width: int, unicode: bool | None = None) -> str:
    """Return the last `width` finite values as one line of bars; empty without any."""
    finite = [value for value in values if math.isfinite(value)][-width:]
    if not finite or width < 1:
        return ""
    bars = _BARS if _unicode(unicode) else _PLAIN_BARS
    low, high = min(finite), max(finite)
    return "".join(bars[int(share(value, low, high) * (len(bars) - 1) + 0.5)] for value in finite)


def chart(
    curves: Mapping[str, Curve], width: int, height: int, *, colours: bool = False, unicode: bool | None = None
) -> list[str]:
    """Return the lines of a chart of named curves (step, value) with both axes; not finite values are left out.

    One curve is drawn in dots of a quarter of a line; several have a colour each, or a mark each where there are none.
    """
    drawn = {
        name: [(x, y) for x, y in curve if math.isfinite(x) and math.isfinite(y)] for name, curve in curves.items()
    }
    points = [point for curve in drawn.values() for point in curve]
    if not points:
        return ["no finite values"]
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    downs = [row / max(height - 1, 1) for row in range(height)]
    labels = [short(high * (1 - down) + low * down) if high > low else "" for down in downs]
    labels[height // 2] = labels[height // 2] or short(high)
    margin = max(map(len, labels))
    columns = max(width - margin - 2, 10)
    dots = _unicode(unicode) and (colours or len(drawn) == 1)
    cells = _cells(drawn, (left, right, low, high), columns, height, dots)
    corner, side, edge = ("┤", "│", "└") if _unicode(unicode) else ("|", "|", "+")
    lines = []
    for row in range(height):
        labelled = row in (0, height // 2, height - 1) and labels[row]
        text = "".join(_cell(cells.get((row, column)), dots, colours) for column in range(columns)).rstrip()
        lines.append(f"{labels[row] if labelled else '':>{margin}} {corner if labelled else side}{text}")
    first, last = short(left), short(right)
    lines.append(f"{'':>{margin}} {edge}{first}{last:>{max(columns - len(first), len(last) + 1)}}")
    if len(drawn) > 1:
        lines += [f"{'':>{margin}}  {_legend(number, dots, colours)} {name}" for number, name in enumerate(drawn)]
    return lines


def short(value: float) -> str:
    """Return a number in few characters: 0.031, 2.5, 12k, 1.2M, 3.1e-05."""
    if abs(float(f"{value:.4g}")) < 1e4 or not math.isfinite(value):
        return f"{value:.4g}"
    size = abs(float(f"{value:.3g}"))  # as it will be shown: 999,999 is 1M and not 1000k
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if factor <= size < factor * 1e3:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.2e}"


def _cells(
    drawn: Mapping[str, Curve], box: tuple[float, float, float, float], columns: int, rows: int, dots: bool
) -> dict[tuple[int, int], tuple[int, int]]:
    """Return (curve, bits) of every cell that something is drawn in; a later curve lies over an earlier one."""
    left, right, low, high = box
    wide, tall = (2, 4) if dots else (1, 1)
    across, down = columns * wide - 1, rows * tall - 1
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for number, curve in enumerate(drawn.values()):
        before: tuple[int, int] | None = None
        for x, y in curve:
            deep = int((1 - share(y, low, high)) * down + 0.5) if high > low else rows * tall // 2
            here = int(share(x, left, right) * across + 0.5), deep
            for column, row in _line(before or here, here):
                cell = (row // tall, column // wide)
                owner, bits = found.get(cell, (number, 0))
                bit = _DOTS[row % 4][column % 2] if dots else 1
                found[cell] = (number, (bits if owner == number else 0) | bit)
            before = here
    return found


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the dots between two dots; none where the curve goes back, as at a new attempt."""
    (x, y), (to_x, to_y) = start, end
    steps = max(abs(to_x - x), abs(to_y - y))
    if steps == 0 or to_x < x:
        return [end]
    return [(x + round((to_x - x) * n / steps), y + round((to_y - y) * n / steps)) for n in range(1, steps + 1)]


def _cell(found: tuple[int, int] | None, dots: bool, colours: bool) -> str:
    if found is None:
        return " "
    number, bits = found
    return _coloured(chr(0x2800 + bits) if dots else _MARKS[number % len(_MARKS)], number, colours)


def _legend(number: int, dots: bool, colours: bool) -> str:
    return _coloured("--" if dots else _MARKS[number % len(_MARKS)], number, colours)


def _coloured(text: str, number: int, colours: bool) -> str:
    code = {"cyan": 36, "yellow": 33, "green": 32, "red": 31}[COLOURS[number % len(COLOURS)]]
    return f"\x1b[{code}m{text}\x1b[0m" if colours else text


def _unicode(wanted: bool | None) -> bool:
    """Return whether standard output can show bars and dots."""
    if wanted is not None:
        return wanted
    return (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"
