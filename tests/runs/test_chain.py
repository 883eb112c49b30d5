"""Runs after other runs: held, sent once, skipped, and what people see of it."""

from __future__ import annotations

import json

import pytest

from cloudtrain.errors import BadJob, Unreachable
from cloudtrain.events import State
from cloudtrain.runs.planning import upstream
from cloudtrain.runs.remove import remove
from cloudtrain.runs.sending import waiting
from cloudtrain.runs.submit import Submitter
from cloudtrain.runs.watching.watch import Look, Watcher
from cloudtrain.testing.memory import MemoryBackend
from tests.runs.platform import LOST, Platform, look
from tests.runs.steps import newest


@pytest.fixture
def submitter(platform) -> Submitter:
    return Submitter("platform", watch=False)


@pytest.fixture
def first(submitter, job):
    run = submitter.submit(job)
    run.acknowledge()
    return run


def end(run, state=State.SUCCEEDED):
    Platform.finish(newest(run), state, 0 if state is State.SUCCEEDED else 1)
    look(run)


def after(submitter, job, *runs, **keys):
    run = submitter.submit(job.replace(args=["after"]), after=runs, **keys)
    run.acknowledge()
    return run


def test_a_run_is_held_until_the_other_has_succeeded(submitter, platform, job, first):
    run = after(submitter, job, first)
    assert run.record.job["after"] == [first.run_id]
    assert run.record.status.reason == f"waits for {first.run_id} (QUEUED)" and run.state is State.QUEUED
    assert run.attempts[0].owner == upstream.HELD, "no process is sending it"
    look(first)
    look(run, 3)
    assert run.record.status.reason == f"waits for {first.run_id} (RUNNING)"
    assert newest(run) not in platform.attempts
    end(first)
    look(run, 3)
    assert newest(run) in platform.attempts and platform.calls.count("submit") == 2
    assert run.state is State.RUNNING
    end(run)
    assert run.state is State.SUCCEEDED


def test_ids_resolve_at_submit_and_what_cannot_succeed_is_refused(submitter, job, first):
    assert submitter.plan(job.replace(after=[first.run_id[:-2]])).job["after"] == [first.run_id]
    with pytest.raises(BadJob, match=r"after\[0\].*no run"):
        submitter.plan(job.replace(after=["absent"]))
    end(first, State.FAILED)
    with pytest.raises(BadJob, match="has ended FAILED: this job would never start"):
        submitter.plan(job.replace(after=[first.run_id]))


def test_after_a_run_that_has_succeeded_it_is_sent_at_once(submitter, platform, job, first):
    end(first)
    run = after(submitter, job, first)
    assert newest(run) in platform.attempts


@pytest.mark.parametrize(
    ("state", "reason"), [(State.FAILED, "failed"), (State.TIMED_OUT, "failed"), (State.CANCELLED, "was cancelled")]
)
def test_it_is_skipped_and_so_are_those_after_it(submitter, platform, job, first, state, reason):
    second = after(submitter, job, first)
    third = after(submitter, job.replace(args=["third"]), second)
    end(first, state)
    look(second)
    look(third)
    assert second.state is third.state is State.CANCELLED
    assert second.record.status.reason == f"skipped: {first.run_id} {reason}"
    assert second.attempts[0].status == second.record.status and second.record.status.ended_at
    assert third.record.status.reason == f"skipped: {second.run_id} was cancelled"
    assert second.record.status.ended_at and platform.calls.count("submit") == 1


def test_a_run_that_was_removed_skips_it(submitter, job, first):
    run = after(submitter, job, first)
    end(first)
    remove(first, here=True)
    look(run)
    assert run.record.status.reason == f"skipped: {first.run_id} was removed"


def test_of_two_processes_one_sends_it(submitter, platform, job, first, monkeypatch):
    """The second one has read the same row, and sends after the first has."""
    run = after(submitter, job, first)
    end(first)
    stale = run.attempts[0]
    look(run)
    assert upstream.is_held(stale) and not upstream.is_held(run.attempts[0])
    assert waiting.advance(run.store, run.record, stale, may_send=True) == (False, False)
    assert platform.calls.count("submit") == 2


def test_what_another_process_has_begun_to_send_is_not_ended_as_held(submitter, platform, job, first):
    run = after(submitter, job, first)
    stale = run.attempts[0]
    end(first)
    look(run)
    run.store.request_cancel(run.run_id)
    assert waiting.advance(run.store, run.record, stale, may_send=True) == (False, False)
    assert not run.attempts[0].status.state.final, "the cancel goes to the platform"


@pytest.mark.parametrize("committed", [False, True])
def test_a_sender_that_is_killed_is_followed_by_one_submission(submitter, platform, job, first, dead, committed):
    run = after(submitter, job, first)
    end(first)
    attempt = run.attempts[0]
    assert run.store.begin_held(attempt.plan, dead)  # what it did before it was killed
    if committed:
        MemoryBackend.submit(platform({}, run.store.home), attempt.plan, None)
    before = platform.calls.count("submit")
    look(run, 2)
    assert run.attempts[0].handle == newest(run) and platform.attempts[newest(run)].plan.run_id == run.run_id
    assert platform.calls.count("submit") == before + (not committed)


def test_an_answer_that_was_lost_is_asked_for_before_it_is_sent_again(submitter, platform, job, first):
    run = after(submitter, job, first)
    end(first)
    platform.after_commit, platform.fails["submit"] = True, [LOST]
    look(run)
    assert run.attempts[0].handle is None and not upstream.is_held(run.attempts[0])
    look(run, 2)
    assert run.attempts[0].handle == newest(run) and platform.calls.count("submit") == 2


def test_a_process_that_may_not_send_says_that_it_is_due(submitter, platform, job, first):
    run = after(submitter, job, first)
    watcher = Watcher(run.store, run.run_id, may_send=False)
    assert watcher.look() is Look.SAME
    assert run.store.orphans() == [first.run_id]  # a watcher of this host takes it: else nothing would see its end
    end(first)
    assert watcher.look() is Look.SEND and newest(run) not in platform.attempts


def test_a_held_run_is_cancelled_without_a_call(submitter, platform, job, first):
    run = after(submitter, job, first)
    platform.calls.clear()
    assert run.cancel().state is State.CANCELLED and platform.calls == []
    end(first)
    look(run)
    assert newest(run) not in platform.attempts


def test_an_equal_job_is_another_run_and_one_that_was_interrupted_is_adopted(submitter, platform, job, first):
    run = after(submitter, job, first)
    again = submitter.submit(job.replace(args=["after"]), after=[first])
    assert again.run_id != run.run_id and not again.adopted
    adopted = submitter.submit(job.replace(args=["after"]), after=[first])  # nobody has seen the id of `again`
    assert adopted.run_id == again.run_id and adopted.adopted and platform.calls.count("submit") == 1


def test_a_model_of_a_run_that_is_not_there_yet(submitter, platform, job, first, home):
    wants = job.replace(args=["after"], inputs={"old": {"run": first.run_id, "what": "outputs"}})
    with pytest.raises(
        BadJob, match=rf"is still QUEUED.*write after: \[{first.run_id}\] to start this job when that run has SUCCEEDED"
    ):
        Submitter("local", watch=False).plan(wants)
    run = Submitter("local", watch=False).submit(wants, after=[first])
    item = run.record.job["inputs"]["old"]
    assert item["uri"] == str(home / "inputs" / first.run_id / "outputs") and "sha256" not in item
    platform.say(newest(first), "hello")
    end(first)
    sent = waiting._final_plan(run.store, run.attempts[0].plan)
    assert sent.run_id == run.run_id and len(sent.job["inputs"]["old"]["sha256"]) == 64
    assert (home / "inputs" / first.run_id / "outputs" / "said").read_text() == "hello"
    run.cancel()


def test_what_cannot_be_planned_any_more_fails_and_an_outage_waits(submitter, job, first, monkeypatch):
    run = after(submitter, job, first)
    end(first)

    def unreachable(*_):
        raise Unreachable("no answer")

    monkeypatch.setattr(waiting, "_final_plan", unreachable)
    look(run)
    assert upstream.is_held(run.attempts[0]) and run.state is State.QUEUED

    def broken(*_):
        raise BadJob([])

    monkeypatch.setattr(waiting, "_final_plan", broken)
    look(run)
    assert run.state is State.FAILED and run.record.status.reason.startswith("not sent: ")


def test_ls_show_and_cancel_have_the_chain(submitter, job, first, cli):
    run = after(submitter, job, first)
    _, listed, _ = cli("ls")
    assert f"  mine-2: QUEUED (waits for {first.run_id} (" in listed
    _, shown, _ = cli("show", run.run_id)
    assert f"after    {first.run_id} {first.record.status.state}" in shown
    _, shown, _ = cli("show", first.run_id, "--json")
    assert json.loads(shown)["before"] == [run.run_id] and json.loads(shown)["after"] == []
    code, _, said = cli("cancel", first.run_id)
    assert code == 0 and f"{run.run_id} will be cancelled too" in said
    look(run)
    assert run.state is State.CANCELLED


def test_on_a_terminal_cancel_asks(submitter, job, first, cli, monkeypatch):
    run = after(submitter, job, first)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    answers = [False, True]
    monkeypatch.setattr("click.confirm", lambda sentence, **_: answers.pop(0))
    code, _, said = cli("cancel", first.run_id)
    assert code == 2 and "nothing was cancelled" in said and not first.record.cancel_requested
    assert cli("cancel", first.run_id)[0] == 0 and first.state is State.CANCELLED
    assert run.run_id and not answers


def test_submit_takes_the_option(submitter, job, first, cli, source):
    code, output, _ = cli("submit", str(source / "train.py"), "-t", "platform", "--after", first.run_id, "--json")
    made = json.loads(output)
    assert code == 0 and made["state"] == "QUEUED" and made["handle"] is None
    assert first.store.dependents(first.run_id)[0].run_id == made["run_id"]
