"""Cancel, resume, rerun, logs and fetch of a run over a backend that starts nothing."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from cloudtrain import events
from cloudtrain.cli import main
from cloudtrain.cli.view import follow, log
from cloudtrain.errors import BadRequest, DiskError
from cloudtrain.events import State, Status
from cloudtrain.job.units import format_duration
from cloudtrain.runs.run import Run
from cloudtrain.testing.memory import MemoryBackend
from tests.conftest import WAIT_S
from tests.runs.steps import newest, watch

pytestmark = pytest.mark.usefixtures("memory")


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


@pytest.mark.parametrize("hangs", ["status", "cancel"])
def test_a_platform_that_hangs_holds_up_no_cancel(submitter, job, monkeypatch, hangs):
    """The request is stored, and the watcher is started to carry it out; the command says so in one line."""
    gate, started, before = threading.Event(), [], set(threading.enumerate())
    run = submitter.submit(job)
    monkeypatch.setattr(follow, "ANSWER_S", 0.1)
    monkeypatch.setattr(MemoryBackend, hangs, lambda *_: gate.wait())
    monkeypatch.setattr(
        "cloudtrain.runs.sending.handover.start", lambda store, plan, instead: started.append(plan.run_id)
    )
    sentence, status = follow.cancel(run)
    assert (
        "has not answered for 0.1 s; the background watcher cancels the run when the platform answers again" in sentence
    )
    assert not status.state.final and started == [run.run_id] and run.record.cancel_requested
    gate.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_S)


def test_a_cancel_that_is_not_confirmed_says_when_the_rest_is_killed(submitter, job, monkeypatch):
    run = submitter.submit(job)
    monkeypatch.setattr(MemoryBackend, "cancel", lambda *_: None)
    sentence, status = follow.cancel(run, wait_s=0.2)
    grace = format_duration(run.attempts[-1].plan.manifest["grace_s"])
    assert not status.state.final and f"what still runs {grace} after the request is killed" in sentence


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
    with pytest.raises(BadRequest, match="has no library with an estimator"):
        run.estimator()
    with pytest.raises(BadRequest, match="has no address"):
        _ = run.model_artifacts
    stored = submitter.submit(job.replace(output="s3://bucket/runs"))
    assert stored.model_artifacts == f"s3://bucket/runs/{stored.run_id}/model"
    assert stored.output_data == f"s3://bucket/runs/{stored.run_id}/outputs"


def test_what_follows_an_older_run_is_of_that_run(submitter, job):
    older = submitter.submit(job.replace(args=["--older"]))
    older.cancel(60)
    submitter.submit(job.replace(args=["--newer"])).cancel(60)
    again = older.rerun()
    assert again.record.parent == older.run_id and again.record.job["args"] == ["--older"]
    assert older.resume().run_id == older.run_id and [each.number for each in older.attempts] == [1, 2]


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
    with pytest.raises(BadRequest, match="not a log cursor"):
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


def test_a_place_that_cannot_be_a_folder_is_one_sentence(submitter, job, tmp_path):
    run = submitter.submit(job)
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to("absent")
    for name in ("file", "nowhere"):
        with pytest.raises(BadRequest, match=f"{name} is not a folder"):
            run.fetch(tmp_path / name)
    with pytest.raises(DiskError, match="file/out cannot be written: Not a directory"):
        run.fetch(tmp_path / "file" / "out")


def test_a_fetched_folder_is_one_runs(submitter, job, tmp_path, monkeypatch):
    first, second = submitter.submit(job), submitter.submit(job, new=True)
    out = tmp_path / "out"
    assert second.fetch(out) == out and not out.exists(), "it left nothing"
    MemoryBackend.say(newest(first), "hello")
    assert first.fetch(out) == first.fetch(out) == out
    assert (out / "outputs" / "said").read_text() == "hello"
    with monkeypatch.context() as patch:
        patch.setattr(MemoryBackend, "fetch", _a_link_to_a_folder)
        second.fetch(tmp_path / "linked")
    assert (tmp_path / "linked" / ".cloudtrain-run").exists(), "a link to a folder is something too"
    with pytest.raises(BadRequest, match=f"already has files fetched from {first.run_id}"):
        second.fetch(out)
    (tmp_path / "mine" / "model").mkdir(parents=True)
    with pytest.raises(BadRequest, match="already contains model/, which was not fetched from this run"):
        second.fetch(tmp_path / "mine")
    assert not (tmp_path / "mine" / ".gitignore").exists()
    before = submitter.plan(job).bundle["source_sha256"]
    first.fetch(Path(job.source) / "out")
    assert submitter.plan(job).bundle["source_sha256"] == before, "what is fetched into the source is not packaged"


def test_find_a_run_by_prefix(submitter, job):
    run = submitter.submit(job)
    assert Run.find(run.run_id[:8]).run_id == Run.find().run_id == run.run_id


def test_a_follower_on_a_pipe_learns_that_there_is_no_output_yet(submitter, job, monkeypatch):
    run = submitter.submit(job)
    said, texts = threading.Event(), list[str]()
    monkeypatch.setattr(log, "WAITING_S", 0.0)
    monkeypatch.setattr(log, "SILENT_S", 0.0)
    monkeypatch.setattr(log, "note", lambda text: (texts.append(text), said.set()))
    monkeypatch.setattr(type(run), "logs", lambda *_, **__: iter(() if said.wait(WAIT_S) else ()))
    log.print_log(run, log.LineFormatter(run.attempts[-1]), follow=True)
    assert texts == [f"{run.run_id}: {run.record.status.state}; no output yet"]


class _Elapsed(threading.Event):
    """Time passes at once, until a number of seconds has."""

    def __init__(self, until_s: float) -> None:
        super().__init__()
        self._left_s = until_s

    def wait(self, timeout: float | None = None) -> bool:
        self._left_s -= timeout or 0.0
        return self._left_s < 0


@pytest.mark.parametrize(
    ("state", "until_s", "noted"),
    [
        (State.QUEUED, log.WAITING_S, True),
        (State.QUEUED, log.WAITING_S - 1, False),
        (State.RUNNING, log.SILENT_S - 1, False),  # many scripts import for longer than WAITING_S
        (State.RUNNING, log.SILENT_S, True),
        (State.SUCCEEDED, log.SILENT_S, False),
    ],
)
def test_a_run_that_has_just_started_is_not_called_silent(submitter, job, monkeypatch, state, until_s, noted):
    run, texts = submitter.submit(job), list[str]()
    run.store.set_status(run.run_id, Status(state))
    monkeypatch.setattr(log, "note", texts.append)
    log._note_silence(run.store.home, run.run_id, _Elapsed(until_s))
    assert texts == ([f"{run.run_id}: {state}; no output yet"] if noted else [])


def test_cancel_without_an_id_names_the_command_for_the_one_live_run(submitter, job, capsys):
    run = submitter.submit(job)
    assert main(["cancel"]) == 2
    assert f"cloudtrain cancel {run.run_id}\n" in capsys.readouterr().err
