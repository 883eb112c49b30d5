"""What a cancel asks of Slurm: launchers that run see its mark, and Slurm ends the job later or, without them, at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloudtrain.backends.slurm.backend import SlurmBackend


@pytest.mark.parametrize(
    ("state", "refused", "asked"),
    [
        ("RUNNING", "", ["scontrol update JobId=7 EndTime=now+180seconds"]),
        ("RUNNING", "scontrol", ["scontrol update JobId=7 EndTime=now+180seconds", "scancel 7"]),
        ("STARTING", "", ["scancel 7"]),
        (None, "", ["scancel 7"]),
    ],
)
def test_launchers_that_run_end_a_job_themselves(tmp_path: Path, state: str | None, refused: str, asked: list[str]):
    backend, commands = SlurmBackend({"folder": str(tmp_path)}, tmp_path / "runs"), []

    def run(argv):
        if argv[0] == "squeue":
            return {"code": 0, "out": "7|RUNNING|None\n", "err": ""}
        commands.append(" ".join(argv))
        return {"code": int(argv[0] == refused), "out": "", "err": ""}

    backend.__dict__["_run"] = run
    (tmp_path / "node-0").mkdir()
    files = {"job": "7", "nodes": "1", "plan.json": json.dumps({"manifest": {"grace_s": 60}})}
    if state:
        files["node-0/status.json"] = json.dumps({"state": state})
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    backend.cancel(str(tmp_path))
    assert commands == asked
    assert (tmp_path / "cancel").exists() and (tmp_path / "node-0/cancel").exists()
    backend.cancel(str(tmp_path))  # as a watcher does after the command
    assert commands == (asked if len(asked) == 1 and state == "RUNNING" else asked * 2)
