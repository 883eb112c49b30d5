"""Submitter, Run and the watcher over a backend that starts nothing: what they do, step by step, in one process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from cloudtrain import events
from cloudtrain.backends import registry
from cloudtrain.errors import BackendError, BadJob, BadRequest, RunFailed, UnknownBackend
from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.job.job import Job
from cloudtrain.nodes.process import Process, start_time
from cloudtrain.runs import notify
from cloudtrain.runs.plan import run_id
from cloudtrain.runs.retry import capacity_pause_s
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter, identity
from cloudtrain.runs.watch import Watcher
from cloudtrain.testing.memory import MemoryBackend
from tests.conftest import WAIT_S


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "BUILT_IN", dict(registry.BUILT_IN))  # other tests in this process do not know it
    MemoryBackend.install()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "my source"
    folder.mkdir()
    (folder / "train.py").write_text("print(1)\n")
    return folder


@pytest.fixture
def job(source: Path) -> Job:
    return Job.from_dict({"name": "mine", "source": str(source), "entrypoint": "train.py"})


@pytest.fixture
def submitter() -> Submitter:
    return Submitter("memory", watch=False)


@pytest.fixture
def dead() -> Process:
    """A process that has died: the owner of what a killed submit left behind."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = replace(Process.here(), pid=child.pid, started=start_time(child.pid))
    child.kill()
    child.wait()
    return process


def watch(run: Run) -> None:
    """What the detached watcher does, until nothing moves any more."""
    Watcher(run.store, run.run_id).run(until=lambda: True)


def newest(run: Run) -> str:
    return run.attempts[-1].attempt_id


# -- submit -----------------------------------------------------------------------------------------------------------


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
    monkeypatch.setattr(MemoryBackend, "features", frozenset())
    wrong = job.replace(
        num_nodes=2, image="a/b", output="s3://b/p", secrets={"T": "env:T"}, resources={"use_spot": True}
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


def test_a_missing_script_is_refused(submitter, job):
    with pytest.raises(BadRequest, match="trian.py"):
        submitter.submit(job.replace(entrypoint="trian.py"))


# -- exactly once -----------------------------------------------------------------------------------------------------


def killed(submitter, job, dead, *, accepted: bool = False, sent: bool = False, key: str | None = None) -> str:
    """Leave what a submit leaves that was killed on its way: after the intent, after sending, or after accepting."""
    resolved = submitter.resolve(job)
    bundle = submitter.package(resolved)
    plan = submitter.plan_of(resolved, bundle, key)
    assert submitter.store.intend(plan, identity=identity(plan), owner=dead, key=key)
    if sent:
        handle = submitter.backend(resolved).submit(plan, bundle)
        if accepted:
            submitter.store.accept(plan.attempt_id, handle)
    return plan.run_id


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
        "nothing was sent"
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


# -- watch ------------------------------------------------------------------------------------------------------------


def test_the_log_becomes_events_and_metrics(submitter, job):
    run = submitter.submit(job.replace(metrics={"acc": "acc=([0-9.]+)"}))
    handle = newest(run)
    MemoryBackend.say(handle, "hello", events.format("metric", {"step": 1, "loss": 2.0, "note": "text"}))
    watch(run)
    MemoryBackend.say(handle, "acc=0.5", "{'loss': 1.5}", events.format("world", {"world_size": 1}))
    MemoryBackend.finish(handle)
    watch(run)
    assert [(row.step, row.name, row.value) for row in run.metrics()] == [
        (1, "loss", 2.0),
        (1, "acc", 0.5),
        (2, "loss", 1.5),
    ]
    assert [event.data for event in run.store.events(run.run_id, "world")] == [{"world_size": 1}]


def test_what_was_said_just_before_the_end_is_not_lost(submitter, job):
    run = submitter.submit(job)
    MemoryBackend.say(newest(run), *(events.format("metric", {"step": n, "loss": float(n)}) for n in range(5000)))
    MemoryBackend.finish(newest(run))
    watch(run)
    assert [row.step for row in run.metrics("loss")] == list(range(5000))


@pytest.mark.parametrize("state", [State.PREEMPTED, State.LOST])
def test_a_lost_attempt_is_followed_by_another(submitter, job, state):
    run = submitter.submit(job.replace(retry={"max_attempts": 2}))
    MemoryBackend.finish(newest(run), state, 75)
    watch(run)
    assert [attempt.status.state for attempt in run.attempts][0] is state
    assert newest(run) == f"{run.run_id}-a2" and not run.record.status.state.final
    assert run.attempts[1].plan.attempt == 2 and run.attempts[1].plan.manifest["attempt"] == 2
    MemoryBackend.finish(newest(run), state, 75)
    watch(run)
    assert run.state is state and len(run.attempts) == 2, "two were allowed"


@pytest.fixture
def told(monkeypatch) -> list[tuple[str, str]]:
    """(attempt, event) of every notification."""
    heard: list[tuple[str, str]] = []
    monkeypatch.setattr(notify, "start", lambda store, run, attempt, event, hidden: heard.append((attempt[-2:], event)))
    return heard


@pytest.mark.parametrize(("state", "last"), [(State.PREEMPTED, "preemption"), (State.LOST, "failure")])
def test_an_attempt_that_is_lost_is_told_where_another_follows(submitter, job, told, state, last):
    run = submitter.submit(job.replace(retry={"max_attempts": 2}))
    MemoryBackend.finish(newest(run), state, 75)
    watch(run)
    assert told == [("a1", "preemption")] and newest(run)[-2:] == "a2"
    MemoryBackend.finish(newest(run), state, 75)
    watch(run)
    assert set(told[1:]) == {("a2", last)} and run.state is state


def test_an_attempt_that_cannot_be_made_again_is_a_failure(submitter, job, told, monkeypatch):
    monkeypatch.setenv("T", "geheim")
    run = submitter.submit(job.replace(retry={"max_attempts": 2}, secrets={"T": "env:T"}))
    monkeypatch.delenv("T")
    MemoryBackend.finish(newest(run), State.LOST, 75)
    watch(run)
    assert told == [("a1", "failure")] and run.verdict() is not None


def test_a_run_whose_bundle_is_gone_ends_instead_of_being_asked_for_ever(submitter, job, told):
    run = submitter.submit(job.replace(retry={"max_attempts": 2}))
    for path in (submitter.home / "bundles").glob("*.tar.gz"):
        path.unlink()
    MemoryBackend.finish(newest(run), State.LOST, 75)
    watch(run)
    status = run.record.status
    assert status.state is State.LOST and "no new attempt: the bundle of" in status.reason
    assert len(run.attempts) == 1 and told == [("a1", "failure")]


CHECKPOINT = '::cloudtrain::{"kind":"checkpoint",%s}'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("for step in range(10): print(step)\n", True),
        ("torch.save(model.state_dict(), 'checkpoint.pt')\nmodel.gradient_checkpointing_enable()\n", True),
        ("trainer.train(resume_from_checkpoint=True)\n", False),
        ("accelerator.load_state(folder)\n", False),
        ("import cloudtrain_runtime\n", False),
        ("folder = os.environ['CLOUDTRAIN_CHECKPOINT_DIR']\n", False),
        ("model.load_state_dict(torch.load('last.pt'))\n", False),
    ],
)
def test_retries_of_a_script_that_cannot_resume_are_told_at_submit(submitter, job, source, text, told):
    def notes(**changes) -> list[str]:
        return [note for note in submitter.plan(job.model_copy(update=changes)).notes if "looks like resuming" in note]

    (source / "train.py").write_text("import lib\n")
    (source / "lib").mkdir()
    (source / "lib" / "loop.py").write_text(text)
    several = {"retry": job.retry.model_copy(update={"max_attempts": 3})}
    assert len(notes(**several)) == told
    assert notes() == []  # one attempt
    assert notes(**several, entrypoint=None, trainer=True) == []  # the shared trainer resumes
    assert notes(**several, args=["--resume", "auto"]) == []


def test_a_watcher_keeps_its_client_until_that_fails(submitter, job, monkeypatch):
    made, looks = [], []

    def create(name, options, home):
        made.append(registry_create(name, options, home))
        return made[-1]

    def look(backend, handle):
        looks.append(backend)
        if len(looks) == 3:
            raise BackendError("the token has expired", "")
        return status(backend, handle)

    registry_create, status = registry.create, MemoryBackend.status
    run = submitter.submit(job)
    monkeypatch.setattr(registry, "create", create)
    monkeypatch.setattr(MemoryBackend, "status", look)
    assert Watcher(run.store, run.run_id).run(until=lambda: len(looks) >= 5) is not None
    assert [made.index(backend) for backend in looks[:5]] == [0, 0, 0, 1, 1]


def test_a_watcher_ends_with_its_history(submitter, job):
    run = submitter.submit(job)
    looks = []

    def until() -> bool:
        looks.append(run.store.home)
        shutil.rmtree(run.store.home, ignore_errors=True)
        return len(looks) > 3

    assert Watcher(run.store, run.run_id).run(until) is None
    assert len(looks) == 1


@pytest.mark.parametrize("state", [State.PREEMPTED, State.LOST])
def test_two_attempts_without_a_newer_checkpoint_are_enough(submitter, job, state):
    run = submitter.submit(job.replace(retry={"max_attempts": 9}))
    for number, said in enumerate(["", '"step":7', "", '"written":"checkpoint-7"', "", '"stored":"step-7"'], 1):
        assert newest(run) == f"{run.run_id}-a{number}" and not run.record.status.state.final
        MemoryBackend.say(newest(run), CHECKPOINT % said if said else "nothing was saved")
        MemoryBackend.finish(newest(run), state, 75, "the machine is gone")
        watch(run)
    assert run.state is state and len(run.attempts) == 6, "to bring an old one to the output is nothing new"
    assert run.record.status.reason.startswith("the machine is gone; no new attempt: the last two were lost before ")
    resumed = Run(run.run_id, run.store).resume()
    MemoryBackend.say(newest(resumed), CHECKPOINT % '"step":9')
    MemoryBackend.finish(newest(resumed), state, 75)
    watch(resumed)
    assert len(resumed.attempts) == 8, "who saves more often goes on"


def test_spot_capacity_brings_retries(submitter, job):
    run = submitter.submit(job.replace(resources={"use_spot": True}))
    MemoryBackend.finish(newest(run), State.PREEMPTED, 75)
    watch(run)
    assert len(run.attempts) == 2


def long_ago(run, **more) -> None:
    MemoryBackend.finish(newest(run), State.FAILED, None, "no such machines", event="capacity")
    status = MemoryBackend.attempts[newest(run)].status
    MemoryBackend.attempts[newest(run)].status = replace(status, ended_at="2026-01-01T00:00:00.000000Z", **more)


def test_where_there_were_no_machines_another_attempt_waits_its_time(submitter, job):
    run = submitter.submit(job.replace(retry={"max_attempts": 2}))
    MemoryBackend.finish(newest(run), State.FAILED, None, "no such machines", event="capacity")
    watch(run)
    assert (run.state, len(run.attempts)) == (State.QUEUED, 1)
    assert run.record.status.reason.startswith("no such machines; another attempt in 1 min")
    long_ago(run, billable_s=0)
    watch(run)
    assert newest(run) == f"{run.run_id}-a2" and not run.record.status.state.final
    long_ago(run, billable_s=90)
    watch(run)
    assert (run.state, len(run.attempts)) == (State.FAILED, 2), "two were allowed"
    assert [attempt.status.billable_s for attempt in run.attempts] == [0, 90] and run.record.status.billable_s == 90


def test_who_waits_for_machines_can_be_cancelled(submitter, job):
    run = submitter.submit(job.replace(retry={"max_attempts": 2}))
    MemoryBackend.finish(newest(run), State.FAILED, None, "no such machines", event="capacity")
    watch(run)
    run.cancel()
    watch(run)
    assert (run.state, len(run.attempts)) == (State.CANCELLED, 1)


def test_not_every_job_waits_for_machines(submitter, job):
    for retry in ({"max_attempts": 1}, {"max_attempts": 3, "on_events": ["preempted", "lost"]}):
        run = submitter.submit(job.replace(retry=retry), new=True)
        MemoryBackend.finish(newest(run), State.FAILED, None, "no such machines", event="capacity")
        watch(run)
        assert (run.state, len(run.attempts)) == (State.FAILED, 1)


def test_pauses_grow_are_bounded_and_differ_between_runs():
    pauses = [capacity_pause_s("run-a", number) for number in range(1, 12)]
    assert pauses == sorted(pauses) and 45 <= pauses[0] <= 75 and pauses[-1] <= 1800 * 1.25
    assert len({capacity_pause_s(f"run-{n}", 1) for n in range(20)}) > 10


@pytest.mark.parametrize("state", [State.FAILED, State.TIMED_OUT, State.CANCELLED])
def test_other_ends_are_ends(submitter, job, state):
    run = submitter.submit(job.replace(retry={"max_attempts": 3}))
    MemoryBackend.finish(newest(run), state, 3, "why")
    watch(run)
    assert (run.state, len(run.attempts)) == (state, 1)
    with pytest.raises(RunFailed, match="why"):
        run.result(60)


def test_no_new_attempt_without_its_secret(submitter, job, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "value-of-it")
    run = submitter.submit(job.replace(retry={"max_attempts": 3}, secrets={"T": "env:MY_TOKEN"}))
    monkeypatch.delenv("MY_TOKEN")
    MemoryBackend.finish(newest(run), State.PREEMPTED, 75)
    watch(run)
    assert run.state is State.PREEMPTED and len(run.attempts) == 1
    assert "no new attempt: secret T: env:MY_TOKEN is not set in the watcher's environment" in run.record.status.reason


def test_a_secret_that_is_nowhere_is_told_before_anything_is_stored(submitter, job, monkeypatch):
    monkeypatch.delenv("MY_TOKEN", raising=False)
    with pytest.raises(BadRequest, match="secret T: env:MY_TOKEN is not set"):
        submitter.submit(job.replace(secrets={"T": "env:MY_TOKEN"}))
    assert submitter.store.runs() == [] and MemoryBackend.attempts == {}


def test_a_lost_attempt_is_ended_before_the_next(submitter, job):
    run = submitter.submit(job.replace(retry={"max_attempts": 2}))
    first = newest(run)
    MemoryBackend.finish(first, State.LOST)
    watch(run)
    assert MemoryBackend.attempts[first].cancels == 1


def test_a_watcher_finishes_what_a_killed_one_began(submitter, job, dead):
    run = submitter.submit(job.replace(retry={"max_attempts": 2}))
    MemoryBackend.finish(newest(run), State.LOST)
    first = run.attempts[0]
    run.store.record(first.attempt_id, status=replace(first.status, state=State.LOST))
    second = replace(first.plan, attempt=2)
    assert run.store.next_attempt(second, owner=dead), "killed between the intent and the submit"
    watch(run)
    assert run.attempts[1].handle == second.attempt_id in MemoryBackend.attempts


def test_two_watchers_do_not_watch_at_once(submitter, job):
    run = submitter.submit(job)
    parent = replace(Process.here(), pid=os.getppid(), started=start_time(os.getppid()))
    assert run.store.lease(run.run_id, parent, 60)
    assert Watcher(run.store, run.run_id).run() is None


# -- cancel, resume, rerun --------------------------------------------------------------------------------------------


def test_cancel(submitter, job):
    run = submitter.submit(job.replace(retry={"max_attempts": 3}))
    assert run.cancel(60).state is State.CANCELLED
    assert run.cancel().state is State.CANCELLED
    assert len(run.attempts) == 1


def test_a_cancel_that_the_canceller_did_not_survive(submitter, job):
    run = submitter.submit(job)
    run.store.request_cancel(run.run_id)  # killed here
    watch(run)
    assert run.state is State.CANCELLED


def test_cancelled_even_if_the_platform_says_failed(submitter, job):
    run = submitter.submit(job.replace(retry={"max_attempts": 3}))
    run.store.request_cancel(run.run_id)
    MemoryBackend.finish(newest(run), State.PREEMPTED, 143)
    watch(run)
    assert (run.state, len(run.attempts)) == (State.CANCELLED, 1)


def test_success_before_the_cancel_stays_success(submitter, job):
    run = submitter.submit(job)
    MemoryBackend.finish(newest(run), State.SUCCEEDED, 0)
    assert run.cancel(60).state is State.SUCCEEDED


def test_resume_is_the_next_attempt_of_the_same_run(submitter, job):
    run = submitter.submit(job)
    with pytest.raises(BadRequest, match="still RUNNING"):
        run.resume()
    run.cancel(60)
    assert run.resume().run_id == run.run_id
    assert newest(run) == f"{run.run_id}-a2" and newest(run) in MemoryBackend.attempts
    MemoryBackend.finish(newest(run), State.SUCCEEDED, 0)
    watch(run)
    assert run.state is State.SUCCEEDED
    with pytest.raises(BadRequest, match="nothing to resume"):
        run.resume()


def test_rerun_is_a_new_run_over_the_same_bundle(submitter, job, source):
    run = submitter.submit(job)
    run.acknowledge()
    (source / "train.py").write_text("print('changed')\n")
    again = run.rerun(sets=["hyperparameters.lr=1e-4"])
    assert again.run_id != run.run_id and again.record.parent == run.run_id
    first, second = run.attempts[0].plan, again.attempts[0].plan
    assert first.bundle["sha256"] == second.bundle["sha256"]
    assert second.manifest["argv"] == ["train.py", "--lr", "1e-4"]
    third = run.rerun(source=str(source)).attempts[0].plan
    assert third.bundle["sha256"] != first.bundle["sha256"]


# -- logs -------------------------------------------------------------------------------------------------------------


def test_logs_of_all_attempts_with_cursors(submitter, job):
    run = submitter.submit(job.replace(retry={"max_attempts": 2}))
    MemoryBackend.say(newest(run), "one", "two")
    MemoryBackend.finish(newest(run), State.LOST)
    watch(run)
    MemoryBackend.say(newest(run), "three")
    MemoryBackend.finish(newest(run))
    watch(run)
    lines = list(run.logs())
    assert [line.text for line in lines] == ["one", "two", "three"]
    for at, line in enumerate(lines):
        assert list(run.logs(after=line.cursor)) == lines[at + 1 :]
    assert list(run.logs(follow=True)) == lines
    with pytest.raises(BadRequest, match="no cursor"):
        list(run.logs(after="junk"))


def test_events_are_no_lines_unless_raw(submitter, job):
    run = submitter.submit(job)
    MemoryBackend.say(newest(run), "one", events.format("metric", {"step": 1, "loss": 2.0}), "two")
    MemoryBackend.finish(newest(run))
    assert [line.text for line in run.logs()] == ["one", "two"]
    assert len(list(run.logs(raw=True))) == 3
    (first, _) = run.logs()
    assert [line.text for line in run.logs(after=first.cursor)] == ["two"]


def _a_link_to_a_folder(self, handle, into, what):
    (into / "outputs").mkdir(parents=True)
    (into / "outputs" / "latest").symlink_to(into, target_is_directory=True)


def test_a_fetched_folder_is_one_runs(submitter, job, tmp_path, monkeypatch):
    first, second = submitter.submit(job), submitter.submit(job, new=True)
    out = tmp_path / "out"
    assert second.fetch(out) == out and [path.name for path in out.iterdir()] == [".gitignore"], "it left nothing"
    MemoryBackend.say(newest(first), "hello")
    assert first.fetch(out) == first.fetch(out) == out
    assert (out / "outputs" / "said").read_text() == "hello"
    with monkeypatch.context() as patch:
        patch.setattr(MemoryBackend, "fetch", _a_link_to_a_folder)
        second.fetch(tmp_path / "linked")
    assert (tmp_path / "linked" / ".cloudtrain-run").exists(), "a link to a folder is something too"
    with pytest.raises(BadRequest, match=f"holds what was fetched from {first.run_id}"):
        second.fetch(out)
    (tmp_path / "mine" / "model").mkdir(parents=True)
    with pytest.raises(BadRequest, match="holds model/ already"):
        second.fetch(tmp_path / "mine")
    assert not (tmp_path / "mine" / ".gitignore").exists()
    before = submitter.plan(job).bundle["source_sha256"]
    first.fetch(Path(job.source) / "out")
    assert submitter.plan(job).bundle["source_sha256"] == before, "what is fetched into the source is not packaged"


def test_find_a_run_by_prefix(submitter, job):
    run = submitter.submit(job)
    assert Run.find(run.run_id[:8]).run_id == Run.find().run_id == run.run_id


@pytest.mark.parametrize("in_git", [True, False])
def test_a_home_inside_the_source_is_no_part_of_it(tmp_path, in_git):
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text("print(1)\n")
    if in_git:
        subprocess.run(["git", "init", "-q", str(source)], check=True)
    submitter = Submitter(home=source / "home", watch=False)
    job = {"source": str(source), "entrypoint": "train.py"}
    first = submitter.submit(job, new=True)
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
