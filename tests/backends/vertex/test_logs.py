"""Entries of a log that come in any order, late and twice, in one look or in many: every line once, in order on each node."""

from __future__ import annotations

import json
import random

import pytest

from cloudtrain.backends.vertex.logs import NUMBERS_PER_START, LogMerge, final_result
from cloudtrain.errors import BadRequest
from cloudtrain.events import MARK

BEFORE_ALL = ""  # nothing is old enough to be given up


def entry(task: str, at: float, text: str, ident: str = "") -> dict:
    stamp = f"2026-01-01T00:00:{at:09.6f}Z"
    return {
        "insertId": ident or f"{task}{at}{text[:20]}",
        "timestamp": stamp,
        "resource": {"labels": {"task_name": task}},
        "jsonPayload": {"message": text},
    }


def line(task: str, seq: int, at: float, text: str, rank: int = 0) -> dict:
    return entry(task, at, f"{seq} {rank} 2026-01-01T00:00:{at:09.6f}Z {text}")


def printed(starts: int = 1) -> list[dict]:
    """What two nodes print in so many starts."""
    lines = []
    for start in range(starts):
        for node, task in enumerate(("workerpool0-0", "workerpool1-0")):
            for seq in range(30):
                text = f"s{start} n{node} {seq}"
                if seq == 29:
                    text = MARK + json.dumps(
                        {"kind": "state", "state": "PREEMPTED" if start < starts - 1 else "SUCCEEDED"}
                    )
                lines.append(line(task, seq, start * 20 + seq // 3 * 0.5 + node * 0.1, text))
    return lines


@pytest.mark.parametrize("starts", [1, 3])
@pytest.mark.parametrize("seed", range(20))
def test_any_order_and_any_number_of_looks(starts: int, seed: int):
    draw = random.Random(seed)
    everything = printed(starts)
    arrivals = everything + draw.sample(everything, 20)
    # late by less than it takes for the next start to begin
    arrivals.sort(key=lambda item: float(item["timestamp"][17:26]) + draw.uniform(0, 4))
    merge, given = LogMerge(), []
    while arrivals:
        count = draw.randint(1, 12)
        merge.add(arrivals[:count])
        del arrivals[:count]
        given += list(merge.ready(BEFORE_ALL))
        if given and draw.random() < 0.2:
            # another process goes on from the cursor: it reads again what lies a little before
            since = float(given[-1].at[17:26]) - 10
            kept = [item for pending in merge._nodes.values() for item in pending.waiting]
            merge = LogMerge(given[-1].cursor)
            stamps = {at for at, _ in kept} | {item.at for item in given if float(item.at[17:26]) >= since}
            merge.add(item for item in everything if item["timestamp"] in stamps and item not in arrivals)
    given += list(merge.ready(BEFORE_ALL))
    for node in (0, 1):
        own = [(item.seq, item.text) for item in given if item.node == node]
        assert [seq for seq, _ in own] == [
            start * NUMBERS_PER_START + seq for start in range(starts) for seq in range(30)
        ]
    assert merge.complete(2) and not merge.complete(3)


def test_what_never_comes_is_given_up_in_its_time():
    merge = LogMerge()
    merge.add([line("workerpool0-0", seq, seq, f"{seq}") for seq in (0, 1, 3, 4)])
    assert [item.seq for item in merge.ready("2026-01-01T00:00:03.000000Z")] == [0, 1]
    assert [item.seq for item in merge.ready("2026-01-01T00:00:03.500000Z")] == [3, 4]
    merge.add([line("workerpool0-0", 2, 2, "2")])
    assert list(merge.ready("2026-01-01T00:00:09.000000Z")) == [], "it would break the order"


def test_a_start_that_begins_without_a_last_word_of_the_former():
    merge = LogMerge()
    merge.add([line("workerpool0-0", seq, seq, "a") for seq in range(3)] + [line("workerpool0-0", 0, 9, "b")])
    assert [item.seq for item in merge.ready("2026-01-01T00:00:05.000000Z")] == [0, 1, 2]
    assert [item.seq for item in merge.ready("2026-01-01T00:00:10.000000Z")] == [NUMBERS_PER_START]


def test_lines_of_the_platform_come_once_whatever_the_cursor():
    entries = [
        entry("service", 1, "pulling", "a"),
        entry("service", 1, "pulled", "b"),
        line("workerpool0-0", 0, 2, "mine"),
        entry("workerpool0-0", 3, "not a number", "c"),
    ]
    merge = LogMerge()
    merge.add(entries + entries)
    given = list(merge.ready(BEFORE_ALL))
    assert [(item.rank, item.text) for item in given] == [
        (-1, "pulling"),
        (-1, "pulled"),
        (0, "mine"),
        (-1, "not a number"),
    ]
    for cut, item in enumerate(given):
        again = LogMerge(item.cursor)
        again.add(entries)
        assert [late.text for late in again.ready(BEFORE_ALL)] == [late.text for late in given[cut + 1 :]]


def test_the_last_word_is_that_of_the_newest_start():
    def word(seq: int, at: float, code: int) -> dict:
        return line("workerpool0-0", seq, at, MARK + json.dumps({"kind": "result", "code": code}), rank=-1)

    assert final_result([word(9, 5, 75), word(9, 8, 3), line("workerpool0-0", 1, 9, "x")])["code"] == 3
    assert final_result([line("workerpool0-0", 1, 9, MARK + '{"kind":"result","code":0}', rank=0)]) is None, (
        "a script's own"
    )


@pytest.mark.parametrize("cursor", ["x", "0:1", "1:a.b.c", "+only"])
def test_no_cursor(cursor: str):
    with pytest.raises(BadRequest, match="is not a log cursor"):
        LogMerge(cursor)
