"""What the files of attempts say without a call of Slurm, and what a dry run of sbatch says of a job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloudtrain.backends.slurm.backend import SlurmBackend
from cloudtrain.events import State
from tests.backends.slurm.test_arrays import Cluster, bundle, plans_of

__all__ = ["bundle"]  # a fixture


def test_files_say_which_attempt_has_ended(tmp_path: Path):
    backend = SlurmBackend({"folder": str(tmp_path)}, tmp_path / "runs")
    handles = [str(tmp_path / "runs" / "r" / f"a{number}") for number in (1, 2)]
    for handle in handles:
        Path(handle, "node-0").mkdir(parents=True)
        Path(handle, "job").write_text("7")
        Path(handle, "state").write_text("STARTED 0 0 1\n")
    before = backend.marks(handles)
    assert backend.has_marks and list(before) == handles and backend.ended(handles) == {}
    Path(handles[0], "node-0", "status.json").write_text(json.dumps({"state": "FAILED", "exit_code": 3}))
    after = backend.marks(handles)
    assert [handle for handle in handles if after[handle] != before[handle]] == handles[:1]
    ends = backend.ended(handles)
    assert [(handle, end.state, end.exit_code) for handle, end in ends.items()] == [(handles[0], State.FAILED, 3)]


@pytest.mark.parametrize(("error", "said"), [("", []), ("sbatch: error: invalid account", ["invalid account"])])
def test_a_dry_run_says_why_a_job_would_not_start(bundle, tmp_path: Path, error: str, said: list[str]):  # noqa: F811
    asked: list[list[str]] = []

    def run(argv: list[str]) -> dict[str, object]:
        asked.append(argv)
        return {"code": int(bool(error)), "out": "", "err": error}

    backend = Cluster().client(tmp_path)
    backend.__dict__["_run"] = run
    problems = backend.probe(plans_of(backend, bundle)[0])
    assert [any(words in problem.message for problem in problems) for words in said] == [True] * len(said)
    assert len(problems) == len(said) and [argv[:2] for argv in asked] == [["sbatch", "--test-only"]]
