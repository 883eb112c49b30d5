"""The three outcomes of a submission, over a backend that starts nothing: what is stored, and what is sent again when."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread

import pytest

from cloudtrain.backends import registry
from cloudtrain.clock import SYSTEM
from cloudtrain.errors import BackendError, BadRequest, NoCapacity, NotReached, Unreachable
from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.job.units import format_time
from cloudtrain.nodes.process import Process, start_time
from cloudtrain.runs.run import Run
from cloudtrain.runs.sending import outcomes, retry, send
from cloudtrain.runs.submit import Submitter
from cloudtrain.testing.clock import VirtualClock
from tests.conftest import wait_for
from tests.runs.platform import LOST, Platform, dead, interrupted, look, quietly

pytestmark = pytest.mark.usefixtures("platform")


@pytest.fixture
def submitter() -> Submitter:
    return Submitter("platform", watch=False)


@pytest.mark.parametrize("after_commit", [True, False])
def test_an_answer_that_was_lost_is_neither_success_nor_failure(submitter, job, platform, after_commit):
    platform.after_commit = after_commit
    platform.fails = {"submit": [LOST], "find": [LOST, LOST]}
    run = submitter.submit(job)
    (attempt,) = run.attempts
    assert (run.record.status.state, attempt.handle, attempt.tries) == (State.QUEUED, None, 1)
    assert "unknown since" in run.record.status.reason and attempt.unanswered_since
    look(run, 2)
    assert platform.calls == ["submit", "find", "find"], "nothing is sent before find has answered"
    assert run.attempts[0].tries == 3 and "tried 3 times" in run.record.status.reason
    look(run)
    assert platform.calls[3:] == (["find"] if after_commit else ["find", "submit"])
    assert run.attempts[0].handle and run.state is State.RUNNING and run.record.status.reason == ""
    assert len(platform.attempts) == 1


def test_how_often_it_was_tried_is_shown_from_the_second_time_on(submitter, job, platform):
    platform.fails = {"submit": [NotReached("no machine answers", waits=True)] * 3}
    run = submitter.submit(job)
    assert run.record.status.reason == "not sent yet: no machine answers"
    look(run)
    assert run.record.status.reason == "not sent yet, tried 2 times: no machine answers"
    platform.fails = {"submit": [LOST]}
    other = submitter.submit(job.replace(name="other"))
    reason = other.record.status.reason
    assert reason.startswith("unknown since ") and reason.endswith(" whether platform has accepted it: no answer")


def test_a_submission_moves_on_where_no_other_sender_is_at_it(submitter, job, platform):
    platform.fails = {"submit": [LOST]}
    run = submitter.submit(job)
    (attempt,), backend = run.attempts, submitter.client(run.attempts[0].plan)
    with outcomes.marked_as_sending(attempt.attempt_id) as mine:
        assert mine and not send.settle(run.store, run.record, attempt, backend, may_send=True)
    assert run.attempts[0].handle is None
    assert send.settle(run.store, run.record, attempt, backend, may_send=True) and run.attempts[0].handle


def test_pauses_for_machines_differ_by_a_quarter_and_double(monkeypatch):
    monkeypatch.setattr(retry, "CAPACITY_S", 100.0)
    monkeypatch.setattr(retry, "CAPACITY_MAX_S", 800.0)
    for number, base_s in ((1, 100), (2, 200), (4, 800), (9, 800)):
        pauses = [retry.capacity_pause_s(f"run-{each}", number) / base_s for each in range(200)]
        assert 0.75 <= min(pauses) < 0.8 and 1.2 < max(pauses) < 1.25


def test_the_same_submit_repeated_adopts_it(submitter, job, platform):
    platform.after_commit = True
    platform.fails = {"submit": [LOST], "find": [LOST] * 3}
    runs = [submitter.submit(job) for _ in range(4)]
    assert len({run.run_id for run in runs}) == 1 and [run.adopted for run in runs] == [False, True, True, True]
    assert platform.calls.count("submit") == 1
    again = Submitter("platform", watch=False).submit(job)
    assert again.run_id == runs[0].run_id and again.attempts[0].handle and len(platform.attempts) == 1


def test_cancel_reaches_it_as_soon_as_the_platform_answers(submitter, job, platform, cli):
    platform.after_commit = True
    platform.fails = {"submit": [LOST], "find": [LOST] * 99}
    run = submitter.submit(job)
    code, _, said = cli("cancel", run.run_id)
    assert code == 5 and "did not answer whether it has the job" in said and "the background watcher cancels it" in said
    assert not run.record.status.state.final
    platform.fails = {}
    look(run, 2)
    assert run.state is State.CANCELLED
    assert platform.attempts[run.attempts[0].attempt_id].status.state is State.CANCELLED


def test_cancel_of_what_the_platform_never_got(submitter, job, platform, cli):
    platform.fails = {"submit": [LOST]}
    run = submitter.submit(job)
    code, said, _ = cli("cancel", run.run_id)
    assert (code, run.record.status.state) == (0, State.CANCELLED) and "CANCELLED" in said
    look(run)
    assert platform.attempts == {} and submitter.submit(job).run_id != run.run_id


def test_a_cancelled_run_is_not_adopted(submitter, job, platform, cli):
    """Nobody knows whether the platform has the cancelled run: the same submit is another run, and sends nothing of it."""
    platform.fails = {"submit": [LOST], "find": [LOST] * 9}
    run = submitter.submit(job)
    assert cli("cancel", run.run_id)[0] == 5
    again = submitter.submit(job)
    assert again.run_id != run.run_id and not again.adopted
    assert list(platform.attempts) == [again.attempts[0].attempt_id]
    platform.fails = {}
    look(run, 2)
    assert run.state is State.CANCELLED and len(platform.attempts) == 1


def test_a_cancelled_run_of_a_key_is_not_sent_again(submitter, job, platform, cli):
    platform.fails = {"submit": [LOST]}
    run = submitter.submit(job, key="k")
    platform.fails = {"find": [LOST] * 9}
    assert cli("cancel", run.run_id)[0] == 5
    assert submitter.submit(job, key="k").run_id == run.run_id and platform.attempts == {}


def test_an_unknown_outcome_is_never_acknowledged(submitter, job, platform, monkeypatch, tmp_path, cli):
    """A watcher that accepts the run while the command prints it does not make the command's answer known."""
    from cloudtrain.cli.view import summary

    printed = summary.print_submitted

    def accepted_meanwhile(run, how):
        printed(run, how)
        look(run)

    monkeypatch.setattr(summary, "print_submitted", accepted_meanwhile)
    platform.after_commit = True
    platform.fails = {"submit": [LOST]}
    file = tmp_path / "job.json"
    file.write_text(json.dumps(job.to_dict(given=True)))
    code, _, _ = cli("submit", str(file), "-t", "platform")
    (attempt,) = submitter.store.unsettled()
    assert code == 5 and attempt.handle, "it was accepted, and is not acknowledged"


def test_readers_never_submit(submitter, job, platform, monkeypatch, cli):
    platform.fails = {"submit": [LOST]}
    run = submitter.submit(job)
    lost = submitter.submit(job.replace(name="lost", retry={"max_attempts": 3}))
    Platform.finish(lost.attempts[-1].attempt_id, State.LOST)
    sent = platform.calls.count("submit")
    for _ in range(20):
        quietly(run), quietly(lost)
    assert cli("ls")[0] == cli("show", run.run_id)[0] == 0
    assert platform.calls.count("submit") == sent and len(lost.attempts) == 1
    look(run), look(lost)
    assert platform.calls.count("submit") == sent + 2


def test_what_a_person_is_shown(submitter, job, platform, monkeypatch, tmp_path, cli):
    platform.fails = {"submit": [LOST], "find": [LOST] * 9}
    (tmp_path / "job.yaml").write_text(json.dumps({**job.to_dict(given=True), "target": "platform"}))
    code, out, err = cli("submit", str(tmp_path / "job.yaml"), "--json")
    data = json.loads(out)
    assert code == 5 and data["handle"] is None and data["state"] == "QUEUED" and data["reused"] is False
    assert "unknown since" in err
    code, out, _ = cli("show", data["run_id"])
    assert code == 0 and "tries without an answer: " in out
    assert "  mine-1: QUEUED (unknown since" in cli("ls")[1]
    (attempt,) = json.loads(cli("show", data["run_id"], "--json")[1])["attempts"]
    assert attempt["tries"] >= 2 and attempt["unanswered_since"]
    code, out, _ = cli("submit", str(tmp_path / "job.yaml"), "--json")
    assert json.loads(out)["run_id"] == data["run_id"] and json.loads(out)["reused"] is True


def test_a_refused_retry_ends_the_run(submitter, job, platform):
    run = submitter.submit(job.replace(retry={"max_attempts": 5}))
    platform.fails = {"submit": [BackendError("AWS denies it")]}
    Platform.finish(run.attempts[-1].attempt_id, State.LOST)
    look(run, 5)
    status = run.record.status
    assert (status.state, status.reason) == (State.FAILED, "attempt 2 was refused: AWS denies it")
    assert platform.calls.count("submit") == 2, "it does not start by itself when it is permitted later"


def test_a_retry_that_meets_an_outage_backs_off(submitter, job, platform, monkeypatch):
    run = submitter.submit(job.replace(retry={"max_attempts": 2}))
    Platform.finish(run.attempts[-1].attempt_id, State.LOST)
    monkeypatch.setattr(retry, "OUTAGE_S", 1000.0)
    platform.fails = {"submit": [LOST] * 99}
    look(run, 30)
    assert platform.calls.count("submit") == 2 and run.attempts[-1].tries == 1
    monkeypatch.setattr(retry, "OUTAGE_S", 0.0)
    look(run, 3)
    assert platform.calls.count("submit") == 5 and run.attempts[-1].tries == 4 and not run.record.status.state.final
    platform.fails = {}
    look(run)
    assert len(platform.attempts) == 2 and run.attempts[-1].handle


def test_pauses_in_an_outage_double_up_to_five_minutes(submitter, job, platform, monkeypatch):
    monkeypatch.setattr(retry, "OUTAGE_S", 1.0)
    attempt, clock = submitter.submit(job).attempts[0], VirtualClock()
    for tries, pause_s in [(1, 1), (2, 2), (5, 16), (9, 256), (10, 300), (5000, 300)]:
        for offset, due in [(-0.5, False), (0.5, True)]:
            tried_at = format_time(clock.now() - pause_s - offset)
            assert retry.outage_is_over(replace(attempt, tries=tries, tried_at=tried_at), clock) is due


def test_a_resume_that_is_refused_says_so_and_fails(submitter, job, platform):
    run = submitter.submit(job)
    Platform.finish(run.attempts[-1].attempt_id, State.FAILED, 1)
    look(run)
    platform.fails = {"submit": [BackendError("no such role")]}
    with pytest.raises(BackendError, match="no such role"):
        run.resume()
    assert run.record.status.state is State.FAILED and "no such role" in run.record.status.reason
    look(run, 3)
    assert platform.calls.count("submit") == 2


def test_a_first_submission_without_machines_waits_where_the_job_asks_for_it(submitter, job, platform, monkeypatch):
    platform.fails = {"submit": [NoCapacity("the quota is used up")] * 2}
    with pytest.raises(NoCapacity):
        submitter.submit(job)
    run = submitter.submit(job.replace(retry={"max_attempts": 3}), new=True)
    assert run.record.status.state is State.QUEUED and "another attempt in" in run.record.status.reason
    look(run)
    assert len(run.attempts) == 1
    monkeypatch.setattr(retry, "CAPACITY_S", 0.0)
    look(run)
    assert [attempt.handle is not None for attempt in run.attempts] == [False, True] and run.state is State.RUNNING


def test_the_log_goes_on_behind_an_attempt_that_never_began(submitter, job, platform, monkeypatch):
    monkeypatch.setattr(retry, "capacity_pause_s", lambda *_: 0.05)
    platform.fails = {"submit": [NoCapacity("none free")]}
    run = submitter.submit(job.replace(retry={"max_attempts": 2}))
    wait_for(lambda: (look(run), len(run.attempts) == 2)[1])
    Platform.say(run.attempts[1].attempt_id, "hello")
    Platform.finish(run.attempts[1].attempt_id, State.SUCCEEDED, 0)
    assert [line.text for line in run.logs()] == ["hello"] == [line.text for line in run.logs(follow=True)]
    refused = submitter.store.find(run.run_id)
    assert refused.status.state is State.SUCCEEDED


def test_the_log_of_a_run_that_was_refused_ends(submitter, job, platform):
    platform.fails = {"submit": [BackendError("no such role")]}
    with pytest.raises(BackendError):
        submitter.submit(job)
    assert list(Run.find().logs(follow=True)) == []


def test_an_outage_does_not_end_a_followed_log(submitter, job, platform, monkeypatch):
    monkeypatch.setattr("cloudtrain.runs.reading.LOOK_S", 0.0)
    run = submitter.submit(job)
    Platform.say(run.attempts[0].attempt_id, "one", "two")
    Platform.finish(run.attempts[0].attempt_id, State.SUCCEEDED, 0)
    whole, cut = Platform.logs, []

    def breaking(self, handle, *, follow=False, after=None):
        for line in whole(self, handle, follow=follow, after=after):
            yield line
            if not cut:
                cut.append(line)
                raise Unreachable("no answer")

    monkeypatch.setattr(Platform, "logs", breaking)
    assert [line.text for line in run.logs(follow=True)] == ["one", "two"]
    cut.clear()
    with pytest.raises(Unreachable):
        list(run.logs())


def test_a_sender_on_another_machine_counts_as_gone_after_a_while(submitter, job, platform):
    elsewhere = replace(Process.here(), host="login1")
    for age, free in [(timedelta(minutes=14), False), (timedelta(minutes=16), True)]:
        name = interrupted(submitter, job.replace(name=f"age{age.seconds}"), age=age)
        with submitter.store.database.write() as db:
            db.execute("UPDATE attempts SET owner = ? WHERE run_id = ?", (str(elsewhere), name))
        assert outcomes.is_free(submitter.store.attempts(name)[0]) is free


@pytest.mark.parametrize("host", ["", "login1"])
def test_an_interrupted_submission_ends_by_the_clock_of_its_home(job, platform, host: str):
    clock = VirtualClock(SYSTEM.now())
    submitter = Submitter("platform", watch=False, clock=clock)
    name = interrupted(submitter, job)
    if host:  # whether its sender lives there cannot be seen
        with submitter.store.database.write() as db:
            db.execute("UPDATE attempts SET owner = ?", (str(replace(Process.here(), host=host)),))
    run = Run(name, submitter.store)
    look(run)
    assert run.record.status.state is State.QUEUED
    clock.jump(outcomes.ADOPTABLE_S + 60)
    look(run)
    assert run.record.status.state is State.FAILED and not platform.attempts


def test_nothing_is_sent_again_without_its_secrets(submitter, job, platform, monkeypatch):
    monkeypatch.setenv("TOKEN", "geheim")
    platform.fails = {"submit": [LOST]}
    run = submitter.submit(job.replace(secrets={"TOKEN": "env:TOKEN"}))
    monkeypatch.delenv("TOKEN")
    with pytest.raises(BadRequest, match="secret TOKEN: env:TOKEN is not set"):
        submitter.submit(job.replace(secrets={"TOKEN": "env:TOKEN"}))
    assert run.record.status.state is State.QUEUED, "nothing was changed"
    look(run)
    status = run.record.status
    assert status.state is State.FAILED and "not submitted again: secret TOKEN: env:TOKEN is not set" in status.reason
    assert platform.calls.count("submit") == 1


def test_a_refusal_of_a_second_try_is_believed_after_another_look(submitter, job, platform):
    """The first one may have begun: its job holds the quota that the second one lacks."""
    run_ids = []

    class Late(Platform):
        def find(self, attempt_id):
            handle = super().find(attempt_id)
            run_ids.append(attempt_id)
            return handle if len(run_ids) > 1 else None  # a list that shows it late

    registry.BUILT_IN["platform"] = (f"{__name__}:Late", None)
    globals()["Late"] = Late
    platform.after_commit = True
    platform.fails = {"submit": [LOST, NoCapacity("the quota is used up")]}
    run = submitter.submit(job)
    look(run, 2)
    assert run.record.status.state is State.RUNNING and len(platform.attempts) == 1


def test_an_asker_that_is_killed_leaves_the_submission_as_it_was(submitter, job, platform):
    platform.fails = {"submit": [LOST]}
    run = submitter.submit(job)
    attempt = run.attempts[0]
    assert submitter.store.change_owner(attempt.attempt_id, old=attempt.owner, new=dead())
    assert outcomes.needs_watcher(run.record, run.attempts[0])
    look(run)
    assert run.attempts[0].handle and platform.calls.count("submit") == 2


def test_a_cancel_while_it_is_sent_has_somebody_to_carry_it_out(submitter, job, platform):
    parent = replace(Process.here(), pid=os.getppid(), started=start_time(os.getppid()))
    name = interrupted(submitter, job)
    with submitter.store.database.write() as db:
        db.execute("UPDATE attempts SET owner = ? WHERE run_id = ?", (str(parent), name))
    run = Run(name, submitter.store)
    assert not outcomes.needs_watcher(run.record, run.attempts[0])
    submitter.store.request_cancel(name)
    assert outcomes.needs_watcher(run.record, run.attempts[0])


def test_an_accepted_attempt_is_claimed_by_nobody(submitter, job, platform):
    platform.fails = {"submit": [LOST]}
    run = submitter.submit(job)
    stale = run.attempts[0]
    look(run)
    assert run.attempts[0].handle and outcomes.is_in_background(run.attempts[0])
    assert send.send_again(submitter.store, stale, Platform({}, Path())) is None
    assert platform.calls.count("submit") == 2


def test_one_thread_of_a_process_sends(submitter, job, platform):
    platform.fails = {"submit": [LOST]}
    run = submitter.submit(job)
    entered, go = Event(), Event()

    class Slow(Platform):
        def find(self, attempt_id):
            entered.set()
            assert go.wait(60)
            return super().find(attempt_id)

    first = Thread(target=send.send_again, args=(Store(submitter.home), run.attempts[0], Slow({}, Path())))
    first.start()
    assert entered.wait(60)
    assert send.send_again(submitter.store, run.attempts[0], Platform({}, Path())) is None
    assert not outcomes.is_free(run.attempts[0]), "the second thread did not take the first one's mark away"
    go.set()
    first.join(60)
    assert platform.calls.count("submit") == 2 and len(platform.attempts) == 1
