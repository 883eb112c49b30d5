"""Whether a run's next attempt has to go where the files of an earlier one are."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.ssh.backend import SshBackend
from cloudtrain.events import Event, State, Status
from cloudtrain.history.store import Store
from cloudtrain.job.job import Job
from cloudtrain.nodes.process import Process
from cloudtrain.runs.sending import retry
from cloudtrain.source.bundle import Bundle

OPTIONS = {"hosts": [{"address": "10.0.0.1"}, {"address": "10.0.0.2"}], "lost_after_s": 600.0}
BEGAN = datetime(2026, 11, 26, 10, tzinfo=UTC)


def at(seconds: float) -> str:
    return (BEGAN + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def usage(seconds: float, **more: Any) -> Event:
    return Event("lost-a1", 0, int(seconds), at(seconds), "usage", {"cpu_percent": 1.0, **more})


CHECKPOINT = Event("lost-a1", 0, 5, at(60), "checkpoint", {"step": 5, "path": "/checkpoints/5"})
WRITTEN = Event("lost-a1", 0, 5, at(60), "checkpoint", {"written": "last.pt"})


@pytest.mark.parametrize(
    ("events", "ended_s", "changes", "newest"),
    [
        ([usage(3600, files=False)], 4210, {}, 0),
        ([], 610, {}, 0),  # lost before the first report
        ([usage(3600, files=True)], 4210, {}, 1),
        ([usage(3600)], 4210, {}, 1),  # by an older launcher
        ([CHECKPOINT, usage(3600, files=False)], 4210, {}, 1),
        ([WRITTEN, usage(3600, files=False)], 4210, {}, 1),
        ([usage(3600, files=False)], 9000, {}, 1),  # it ran on unseen: the client slept
        ([usage(3600, files=False)], 4210, {"checkpoint": {"required": True}}, 1),
        ([usage(3600, files=True)], 4210, {"output": "/shared/runs"}, None),
    ],
)
def test_the_next_attempt_is_bound_to_a_machine_only_by_files(
    events: list[Event], ended_s: float, changes: dict[str, Any], newest: int | None, home: Path, tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/train.py").touch()
    job = Job.from_dict({"name": "lost", "source": str(tmp_path / "source"), "entrypoint": "train.py", **changes})
    bundle, backend, store = (
        Bundle.make(tmp_path / "source", tmp_path / "bundles"),
        SshBackend(OPTIONS, home),
        Store(home),
    )
    assert store.intend(backend.plan(job, bundle, "lost"), identity="lost", owner=Process.here())
    store.accept("lost-a1", "10.0.0.1:~/.cloudtrain/runs/lost/a1")
    with store.database.write() as db:
        db.execute("UPDATE attempts SET created_at = ?", (at(0),))
    store.record("lost-a1", events=events, status=Status(State.LOST, None, "", at(0), at(ended_s)))
    plan = retry.plan_after(store, backend, backend.plan(job, bundle, "lost", 2))
    assert plan.request.get("files_of") == newest
