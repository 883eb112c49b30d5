"""Draw metrics as text: a chart with axes, and a sparkline in one line."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cloudtrain.history.sampling import share
from cloudtrain.job.units import format_number

COLOURS = ("cyan", "yellow", "green", "red")
_MARKS = "*o+x#@"
_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = "_.-=^"
# [row][column] of a dot in a braille cell -> its bit
_BRAILLE_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


class _Letters(NamedTuple):
    """What a chart is drawn with, beside its curves."""

    corner: str
    side: str
    edge: str
    gone: str  # a value that is not finite
    faint: str  # what the next attempt did again


_LETTERS = {True: _Letters("┤", "│", "└", "×", "·"), False: _Letters("|", "|", "+", "x", ".")}
Curve = Sequence[tuple[float, float]]
_GONE = -1  # in place of a cell's bits: a value that is not finite
_Cell = tuple[int, bool, int]  # number of the curve, whether it is a lost part, bits of the dots


def sparkline(values: Sequence[float], width: int, unicode: bool | None = None) -> str:
    """Return the last `width` finite values as a line of bars; "" where no value is finite."""
    finite = [value for value in values if math.isfinite(value)][-width:]
    if not finite or width < 1:
        return ""
    bars = _BARS if _unicode(unicode) else _PLAIN_BARS
    low, high = min(finite), max(finite)
    return "".join(bars[int(share(value, low, high) * (len(bars) - 1) + 0.5)] for value in finite)


def chart(
    curves: Mapping[str, Curve],
    width: int,
    height: int,
    *,
    lost: Mapping[str, Sequence[Curve]] | None = None,
    colours: bool = False,
    unicode: bool | None = None,
) -> list[str]:
    """Return the lines of a chart with both axes. `curves` maps names to (step, value) points; those that are not finite
    are marked on the axis.

    One curve is drawn in braille dots. Several curves get a colour each, or without colours a mark each. `lost` are parts
    of a curve that are drawn faint, under all curves.
    """
    layers = [(n, True, _finite(part)) for n, name in enumerate(curves) for part in (lost or {}).get(name, ())]
    layers += [(number, False, _finite(curve)) for number, curve in enumerate(curves.values())]
    points = [point for _, _, curve in layers for point in curve]
    if not points:
        return ["no finite values"]
    gone = [(number, x) for number, curve in enumerate(curves.values()) for x, y in curve if not math.isfinite(y)]
    across = [*(x for x, _ in points), *(x for _, x in gone)]
    left, right = min(across), max(across)
    low, high = min(y for _, y in points), max(y for _, y in points)
    labels = _labels(low, high, height)
    margin = max(map(len, labels))
    columns = max(width - margin - 2, 10)
    letters = _LETTERS[_unicode(unicode)]
    dots = _unicode(unicode) and (colours or len(curves) == 1)
    cells = _draw_cells(layers, (left, right, low, high), columns, height, dots)
    for number, x in gone:  # on the axis, where no curve is drawn
        place = (height - 1, int(share(x, left, right) * (columns - 1) + 0.5))
        cells.setdefault(place, (number, False, _GONE))
    lines = []
    for row in range(height):
        text = "".join(_render_cell(cells.get((row, column)), dots, colours, letters) for column in range(columns))
        label = labels[row] if row in (0, height // 2, height - 1) else ""
        lines.append(f"{label:>{margin}} {letters.corner if label else letters.side}{text.rstrip()}")
    first, last = format_short(left), format_short(right)
    lines.append(f"{'':>{margin}} {letters.edge}{first}{last:>{max(columns - len(first), len(last) + 1)}}")
    notes = [f"{_legend(number, dots, colours)} {name}" for number, name in enumerate(curves) if len(curves) > 1]
    notes += [f"{letters.gone} values that are not finite"] * bool(gone)
    notes += [f"{letters.faint} lost: the next attempt resumed before it"] * any(faint for _, faint, _ in layers)
    return [*lines, *(f"{'':>{margin}}  {note}" for note in notes)]


def _labels(low: float, high: float, height: int) -> list[str]:
    """Return the number of each row of a chart; where all values are equal, of the middle one alone."""
    fractions = [row / max(height - 1, 1) for row in range(height)]
    labels = [format_short(high * (1 - fraction) + low * fraction) if high > low else "" for fraction in fractions]
    labels[height // 2] = labels[height // 2] or format_short(high)
    return labels


def format_short(value: float) -> str:
    """Return a number as a short text: 0.031, 2.5, 12k, 1.2M, 3.1e-5."""
    if abs(float(f"{value:.4g}")) < 1e4 or not math.isfinite(value):
        return format_number(value)
    size = abs(float(f"{value:.3g}"))  # rounded as it is shown: 999,999 is 1M, not 1000k
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if factor <= size < factor * 1e3:
            return f"{value / factor:.3g}{unit}"
    return format_number(value, 3)


def _finite(curve: Curve) -> Curve:
    return [(x, y) for x, y in curve if math.isfinite(x) and math.isfinite(y)]


def _draw_cells(
    layers: Sequence[tuple[int, bool, Curve]],
    box: tuple[float, float, float, float],
    columns: int,
    rows: int,
    dots: bool,
) -> dict[tuple[int, int], _Cell]:
    """Return the drawn cells by row and column. A later layer covers an earlier one."""
    left, right, low, high = box
    dots_across, dots_down = (2, 4) if dots else (1, 1)
    last_x, last_y = columns * dots_across - 1, rows * dots_down - 1
    cells: dict[tuple[int, int], _Cell] = {}
    for number, faint, curve in layers:
        previous: tuple[int, int] | None = None
        for x, y in curve:
            y_dot = int((1 - share(y, low, high)) * last_y + 0.5) if high > low else rows * dots_down // 2
            position = int(share(x, left, right) * last_x + 0.5), y_dot
            for column, row in _dots_between(previous or position, position):
                cell = (row // dots_down, column // dots_across)
                *layer, bits = cells.get(cell, (number, faint, 0))
                bit = _BRAILLE_BITS[row % 4][column % 2] if dots else 1
                cells[cell] = (number, faint, (bits if layer == [number, faint] else 0) | bit)
            previous = position
    return cells


def _dots_between(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the dots from `start` to `end`; only `end` where the steps go back, as after a restart."""
    (x, y), (to_x, to_y) = start, end
    steps = max(abs(to_x - x), abs(to_y - y))
    if steps == 0 or to_x < x:
        return [end]
    return [(x + round((to_x - x) * n / steps), y + round((to_y - y) * n / steps)) for n in range(1, steps + 1)]


def _render_cell(cell: _Cell | None, dots: bool, colours: bool, letters: _Letters) -> str:
    if cell is None:
        return " "
    number, faint, bits = cell
    if bits == _GONE:
        return _coloured(letters.gone, number, colours)
    if faint:
        return _coloured(letters.faint, number, colours)
    return _coloured(chr(0x2800 + bits) if dots else _MARKS[number % len(_MARKS)], number, colours)


def _legend(number: int, dots: bool, colours: bool) -> str:
    return _coloured("--" if dots else _MARKS[number % len(_MARKS)], number, colours)


def _coloured(text: str, number: int, colours: bool) -> str:
    code = {"cyan": 36, "yellow": 33, "green": 32, "red": 31}[COLOURS[number % len(COLOURS)]]
    return f"\x1b[{code}m{text}\x1b[0m" if colours else text


def _unicode(forced: bool | None) -> bool:
    """Return whether standard output can show bars and dots."""
    if forced is not None:
        return forced
    return (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"
