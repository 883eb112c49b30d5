"""Inputs that name a run: where its results are read, what is copied, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloudtrain.backends.local.backend import LocalBackend
from cloudtrain.errors import BadJob, UnknownRun
from cloudtrain.events import State, Status
from cloudtrain.history.store import Store
from cloudtrain.job.job import Job
from cloudtrain.nodes.process import Process
from cloudtrain.runs.planning.plan import Planner
from cloudtrain.runs.remove import remove
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from cloudtrain.testing.memory import MemoryBackend


@pytest.fixture
def store(home: Path) -> Store:
    return Store(home)


def ended(store: Store, job: Job, state: State = State.SUCCEEDED, **files: str) -> str:
    """Store a run of `local` that has ended without a process, with the files in its model; return its id."""
    plan = Planner("local", home=store.home).plan(job)
    store.intend(plan, identity="", owner=Process.here())
    folder = store.home / "runs" / plan.run_id
    (folder / "a1").mkdir(parents=True)
    (folder / "a1" / "request.json").write_text(json.dumps(plan.request))
    store.accept(plan.attempt_id, str(folder / "a1"))
    store.set_status(plan.run_id, Status(state))
    for name, text in files.items():
        (folder / "model").mkdir(exist_ok=True)
        (folder / "model" / name).write_text(text)
    return plan.run_id


def using(job: Job, run: str, **keys: str) -> Job:
    return job.replace(inputs={"model": {"run": run, **keys}})


def located(job: Job, target: str = "local", **options: object) -> dict[str, str]:
    found: dict[str, str] = Planner(target, **options).plan(job).job["inputs"]["model"]
    return found


def test_a_model_here_is_read_where_it_is(store, job, home):
    first = ended(store, job, config="{}")
    found = located(using(job, first[:-2]))  # a unique prefix
    with pytest.raises(BadJob, match="a job on vertex-local cannot read it there"):  # it copies from buckets alone
        located(using(job, first), "vertex-local")
    assert found["uri"] == str(home / "runs" / first / "model") and found["run"] == first and found["what"] == "model"
    assert len(found["sha256"]) == 64 and not (home / "inputs").exists()
    plan = Planner("local").plan(using(job, first))
    assert any(note.startswith(f"input model is the model of {first}: ") for note in plan.notes)
    assert plan.manifest["inputs"]["model"]["uri"] == found["uri"]


def test_the_digest_is_of_names_and_bytes(store, job):
    digests = [located(using(job, ended(store, job, **files)))["sha256"]
               for files in ({"a": "1"}, {"a": "1"}, {"a": "2"}, {"b": "1"})]  # fmt: skip
    assert digests[0] == digests[1] and len(set(digests)) == 3


def test_a_rerun_refuses_results_that_have_changed(store, job, home):
    first = ended(store, job, weights="1")
    stored = Planner("local").plan(using(job, first)).job
    assert located(Job.from_dict(stored))["sha256"] == stored["inputs"]["model"]["sha256"]
    (home / "runs" / first / "model" / "weights").write_text("2")
    with pytest.raises(BadJob, match="has changed: its sha256 was"):
        Planner("local").plan(Job.from_dict(stored))


def test_what_is_refused(store, job):
    with pytest.raises(BadJob, match="inputs.model.run.*is still QUEUED"):
        located(using(job, ended(store, job, State.QUEUED, weights="1")))
    failed = ended(store, job, State.FAILED, weights="1")
    with pytest.raises(BadJob, match="has ended FAILED, so its model may be incomplete"):
        located(using(job, failed))
    with pytest.raises(BadJob, match="has no checkpoints: there is nothing at"):
        located(using(job, failed, what="checkpoints"))
    with pytest.raises(BadJob, match="no run"):
        located(using(job, "absent"))
    with pytest.raises(UnknownRun):
        Run.find("absent")


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        ({}, "needs uri or run"),
        ({"uri": "s3://b/c", "what": "model"}, "needs run: what selects results of a run"),
        ({"run": "r", "what": "model/../x"}, "points outside the run's results"),
        ({"run": "r", "what": "log"}, "what"),
    ],
)
def test_keys_that_do_not_fit(job, item, problem):
    with pytest.raises(BadJob, match=problem):
        job.replace(inputs={"model": item})


def test_a_part_of_the_checkpoints_of_a_failed_run(store, job, home):
    first = ended(store, job, State.FAILED)
    folder = home / "runs" / first / "checkpoints" / "step-5"
    folder.mkdir(parents=True)
    (folder / "weights").write_text("1")
    assert located(using(job, first, what="checkpoints/step-5"))["uri"] == str(folder)


def test_what_another_platform_has_is_copied_once_and_removed_with_the_run(memory, submitter, job, home):
    run = submitter.submit(job)
    attempt = run.attempts[0].attempt_id
    MemoryBackend.say(attempt, "hello")
    MemoryBackend.finish(attempt, State.SUCCEEDED, 0)
    run.wait(60)
    found = located(using(job, run.run_id, what="outputs"))
    copied = home / "inputs" / run.run_id / "outputs"
    assert found["uri"] == str(copied) and (copied / "said").read_text() == "hello"
    assert located(using(job, run.run_id, what="outputs")) == found
    with pytest.raises(BadJob, match=r"is stored on memory, and a job on slurm cannot read it there"):
        located(using(job, run.run_id, what="outputs"), "slurm", folder="/shared")
    remove(run)
    assert not copied.parent.exists()


def test_a_bucket_is_read_where_it_is(store, job, monkeypatch):
    asked = []

    class Bucket:
        def __init__(self, uri: str) -> None:
            self.uri = uri

        def digest(self, below: str) -> str:
            asked.append(f"{self.uri}/{below}")
            return "f" * 64

    monkeypatch.setattr("cloudtrain.backends.attached.backend.opened", Bucket)
    first = ended(store, job.replace(output="s3://bucket/runs"))
    found = located(using(job, first))
    assert found["uri"] == f"s3://bucket/runs/{first}/model/" and found["sha256"] == "f" * 64
    assert asked == [f"s3://bucket/runs/{first}/model"]


def test_the_run_is_kept_in_provenance_and_shown(store, job, cli, monkeypatch):
    first = ended(store, job, config="{}")
    monkeypatch.setattr(LocalBackend, "submit", lambda self, plan, bundle: "/handle")
    run = Submitter("local", watch=False).submit(using(job, first))
    kept = run.record.job["inputs"]["model"]
    assert kept["run"] == first and len(kept["sha256"]) == 64
    store.set_status(run.run_id, Status(State.SUCCEEDED))
    code, output, _ = cli("show", run.run_id, "--verbose")
    assert code == 0 and f"model of {first}: " in output and kept["sha256"][:12] in output


def test_the_console_writes_the_run_and_not_what_was_found(store, job):
    from cloudtrain.console.form import lean

    first = ended(store, job, config="{}")
    data = Planner("local").plan(using(job, first)).job
    assert lean(data)["inputs"] == {"model": {"run": first, "what": "model"}}
    assert lean(job.replace(inputs={"a": "s3://b/c"}).to_dict())["inputs"] == {"a": "s3://b/c"}


def test_a_cluster_reads_what_its_run_left_in_the_folder_of_all_nodes(store, job):
    plan = Planner("slurm", home=store.home, folder="/shared").plan(job)
    store.intend(plan, identity="", owner=Process.here())
    store.accept(plan.attempt_id, str(plan.request["folder"]))
    store.set_status(plan.run_id, Status(State.SUCCEEDED))
    found = located(using(job, plan.run_id), "slurm", folder="/shared")
    assert found["uri"] == f"/shared/runs/{plan.run_id}/model" and found.get("sha256") is None
