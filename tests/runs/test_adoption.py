"""An interrupted submit is adopted by the next one of the same job or key, over a backend that starts nothing."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Timer

import pytest

from cloudtrain.errors import BackendError, BadRequest, NoCapacity, Unreachable
from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import Process, start_time
from cloudtrain.runs.planning import keys
from cloudtrain.runs.run import Run
from cloudtrain.runs.sending import exactly_once, handover, outcomes, retry, send
from cloudtrain.runs.submit import Submitter
from cloudtrain.testing.memory import MemoryBackend
from tests.conftest import WAIT_S
from tests.runs.platform import LOST, Platform, interrupted, look

pytestmark = pytest.mark.usefixtures("platform")


@pytest.fixture
def submitter() -> Submitter:
    return Submitter("platform", watch=False)


def test_an_old_interrupted_submit_needs_a_decision(submitter, job):
    name = interrupted(submitter, job, age=timedelta(minutes=16))
    with pytest.raises(BadRequest, match=f"submitted 16 min ago as {name}, and that run was interrupted") as caught:
        submitter.submit(job)
    assert caught.value.exit_code == 2 and "--adopt" in caught.value.hint and "--new" in caught.value.hint
    assert submitter.submit(job, adopt=True).run_id == name
    young = interrupted(submitter, job.replace(name="young"), age=timedelta(minutes=14))
    assert submitter.submit(job.replace(name="young")).run_id == young


def test_an_interrupted_submit_whose_run_has_failed_needs_a_decision(submitter, job, platform, cli):
    name = interrupted(submitter, job)
    submitter.store.accept(f"{name}-a1", Platform({}, Path()).submit(submitter.store.attempts(name)[0].plan, None))
    Platform.finish(f"{name}-a1", State.FAILED, 3)
    look(Run(name, submitter.store))
    with pytest.raises(BadRequest, match=f"{name}, and that run has since ended FAILED"):
        submitter.submit(job)
    adopted = submitter.submit(job, adopt=True)
    assert (adopted.run_id, adopted.refresh().state) == (name, State.FAILED), "it is returned as it is"
    assert len(submitter.store.attempts(name)) == 1
    assert submitter.submit(job, new=True).run_id != name
    code, _, err = cli("submit", "train.py", "--new", "--adopt")
    assert code == 2 and "cannot be combined" in err


def test_what_a_watcher_has_found_is_adopted_too(submitter, job, platform):
    """The sender was killed behind the platform's answer: nobody has seen the run's id, whoever stored the handle."""
    name = interrupted(submitter, job)
    Platform({}, Path()).submit(submitter.store.attempts(name)[0].plan, None)
    look(Run(name, submitter.store))
    assert submitter.store.attempts(name)[0].handle
    again = submitter.submit(job)
    assert again.run_id == name and again.adopted and len(platform.attempts) == 1


def test_an_interrupted_submit_that_nobody_repeats_ends_by_itself(submitter, job, platform):
    name = interrupted(submitter, job, age=timedelta(minutes=14))
    run = Run(name, submitter.store)
    look(run, 3)
    assert not run.record.status.state.final and "submit" not in platform.calls, "only a submit sends it"
    old = Run(interrupted(submitter, job.replace(name="old"), age=timedelta(minutes=16)), submitter.store)
    look(old)
    assert old.record.status.state is State.FAILED and "has no such job" in old.record.status.reason


def test_an_interrupted_submit_says_so_and_is_looked_after(submitter, job, platform, cli):
    name = interrupted(submitter, job)
    run = Run(name, submitter.store)
    assert outcomes.needs_watcher(run.record, run.attempts[-1])
    look(run)
    reason = "its submission was interrupted, and platform does not have it: submit the same job again to continue it"
    assert run.record.status.state is State.QUEUED and run.record.status.reason.startswith(reason)
    for command in (("ls",), ("show", name)):
        assert "its submission was interrupted" in cli(*command)[1]
    assert submitter.submit(job).run_id == name and run.record.status.reason == "", "it is sent"
    assert submitter.store.attempts(name)[0].handle
    other = interrupted(submitter, job.replace(name="other"))
    newest = submitter.store.attempts(other)[0]
    living = replace(Process.here(), pid=os.getppid(), started=start_time(os.getppid()))
    assert submitter.store.change_owner(newest.attempt_id, old=newest.owner, new=living)
    assert not outcomes.needs_watcher(submitter.store.find(other), submitter.store.attempts(other)[0]), (
        "its sender lives"
    )


def test_what_an_interrupted_submission_of_several_steps_left_is_discarded_at_its_end(submitter, job, monkeypatch):
    discarded: list[str] = []
    monkeypatch.setattr(Platform, "discard", lambda self, attempt_id: discarded.append(attempt_id), raising=False)
    young = interrupted(submitter, job)
    old = interrupted(submitter, job.replace(name="old"), age=timedelta(hours=1))
    look(Run(young, submitter.store))
    look(Run(old, submitter.store))
    assert discarded == [f"{old}-a1"] and submitter.store.find(old).status.state is State.FAILED


def test_who_looks_at_an_interrupted_submit_starts_a_watcher_for_it(submitter, job, monkeypatch):
    started: list[str] = []
    monkeypatch.setattr(handover, "start", lambda store, plan, instead: started.append(plan.run_id))
    name = interrupted(submitter, job)
    Run(name, submitter.store, watch=False).refresh()
    assert not started
    Run(name, submitter.store).refresh()
    assert started == [name]


def test_an_intent_elsewhere_never_blocks_a_submit(submitter, job, platform, cli):
    name = interrupted(submitter, job)
    platform.fails = {"find": [BackendError("there are no AWS credentials")] * 9}
    MemoryBackend.install()
    elsewhere = Submitter("memory", watch=False)
    run = elsewhere.submit(job)
    assert run.attempts[0].handle and platform.calls == []
    (note,) = elsewhere.notes
    assert name in note and "platform" in note
    other = submitter.submit(job.replace(name="other"))
    assert other.attempts[0].handle and name in submitter.notes[0], "nor where it goes to the same place"
    code, _, err = cli("cancel", name)
    assert code == 5 and "no AWS credentials" in err and not Run(name, submitter.store).record.status.state.final


def test_a_key_of_another_job_is_refused_with_what_differs(submitter, job, platform):
    first = submitter.submit(job, key="nightly")
    with pytest.raises(BadRequest, match=r"differs in hyperparameters\.lr, num_nodes, parallelism") as caught:
        submitter.submit(job.replace(hyperparameters={"lr": "1"}, num_nodes=2), key="nightly")
    assert caught.value.exit_code == 2 and first.run_id in caught.value.message
    (Path(job.source) / "train.py").write_text("print(2)\n")
    (Path(job.source) / "summary.md").write_text("written by CI\n")
    with pytest.raises(BadRequest, match=r"differs in the source \(summary\.md, train\.py\)"):
        submitter.submit(job, key="nightly")
    MemoryBackend.install()
    with pytest.raises(BadRequest, match=r"the target \(platform, now memory\)"):
        Submitter("memory", watch=False).submit(job, key="nightly")
    assert len(platform.attempts) == 1


def test_a_key_is_checked_from_an_empty_history(submitter, job, platform, tmp_path):
    first = submitter.submit(job, key="nightly")
    elsewhere = Submitter("platform", home=tmp_path / "elsewhere", watch=False)
    with pytest.raises(BadRequest, match=r"the job's digest \([0-9a-f]{16}, now [0-9a-f]{16}\)"):
        elsewhere.submit(job.replace(hyperparameters={"lr": "1"}), key="nightly")
    assert Store(tmp_path / "elsewhere").runs() == [], "nothing was written"
    (Path(job.source) / "train.py").write_text("print(2)\n")
    with pytest.raises(BadRequest, match="the source's digest"):
        elsewhere.submit(job, key="nightly")
    (Path(job.source) / "train.py").write_text("print(1)\n")
    again = elsewhere.submit(job, key="nightly")
    assert again.run_id == first.run_id and again.adopted


def test_a_key_finds_a_later_attempt_from_an_empty_history(submitter, job, platform, tmp_path, monkeypatch):
    """The first attempt was refused for lack of machines and left nothing on the platform; the second one runs."""
    patient = job.replace(retry={"max_attempts": 3, "on_events": ["capacity"]})
    platform.fails = {"submit": [NoCapacity("no machines")]}
    first = submitter.submit(patient, key="nightly")
    monkeypatch.setattr(retry, "CAPACITY_S", 0.0)
    look(first)
    assert [attempt.handle is not None for attempt in first.attempts] == [False, True]
    elsewhere = Submitter("platform", home=tmp_path / "elsewhere", watch=False)
    again = elsewhere.submit(patient, key="nightly")
    assert again.run_id == first.run_id and again.adopted and len(platform.attempts) == 1
    assert again.state is State.RUNNING
    assert [attempt.status.state for attempt in again.attempts] == [State.LOST, State.RUNNING]
    absent = again.attempts[0].status
    assert absent.reason == "the platform has no such job" and absent.ended_at


def test_a_key_finds_what_an_earlier_attempt_came_to(submitter, job, platform, tmp_path):
    patient = job.replace(retry={"max_attempts": 2})
    first = submitter.submit(patient, key="nightly")
    Platform.finish(f"{first.run_id}-a1", State.PREEMPTED, None, "the machine was taken away")
    look(first)
    again = Submitter("platform", home=tmp_path / "elsewhere", watch=False).submit(patient, key="nightly")
    assert again.run_id == first.run_id and again.adopted and len(platform.attempts) == 2
    earlier, newest = again.attempts
    assert (earlier.status.state, earlier.status.reason) == (State.PREEMPTED, "the machine was taken away")
    assert [earlier.handle, newest.handle] == [f"{first.run_id}-a1", f"{first.run_id}-a2"]


@pytest.mark.parametrize(
    ("age", "since"), [(timedelta(minutes=100), "100 min"), (timedelta(hours=2), "2 h"), (timedelta(hours=49), "49 h")]
)
def test_an_undecided_submission_says_how_old_it_is(submitter, job, age: timedelta, since: str):
    name = interrupted(submitter, job, age=age)
    with pytest.raises(BadRequest) as caught:
        submitter.submit(job)
    text = f"the same job was submitted {since} ago as {name}, and that run was interrupted"
    assert (caught.value.message, caught.value.hint) == (text, f"--adopt continues {name}, --new starts another run")


def test_the_key_of_a_run_that_never_began_is_free(submitter, job, platform, cli):
    """Refused, then cancelled before it started: the same key, even with a corrected job, is submitted each time."""
    platform.fails = {"submit": [BackendError("no such role")]}
    with pytest.raises(BackendError):
        submitter.submit(job, key="nightly")
    refused = Run.find()
    submitter.store.claim_notice(refused.attempts[0].attempt_id, "failed")
    platform.fails = {"submit": [LOST]}
    corrected = job.replace(hyperparameters={"lr": "1"})
    run = submitter.submit(corrected, key="nightly")
    assert run.run_id == refused.run_id and run.record.status.state is State.QUEUED and not run.adopted
    assert submitter.store.claim_notice(run.attempts[0].attempt_id, "failed"), "it is told of this one, too"
    assert cli("cancel", run.run_id)[0] == 0 and run.record.status.state is State.CANCELLED
    again = submitter.submit(corrected, key="nightly")
    assert again.attempts[0].handle and again.state is State.RUNNING and not again.adopted
    assert not again.record.cancel_requested and len(again.attempts) == len(platform.attempts) == 1
    Platform.finish(again.attempts[0].attempt_id, State.FAILED, 1)
    look(again)
    assert submitter.submit(corrected, key="nightly").adopted, "what ran keeps its key"
    assert platform.calls.count("submit") == 3


def test_a_free_key_finds_what_another_machine_has_submitted(submitter, job, platform, cli, tmp_path):
    platform.fails = {"submit": [BackendError("no such role")]}
    with pytest.raises(BackendError):
        submitter.submit(job, key="nightly")
    elsewhere = Submitter("platform", home=tmp_path / "elsewhere", watch=False)
    handle = elsewhere.submit(job, key="nightly").attempts[0].handle
    again = submitter.submit(job, key="nightly")
    assert again.adopted and again.attempts[0].handle == handle and len(platform.attempts) == 1


def test_two_processes_send_it_once(submitter, job, platform):
    platform.fails = {"submit": [LOST]}
    run = submitter.submit(job)
    attempt = run.attempts[0]
    parent = replace(Process.here(), pid=os.getppid(), started=start_time(os.getppid()))
    assert submitter.store.change_owner(attempt.attempt_id, old=attempt.owner, new=parent)
    look(run, 3)
    assert platform.calls == ["submit"], "somebody else sends it just now"
    assert submitter.submit(job).run_id == run.run_id and platform.calls == ["submit"]
    assert send.send_again(submitter.store, attempt, Platform({}, Path())) is None


@pytest.fixture
def watcher() -> str:
    """The owner of what a watcher, a process that lives, finishes for nobody."""
    parent = replace(Process.here(), pid=os.getppid(), started=start_time(os.getppid()))
    return f"{parent}{outcomes.BACKGROUND}"


def give(submitter: Submitter, run_id: str, owner: str) -> None:
    (attempt,) = submitter.store.attempts(run_id)
    assert submitter.store.change_owner(attempt.attempt_id, old=attempt.owner, new=owner)


@pytest.mark.parametrize("answer", [None, LOST])
def test_what_a_living_watcher_has_just_found_is_adopted(submitter, job, platform, watcher, answer):
    """Its handle is stored, and nobody has seen the run's id: the sender was killed, or got no answer."""
    if answer:
        platform.fails = {"submit": [answer]}
        name = submitter.submit(job).run_id
    else:
        name = interrupted(submitter, job)
    give(submitter, name, watcher)
    submitter.store.accept(f"{name}-a1", Platform({}, Path()).submit(submitter.store.attempts(name)[0].plan, None))
    again = submitter.submit(job)
    assert again.run_id == name and again.adopted and len(platform.attempts) == 1
    again.acknowledge()
    assert submitter.submit(job).run_id != name


def test_a_watcher_stores_what_it_finds_for_nobody(submitter, job, platform, monkeypatch):
    """At no moment does it look as if the watcher's process will tell a person the run's id."""
    seen: list[bool] = []

    def accept(store: Store, attempt_id: str, handle: str) -> None:
        before(store, attempt_id, handle)
        (attempt,) = [one for run in store.runs() for one in store.attempts(run.run_id) if one.attempt_id == attempt_id]
        seen.append(outcomes.is_in_background(attempt))

    before = Store.accept
    monkeypatch.setattr(Store, "accept", accept)
    found = interrupted(submitter, job)
    Platform({}, Path()).submit(submitter.store.attempts(found)[0].plan, None)
    look(Run(found, submitter.store))
    platform.fails = {"submit": [LOST]}
    look(submitter.submit(job.replace(name="lost")))
    first = submitter.submit(job.replace(name="first"))
    after = submitter.submit(job.replace(name="second"), after=[first])
    Platform.finish(first.attempts[0].attempt_id, State.SUCCEEDED, 0)
    look(first)
    look(after, 2)
    assert after.attempts[0].handle and seen == [True, True, False, True]


@pytest.mark.parametrize("found", [True, False])
def test_a_submit_waits_for_who_asks_about_a_killed_one(submitter, job, platform, watcher, found):
    """`cloudtrain show` asks the platform at this moment: its question is no submission of somebody else."""
    name = interrupted(submitter, job)
    (attempt,) = submitter.store.attempts(name)
    give(submitter, name, watcher)
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(lambda: Submitter("platform", watch=False).submit(job))
        with pytest.raises(TimeoutError):
            again.result(1)
        if found:
            submitter.store.accept(attempt.attempt_id, Platform({}, Path()).submit(attempt.plan, None))
        else:
            give(submitter, name, attempt.owner)
        run = again.result(WAIT_S)
    assert run.run_id == name and run.adopted and len(platform.attempts) == 1
    assert submitter.store.attempts(name)[0].handle


def test_a_submit_whose_claim_a_question_took_tries_again(submitter, job, platform, watcher, monkeypatch):
    name = interrupted(submitter, job)
    (attempt,) = submitter.store.attempts(name)
    claim, claimed = Store.change_owner, []

    def change_owner(store: Store, attempt_id: str, *, old: str, new: Process | str) -> bool:
        if not claimed:
            assert claim(store, attempt_id, old=old, new=watcher)
            Timer(0.5, lambda: claim(Store(submitter.home), attempt_id, old=watcher, new=attempt.owner)).start()
        claimed.append(claim(store, attempt_id, old=old, new=new))
        return claimed[-1]

    with monkeypatch.context() as patched:
        patched.setattr(Store, "change_owner", change_owner)
        run = submitter.submit(job)
    assert claimed[0] is False and claimed[-1] is True and len(claimed) == 2, "it waits, and then tries once more"
    assert run.run_id == name and run.attempts[0].handle and len(platform.attempts) == 1


def test_a_question_without_end_is_said(submitter, job, platform, watcher, monkeypatch):
    monkeypatch.setattr(exactly_once, "ASKED_S", 0.3)
    name = interrupted(submitter, job)
    give(submitter, name, watcher)
    with pytest.raises(Unreachable, match=f"{name}: another cloudtrain process has asked platform about it"):
        submitter.submit(job)
    assert "submit" not in platform.calls and len(submitter.store.runs()) == 1


def test_a_job_of_an_older_version_is_the_same_job(submitter, job):
    """A field that is new since is no other job: neither for a key nor for an interrupted submit."""
    plan = submitter.plan(job, key="nightly")
    data = {name: value for name, value in plan.job.items() if name not in ("min_nodes", "image", "inputs")}
    assert keys.same(replace(plan, job=data), plan)
    assert not keys.same(replace(plan, job={**data, "args": ["other"]}), plan)


def test_options_of_other_platforms_make_no_other_job(submitter, job, platform):
    """Versions that stored the options of the first platform alone made the same run of the same key."""
    both = job.replace(options={"platform": {}, "sagemaker": {"image": "registry/job:1"}})
    plan, bundle = submitter.plan_job(both, key="nightly")
    older = replace(plan, job={**plan.job, "options": {"platform": {}}})
    assert plan.job["options"].keys() == {"platform", "sagemaker"} and older.identity == plan.identity
    found = [keys.labels(each.job, "s", each.backend, each.target) for each in (older, plan)]
    assert found[0] == found[1], "what a platform keeps of it, for another machine"
    submitter.send(older, bundle, key="nightly")
    assert submitter.submit(both, key="nightly").run_id == plan.run_id
    with pytest.raises(BadRequest, match="options.platform"):
        submitter.submit(both.replace(options={"platform": {"poll_s": 7}}), key="nightly")


def test_a_key_of_an_attached_run_is_refused(submitter, job, platform):
    plan = submitter.plan(job, key="nightly")
    submitter.store.attach(plan, "attached:x", "2026-11-23T00:00:00Z", "/shared/x", {})
    with pytest.raises(BadRequest, match="cannot be submitted here: another machine submitted it"):
        submitter.submit(job, key="nightly")
    assert platform.calls == []


@pytest.mark.parametrize("found", ["a job", "nothing", "no answer"])
def test_a_refusal_is_one_only_where_no_earlier_submission_has_begun(submitter, job, platform, found: str):
    run_id = interrupted(submitter, job)
    store = submitter.store
    plan = store.attempts(run_id)[0].plan
    backend, refusal, discarded = Platform({}, Path()), BackendError("no such image"), []
    backend.discard = discarded.append
    if found == "a job":
        MemoryBackend.submit(backend, plan, submitter.package(submitter.resolve(job)))
    platform.fails["find"] = [LOST] if found == "no answer" else []
    outcome = outcomes.record_not_sent(store, plan, backend, refusal, again=True)
    (attempt,) = store.attempts(run_id)
    if found == "a job":
        assert outcome == outcomes.Accepted(plan.attempt_id) and attempt.handle == plan.attempt_id and not discarded
    elif found == "nothing":
        assert outcome == outcomes.Refused(refusal, waiting=False) and discarded == [plan.attempt_id]
        assert attempt.status.state is State.FAILED
    else:
        assert isinstance(outcome, outcomes.Unknown) and outcome.error is LOST and not discarded
        assert attempt.unanswered_since and not attempt.status.state.final and "no answer" in attempt.status.reason
    platform.calls.clear()
    assert isinstance(outcomes.record_not_sent(store, plan, backend, refusal, again=False), outcomes.Refused)
    assert not platform.calls, "a first submission has no earlier one"


def test_the_key_of_another_job_on_the_platform_is_named(submitter, job, platform, home):
    run_id = submitter.submit(job, key="mine").run_id
    elsewhere = Submitter("platform", home=home.with_name("elsewhere"), watch=False)
    with pytest.raises(BadRequest, match=f"^the key 'mine' is already used by run {run_id}, whose job differs"):
        elsewhere.submit(job.replace(args=["--other"]), key="mine")


def test_an_interrupted_submission_of_another_job_that_was_looked_for_has_no_note(submitter, job, platform):
    other = interrupted(submitter, job.replace(name="other"))
    submitter.submit(job)
    assert not [note for note in submitter.notes if other in note], "the platform has no such job"
    platform.fails["find"] = [LOST]
    submitter.submit(job.replace(args=["--again"]))
    assert [note for note in submitter.notes if other in note]


@pytest.mark.parametrize("before", ["held", "accepted", "sent just now"])
def test_what_is_no_interrupted_submission_hides_none_behind_it(submitter, job, platform, before: str):
    """What another process lives for, or waits for another run, is left alone; a later one of this job is adopted."""
    if before == "held":
        first = submitter.submit(job.replace(name="first"))
        first.acknowledge()
        name = submitter.submit(job.replace(name="other"), after=[first]).run_id
    else:
        name = interrupted(submitter, job, age=timedelta(minutes=2))
        living = replace(Process.here(), pid=os.getppid(), started=start_time(os.getppid()))
        with submitter.store.database.write() as db:
            db.execute("UPDATE attempts SET owner = ? WHERE run_id = ?", (str(living), name))
        if before == "accepted":
            plan = submitter.store.attempts(name)[0].plan
            submitter.store.accept(plan.attempt_id, Platform({}, Path()).submit(plan, None))
    mine = interrupted(submitter, job, age=timedelta(minutes=1))
    again = submitter.submit(job)
    assert again.run_id == mine != name and again.adopted
