"""A run of another machine is resumed with the job and the source that its output has: those, or nothing is sent."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import cloudtrain
from cloudtrain.errors import BadRequest
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from cloudtrain.testing.memory import MemoryBackend
from tests.runs.test_attach_all import record

sys.path.insert(0, str(Path(__file__).parents[2] / "entrypoints"))
from launcher.output import source as packed  # noqa: E402

START = "20261120T101500.000000Z-x"


@pytest.fixture
def left(memory, job, source: Path, tmp_path: Path):
    """Return the run that a failed attempt has left in its output, whose submitter is gone: its id, and its folder."""
    given = job.replace(output=str(tmp_path / "out"), env={"A": "b"}, hyperparameters={"lr": 0.1})
    plan = Submitter("memory", home=tmp_path / "gone", watch=False).submit(given).attempts[0].plan
    MemoryBackend.attempts.clear()
    folder = tmp_path / "out" / plan.run_id
    about = {"backend": "memory", "job": plan.job, "bundle": plan.bundle}
    failed = {"final": True, "platform": "memory", "manifest": plan.manifest, "about": about}
    path = folder / "history" / plan.attempt_id / START / "run.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(record(plan.run_id, "FAILED", **failed))
    archive = folder / packed.name_of(about)
    archive.parent.mkdir()
    archive.write_bytes(packed.pack(str(source)))
    return plan, folder, path, archive


def attach(folder: Path, tmp_path: Path) -> Run:
    run = cloudtrain.attach(str(folder), tmp_path / "mine")
    run.watch = False
    return run


def test_it_is_sent_as_it_was_and_becomes_one_of_this_history(left, tmp_path: Path):
    plan, folder, _, _ = left
    run, asked = attach(folder, tmp_path), list[str]()
    run.resume(target="memory", confirm=asked.append)
    assert asked == [
        f"{plan.run_id} was submitted from another machine: its job and source from {folder} run on memory"
    ]
    assert list(MemoryBackend.attempts) == [f"{plan.run_id}-a2"] and run.record.attached is None
    sent = run.attempts[1].plan
    assert sent.bundle["source_sha256"] == plan.bundle["source_sha256"]
    assert sent.manifest["argv"] == plan.manifest["argv"] and sent.manifest["output"] == plan.manifest["output"]
    assert sent.job["env"] == {"A": "b"}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("absent", "has no source of"),
        ("damaged", "cannot be used: the archive is damaged"),
        ("other", "cannot be used: the archive does not have the same files"),
        ("no job", "its record has no job, or it is a copy"),
    ],
)
def test_without_its_source_nothing_is_sent(left, source: Path, tmp_path: Path, kind: str, expected: str):
    _, folder, path, archive = left
    if kind == "absent":
        archive.unlink()
    elif kind == "damaged":
        archive.write_bytes(b"\x1f\x8b no archive")
    elif kind == "other":
        (source / "train.py").write_text("print('evil')\n")
        archive.write_bytes(packed.pack(str(source)))
    else:
        written: dict[str, Any] = json.loads(path.read_text())
        written["about"].pop("job")
        path.write_text(json.dumps(written))
    run = attach(folder, tmp_path)
    with pytest.raises(BadRequest, match=expected):
        run.resume(target="memory")
    assert not MemoryBackend.attempts and len(run.attempts) == 1 and run.record.attached
