"""What reaches the terminal, and how fast."""

from __future__ import annotations

import io
import json
import re
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudtrain.cli.view import columns
from cloudtrain.cli.view.terminal import BATCH, LineWriter, clean, print_coloured_json, print_pairs, print_table
from tests.conftest import wait_for

OBEYED = [chr(code) for code in [*range(9), *range(10, 32), *range(127, 160)]]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("plain", "plain"),
        ("ü 漢字 🙂\ttab", "ü 漢字 🙂\ttab"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[2J\x1b[Hclear", "clear"),
        ("\x1b]0;title\x07rest", "rest"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bPq#0\x1b\\sixel", "sixel"),
        ("\x9b31mC1", "C1"),
        ("\x9d0;title\x9cC1 OSC", "C1 OSC"),
        ("\x1b(Bcharset", "charset"),
        ("\x1bcreset", "reset"),
        ("over\rwritten\b\b", "overwritten"),
        ("a\nb\x0bc\x0cd", "abcd"),
        ("cut \x1b[", "cut "),
        ("cut \x1b", "cut "),
        ("unended \x1b]0;title", "unended 0;title"),
        ("50\xa0%", "50\xa0%"),
    ],
)
def test_clean(text, left):
    assert clean(text) == left


@given(st.text(alphabet=st.one_of(st.sampled_from("\x1b\x9b\x9d[]();?0m\\\x07 a"), st.characters()), max_size=40))
def test_clean_leaves_nothing_that_a_terminal_obeys(text):
    left = clean(text)
    assert not set(left) & set(OBEYED)
    assert clean(left) == left


SHOWN_AS_ESCAPES = "[\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff]"


@given(st.text())
def test_clean_keeps_what_is_harmless(text):
    if not set(text) & {*OBEYED, "\u2028", "\u2029"} and not re.search(SHOWN_AS_ESCAPES, text):
        assert clean(text) == text


def test_lines_are_whole_in_order_and_once():
    out = io.StringIO()
    count = BATCH * 3 + 7
    with LineWriter(out) as lines:
        for number in range(count):
            lines.add(str(number))
    assert out.getvalue().splitlines() == [str(number) for number in range(count)]


def test_a_line_is_written_while_the_next_is_awaited():
    out = io.StringIO()
    with LineWriter(out) as lines:
        for number in range(5):
            lines.add(f"line {number}")
            wait_for(lambda: f"line {number}\n" in out.getvalue(), "the line")


def test_many_lines_are_few_writes():
    class Counted(io.StringIO):
        writes = 0

        def write(self, text: str) -> int:
            self.writes += 1
            return super().write(text)

    out = Counted()
    with LineWriter(out) as lines:
        for number in range(BATCH * 10):
            lines.add("x")
    assert len(out.getvalue()) == BATCH * 20
    assert out.writes <= BATCH  # of 20,000 lines


@pytest.mark.parametrize("count", [1, BATCH + 1])
def test_a_reader_that_left_is_told_to_the_writer(count):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    before = set(threading.enumerate())  # other tests of this process have some of their own
    with pytest.raises(BrokenPipeError):
        with LineWriter(Closed()) as lines:
            for number in range(count):
                lines.add("x")
    assert set(threading.enumerate()) <= before


def test_a_table_that_is_piped_is_aligned_and_plain(capsys):
    print_table(("name", "size"), [("a\x1b[31m", "1"), ("long name", "1000")], right=("size",))
    assert capsys.readouterr().out == "name       size\na             1\nlong name  1000\n"


def test_pairs_leave_out_what_is_empty(capsys):
    print_pairs([("one", "1"), ("none", ""), ("lines", "a\nb")])
    assert capsys.readouterr().out == "  one    1\n  lines  a\n         b\n"


@pytest.mark.parametrize(
    ("text", "width", "found"),
    [
        ("short", 8, ["short"]),
        ("one two three four", 9, ["one two", "three", "four"]),
        ("a/path/without/a/blank", 10, ["a/path/wit", "hout/a/bla", "nk"]),
        ("損失の値", 5, ["損失", "の値"]),
        ("e\u0301" * 3, 3, ["e\u0301" * 3]),
        ("", 8, [""]),
    ],
)
def test_long_cells_are_folded_as_a_terminal_counts(text, width, found):
    assert columns.fold(text, width) == found
    assert all(columns.display_width(line) <= width for line in found)


@given(st.lists(st.tuples(st.integers(0, 200), st.booleans()), min_size=1, max_size=8), st.integers(1, 300))
def test_columns_are_narrowed_only_as_far_as_it_needs(told, total):
    widths, whole = [width for width, _ in told], [keep for _, keep in told]
    found = columns.fit_widths(widths, whole, total)
    needed = sum(found) + columns.GAP * (len(found) - 1)
    for before, after, keep in zip(widths, found, whole, strict=True):
        assert after == before or (not keep and columns.MIN_WIDTH <= after < before)
    if needed > total:  # nothing more can be taken
        assert all(keep or width <= columns.MIN_WIDTH for width, keep in zip(found, whole, strict=True))
    elif found != widths:
        assert needed == total


@pytest.mark.parametrize("colour", [True, False])
def test_json_on_a_terminal(monkeypatch, capsys, colour):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "" if colour else "1")
    told = {'a " key': ["te\x9bxt: 1", -1.5e-7, True, None], "deep": {"x": 'no "y": 2'}}
    print_coloured_json(json.dumps(told))
    shown = capsys.readouterr().out
    assert ("\x1b[36m" in shown) == colour and "\x9b" not in shown
    assert json.loads(re.sub(r"\x1b\[\d+m", "", shown)) == told


def test_direction_marks_and_zero_width_characters_are_shown_as_escapes():
    assert clean("a\u202eb\u200bc\ufeff\u2066d") == "a\\u202eb\\u200bc\\ufeff\\u2066d"
    assert clean("né\t日本") == "né\t日本"
