"""Why a run failed, from its last lines."""

from __future__ import annotations

import pytest

from cloudtrain.cli.view.log import KEPT_LINES, LastLines
from cloudtrain.events import LogLine

TRACE = ["Traceback (most recent call last):", '  File "x.py", line 1, in <module>', "    f()", "ValueError: boom"]


def told(*lines: tuple[int, int, str], attempt: int = 1) -> LastLines:
    memory = LastLines()
    tell(memory, *lines, attempt=attempt)
    return memory


def tell(memory: LastLines, *lines: tuple[int, int, str], attempt: int = 1) -> None:
    for seq, (node, rank, text) in enumerate(lines):
        memory.add(LogLine(f"2026-11-20T00:00:{seq:02}Z", node, rank, seq, text, f"{attempt}/{seq}"))


def test_the_traceback_of_the_rank_that_is_known_to_have_failed():
    lines = [(0, 0, text) for text in TRACE] + [
        (1, 1, "before"),
        *((1, 1, text) for text in TRACE[:-1]),
        (1, 1, "KeyError: 'x'"),
    ]
    assert told(*lines).failure_lines(1) == ("node 1, rank 1", [*TRACE[:-1], "KeyError: 'x'"])


def test_without_that_the_rank_whose_traceback_came_first():
    lines = [(1, 1, "hello"), *((1, 1, text) for text in TRACE), *((0, 0, text) for text in TRACE), (0, 0, "later")]
    assert told(*lines).failure_lines(None) == ("node 1, rank 1", TRACE)


def test_a_chain_of_exceptions_begins_with_its_cause():
    chain = [
        *TRACE,
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        *TRACE[:-1],
        "KeyError: 1",
    ]
    assert told((0, 0, "before"), *((0, 0, text) for text in chain)).failure_lines(0)[1] == chain


def test_two_tracebacks_that_are_no_chain_show_the_last():
    lines = [(0, 0, text) for text in [*TRACE, "went on", "and on", "and on", "and on", *TRACE[:-1], "KeyError: 1"]]
    assert told(*lines).failure_lines(0)[1] == [*TRACE[:-1], "KeyError: 1"]


def test_no_traceback_shows_the_last_lines():
    lines = [(0, 0, f"line {number}") for number in range(100)]
    assert told(*lines).failure_lines(0)[1] == [f"line {number}" for number in range(80, 100)]


def test_a_long_traceback_keeps_its_end():
    lines = [
        (0, 0, text)
        for text in [TRACE[0], *(f"  frame {number}" for number in range(2 * KEPT_LINES)), "RecursionError"]
    ]
    whose, shown = told(*lines).failure_lines(0)
    assert shown[-1] == "RecursionError" and len(shown) <= KEPT_LINES


@pytest.mark.parametrize("rank", [None, 0, 7])
def test_a_launcher_that_refused_is_heard_when_no_rank_has_spoken(rank):
    memory = told((0, -1, "the input is missing"), (0, -1, '::cloudtrain::{"kind": "state", "state": "FAILED"}'))
    assert memory.failure_lines(rank) == ("the launcher of node 0", ["the input is missing"])


def test_a_silent_run():
    assert LastLines().failure_lines(0) == ("", [])


def test_a_new_attempt_is_remembered_alone():
    memory = told((0, 0, "old"), (0, 1, "old"))
    tell(memory, (0, 0, "new"), attempt=2)
    assert memory.failure_lines(None) == ("node 0, rank 0", ["new"])
    assert memory.single_rank
