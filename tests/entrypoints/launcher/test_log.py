"""Lines: every one, once, in order, whatever the reads look like; no secret among them."""

from __future__ import annotations

import errno
import os
import re
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launcher.log import MAX_LINE, KeptLog, Log, Splitter, cut
from launcher.sink import Sink

from tests.entrypoints.launching import Attempt


def split(data: bytes, cuts: list[int] | None = None, *secrets: str) -> list[bytes]:
    """Return the lines of data that is read in pieces."""
    log = Log(os.open(os.devnull, os.O_WRONLY))
    log.masks.hide(*secrets)
    splitter = Splitter(log)
    bounds = sorted({0, len(data), *(at % (len(data) + 1) for at in cuts or ())})
    lines = [line for start, end in zip(bounds, bounds[1:], strict=False) for line in splitter.feed(data[start:end])]
    return lines + splitter.end()


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"a", [b"a"]),
        (b"a\n", [b"a"]),
        (b"a\n\n b \n", [b"a", b"", b" b "]),
        (b"a\r\nb\rc\r", [b"a", b"b", b"c"]),
        (b"10%\r50%\r100%\n", [b"10%", b"50%", b"100%"]),
        (b"\n", [b""]),
        (b"\xff\xfe ok\n", [b"\\xff\\xfe ok"]),
        ("ü \u2028 \x85 \x0b\n".encode(), ["ü \u2028 \x85 \x0b".encode()]),
        (b"\0\n", [b"\0"]),
        (b"\r\r\n\n", [b"", b"", b""]),
    ],
)
def test_what_a_line_is(data: bytes, lines: list[bytes]):
    assert split(data) == lines
    assert split(data, list(range(len(data)))) == lines


@settings(max_examples=300, deadline=None)
@given(
    data=st.lists(
        st.sampled_from([b"a", b"\n", b"\r", b"\r\n", "ü☃".encode(), b"\xff", b"secret", b"sec", b"ret", b"x" * 70000])
    ).map(b"".join),
    cuts=st.lists(st.integers(0, 200000)),
)
def test_reads_do_not_show_in_the_lines(data: bytes, cuts: list[int]):
    whole = split(data)
    plain = re.sub(rb"\r\n?", b"\n", data)
    assert b"".join(whole) == plain.replace(b"\n", b"").decode("utf-8", "backslashreplace").encode()
    if len(data) < MAX_LINE:
        assert split(data, cuts) == whole
    assert b"".join(split(data, cuts)) == b"".join(whole)
    assert all(len(line) <= MAX_LINE for line in split(data, cuts))
    assert b"secret" not in b"\n".join(split(data, cuts, "secret"))


def test_a_long_line_is_cut_between_characters():
    line = "☃".encode() * 50000
    pieces = cut(line)
    assert b"".join(pieces) == line and len(pieces) == 3
    for piece in (*pieces, *split(line + b"\n", [1000, 70001, 99999])):
        assert len(piece) <= MAX_LINE
        piece.decode()


@settings(max_examples=200, deadline=None)
@given(before=st.integers(0, 2 * MAX_LINE), cuts=st.lists(st.integers(0, 3 * MAX_LINE)))
def test_a_secret_is_masked_wherever_it_is_cut(before: int, cuts: list[int]):
    data = b"x" * before + b"hunter2-hunter2" + b"y" * 10 + b"\n"
    assert (
        b"".join(split(data, [*cuts, before + 3, before + 9], "hunter2-hunter2")) == b"x" * before + b"***" + b"y" * 10
    )


def test_secrets_of_several_lines_and_in_quotes_are_masked():
    key = "-----BEGIN KEY-----\nMIIEow\r\nabcd\n}\n"
    lines = split(
        key.encode() + b"{'k': " + repr(key).encode() + b"}\n" + b'say "MIIEow" } fine\n', [5, 20], key, 'q"uo\\te'
    )
    assert not [line for line in lines if b"MIIEow" in line or b"BEGIN" in line or b"abcd" in line]
    assert lines[-1] == b'say "***" } fine'
    assert split(b'"q\\"uo\\\\te" q"uo\\te\n', [], 'q"uo\\te') == [b'"***" ***']


def test_the_longer_of_two_secrets_wins():
    assert split(b"tokentoken2 token\n", [], "token", "tokentoken2") == [b"*** ***"]


def test_the_log_goes_on_where_a_killed_writer_left_it(tmp_path: Path):
    log = Log.in_folder(str(tmp_path))
    log.lines(0, [b"a", b"b"])
    with open(tmp_path / "log", "ab") as file:
        file.write(b"2 0 2026-11-20T11:14:25.123456Z torn")
    again = Log.in_folder(str(tmp_path))
    again.say("after")
    lines = (tmp_path / "log").read_text().split("\n")
    assert [line.split(" ")[0] for line in lines[:-1]] == ["0", "1", "2", "3"]
    assert lines[3].endswith(" after") and lines[4] == ""
    again.close()
    again.say("never")
    assert "never" not in (tmp_path / "log").read_text()


def test_a_copy_stays_open_while_another_thread_writes_a_line_to_it(monkeypatch: pytest.MonkeyPatch):
    """Its number may be another file's as soon as it is closed."""
    log = KeptLog(os.open(os.devnull, os.O_WRONLY))
    put, forgets, written = Sink.put, threading.Thread(target=log.forget), []

    def slowly(sink: Sink, *line: object) -> None:
        if not written:
            forgets.start()
            forgets.join(0.1)
        put(sink, *line)
        written.append(os.fstat(sink.descriptor))

    monkeypatch.setattr(Sink, "put", slowly)
    log.say("a line")
    forgets.join()
    assert len(written) == 2 and log.copy is None


def test_a_full_disk_loses_nothing_that_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = Log.in_folder(str(tmp_path))
    real, full = os.write, True

    def write(descriptor: int, data: bytes) -> int:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[:7])

    monkeypatch.setattr(os, "write", write)
    log.lines(0, [b"one", b"two"])
    full = False
    log.flush()
    log.lines(0, [b"three"])
    monkeypatch.undo()
    assert [line.split(" ")[3] for line in (tmp_path / "log").read_text().splitlines()] == ["one", "two", "three"]


def test_two_hundred_thousand_lines_arrive_in_order(tmp_path: Path):
    script = (
        "import os\nfor n in range(100000): print(n, 'ü' if n % 1000 == 0 else 'loss 0.123')\nprint('last', end='')"
    )
    with Attempt(tmp_path, script, processes=2) as attempt:
        assert attempt.run() == [0]
        lines = attempt.lines()
        assert [line[0] for line in lines] == list(range(len(lines)))
        for rank in (0, 1):
            texts = [text for _, of, _, text in lines if of == rank]
            assert texts == [f"{n} {'ü' if n % 1000 == 0 else 'loss 0.123'}" for n in range(100000)] + ["last"]
        assert sorted(line[2] for line in lines) == [line[2] for line in lines]


def test_both_outputs_share_one_order(tmp_path: Path):
    script = "import sys\nfor n in range(2000): print(n, file=(sys.stdout, sys.stderr)[n % 2])"
    with Attempt(tmp_path, script) as attempt:
        assert attempt.run() == [0]
        assert attempt.texts(0) == [str(n) for n in range(2000)]


def test_secrets_reach_the_ranks_and_no_line(tmp_path: Path):
    secret = "pa$$ word\nline two of it"
    script = """
import os, sys, time
value = os.environ["TOKEN"]
assert value == "pa$$ word\\nline two of it"
for letter in value: sys.stdout.write(letter); sys.stdout.flush(); time.sleep(0.002)
print(); print(repr(value)); print("url https://user:" + value.split("\\n")[0] + "@host")
print("event", {"a": value}, file=sys.stderr)
raise SystemExit("failed with " + value)
"""
    with Attempt(tmp_path, script, secrets={"TOKEN": ["env:NAME"]}, stdin={"secrets": {"env:NAME": secret}}) as attempt:
        assert attempt.run() == [1]
        raw = (attempt.folders[0] / "log").read_text() + (attempt.folders[0] / "status.json").read_text()
        assert "pa$$ word" not in raw and "line two" not in raw and raw.count("***") >= 7
        assert "url https://user:***@host" in attempt.texts(0)


def test_a_reason_holds_no_secret(tmp_path: Path):
    inputs = {"train": {"uri": "/absent/hunter2hunter2/data", "mode": "copy"}}
    secrets = {"TOKEN": ["env:T"]}
    with Attempt(tmp_path, secrets=secrets, inputs=inputs, stdin={"secrets": {"env:T": "hunter2hunter2"}}) as attempt:
        assert attempt.run() == [78]
        assert attempt.status()["reason"] == "the input train does not exist on this node: /absent/***/data"
        assert "hunter2" not in (attempt.folders[0] / "log").read_text()


def test_the_supervisors_own_environment_holds_no_secret(tmp_path: Path):
    with Attempt(
        tmp_path,
        "print('up', flush=True); import time; time.sleep(600)",
        secrets={"TOKEN": ["env:T"]},
        stdin={"secrets": {"env:T": "hunter2hunter2"}},
    ) as attempt:
        attempt.start().heard("up")
        for pid in (attempt.guard(), attempt.supervisor()):
            assert b"hunter2" not in Path(f"/proc/{pid}/environ").read_bytes()
            assert b"hunter2" not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_name_of_several_lines_is_no_event(tmp_path: Path):
    log = Log(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT))
    log.say('keep: a\n::cloudtrain::{"kind":"result"} cannot be read')
    log.event("state", state="RUNNING")
    texts = [line.split(" ", 3)[3] for line in (tmp_path / "log").read_text().splitlines()]
    assert [text.startswith("::cloudtrain::") for text in texts] == [False, False, True]
