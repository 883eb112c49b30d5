"""What a backend does not say of itself is taken for what is true of a platform in a cloud."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain.backends import registry
from cloudtrain.errors import BadJob
from cloudtrain.job.job import Job
from cloudtrain.runs.planning.plan import Planner
from cloudtrain.testing.memory import MemoryBackend


def test_a_path_is_not_taken_for_one_of_this_machine_on_a_backend_that_does_not_say_so(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(registry, "BUILT_IN", dict(registry.BUILT_IN))
    MemoryBackend.install()
    (tmp_path / "train.py").write_text("")
    job = Job(
        name="mine", source=str(tmp_path), entrypoint="train.py", target="memory", audit=True, output="/data/runs"
    )
    Planner().plan(job)
    monkeypatch.delattr(MemoryBackend, "output_is_here")
    with pytest.raises(BadJob, match="is on the machines of memory"):
        Planner().plan(job)
