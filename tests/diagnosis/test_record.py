"""A run's verdict from its own log and end: judged once, kept, and shown without what a job could do with it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from cloudtrain.backends.api import Plan
from cloudtrain.diagnosis import record as verdict_record
from cloudtrain.events import Event, LogLine, State, Status
from cloudtrain.history.records import AttemptRecord
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import Process
from cloudtrain.report import notify

TOKEN = "hf_" + "aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY3z"  # of the right form, and nobody's
FAILED = Status(State.FAILED, 1, "rank 1 exited with code 1", "2026-01-01T00:00:00Z", "2026-01-01T00:00:09Z")


@pytest.fixture
def attempt(home) -> tuple[Store, AttemptRecord]:
    """An attempt of two ranks whose launcher says that rank 1 failed first."""
    store = Store(home)
    manifest = {"secrets": {}, "nodes": 1, "processes_per_node": 2, "argv": ["train.py"]}
    plan = Plan("local", "tiny-1", 1, {}, {"sha256": "0", "files": 1}, manifest, {})
    store.intend(plan, identity="i", owner=Process.here())
    result = Event("tiny-1-a1", 0, 99, "2026-01-01T00:00:09Z", "result", {"by": "script", "failed_rank": 1})
    store.record("tiny-1-a1", status=FAILED, events=[result])
    store.set_status("tiny-1", FAILED)
    return store, store.attempts("tiny-1")[-1]


def lines(text: str) -> list[LogLine]:
    texts = ["Traceback (most recent call last):", '  File "train.py", line 1, in <module>', "    run()", text]
    return [LogLine("2026-01-01T00:00:08Z", 0, 1, 20 + seq, line, "") for seq, line in enumerate(texts)]


def test_it_is_judged_once_and_kept(attempt):
    store, record = attempt
    assert verdict_record.load_verdict(store, record) is None
    verdict = verdict_record.judge_attempt(store, record, FAILED, lines("MemoryError"))
    assert (verdict.label, verdict.rank, verdict.node, verdict.seq) == ("host-memory", 1, 0, 23)
    assert verdict_record.judge_attempt(store, record, FAILED, lines("KeyError: 1")).label == "script-error"
    assert verdict_record.load_verdict(store, record) == verdict, "the first one stays"
    assert notify.message(store, "tiny-1", "tiny-1-a1", "failure")["text"].endswith(
        "; probably out of memory on the machine (rank 1)"
    )


def test_a_verdict_of_another_version_is_none(attempt):
    store, record = attempt
    store.record(
        record.attempt_id,
        events=[Event(record.attempt_id, verdict_record.NODE, 0, "", verdict_record.KIND, {"old": 1})],
    )
    assert verdict_record.load_verdict(store, record) is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("MemoryError: \x1b[2J\x1b]0;title\x07a\x9b31mb\x08\u2028c\u202ed", "MemoryError: a31mbcd"),
        (f"MemoryError: {TOKEN}", "(line hidden: it seems to contain a credential)"),
    ],
)
def test_a_hostile_line_is_shown_as_text_and_a_credential_not_at_all(attempt, text, shown):
    store, record = attempt
    verdict = verdict_record.judge_attempt(store, record, FAILED, lines(text))
    assert (verdict.label, verdict.deciding) == ("host-memory", shown)
    assert TOKEN not in json.dumps([event.data for event in store.events("tiny-1")])


def test_a_hostile_place_is_shown_as_text(attempt):
    store, record = attempt
    log = lines("KeyError: 1")
    log[1] = log[1]._replace(text='  File "/run/source/\x1b]0;title\x07rows\u202e.py", line 7, in <module>')
    assert verdict_record.judge_attempt(store, record, FAILED, log).raised == "rows.py, line 7"
    assert "\\u202e" not in json.dumps([event.data for event in store.events("tiny-1")])


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("sagemaker", "raise resources.disk_gb, or keep"),
        ("vertex", "raise resources.disk_gb, or keep"),
        ("kubernetes", "the size of the volume that is full"),
        ("slurm", "your quota of the shared folder"),
        ("ssh", "free space on that machine"),
        ("local", "free space on this computer (df -h)"),
    ],
)
def test_a_full_disk_has_a_fix_that_its_place_offers(attempt, backend, words):
    store, record = attempt
    record = replace(record, plan=replace(record.plan, backend=backend))
    full = lines("OSError: [Errno 28] No space left on device")
    verdict = verdict_record.judge_attempt(store, record, FAILED, full)
    assert verdict.label == "disk-full" and words in verdict.change
    assert ("disk_gb" in verdict.change) == (backend in ("sagemaker", "vertex", "kubernetes"))


@pytest.mark.parametrize("backend", ["kubernetes", "slurm", "ssh", "local"])
def test_too_little_memory_has_a_fix_that_its_place_offers(attempt, backend):
    store, record = attempt
    record = replace(record, plan=replace(record.plan, backend=backend))
    verdict = verdict_record.judge_attempt(store, record, FAILED, lines("MemoryError"))
    assert verdict.label == "host-memory" and "data loader" not in verdict.change
    assert ("resources.memory" in verdict.change) == (backend in ("kubernetes", "slurm"))


@pytest.mark.parametrize(
    ("files", "entry", "change"),
    [
        (
            ["tools/train.py", "nets/__init__.py"],
            "tools/train.py",
            "entrypoint: -m tools.train, or set PYTHONPATH: . in env",
        ),
        (
            ["tools/train.py", "nets.py"],
            "tools/train.py",
            "nets.py is in the source: start the script with entrypoint: -m",
        ),
        (["train.py", "src/nets/a.py"], "train.py", "src/nets/a.py is in the source: set PYTHONPATH: src in env"),
        (["train.py", "src/other.py"], "train.py", "add the package to requirements.txt"),
    ],
)
def test_a_missing_module_of_the_source_is_found_by_its_path(attempt, tmp_path, files, entry, change):
    store, record = attempt
    for name in files:
        (tmp_path / "job" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "job" / name).write_text("")
    job = {"source": str(tmp_path / "job"), "entrypoint": entry}
    record = replace(record, plan=replace(record.plan, job=job))
    verdict = verdict_record.judge_attempt(store, record, FAILED, lines("ModuleNotFoundError: No module named 'nets'"))
    assert verdict.label == "missing-module" and change in verdict.change
