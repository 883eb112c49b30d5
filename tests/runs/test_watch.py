"""The watcher over a backend that starts nothing: logs, metrics, retries and their ends, step by step."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from cloudtrain import events
from cloudtrain.backends import registry
from cloudtrain.clock import SYSTEM
from cloudtrain.errors import BackendError, LogDenied, RunFailed
from cloudtrain.events import State
from cloudtrain.history.spool import last_contact
from cloudtrain.nodes.process import Process, start_time
from cloudtrain.report import notify
from cloudtrain.runs.run import Run
from cloudtrain.runs.sending import resume
from cloudtrain.runs.sending.retry import capacity_pause_s
from cloudtrain.runs.watching import collect
from cloudtrain.runs.watching import watch as watch_module
from cloudtrain.runs.watching.watch import Watcher
from cloudtrain.runs.watching.watch_all import watch_run
from cloudtrain.testing.clock import VirtualClock
from cloudtrain.testing.memory import MemoryBackend
from tests.runs.steps import newest, watch

pytestmark = pytest.mark.usefixtures("memory")


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


def test_points_have_rank_attempt_and_epoch_and_a_count_continues_after_a_resume(submitter, job):
    run = submitter.submit(job.replace(retry={"max_attempts": 2}))
    for attempt, (loss, step) in enumerate([("3.0", 10), ("2.0", 11)], start=1):
        told = events.format("metric", {"step": step, "acc": 0.5, "epoch": 1.5})
        for rank in (0, 1):
            MemoryBackend.say(newest(run), f"{{'loss': {loss}, 'epoch': {attempt}}}", told, rank=rank)
        MemoryBackend.say(newest(run), events.format("metric", {"step": step, "acc": 0.1, "_rank": 3}))
        MemoryBackend.finish(newest(run), *([State.PREEMPTED, 75] if attempt == 1 else []))
        watch(run)
    losses = [(row.attempt, row.rank, row.step, row.value, row.epoch) for row in run.metrics("loss", rank=None)]
    assert losses == [(1, 0, 1, 3.0, 1.0), (1, 1, 1, 3.0, 1.0), (2, 0, 2, 2.0, 2.0), (2, 1, 2, 2.0, 2.0)]
    assert [(row.rank, row.step, row.epoch) for row in run.metrics("acc")] == [(0, 10, 1.5), (0, 11, 1.5)]
    assert [(row.step, row.value) for row in run.metrics("acc", rank=3)] == [(10, 0.1), (11, 0.1)]
    assert {row.name for row in run.metrics(rank=None)} == {"loss", "acc"}, "an epoch is an axis, no metric"


def test_what_was_said_just_before_the_end_is_not_lost(submitter, job):
    run = submitter.submit(job)
    MemoryBackend.say(newest(run), *(events.format("metric", {"step": n, "loss": float(n)}) for n in range(5000)))
    MemoryBackend.finish(newest(run))
    watch(run)
    assert [row.step for row in run.metrics("loss")] == list(range(5000))


def long_run(submitter, job, monkeypatch, ended: State = State.SUCCEEDED) -> Run:
    """Return a run whose attempt has ended, and whose log takes longer to read than an end waits for."""
    monkeypatch.setattr(watch_module, "REST_S", 0.0)
    monkeypatch.setattr(collect, "BATCH", 200)
    run = submitter.submit(job)
    MemoryBackend.say(newest(run), *(events.format("metric", {"step": n, "loss": float(n)}) for n in range(700)))
    MemoryBackend.finish(newest(run), ended, 0 if ended is State.SUCCEEDED else 1)
    return run


def kill_while_it_reads(run: Run) -> None:
    """Let a watcher end in the middle of the log whose run has ended."""

    def lease() -> bool:
        if run.store.is_unread(run.run_id):
            raise KeyboardInterrupt
        return True

    with pytest.raises(KeyboardInterrupt):
        Watcher(run.store, run.run_id, lease=lease).look()


def test_a_success_is_stored_before_a_long_rest_of_its_log(submitter, job, monkeypatch, cli, told):
    run, seen, shown = long_run(submitter, job, monkeypatch), [], []

    def lease() -> bool:
        points = len(run.store.metrics(run.run_id, "loss"))
        seen.append((points, run.record.status.state.value, run.store.is_unread(run.run_id)))
        if points == 600:
            shown.extend(cli(command, run.run_id)[1:] for command in ("ls", "show", "metrics"))
        return True

    assert run.store.lease(run.run_id, Process.here(), 60), "a reader finds that somebody watches"
    Watcher(run.store, run.run_id, lease=lease).look()
    assert [each for each in seen if 0 < each[0] < 700] == [
        (200, "QUEUED", False),
        (400, "SUCCEEDED", True),
        (600, "SUCCEEDED", True),
    ]
    ls, show, metrics = ("".join(texts) for texts in shown)
    assert "SUCCEEDED" in ls and "SUCCEEDED" in show
    for text in (show, metrics):
        assert "the log is still being read; points so far are up to step 599" in text
    assert len(run.metrics("loss")) == 700 and not run.store.is_unread(run.run_id)
    assert "still being read" not in cli("show", run.run_id)[1] and told == [("a1", "end")]


def test_a_killed_watcher_leaves_the_rest_of_a_log_to_the_next(submitter, job, monkeypatch, told):
    run = long_run(submitter, job, monkeypatch)

    kill_while_it_reads(run)
    assert run.record.status.state is State.SUCCEEDED and len(run.store.metrics(run.run_id)) < 700 and told == []
    MemoryBackend.finish(newest(run), State.LOST, None)  # what the platform says meanwhile counts no more
    assert len(run.metrics("loss")) == 700, "a reader reads the rest without a watcher"
    assert run.state is State.SUCCEEDED and len(run.attempts) == 1 and told == [("a1", "end")]


def test_an_attempt_that_is_resumed_while_its_log_is_read_does_not_end_the_run_again(submitter, job, monkeypatch):
    run = long_run(submitter, job, monkeypatch, State.FAILED)

    def lease() -> bool:
        if run.store.is_unread(run.run_id) and len(run.attempts) == 1:
            resume.send_next(run.store, run.run_id, sets=(), target=None, watch=False)
        return True

    Watcher(run.store, run.run_id, lease=lease).look()
    assert len(run.attempts) == 2 and not run.store.find(run.run_id).status.state.final
    assert run.attempts[0].status.state is State.FAILED
    assert len(run.store.metrics(run.run_id, "loss")) == 700


def test_a_resume_reads_the_rest_of_the_log_first(submitter, job, monkeypatch):
    run = long_run(submitter, job, monkeypatch, State.FAILED)

    kill_while_it_reads(run)
    assert len(run.store.metrics(run.run_id)) < 700
    run.resume()
    assert len(run.store.metrics(run.run_id)) == 700 and len(run.attempts) == 2


def test_a_failure_is_stored_with_its_verdict_before_the_metrics_of_a_long_log(submitter, job, monkeypatch):
    run = long_run(submitter, job, monkeypatch, State.FAILED)
    MemoryBackend.say(newest(run), "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    seen = []

    def lease() -> bool:
        verdict = run.store.latest(run.attempts[-1].attempt_id, -1, "verdict")
        points = len(run.store.metrics(run.run_id, "loss"))
        seen.append((points, run.record.status.state.value, verdict and verdict.data["label"]))
        return True

    Watcher(run.store, run.run_id, lease=lease).look()
    because = run.verdict().label
    assert "memory" in because
    assert {each for each in seen if each[2]} == {(points, "FAILED", because) for points in (400, 600, 700)}
    assert not run.store.is_unread(run.run_id)


def test_a_cancelled_run_is_so_before_the_metrics_of_a_long_log(submitter, job, monkeypatch):
    run, seen = long_run(submitter, job, monkeypatch, State.CANCELLED), []
    run.store.request_cancel(run.run_id)

    def lease() -> bool:
        seen.append((len(run.store.metrics(run.run_id, "loss")), run.record.status.state.value))
        return True

    Watcher(run.store, run.run_id, lease=lease).look()
    assert (400, "CANCELLED") in seen and len(run.metrics("loss")) == 700


@pytest.mark.parametrize("state", [State.SUCCEEDED, State.FAILED, State.PREEMPTED])
def test_a_log_that_the_account_may_not_read_delays_no_state(submitter, job, clock, monkeypatch, state):
    def refuse(*_, **__):
        asked.append(clock.now())
        raise LogDenied("the log cannot be read: your account may not get pods/log")
        yield

    asked, errors = [], []
    monkeypatch.setattr(MemoryBackend, "logs", refuse)
    run = submitter.submit(job)
    looks = Watcher(run.store, run.run_id, complain=errors.append)
    for _ in range(5):
        looks.look()
        clock.sleep(1)
    assert run.record.status.state is State.RUNNING and len(asked) == len(errors) == 1
    answer = last_contact(run.store.home, run.run_id, clock)
    assert "may not get pods/log" in answer.error and not answer.unreachable
    clock.sleep(watch_module.DENIED_S)
    looks.look()
    assert len(asked) == 2 and len(errors) == 1, "tried again, and said once"
    MemoryBackend.finish(newest(run), state, 3 if state is State.FAILED else None)
    looks.look()
    assert run.record.status.state is state


def test_an_attempt_that_another_follows_is_read_to_its_end_first(submitter, job, monkeypatch):
    run = long_run(submitter, job.replace(retry={"max_attempts": 2}), monkeypatch, State.PREEMPTED)
    states = []
    Watcher(run.store, run.run_id, lease=lambda: states.append(run.record.status.state.final) or True).look()
    assert states and not any(states) and len(run.attempts) == 2


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
    monkeypatch.setattr(notify, "start", lambda store, run, attempt, event, *_: heard.append((attempt[-2:], event)))
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
    assert status.state is State.LOST and "no new attempt: the packaged source of" in status.reason
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
        return [
            note
            for note in submitter.plan(job.model_copy(update=changes)).notes
            if "seems to load a checkpoint" in note
        ]

    (source / "train.py").write_text("import lib\n")
    (source / "lib").mkdir()
    (source / "lib" / "loop.py").write_text(text)
    several = {"retry": job.retry.model_copy(update={"max_attempts": 3})}
    assert len(notes(**several)) == told
    assert notes() == []  # one attempt
    assert (
        notes(**several, entrypoint=None, trainer=True, hyperparameters={"dataset": "python-stdlib"}) == []
    )  # the shared trainer resumes
    assert notes(**several, args=["--resume", "auto"]) == []


def test_a_watcher_keeps_its_client_until_that_fails(submitter, job, monkeypatch):
    made, looks = [], []

    def create(*given):
        made.append(registry_create(*given))
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
    watcher = Watcher(run.store, run.run_id)
    assert all(watcher.refresh() for _ in range(5))
    assert [made.index(backend) for backend in looks[:5]] == [0, 0, 0, 1, 1]


def test_a_watcher_ends_with_its_history(submitter, job, monkeypatch):
    run = submitter.submit(job)
    looks, images = [], MemoryBackend.images

    def remove(backend, handle):
        looks.append(run.store.home)
        shutil.rmtree(run.store.home, ignore_errors=True)
        return images(backend, handle)

    monkeypatch.setattr(MemoryBackend, "images", remove)
    assert watch_run(run.store, run.run_id) is None
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
    assert run.record.status.reason.startswith(
        "the machine is gone; no new attempt: the last two attempts were lost before "
    )
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


def test_where_there_were_no_machines_another_attempt_waits_its_time(submitter, job):
    def no_machines(billable_s: float) -> None:
        refusal = "no such machines"
        MemoryBackend.finish(newest(run), State.FAILED, None, refusal, event="capacity", billable_s=billable_s)
        watch(run)

    run = submitter.submit(job.replace(retry={"max_attempts": 2}))
    clock = run.store.clock = VirtualClock(SYSTEM.now())
    no_machines(0)
    assert (run.state, len(run.attempts)) == (State.QUEUED, 1)
    assert run.record.status.reason.startswith("no such machines; another attempt in 1 min")
    clock.jump(76)
    watch(run)
    assert newest(run) == f"{run.run_id}-a2" and not run.record.status.state.final
    no_machines(90)
    assert (run.state, len(run.attempts)) == (State.FAILED, 2), "two were allowed"
    assert [attempt.status.billable_s for attempt in run.attempts] == [0, 90] and run.record.status.billable_s == 90


LATE = "2 of 3 nodes joined within 300 s; missing: 2"
PENDING = "node 2: Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu."


def test_nodes_that_do_not_come_are_want_of_capacity_and_the_verdict_has_the_platforms_reason(submitter, job):
    run = submitter.submit(job.replace(retry={"max_attempts": 2}))
    clock = run.store.clock = VirtualClock(SYSTEM.now())
    seen = MemoryBackend.attempts[newest(run)]
    for state, reason in ((State.STARTING, PENDING), (State.STOPPING, "a container failed with exit code 75")):
        seen.status = replace(seen.status, state=state, reason=reason)
        watch(run)
    MemoryBackend.finish(newest(run), State.PREEMPTED, 75, LATE)
    watch(run)
    assert (run.state, len(run.attempts)) == (State.QUEUED, 1)
    assert run.record.status.reason.startswith(f"{LATE}; memory reported: {PENDING}; another attempt in 1 min")
    clock.jump(76)
    watch(run)
    MemoryBackend.finish(newest(run), State.PREEMPTED, 75, LATE)
    watch(run)
    first, last = (attempt.status for attempt in run.attempts)
    assert (first.event, first.reason) == ("capacity", f"{LATE}; memory reported: {PENDING}")
    assert (last.event, last.reason) == ("capacity", LATE), "no usage was reported of this one"
    verdict = run.verdict()
    assert (verdict.label, verdict.deciding) == ("capacity", LATE)


def test_who_waits_for_machines_can_be_cancelled(submitter, job):
    run = submitter.submit(job.replace(retry={"max_attempts": 2}))
    MemoryBackend.finish(newest(run), State.FAILED, None, "no such machines", event="capacity")
    watch(run)
    run.cancel()
    watch(run)
    assert (run.state, len(run.attempts)) == (State.CANCELLED, 1)


@pytest.mark.parametrize("hours", [-3, 0, 3])
def test_the_wait_for_machines_is_by_our_clock(submitter, job, hours: int):
    """The platform's may be another one: the pause begins when the end is seen here."""
    run = submitter.submit(job.replace(retry={"max_attempts": 2}))
    MemoryBackend.finish(newest(run), State.FAILED, None, "no such machines", event="capacity")
    attempt = MemoryBackend.attempts[newest(run)]
    ended = datetime.fromisoformat(attempt.status.ended_at or "") + timedelta(hours=hours)
    attempt.status = replace(attempt.status, ended_at=ended.isoformat().replace("+00:00", "Z"))
    pause_s = capacity_pause_s(newest(run), 1)
    clock = run.store.clock = VirtualClock(SYSTEM.now())
    watch(run)
    assert (run.state, len(run.attempts)) == (State.QUEUED, 1)
    clock.jump(pause_s - 2)
    watch(run)
    assert len(run.attempts) == 1
    clock.jump(4)
    watch(run)
    assert len(run.attempts) == 2


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


def test_the_error_of_a_failed_run_has_its_cause_and_what_to_try(submitter, job):
    run = submitter.submit(job)
    for line in ("Traceback (most recent call last):", "MemoryError"):
        MemoryBackend.say(newest(run), line)
    MemoryBackend.finish(newest(run), State.FAILED, 1, "rank 0 exited with code 1")
    watch(run)
    with pytest.raises(
        RunFailed, match="rank 0 exited with code 1: .*out of memory on the machine.*: MemoryError"
    ) as failed:
        run.result(60)
    assert "hold less in memory" in failed.value.hint and f"cloudtrain logs {run.run_id}" in failed.value.hint


def test_no_new_attempt_without_its_secret(submitter, job, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "value-of-it")
    run = submitter.submit(job.replace(retry={"max_attempts": 3}, secrets={"T": "env:MY_TOKEN"}))
    monkeypatch.delenv("MY_TOKEN")
    MemoryBackend.finish(newest(run), State.PREEMPTED, 75)
    watch(run)
    assert run.state is State.PREEMPTED and len(run.attempts) == 1
    assert "no new attempt: secret T: env:MY_TOKEN is not set in the watcher's environment" in run.record.status.reason


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
    assert Watcher(run.store, run.run_id).refresh() is None


@pytest.mark.parametrize("ended", [True, False])
def test_one_that_stands_by_takes_over_when_the_other_is_gone(submitter, job, clock, ended):
    run, told = submitter.submit(job), []
    parent = replace(Process.here(), pid=os.getppid(), started=start_time(os.getppid()))
    assert run.store.lease(run.run_id, parent, 60)
    MemoryBackend.finish(newest(run))
    began = clock.monotonic()

    def stand_by() -> None:
        told.append(clock.monotonic() - began)
        if ended:
            run.store.release(run.run_id, parent)

    assert watch_run(run.store, run.run_id, stand_by).state is State.SUCCEEDED
    waited_s = clock.monotonic() - began
    assert len(told) == 1 and (waited_s < 1 if ended else 60 <= waited_s < 61)
    assert not run.store.watched(run.run_id)


def test_what_a_script_logs_is_not_read_from_its_lines_too(submitter, job):
    run = submitter.submit(job)
    MemoryBackend.say(newest(run), events.format("metric", {"step": 1, "loss": 2.25}), "step 1: loss 2.3, acc 0.5")
    MemoryBackend.finish(newest(run))
    watch(run)
    assert [row.value for row in run.metrics("loss")] == [2.25]
    assert [row.value for row in run.metrics("acc")] == [0.5]


def test_lines_of_the_shared_trainer_are_for_people(submitter, job):
    shared = {
        "name": "mine",
        "source": job.source,
        "trainer": True,
        "hyperparameters": {"dataset": "python-stdlib"},
        "metrics": {"mine": r"said ([0-9.]+)"},
    }
    run = submitter.submit(shared)
    MemoryBackend.say(newest(run), "held-out loss 5.696 before training", "said 3.5")
    MemoryBackend.finish(newest(run))
    watch(run)
    assert [(row.name, row.value) for row in run.metrics()] == [("mine", 3.5)]


OUTSIDE = "urllib3.exceptions.MaxRetryError: HTTPSConnectionPool(host='hub.example', port=443): Max retries exceeded"


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("state", [State.FAILED, State.TIMED_OUT, State.LOST, State.PREEMPTED, State.CANCELLED])
def test_resume_is_named_where_it_finds_a_checkpoint(submitter, job, cli, state, saved):
    run = submitter.submit(job)
    MemoryBackend.say(newest(run), *([events.format("checkpoint", {"step": 4})] if saved else []), OUTSIDE)
    MemoryBackend.finish(newest(run), state, None if state in (State.LOST, State.CANCELLED) else 1)
    watch(run)
    shown = cli("show", run.run_id)[1].rpartition("next ")[2]
    assert (f"cloudtrain resume {run.run_id}" in shown) is saved
    assert saved or f"cloudtrain rerun {run.run_id}" in shown
