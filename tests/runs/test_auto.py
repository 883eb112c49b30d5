"""`parallelism: auto` is frozen by the plan: later attempts have the same layout, unless they ask anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain.events import State
from cloudtrain.job.job import Job
from cloudtrain.runs.run import Run
from cloudtrain.runs.sending import resume
from cloudtrain.runs.submit import Submitter
from cloudtrain.testing.memory import MemoryBackend
from tests.runs.steps import newest, watch


def test_a_plan_freezes_the_choice_and_resume_keeps_it(memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "notes.txt").write_text("x")
    submitter = Submitter("memory", watch=False)
    job = Job(name="t", trainer=True, source=str(tmp_path / "source"), parallelism="auto",
              resources={"accelerators": "A100-40GB:8"}, hyperparameters={"model": "meta-llama/Llama-3.1-8B",
              "dataset": "python-stdlib", "bf16": True, "block_size": 4096, "global_batch_size": 64})  # fmt: skip
    run: Run = submitter.submit(job, new=True)
    run.acknowledge()
    first = run.attempts[0].plan
    assert first.job["parallelism"]["strategy"] == first.manifest["parallelism"]["strategy"] == "fsdp"
    assert first.job["hyperparameters"]["per_device_train_batch_size"] == "4"
    assert any(note.startswith("parallelism auto: fsdp") for note in first.notes)
    MemoryBackend.finish(newest(run), State.FAILED, 1)
    watch(run)
    second, _, _ = resume.plan_next(run.store, run.attempts)
    assert second.manifest["argv"] == first.manifest["argv"] and second.job == first.job
    anew, _, notes = resume.plan_next(
        run.store, run.attempts, ["resources.accelerators=A100-80GB:4", "parallelism=auto"]
    )
    assert anew.manifest["parallelism"]["strategy"] == "fsdp" and any("parallelism auto" in note for note in notes)
    assert anew.manifest["argv"][anew.manifest["argv"].index("--global_batch_size") + 1] == "64"
