"""A failure of the corpus as a run in a history, with its log where an attached run has it."""

from __future__ import annotations

from pathlib import Path

from cloudtrain.backends.api import Plan
from cloudtrain.events import Event, State, Status
from cloudtrain.history.store import Store
from tests.diagnosis.entries import Entry

AT = "2026-01-01T00:00:00.000000Z"
START = "20260101T000000.000000Z-0000"


def stored(store: Store, folder: Path, name: str, entry: Entry) -> str:
    """Write a failure into a history and its log below a folder; return the run's id."""
    run_id = f"{name}-260101-000000-abcd"
    uri = str(folder / run_id)
    manifest = {"argv": ["train.py"], "nodes": 1, "processes_per_node": 1, "max_runtime_s": 60, "secrets": {}}
    bundle = {"sha256": "0" * 64, "files": 1, "size_bytes": 1}
    plan = Plan("local", run_id, 1, {}, bundle, manifest, {"name": name})
    for seq, (node, rank, text) in enumerate(entry.log):
        piece = Path(uri) / "logs" / plan.attempt_id / f"node-{node}" / START / "00000000"
        piece.parent.mkdir(parents=True, exist_ok=True)
        with piece.open("ab") as file:
            file.write(f"{seq} {rank} 2026-01-01T00:00:00.{seq:06}Z {text}\n".encode("utf-8", "surrogateescape"))
    record = Path(uri) / "history" / plan.attempt_id / START / "run.json"
    record.parent.mkdir(parents=True)
    record.write_text(f'{{"version": 1, "run_id": "{run_id}", "attempt": 1, "state": "{entry.end["state"]}"}}')
    store.attach(plan, f"attached:{plan.attempt_id}@{uri}", AT, uri, {})
    told = {name: entry.end[name] for name in ("by", "failed_rank") if entry.end[name] is not None}
    store.record(plan.attempt_id, events=[Event(plan.attempt_id, 0, 0, AT, "result", told)] if told else [])
    status = Status(State[entry.end["state"]], entry.end["exit_code"], entry.end["reason"] or "", AT, AT)
    store.overwrite_status(plan.attempt_id, status)
    return run_id
