"""The audit log: a line before each submit, cancel and rm, which nothing changes afterwards."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from cloudtrain.backends import registry
from cloudtrain.cli import main
from cloudtrain.errors import DiskError
from cloudtrain.events import State
from cloudtrain.history import audit
from cloudtrain.runs.submit import Submitter
from cloudtrain.testing.memory import MemoryBackend
from tests.runs.steps import newest, watch


@pytest.fixture
def submitter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submitter:
    monkeypatch.setattr(registry, "BUILT_IN", dict(registry.BUILT_IN))
    monkeypatch.setattr("cloudtrain.runs.watcher.start", lambda *_, **__: None)
    MemoryBackend.install()
    (tmp_path / "train.py").write_text("print(1)\n")
    return Submitter("memory", watch=False)


def job(tmp_path: Path, **more) -> dict:
    return {"name": "mine", "source": str(tmp_path), "entrypoint": "train.py", **more}


def test_submits_retries_cancels_and_deletions_are_logged(submitter: Submitter, tmp_path: Path, home: Path, capsys):
    run = submitter.submit(job(tmp_path, retry={"max_attempts": 2}, env={"A": "hunter2"}, args=["--key", "hunter3"]))
    MemoryBackend.finish(newest(run), State.LOST, 1)
    watch(run)
    run.cancel()
    watch(run)
    assert main(["rm", run.run_id, "--yes"]) == 0
    capsys.readouterr()
    assert main(["audit", run.run_id[:6], "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["what"], row.get("attempt")) for row in rows] == [
        ("submit", 1),
        ("submit", 2),
        ("cancel", None),
        ("rm", None),
    ]
    assert {row["run"] for row in rows} == {run.run_id} and all(
        row["who"].endswith(f"@{socket.gethostname()}") for row in rows
    )
    text = (home / audit.FILE).read_text()
    assert "hunter" not in text and (home / audit.FILE).stat().st_mode & 0o077 == 0
    assert main(["audit"]) == 0
    assert "cancel" in capsys.readouterr().out
    assert main(["audit", "other"]) == 0


def test_an_exec_is_logged_without_its_command(submitter: Submitter, tmp_path: Path, home: Path):
    from cloudtrain.runs.inside import Inside

    run = submitter.submit(job(tmp_path))
    Inside(run, run.attempts[-1], None).record("exec", command=["cat", "hunter2"], on=1)  # type: ignore[arg-type]
    row = list(audit.read(home, run.run_id))[-1]
    assert (row["what"], row["attempt"], row["target"], row["detail"]) == ("exec", 1, "memory", "node 1")
    assert "hunter2" not in (home / audit.FILE).read_text()


def test_the_line_is_there_before_the_platform_is_asked(submitter: Submitter, tmp_path: Path, home: Path, monkeypatch):
    seen = []
    real = MemoryBackend.submit
    monkeypatch.setattr(MemoryBackend, "submit", lambda *given: (seen.extend(audit.read(home)), real(*given))[1])
    submitter.submit(job(tmp_path))
    assert [row["what"] for row in seen] == ["submit"]


def test_what_cannot_be_logged_is_not_sent(submitter: Submitter, tmp_path: Path, home: Path):
    home.mkdir(parents=True, exist_ok=True)
    (home / audit.FILE).mkdir()
    with pytest.raises(DiskError, match=r"audit\.jsonl cannot be written"):
        submitter.submit(job(tmp_path))
    assert not MemoryBackend.attempts


def test_lines_are_only_appended_and_a_torn_one_is_left_out(home: Path):
    home.mkdir(parents=True)
    audit.append(home, "submit", "a-1", attempt=1)
    before = (home / audit.FILE).read_bytes()
    with open(home / audit.FILE, "ab") as file:
        file.write(b'{"at": "2026\n[1]\n')
    audit.append(home, "cancel", "a-1")
    assert (home / audit.FILE).read_bytes().startswith(before)
    assert [row["what"] for row in audit.read(home)] == ["submit", "cancel"]
    if os.getuid():
        assert oct((home / audit.FILE).stat().st_mode)[-3:] == "600"
