"""Plan and submit over a backend that starts nothing: what is sent and stored, and an interrupted submit."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from cloudtrain.backends.traits import Traits
from cloudtrain.errors import BackendError, BadJob, BadRequest, UnknownBackend
from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import Process, start_time
from cloudtrain.runs.planning.plan import run_id
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from cloudtrain.testing.memory import MemoryBackend
from tests.conftest import WAIT_S
from tests.runs.steps import killed, newest, watch

pytestmark = pytest.mark.usefixtures("memory")


def test_submit_and_end(submitter, job):
    run = submitter.submit(job)
    assert run.run_id.startswith("mine-") and not run.adopted
    assert MemoryBackend.attempts[newest(run)].plan == run.attempts[0].plan
    watch(run)
    assert run.state is State.RUNNING
    MemoryBackend.finish(newest(run), State.SUCCEEDED, 0)
    assert run.wait(60).state is State.SUCCEEDED
    assert run.result(60).exit_code == 0


def test_the_plan_is_what_is_sent(submitter, job):
    plan = submitter.plan(job)
    assert submitter.store.runs() == [] and MemoryBackend.attempts == {}
    run = submitter.submit_plan(plan)
    assert run.run_id == plan.run_id
    assert MemoryBackend.attempts[plan.attempt_id].plan == plan
    again = submitter.submit_plan(plan)
    assert again.adopted and again.run_id == plan.run_id and len(MemoryBackend.attempts) == 1


def test_a_plan_of_another_source_is_refused(submitter, job, source, home):
    plan = submitter.plan(job)
    shutil.rmtree(home / "bundles")
    (source / "train.py").write_text("print(2)\n")
    with pytest.raises(BadRequest, match="source has changed"):
        submitter.submit_plan(plan)
    assert submitter.store.runs() == []


def test_labels_are_added(submitter, job, source):
    subprocess.run(["git", "init", "-q", str(source)], check=True)
    subprocess.run(["git", "-C", str(source), "add", "."], check=True)
    subprocess.run(
        ["git", "-C", str(source), "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"], check=True
    )
    labels = submitter.plan(job.replace(labels={"team": "nlp"})).job["labels"]
    assert labels["team"] == "nlp" and labels["user"] and len(labels["commit"]) == 12
    (source / "train.py").write_text("changed\n")
    assert submitter.plan(job).job["labels"]["commit"].endswith("-dirty")


def test_a_git_source_is_pinned(submitter, job, source):
    git = ["git", "-C", str(source), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "x"], ["checkout", "-q", "--detach"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    address = source.as_uri()
    plan = submitter.plan(job.replace(source=f"git+{address}@main"))
    assert plan.job["source"] == f"git+{address}@{commit}" and plan.bundle["commit"] == commit
    assert plan.bundle["source_sha256"] == submitter.plan(job).bundle["source_sha256"]
    assert submitter.submit_plan(plan).run_id == plan.run_id


def test_run_ids():
    assert run_id("a") != run_id("a")
    assert run_id("a", "key") == run_id("a", "key") != run_id("a", "other")
    assert run_id("tiny-lm", "key").startswith("tiny-lm-k") and len(run_id("tiny-lm", "key")) == len("tiny-lm-k") + 16


def test_unknown_backend_and_options_are_refused(job, source):
    with pytest.raises(UnknownBackend):
        Submitter("nowhere", watch=False).submit(job)
    with pytest.raises(BadJob, match=r"options.memory.wrong"):
        Submitter("memory", watch=False, wrong=1).submit(job)
    assert Store(Path(os.environ["CLOUDTRAIN_HOME"])).runs() == []


def test_all_problems_with_the_backend_at_once(job, monkeypatch):
    monkeypatch.setattr(MemoryBackend, "traits", Traits())
    wrong = job.replace(
        num_nodes=2, image="a/b", output="/data/runs", secrets={"T": "env:T"}, resources={"use_spot": True}
    )
    with pytest.raises(BadJob) as error:
        Submitter("memory", watch=False).submit(wrong)
    assert {problem.path for problem in error.value.problems} == {
        "num_nodes",
        "image",
        "output",
        "secrets",
        "resources.use_spot",
    }
    (spot,) = [problem for problem in error.value.problems if problem.path == "resources.use_spot"]
    assert "--set resources.use_spot=false" in spot.hint


def test_a_missing_script_is_refused(submitter, job):
    with pytest.raises(BadRequest, match="trian.py"):
        submitter.submit(job.replace(entrypoint="trian.py"))


@pytest.mark.parametrize(("sent", "accepted"), [(False, False), (True, False), (True, True)])
def test_a_killed_submit_is_adopted_by_the_next(submitter, job, dead, sent, accepted):
    name = killed(submitter, job, dead, sent=sent, accepted=accepted)
    run = submitter.submit(job)
    assert (run.run_id, run.adopted) == (name, True)
    assert list(MemoryBackend.attempts) == [f"{name}-a1"]
    assert run.attempts[0].handle == f"{name}-a1"
    run.acknowledge()
    assert submitter.submit(job).run_id != name, "what a person knows is not adopted again"


def test_new_forbids_adoption(submitter, job, dead):
    name = killed(submitter, job, dead)
    assert submitter.submit(job, new=True).run_id != name


def test_another_job_is_not_adopted_but_its_handle_is_found(submitter, job, dead):
    name = killed(submitter, job, dead, sent=True)
    run = submitter.submit(job.replace(hyperparameters={"lr": "1"}))
    assert run.run_id != name
    assert submitter.store.attempts(name)[0].handle == f"{name}-a1"


def test_a_living_submit_is_left_alone(submitter, job):
    parent = replace(Process.here(), pid=os.getppid(), started=start_time(os.getppid()))
    name = killed(submitter, job, parent, sent=False)
    run = submitter.submit(job)
    assert run.run_id != name
    assert submitter.store.attempts(name)[0].handle is None


def test_a_key_is_one_run(submitter, job):
    first = submitter.submit(job, key="nightly 1")
    first.acknowledge()
    second = submitter.submit(job, key="nightly 1")
    assert second.run_id == first.run_id == run_id("mine", "nightly 1") and second.adopted
    assert submitter.submit(job, key="nightly 2").run_id != first.run_id
    assert len(MemoryBackend.attempts) == 2


def test_a_killed_submit_with_a_key_is_finished(submitter, job, dead):
    name = killed(submitter, job, dead, key="k")
    run = submitter.submit(job, key="k")
    assert run.run_id == name and list(MemoryBackend.attempts) == [f"{name}-a1"]


def test_a_key_finds_the_run_from_an_empty_store(submitter, job, home):
    first = submitter.submit(job.replace(retry={"max_attempts": 2}), key="nightly")
    MemoryBackend.finish(newest(first), State.LOST)
    watch(first)
    handles = list(MemoryBackend.attempts)
    assert len(handles) == 2
    elsewhere = Submitter("memory", home=home / "elsewhere", watch=False)
    second = elsewhere.submit(job, key="nightly")
    assert second.run_id == first.run_id and second.adopted
    assert [attempt.handle for attempt in second.attempts] == handles == list(MemoryBackend.attempts), (
        "nothing was submitted"
    )
    assert second.attempts[0].status.state is State.LOST and second.state is State.RUNNING


def test_a_platform_that_refuses_leaves_an_intent_that_is_told(submitter, job, monkeypatch):
    def refuse(self, plan, bundle):
        raise BackendError("no quota")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryBackend, "submit", refuse)
        with pytest.raises(BackendError, match="no quota"):
            submitter.submit(job)
    (record,) = submitter.store.runs()
    assert (record.status.state, record.status.reason) == (State.FAILED, "no quota")
    assert not submitter.submit(job).adopted


def test_a_secret_that_is_nowhere_is_told_before_anything_is_stored(submitter, job, monkeypatch):
    monkeypatch.delenv("MY_TOKEN", raising=False)
    with pytest.raises(BadRequest, match="secret T: env:MY_TOKEN is not set"):
        submitter.submit(job.replace(secrets={"T": "env:MY_TOKEN"}))
    assert submitter.store.runs() == [] and MemoryBackend.attempts == {}


@pytest.mark.parametrize("in_git", [True, False])
def test_a_home_inside_the_source_is_no_part_of_it(tmp_path, in_git):
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text("print(1)\n")
    if in_git:
        subprocess.run(["git", "init", "-q", str(source)], check=True)
    submitter = Submitter(home=source / "home", watch=False)
    job = {"source": str(source), "entrypoint": "train.py"}
    planned = [submitter.plan(job).bundle for _ in range(2)]
    assert planned[0] == planned[1], "a plan packages nothing of the plan before it"
    assert (source / "home" / ".gitignore").read_text() == "*\n"
    first = submitter.submit(job, new=True)
    assert first.attempts[0].plan.bundle == planned[0]
    first.wait(WAIT_S)
    again = submitter.submit(job, new=True)
    assert again.wait(WAIT_S).state is State.SUCCEEDED
    assert [run.attempts[0].plan.bundle["files"] for run in (first, again)] == [1, 1]


def test_an_attempt_that_a_thread_sends_is_not_sent_by_another_that_looks(home, tmp_path, monkeypatch):
    """Its owner is this very process, as it is for an attempt that a watcher was interrupted in."""
    (tmp_path / "train.py").write_text("print(1)\n")
    submitter = Submitter("memory", home=home, watch=False)
    sent, seen = [], []
    really = MemoryBackend.submit

    def slow(self, plan, bundle):
        sent.append(plan.attempt_id)
        looking = threading.Thread(target=lambda: seen.append(Run(plan.run_id, Store(home), watch=False).refresh()))
        looking.start()
        looking.join(WAIT_S)
        return really(self, plan, bundle)

    monkeypatch.setattr(MemoryBackend, "submit", slow)
    run = submitter.submit({"source": str(tmp_path), "entrypoint": "train.py"})
    assert sent == [f"{run.run_id}-a1"]
    assert len(seen) == 1 and not seen[0].state.final


def test_submits_of_one_submitter_share_a_client_until_the_credentials_may_have_changed(submitter, job, monkeypatch):
    used, errors, submit = [], [], MemoryBackend.submit

    def noting(self, plan, bundle):
        used.append(self)
        if errors:
            raise errors.pop()
        return submit(self, plan, bundle)

    monkeypatch.setattr(MemoryBackend, "submit", noting)
    for _ in range(3):
        submitter.submit(job, new=True)
    assert used == [used[0]] * 3
    monkeypatch.setenv("AWS_PROFILE", "another")
    submitter.submit(job, new=True)
    assert used[3] is not used[0]
    errors.append(BackendError("AWS does not accept the credentials"))
    with pytest.raises(BackendError):
        submitter.submit(job, new=True)
    submitter.submit(job, new=True)
    assert used[4] is used[3] and used[5] is not used[3], "they may have been renewed"
