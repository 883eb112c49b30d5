from __future__ import annotations

import json
import threading
from itertools import islice

import pytest

from cloudtrain.events import ENDED, State
from cloudtrain.nodes import directory, supervisor
from cloudtrain.nodes import logs as node_logs
from cloudtrain.nodes.process import Process
from tests.conftest import wait_for


def line(seq, text, second=0.0, rank=0):
    return f"{seq} {rank} 2026-01-01T00:00:{second:09.6f}Z {text}\n".encode()


@pytest.fixture
def logs(tmp_path):
    return [tmp_path / "n0" / "log", tmp_path / "n1" / "log"]


def write(log, *lines):
    log.parent.mkdir(exist_ok=True)
    with log.open("ab") as file:
        file.write(b"".join(lines))


def test_nothing_yet(logs):
    assert list(node_logs.tail(logs)) == []


def test_lines_of_two_nodes_by_time(logs):
    write(logs[0], line(0, "a", 1), line(1, "c", 3))
    write(logs[1], line(0, "b", 2), line(1, "d", 4))
    found = list(node_logs.tail(logs))
    assert [(x.node, x.seq, x.text) for x in found] == [(0, 0, "a"), (1, 0, "b"), (0, 1, "c"), (1, 1, "d")]


def test_every_cursor_continues_behind_its_line(logs):
    for n in range(50):
        write(logs[n % 2], line(n // 2, f"text {n}", n / 10))
    found = list(node_logs.tail(logs))
    assert len(found) == 50
    for at, seen in enumerate(found):
        assert list(node_logs.tail(logs, after=seen.cursor)) == found[at + 1 :]


def test_text_may_hold_anything_but_a_newline(logs):
    texts = ["", " ", "  two  ", "a b c", "\r", "\x00", "ü 漢", "::cloudtrain::{}"]
    write(logs[0], *(line(n, text) for n, text in enumerate(texts)))
    assert [x.text for x in node_logs.tail(logs[:1])] == texts


def test_bytes_that_are_no_text_are_shown_as_escapes(logs):
    write(logs[0], b"0 0 2026-01-01T00:00:00.000000Z \xff\n")
    assert [x.text for x in node_logs.tail(logs[:1])] == ["\\xff"]


def test_a_line_that_is_being_written_waits(logs):
    write(logs[0], line(0, "whole"), line(1, "torn")[:-3])
    (seen,) = node_logs.tail(logs[:1])
    write(logs[0], line(1, "torn")[-3:])
    assert [x.text for x in node_logs.tail(logs[:1], after=seen.cursor)] == ["torn"]


def test_lines_longer_than_a_chunk(logs, monkeypatch):
    monkeypatch.setattr(node_logs, "CHUNK_BYTES", 7)
    write(logs[0], line(0, "x" * 100), line(1, "y"))
    found = list(node_logs.tail(logs[:1]))
    assert [len(x.text) for x in found] == [100, 1]
    assert list(node_logs.tail(logs[:1], after=found[0].cursor)) == found[1:]


def test_following_goes_on_until_the_end(logs):
    over = threading.Event()
    write(logs[0], line(0, "first"))
    stream = node_logs.tail(logs, follow=True, ended=over.is_set)
    assert next(stream).text == "first"
    write(logs[1], line(0, "second", 1))
    assert next(stream).text == "second"
    write(logs[0], line(1, "last", 2))
    over.set()
    assert [x.text for x in stream] == ["last"]


def test_what_is_written_just_before_the_end_is_seen(logs):
    write(logs[0])

    def ended():
        write(logs[0], line(0, "at the very end"))
        return True

    assert [x.text for x in node_logs.tail(logs, follow=True, ended=ended)] == ["at the very end"]


def test_a_million_lines_need_no_memory(logs):
    write(logs[0], *(line(n, "text") for n in range(20_000)))
    assert [x.seq for x in islice(node_logs.tail(logs[:1]), 3)] == [0, 1, 2]


# -- states -----------------------------------------------------------------------------------------------------------


def status(folder, state, **fields):
    folder.mkdir(exist_ok=True)
    me = Process.here()
    said = {"state": state, "pid": me.pid, "start_ticks": int(me.started), "boot_id": me.boot_id, **fields}
    (folder / "status.json").write_text(json.dumps(said))


def test_a_live_supervisor_is_believed(tmp_path):
    status(tmp_path / "n", "RUNNING", started_at="t")
    assert directory.node_status(tmp_path / "n").state is State.RUNNING


@pytest.mark.parametrize("wrong", [{"pid": 2**22 - 1}, {"start_ticks": 1}, {"boot_id": "other"}, {"pid": None}])
def test_a_dead_supervisor_without_a_last_word_is_lost(tmp_path, wrong):
    status(tmp_path / "n", "RUNNING", **wrong)
    assert directory.node_status(tmp_path / "n").state is State.LOST


def test_a_dead_supervisors_last_word_counts(tmp_path):
    status(tmp_path / "n", "FAILED", pid=2**22 - 1, exit_code=7, reason="why")
    found = directory.node_status(tmp_path / "n")
    assert (found.state, found.exit_code, found.reason) == (State.FAILED, 7, "why")


@pytest.mark.parametrize("junk", ["", "{", "[]", '{"state": "NONE"}', '{"state": 1}'])
def test_junk_in_the_status_is_no_status(tmp_path, junk):
    (tmp_path / "n").mkdir()
    (tmp_path / "n" / "status.json").write_text(junk)
    assert supervisor.read_status(tmp_path / "n") is None


def test_only_a_loss_that_was_reported_has_a_known_end(tmp_path):
    status(tmp_path / "hung", "LOST", started_at="1", ended_at="3")
    status(tmp_path / "died", "RUNNING", pid=2**22 - 1, started_at="1", at="2")
    status(tmp_path / "done", "SUCCEEDED", started_at="1", ended_at="4")
    hung, died, done = [(None, directory.node_status(tmp_path / name)) for name in ("hung", "died", "done")]
    assert (hung[1].event, died[1].event, done[1].event) == (ENDED, "", "")
    known = directory.merge_statuses([hung, done])
    assert (known.state, known.event, known.started_at, known.ended_at) == (State.LOST, ENDED, "1", "4")
    assert directory.merge_statuses([hung, died]).event == "", "what the supervisor of one left may have run on"
    assert directory.merge_statuses([done]).event == ""


def merged(*found):
    from cloudtrain.events import Status

    return directory.merge_statuses(
        [({"failed_at": at}, Status(State[name], code, name)) if name else (None, None) for name, code, at in found]
    )


@pytest.mark.parametrize(
    ("found", "state", "code"),
    [
        ([(None, None, None)], State.QUEUED, None),
        ([("STARTING", None, None), (None, None, None)], State.STARTING, None),
        ([("RUNNING", None, None), ("RUNNING", None, None)], State.RUNNING, None),
        ([("SUCCEEDED", 0, None), ("RUNNING", None, None)], State.RUNNING, None),
        ([("FAILED", 3, "1"), ("RUNNING", None, None)], State.STOPPING, None),
        ([("SUCCEEDED", 0, None), ("SUCCEEDED", 0, None)], State.SUCCEEDED, 0),
        ([("SUCCEEDED", 0, None), ("FAILED", 4, "1")], State.FAILED, 4),
        ([("FAILED", 4, "2"), ("FAILED", 5, "1")], State.FAILED, 5),
        ([("LOST", None, None), ("FAILED", 5, "1")], State.FAILED, 5),
        ([("LOST", None, None), ("SUCCEEDED", 0, None)], State.LOST, None),
        ([("CANCELLED", 75, None), ("FAILED", 5, "1")], State.CANCELLED, 75),
    ],
)
def test_an_attempts_state_from_its_nodes(found, state, code):
    result = merged(*found)
    assert result.state is state
    if state.final:
        assert result.exit_code == code


# -- starting ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def node(tmp_path):
    (tmp_path / "node-0" / "source").mkdir(parents=True)
    return tmp_path / "node-0"


def test_a_supervisor_is_started_once(node, tmp_path):
    import sys

    argv = [
        sys.executable,
        "-c",
        "import sys; open('../ran', 'a').write(sys.stdin.read() + ';'); open('../status.json', 'w').write('{}')",
    ]
    assert directory.start(node, argv, {}, {"secrets": {}})
    directory.start(node, argv, {}, {"secrets": {}})
    wait_for(lambda: (node / "status.json").exists())
    assert not directory.start(node, argv, {}, {"secrets": {}})
    assert (node / "ran").read_text() == '{"secrets": {}};'


def test_a_supervisor_that_cannot_start_is_lost_with_its_last_word(node):
    assert directory.start(node, ["/no/such/python"], {}, {})
    found = wait_for(lambda: (s := directory.node_status(node)) and s.state.final and s)
    assert found.state is State.LOST and "/no/such/python" in found.reason


def test_a_cancelled_node_is_not_started(node):
    (node / "cancel").touch()
    assert not directory.start(node, ["/bin/true"], {}, {})
    assert directory.node_status(node).state is State.CANCELLED


def test_a_line_without_an_end_is_left_out_and_the_next_one_has_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr(node_logs, "CHUNK_BYTES", 300)
    monkeypatch.setattr(node_logs, "MOST_LINE", 1000)
    first, last = b"0 0 2026-11-20T10:15:01Z a\n", b"1 0 2026-11-20T10:15:02Z b\n"
    (tmp_path / "log").write_bytes(first + b"7 0 2026-11-20T10:15:01Z " + b"x" * 5500 + b"\n" + last)
    (one, other) = node_logs.tail([tmp_path / "log"])
    assert (one.text, other.text) == ("a", "b")
    assert (int(one.cursor), int(other.cursor)) == (len(first), (tmp_path / "log").stat().st_size)
