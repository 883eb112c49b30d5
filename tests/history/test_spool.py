"""The spool: what is read is what was written, from any cursor, whatever a killed writer has left behind."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from cloudtrain.events import LogLine
from cloudtrain.history import spool as spools
from cloudtrain.history.spool import Spool, SpoolTaken

BACKEND = SimpleNamespace(follow_s=1.0)


def attempt(cursor: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(run_id="mine", number=1, attempt_id="mine-a1", cursor=cursor)


def opened(home: Path, cursor: str | None = None) -> Spool:
    spool = Spool.open(home, attempt(cursor), BACKEND)
    assert spool is not None
    return spool


def make_lines(count: int, nodes: int = 1, seed: int = 1) -> list[LogLine]:
    """Lines of several nodes in any order, with cursors like those of the backends."""
    choose, offsets, seqs, lines = random.Random(seed), [0] * nodes, [0] * nodes, []
    texts = (
        "loss 1.5",
        "",
        'a "quoted" \\ text',
        "\ud800 half",
        "\x1b[1m bold \r",
        "naïve 日本",
        "x" * 300,
        "]\n[".strip(),
    )
    for _ in range(count):
        node = choose.randrange(nodes)
        offsets[node] += choose.randint(1, 99)
        lines.append(
            LogLine("2026-11-23T05:00:00Z", node, 0, seqs[node], choose.choice(texts), ",".join(map(str, offsets)))
        )
        seqs[node] += 1
    return lines


def write(spool: Spool, lines: list[LogLine], seed: int = 2) -> None:
    choose, begin = random.Random(seed), 0
    while begin < len(lines):
        end = begin + choose.randint(1, 40)
        spool.append(lines[begin:end])
        begin = end


@pytest.mark.parametrize("nodes", [1, 3, 16])
def test_lines_are_read_as_they_were_written_from_any_cursor(home, monkeypatch, nodes):
    monkeypatch.setattr(spools, "SEARCH_BYTES", 700)
    monkeypatch.setattr(spools, "CHUNK_BYTES", 333)
    lines = make_lines(400, nodes)
    spool = opened(home)
    write(spool, lines)
    assert list(spool.lines()) == lines
    for at in range(0, 400, 7):
        assert list(spool.lines(lines[at].cursor)) == lines[at + 1 :]
    assert spool.reader("of another log") is None
    assert stat.S_IMODE(spool.path.stat().st_mode) == 0o600
    assert opened(home, lines[-1].cursor).cursor == lines[-1].cursor


def test_cursors_of_many_nodes_do_not_make_the_spool_larger_than_the_log(home):
    lines = make_lines(2000, 64)
    spool = opened(home)
    spool.append(lines)
    text_bytes = sum(len(line.text) + len(line.at) for line in lines)
    assert sum(len(line.cursor) for line in lines) > 3 * text_bytes
    assert spool.path.stat().st_size < 2 * text_bytes


def test_a_reader_sees_what_is_appended_and_never_half_a_line(home):
    lines = make_lines(50, 3)
    spool = opened(home)
    spool.append(lines[:20])
    reader = spool.reader(lines[9].cursor)
    assert list(reader.read()) == lines[10:20]
    assert list(reader.read()) == []
    spool.append(lines[20:])
    whole = spool.path.read_bytes()
    seen = []
    for cut in range(whole.rfind(b"\n", 0, len(whole) // 2), len(whole) + 1, 5):
        spool.path.write_bytes(whole[:cut])
        seen += reader.read()
    spool.path.write_bytes(whole)
    assert seen + list(reader.read()) == lines[20:]


@pytest.mark.parametrize("left", [b'["2026-11-23T05:00:00Z",0,0,5,"cut of', b"\0" * 5000, b'["too","short"]\n'])
def test_what_a_killed_writer_left_of_a_line_is_cut_off(home, left):
    lines = make_lines(30, 2)
    write(opened(home), lines[:20])
    path = opened(home).path
    with path.open("ab") as file:
        file.write(left)
    again = opened(home, lines[3].cursor)
    assert again.cursor == lines[19].cursor
    again.append(lines[20:])
    assert list(again.lines()) == lines


def test_a_writer_that_lost_its_lease_writes_nothing(home):
    lines = make_lines(30)
    old = opened(home)
    old.append(lines[:10])
    new = opened(home, old.cursor)
    new.append(lines[10:20])
    with pytest.raises(SpoolTaken):
        old.append(lines[10:15])
    assert list(new.lines()) == lines[:20]


def test_no_spool_where_the_log_is_here_or_was_read_without_one(home):
    assert Spool.open(home, attempt(), SimpleNamespace(follow_s=None)) is None
    assert Spool.open(home, attempt(), SimpleNamespace(follow_s=0.0)) is None
    assert Spool.open(home, attempt("12"), BACKEND) is None
    opened(home)  # empty, though the history has read lines: it was lost
    assert Spool.open(home, attempt("12"), BACKEND) is None
    assert not Spool(home, "mine", 1).exists()


def test_who_follows_is_known_for_a_while(home):
    spool = Spool(home, "mine", 1)
    assert not spool.is_followed()
    spool.follow()
    assert spool.is_followed()
    past = spool.path.with_name("followed").stat().st_mtime - spools.FOLLOWED_S - 1
    os.utime(spool.path.with_name("followed"), (past, past))
    assert not spool.is_followed()
