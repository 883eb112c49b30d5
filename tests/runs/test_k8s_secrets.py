"""A secret that only a Kubernetes cluster can read is refused elsewhere, before anything is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cloudtrain.errors import BadJob
from cloudtrain.job.job import Job
from cloudtrain.runs.planning.plan import Planner


@pytest.mark.parametrize(
    "sources, refused",
    [("k8s:hub/token", True), (["k8s:hub/token", "aws-secretsmanager:hub"], False), ("aws-secretsmanager:hub", False)],
)
def test_a_secret_of_a_cluster_needs_one(home: Path, tmp_path: Path, sources: Any, refused: bool):
    (tmp_path / "train.py").write_text("print(1)\n")
    job = Job(source=str(tmp_path), entrypoint="train.py", secrets={"HF_TOKEN": sources})
    if refused:
        with pytest.raises(BadJob, match="does not offer secrets of a Kubernetes cluster"):
            Planner("local").plan(job)
    else:
        Planner("local").plan(job)
