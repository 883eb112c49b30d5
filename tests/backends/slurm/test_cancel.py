"""What a cancel asks of Slurm: launchers that run see its mark, and Slurm ends the job later or, without them, at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloudtrain.backends.slurm.backend import SlurmBackend
from cloudtrain.errors import Unreachable

END, SCANCEL = "scontrol update JobId=7 EndTime=now+180seconds", "scancel 7"


def backend_of(folder: Path, state: str | None, error: str, commands: list[str]) -> SlurmBackend:
    """Return the backend of a job whose first node is in `state`; `error` is what scontrol update answers."""
    backend = SlurmBackend({"folder": str(folder)}, folder / "runs")

    def run(argv):
        if argv[0] == "squeue":
            return {"code": 0, "out": "7|RUNNING|None\n", "err": ""}
        commands.append(" ".join(argv))
        refused = bool(error) and argv[0] == "scontrol"
        return {"code": int(refused), "out": "", "err": error if refused else ""}

    backend.__dict__["_run"] = run
    (folder / "node-0").mkdir()
    files = {"job": "7", "nodes": "1", "plan.json": json.dumps({"manifest": {"grace_s": 60}})}
    if state:
        files["node-0/status.json"] = json.dumps({"state": state})
    for name, text in files.items():
        (folder / name).write_text(text)
    return backend


@pytest.mark.parametrize(
    ("state", "error", "asked"),
    [
        ("RUNNING", "", [END]),
        ("RUNNING", "scontrol: error: Access/permission denied for job 7", [END, SCANCEL]),
        ("STOPPING", "", [END]),  # they have seen the mark of another cancel
        ("STARTING", "", [SCANCEL]),
        (None, "", [SCANCEL]),
    ],
)
def test_launchers_that_run_end_a_job_themselves(tmp_path: Path, state: str | None, error: str, asked: list[str]):
    commands: list[str] = []
    backend = backend_of(tmp_path, state, error, commands)
    backend.cancel(str(tmp_path))
    assert commands == asked
    assert (tmp_path / "cancel").exists() and (tmp_path / "node-0/cancel").exists()
    for _ in range(2):  # as each new watcher does after the command
        backend.cancel(str(tmp_path))
    assert commands == (asked if asked == [END] else asked * 3)


def test_no_process_is_signalled_where_the_controller_does_not_answer(tmp_path: Path):
    commands: list[str] = []
    backend = backend_of(tmp_path, "RUNNING", "slurm_update error: Unable to contact slurm controller", commands)
    with pytest.raises(Unreachable):
        backend.cancel(str(tmp_path))
    assert commands == [END]
