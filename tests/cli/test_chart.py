from __future__ import annotations

import math

import pytest

from cloudtrain.cli.view.chart import chart, format_short, sparkline


def test_a_small_curve_goes_from_its_lowest_to_its_highest():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8, unicode=True) == "▁▂▃▄▅▆▇█"
    assert sparkline([9, 9, 0, 7], 2, unicode=True) == "▁█"
    assert sparkline([5, math.nan, 5], 9, unicode=True) == "▁▁"
    assert sparkline([math.inf], 9) == "" == sparkline([], 9) == sparkline([1.0], 0)
    assert sparkline([0, 4], 9, unicode=False) == "_^"


def test_a_falling_line_in_marks():
    lines = chart({"a": [(0, 3), (1, 2), (2, 1), (3, 0)]}, 14, 4, unicode=False)
    drawn = [line.partition("|")[2] for line in lines[:-1]]
    assert [row.strip("* ") for row in drawn] == [""] * 4
    first = [row.index("*") for row in drawn]
    assert first == sorted(first) and first[0] == 0 and max(map(len, drawn)) == 11
    assert lines[-1].strip().startswith("+0") and lines[-1].endswith("3")


def test_dots_are_four_to_a_line():
    (top, *_) = chart({"a": [(0, 0), (1, 1)]}, 13, 1, unicode=True)
    assert top == "1 ┤⣀⣀⠤⠤⠤⠒⠒⠒⠉⠉"  # rises within one line
    flat = chart({"a": [(0, 5.0), (9, 5.0)]}, 20, 3, unicode=True)
    assert sum("⠉" in line or "⠒" in line or "⣀" in line or "⠤" in line for line in flat) == 1


def test_several_curves_have_a_mark_or_a_colour_each():
    curves = {"one": [(0, 0), (1, 1)], "two": [(0, 1), (1, 0)]}
    plain = chart(curves, 30, 6, unicode=True)
    assert "\x1b" not in "".join(plain) and any("*" in line for line in plain) and any("o" in line for line in plain)
    assert plain[-2].split() == ["*", "one"] and plain[-1].split() == ["o", "two"]
    coloured = "".join(chart(curves, 30, 6, unicode=True, colours=True))
    assert "\x1b[36m" in coloured and "\x1b[33m" in coloured and "*" not in coloured


def test_a_lost_part_is_faint_and_lies_under_the_curve():
    kept, lost = [(0, 4.0), (5, 2.0), (9, 0.0)], [(5, 2.0), (9, 4.0)]
    for unicode, faint, strong in ((True, "·", "⠁"), (False, ".", "*")):
        *drawn, _, legend = chart({"a": kept}, 30, 6, lost={"a": [lost]}, unicode=unicode)
        assert legend.split()[:2] == [faint, "lost:"]
        side = "".join(line.partition("│" if unicode else "|")[2][16:] for line in drawn[1:3])
        assert faint in side and strong not in side, "the newer attempt is not there"
        *drawn, _, legend = chart({"a": kept}, 30, 6, lost={"a": [kept]}, unicode=unicode)
        assert not [line for line in drawn if faint in line.partition("│" if unicode else "|")[2]], "it is covered"
    assert "\x1b[36m·" in "".join(chart({"a": kept}, 30, 6, lost={"a": [lost]}, unicode=True, colours=True))


@pytest.mark.parametrize("width", [30, 60, 100])
def test_no_line_is_longer_than_the_terminal(width):
    curve = [(n * 1000, math.exp(-n / 50) * 1e-4) for n in range(500)]
    assert max(map(len, chart({"a": curve}, width, 12, unicode=True))) <= width


def test_what_is_no_number_is_left_out():
    assert chart({"a": [(0, math.nan), (1, math.inf)]}, 40, 5) == ["no finite values"]
    assert "1e" not in "".join(chart({"a": [(0, 1.0), (1, math.inf), (2, 2.0)]}, 40, 5))


# what a loss can be when it explodes: a distance that is not a number, one that is nearly none, and none at all
EXTREMES = [
    [1.7e308, -1.7e308] * 3,
    [5e-324, 0.0, 5e-324],
    [1.7e308, math.nan, math.inf, -math.inf, 1.7e308, 1.0],
    [-1.7e308, -1.6e308],
]


@pytest.mark.parametrize("values", EXTREMES)
def test_numbers_of_any_size_are_drawn(values):
    assert set(sparkline(values, 9, unicode=True)) <= set("▁▂▃▄▅▆▇█") and sparkline(values, 9)
    for unicode in (False, True):
        lines = chart({"a": list(enumerate(values)), "b": [(0, 1.0)]}, 40, 5, unicode=unicode)
        assert max(map(len, lines)) <= 40 and "nan" not in "".join(lines) and "inf" not in "".join(lines)
    assert sparkline(EXTREMES[0], 9, unicode=True) == "█▁█▁█▁"
    drawn = chart({"a": list(enumerate(EXTREMES[0]))}, 40, 5, unicode=False)
    assert "1.7e308 |*" in drawn[0] and "-1.7e308 |" in drawn[4] and "*" in drawn[4]
    assert len(chart({"a": [(-1.7e308, 0), (1.7e308, 1)]}, 40, 5, unicode=False)) == 6


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.031, "0.031"), (2.5, "2.5"), (0, "0"), (12_000, "12k"), (1_200_000, "1.2M"), (3.1e-5, "3.1e-5"),
        (9999, "9999"), (9999.4, "9999"), (9999.6, "10k"), (999_499, "999k"), (999_500, "1M"), (999_999, "1M"),
        (5_000_000, "5M"), (999_999_999, "1G"), (5e12, "5T"), (9.999e14, "1e15"), (1.7e308, "1.7e308"),
        (math.inf, "inf"), (math.nan, "nan"),
    ],
)  # fmt: skip
def test_numbers_are_short(value, text):
    assert format_short(value) == text and (
        not math.isfinite(value) or format_short(-value) == "-" * (value != 0) + text
    )


def test_values_that_are_not_finite_are_marked_on_the_axis():
    curve = [(0, 2.0), (1, 1.0), (2, math.nan), (3, math.nan)]
    *_, lowest, _, legend = chart({"a": curve}, 20, 4, unicode=False)
    assert lowest.endswith("x") and legend.split()[:2] == ["x", "values"]
    assert "not finite" not in "".join(chart({"a": curve[:2]}, 20, 4, unicode=False))
