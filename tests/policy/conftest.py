"""A project with a job, a policy and the backend that keeps plans in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain.backends import registry
from cloudtrain.backends.api import Facts
from cloudtrain.testing.memory import MemoryBackend


class Cloud(MemoryBackend):
    """The backend in memory, which says where its plans go."""

    name = "memory"

    def facts(self, plan) -> Facts:
        options = (plan.job.get("options") or {}).get("memory") or {}
        machine = plan.job["resources"]["instance_type"]
        return Facts(
            "1234",
            "eu-west-1",
            (machine,) if machine else (),
            (plan.job["image"] or "",),
            bool(options.get("isolate")),
            plan.requested_gpus,
        )


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(registry, "BUILT_IN", dict(registry.BUILT_IN))
    Cloud.install()
    monkeypatch.setattr("cloudtrain.runs.sending.handover.start", lambda *_, **__: None)
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("print(1)\n")
    (folder / "job.yaml").write_text("entrypoint: train.py\n")
    (folder / "cloudtrain.toml").write_text('[targets.prod]\nbackend = "memory"\n[defaults]\ntarget = "prod"\n')
    monkeypatch.chdir(folder)
    return folder
