"""What lies at a URI was written by somebody: whatever it holds, it is read as a run, or refused in one sentence."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cloudtrain import events
from cloudtrain.backends import output_log
from cloudtrain.backends.api import Plan
from cloudtrain.backends.attached.run import AttachedRun
from cloudtrain.backends.store.files import bounded
from cloudtrain.backends.store.open import opened
from cloudtrain.cli.view import runs
from cloudtrain.errors import BadRequest, CloudtrainError
from cloudtrain.events import State
from cloudtrain.runs.attach import attach
from cloudtrain.testing.clock import VirtualClock

RUN, ATTEMPT = "evil-261120-101500-ab3d", "evil-261120-101500-ab3d-a1"
START = "20261120T101501.123456Z-1f3a"
AT = "2026-11-20T10:15:01.123456Z"
EVENT = '::cloudtrain::{"kind": "metric", "step": 1, "loss": 2.5}'
RECORD: dict[str, Any] = {
    "version": 1,
    "run_id": RUN,
    "attempt": 1,
    "start": START,
    "state": "FAILED",
    "exit_code": 3,
    "reason": "rank 0 exited with code 3",
    "by": "script",
    "failed_rank": 0,
    "started_at": AT,
    "ended_at": "2026-11-20T10:16:01.123456Z",
    "updated_at": "2026-11-20T10:16:01.123456Z",
    "platform": "local",
    "manifest": {"argv": ["train.py"], "nodes": 1, "processes_per_node": 1, "gpus_per_node": 0, "max_runtime_s": 60},
    "about": {
        "backend": "local",
        "job": {"name": "evil", "source": "/src", "entrypoint": "train.py", "output": "/out"},
        "bundle": {"sha256": "ab" * 32, "size_bytes": 10, "files": 1, "commit": "c0ffee", "dirty": True},
        "patch": "diff --git a/x b/x\n",
        "left_out": ["y: it is not text"],
    },
}
WORDS: list[Any] = [
    None,
    [],
    {},
    True,
    -1,
    10**400,
    1e308,
    "\x1b]0;title\x07x",
    "x" * 100_000,
    [["\x1b[2J"]],
    {"a": {"\x00": 1}},
]


def written(top: Path, record: Any = RECORD, log: bytes = b"", *, start: str = START, attempt: str = ATTEMPT) -> str:
    place = top / "history" / attempt / start
    place.mkdir(parents=True, exist_ok=True)
    (place / "run.json").write_bytes(record if isinstance(record, bytes) else json.dumps(record).encode())
    if log:
        logs = top / "logs" / attempt / "node-0" / start
        logs.mkdir(parents=True, exist_ok=True)
        (logs / "00000000").write_bytes(log)
    return str(top)


def line(seq: int, text: str, rank: int = 0) -> bytes:
    return f"{seq} {rank} {AT} {text}\n".encode()


def test_a_whole_one_is_read(tmp_path: Path):
    run = attach(written(tmp_path / "out", log=line(0, "hello") + line(1, EVENT)), tmp_path / "home")
    shown = runs.shown_json(run)
    assert (shown["state"], shown["exit_code"], shown["created_at"]) == ("FAILED", 3, "2026-11-20T10:15:00.000000Z")
    assert (shown["provenance"]["commit"], shown["provenance"]["text"]) == ("c0ffee", "diff --git a/x b/x\n")
    assert [(row.step, row.name, row.value) for row in run.metrics()] == [(1, "loss", 2.5)]
    assert [each.text for each in run.logs()] == ["hello"]


def test_when_an_attempt_began_is_told_to_the_microsecond(tmp_path: Path):
    """What the attempt before it wrote in that very second is not taken for its own."""
    again = {**RECORD, "attempt": 2}
    written(tmp_path, again, start="20261120T101600.700001Z-x", attempt=f"{RUN}-a2")
    written(tmp_path, again, start="20261120T101600.900000Z-y", attempt=f"{RUN}-a2")
    (attempt,) = AttachedRun(str(tmp_path)).attempts()
    assert attempt.created_at == "2026-11-20T10:16:00.700001Z"


def changed() -> list[tuple[str, Any]]:
    """Return (name, record) for every field, and every field of a field, with every word in its place."""
    found = []
    for number, word in enumerate(WORDS):
        for name, value in RECORD.items():
            found.append((f"{name}-{number}", {**RECORD, name: word}))
            if isinstance(value, dict):
                found += [(f"{name}.{inner}-{number}", {**RECORD, name: {**value, inner: word}}) for inner in value]
                found += [
                    (
                        f"job.{inner}-{number}",
                        {**RECORD, "about": {**RECORD["about"], "job": {**value["job"], inner: word}}},
                    )
                    for inner in ("name", "output", "labels", "options", "target", "secrets")
                    if name == "about"
                ]
    return found


def test_whatever_a_field_holds_nothing_breaks(tmp_path: Path):
    read = 0
    for name, record in changed():
        try:
            (attempt,) = AttachedRun(written(tmp_path / "out", record)).attempts()
        except CloudtrainError as error:
            assert error.message and not name.startswith(("about", "manifest", "state", "reason")), name
            continue
        read += 1
        text = attempt.plan.to_json() + json.dumps([attempt.provenance, attempt.created_at, str(attempt.status)])
        assert "\\u001b" not in text and "\\u0000" not in text and len(text) < 2_000_000, name
        assert attempt.plan.attempt_id == ATTEMPT and Plan.from_json(attempt.plan.to_json()) == attempt.plan
    assert read > 150


def test_whatever_all_fields_hold_it_is_shown(tmp_path: Path):
    for number, word in enumerate(WORDS):
        record = {name: value if name in ("version", "run_id", "attempt") else word for name, value in RECORD.items()}
        run = attach(written(tmp_path / str(number), record, line(0, "x")), tmp_path / "home" / str(number))
        shown = json.dumps(runs.shown_json(run), ensure_ascii=False)
        assert "\x1b" not in shown and "\x00" not in shown and len(shown) < 2_000_000
        assert run.run_id == RUN and run.record.attached == str(tmp_path / str(number))


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (b"", "not a run history that"),
        (b"{", "not a run history that"),
        (b"[" * 100_000, "not a run history that"),
        (b'{"version": ' + b"9" * 5000 + b"}", "not a run history that"),
        (b" " * (5 << 20), "has more than 4,194,304 bytes"),
        ({**RECORD, "version": 2}, "newer cloudtrain"),
        ({**RECORD, "run_id": "../../escape"}, "not a run history that"),
        ({**RECORD, "attempt": 2}, "not a run history that"),
    ],
)
def test_a_record_that_is_none_is_refused(tmp_path: Path, record: Any, said: str):
    with pytest.raises(CloudtrainError, match=said):
        attach(written(tmp_path / "out", record), tmp_path / "home")
    assert not (tmp_path / "home" / "history.sqlite3").exists() or attach_nothing(tmp_path / "home")


def attach_nothing(home: Path) -> bool:
    from cloudtrain.history.store import Store

    return Store(home).runs() == []


def test_lines_that_are_none_are_left_out(tmp_path: Path):
    zeros = "0" * 400
    huge = events.format("metric", {"step": 0, "loss": 0, "fine": 2.0}).replace(":0,", f":1{zeros},")
    log = b"".join(
        [
            b"no line\n", b"\xff\xfe\x00\n", b"99999999999999999999 0 " + AT.encode() + b" x\n", b"1 0 yesterday x\n",
            b"1 -5 " + AT.encode() + b" x\n", line(1, "\x1b[31mred"), line(2, huge),
            line(3, '::cloudtrain::{"kind": "state", "state": {"a": [[[]]]}}', -1), line(4, "x" * 70_000), b"5 0 " + AT.encode(),
        ]
    )  # fmt: skip
    run = attach(written(tmp_path / "out", log=log), tmp_path / "home")
    lines = list(run.logs(raw=True))
    assert [each.seq for each in lines] == [1, 2, 3, 4] and max(len(each.text) for each in lines) == 70_000
    assert ("fine", 0, 2.0) in {(row.name, row.step, row.value) for row in run.metrics()}


def test_a_runs_folder_that_is_a_link_is_refused_with_what_to_do(tmp_path: Path):
    written(tmp_path / "run")
    (tmp_path / "latest").symlink_to("run")
    with pytest.raises(CloudtrainError, match="latest is a link, not a folder") as caught:
        AttachedRun(str(tmp_path / "latest")).attempts()
    assert caught.value.hint == "if you trust it, give the folder that the link leads to"
    assert AttachedRun(str(tmp_path / "run")).attempts()


def test_names_and_links_that_lead_elsewhere_are_not_followed(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "00000000").write_bytes(line(0, "not yours"))
    (secret / "run.json").write_text(json.dumps({**RECORD, "reason": "not yours"}))
    top = Path(written(tmp_path / "out", log=line(0, "hello")))
    logs = top / "logs" / ATTEMPT
    (logs / "node-0" / "20261121T000000.000000Z-aaaa").symlink_to(secret)
    (logs / "node-1" / START).mkdir(parents=True)
    (logs / "node-1" / START / "00000000").symlink_to(secret / "00000000")
    (logs / "node-00" / START).mkdir(parents=True)
    (logs / "node-00" / START / "00000000").write_bytes(line(0, "another name"))
    (top / "history" / ATTEMPT / "20261122T000000.000000Z-bbbb").symlink_to(secret)
    (top / "model").mkdir()
    for name, target in {"out": "/etc/passwd", "up": "../../secret/run.json", "in": "weights"}.items():
        (top / "model" / name).symlink_to(target)
    (top / "model" / "weights").write_text("12345")
    (top / "outputs").symlink_to(secret)
    run = attach(str(top), tmp_path / "home")
    assert [each.text for each in run.logs()] == ["hello"]
    assert run.record.status.reason == "rank 0 exited with code 3"
    got = run.fetch(tmp_path / "got")
    found = {path.relative_to(got).as_posix() for path in got.rglob("*") if not path.name.startswith(".")}
    assert found == {"model", "model/weights", "model/in"}
    assert os.readlink(got / "model" / "in") == "weights"


def test_expressions_that_could_take_for_ever_are_not_used(tmp_path: Path):
    metrics = {
        "bad": "(a+)+$",
        "worse": "((a|b)*c?)*d",
        "back": r"(a+)\1",
        "loss": "loss=([0-9.e+-]+)",
        "named": "(?P<value>[0-9.]+) s",
    }
    record = {**RECORD, "about": {**RECORD["about"], "job": {**RECORD["about"]["job"], "metrics": metrics}}}
    run = attach(written(tmp_path / "out", record, line(0, "a" * 5000) + line(1, "loss=2.5")), tmp_path / "home")
    assert [(row.name, row.value) for row in run.metrics()] == [("loss", 2.5)]
    assert set(run.record.job["metrics"]) == {"loss", "named"}


def test_two_runs_in_one_place_are_refused(tmp_path: Path):
    written(tmp_path / "out")
    other = "other-261120-101500-ab3d"
    written(tmp_path / "out", {**RECORD, "run_id": other}, attempt=f"{other}-a1")
    with pytest.raises(BadRequest, match="more than one run"):
        attach(str(tmp_path / "out"), tmp_path / "home")


def test_starts_of_one_attempt_follow_one_another(tmp_path: Path):
    later = "20261120T111501.123456Z-2222"
    top = written(tmp_path / "out", {**RECORD, "state": "RUNNING"}, line(0, "a") + line(1, "b"))
    written(tmp_path / "out", {**RECORD, "reason": "the second"}, line(0, "c"), start=later)
    run = attach(top, tmp_path / "home")
    assert run.record.status.reason == "the second"
    assert [(each.seq, each.text) for each in run.logs()] == [(0, "a"), (1, "b"), (output_log.STARTS, "c")]


def test_a_gap_in_a_log_is_waited_for_and_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    top = Path(written(tmp_path / "out", log=line(0, "a")))
    pieces = top / "logs" / ATTEMPT / "node-0" / START
    (pieces / "00000002").write_bytes(line(2, "c"))
    shared = AttachedRun(str(top))
    shared.attempts()
    assert [each.text for each in shared.lines(ATTEMPT)] == ["a"]
    (pieces / "00000001").write_bytes(line(1, "b"))
    assert [each.text for each in shared.lines(ATTEMPT)] == ["a", "b", "c"]
    monkeypatch.setattr(output_log, "MOST_PIECE", len(line(0, "a")) + 1)
    (pieces / "00000001").write_bytes(line(1, "long"))
    assert [each.text for each in shared.lines(ATTEMPT)] == ["a"]


def test_a_line_without_an_end_is_read_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    top = Path(written(tmp_path / "out", log=line(0, "a")))
    for number in range(1, 9):
        (top / "logs" / ATTEMPT / "node-0" / START / f"{number:08d}").write_bytes(b"x" * 90)
    monkeypatch.setattr(output_log, "MOST_PIECE", 100)
    files, read = opened(str(top)), []
    monkeypatch.setattr(files, "read", lambda name, most: (read.append(name), b"x" * 90)[1])
    assert list(output_log.log_lines(files, f"logs/{ATTEMPT}")) == []
    assert len(read) == 2 and "has a line of more than 100 bytes" in caplog.text


def test_what_arrives_too_slowly_is_not_read():
    clock = VirtualClock(0.0)

    def drip():
        while True:
            clock.sleep(1)
            yield b"x"

    with pytest.raises(CloudtrainError, match="arrives too slowly: 61 bytes in 61 s"):
        bounded(drip(), 1 << 20, "s3://bucket/run.json", clock)


def test_who_is_silent_for_long_is_lost_and_may_come_back(tmp_path: Path):
    def stamp(ago: timedelta) -> str:
        return (datetime.now(UTC) - ago).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    alive = {**RECORD, "state": "RUNNING", "exit_code": None, "reason": "", "ended_at": None}
    top = written(tmp_path / "out", {**alive, "updated_at": stamp(timedelta(minutes=5))})
    assert attach(top, tmp_path / "home").state is State.RUNNING
    written(tmp_path / "out", {**alive, "updated_at": stamp(timedelta(hours=3))})
    lost = attach(top, tmp_path / "home")
    assert lost.record.status.state is State.LOST and "for the last time" in lost.record.status.reason
    written(tmp_path / "out", {**alive, "updated_at": stamp(timedelta(0))})
    assert attach(top, tmp_path / "home").record.status.state is State.RUNNING
    written(tmp_path / "out", {**RECORD, "attempt": 2}, attempt=f"{RUN}-a2")
    both = attach(top, tmp_path / "home")
    assert [attempt.status.state for attempt in both.attempts] == [State.LOST, State.FAILED]
    assert both.record.status.state is State.FAILED


def test_a_folder_that_cannot_be_read_is_said_so(tmp_path: Path):
    with pytest.raises(CloudtrainError):
        attach(str(tmp_path / "nowhere"), tmp_path / "home")
