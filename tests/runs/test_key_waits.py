"""A run of a key waits for a platform that does not answer: nothing is sent before the key was looked for."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from cloudtrain.errors import NoCapacity, NoService, NotReached
from cloudtrain.events import State
from cloudtrain.runs.run import Run
from cloudtrain.runs.sending import retry
from cloudtrain.runs.submit import Submitter
from tests.runs.platform import Platform, look

pytestmark = pytest.mark.usefixtures("platform")

CLOSED = NoService("the connection is refused")


@pytest.fixture
def submitter(monkeypatch: pytest.MonkeyPatch) -> Submitter:
    monkeypatch.setattr(retry, "OUTAGE_S", 0.0)
    return Submitter("platform", watch=False)


def unasked(submitter: Submitter, job, key: str = "nightly") -> Run:
    Platform.fails["find"] = [CLOSED]
    run = submitter.submit(job, sets=["limits.max_wait=20m"], key=key)
    assert run.state is State.QUEUED and not run.adopted
    return run


def test_it_is_sent_once_the_platform_has_answered(submitter, job, platform):
    run = unasked(submitter, job)
    assert run.record.status.reason.startswith("not sent yet: the connection is refused (with --key nothing is sent")
    Platform.fails["find"] = [CLOSED]
    look(run)
    assert "submit" not in platform.calls and "tried 2 times" in run.record.status.reason
    look(run)
    assert [call for call in platform.calls if call == "submit"] == ["submit"]
    look(run)
    again = submitter.submit(job, sets=["limits.max_wait=20m"], key="nightly")
    assert again.run_id == run.run_id and len(platform.attempts) == 1


def test_the_next_submit_of_the_key_asks_again(submitter, job, platform):
    run = unasked(submitter, job)
    again = submitter.submit(job, sets=["limits.max_wait=20m"], key="nightly")
    assert again.run_id == run.run_id and list(platform.attempts) == [f"{run.run_id}-a1"]


def test_without_a_bound_it_fails_at_once(submitter, job, platform):
    Platform.fails["find"] = [CLOSED]
    with pytest.raises(NoService):
        submitter.submit(job, key="nightly")
    assert submitter.store.runs() == [] and "submit" not in platform.calls


def test_what_another_machine_sent_meanwhile_is_followed(submitter, job, platform, tmp_path):
    run = unasked(submitter, job)
    other = Submitter("platform", watch=False, home=tmp_path / "other")
    assert other.submit(job, sets=["limits.max_wait=20m"], key="nightly").run_id == run.run_id
    look(run)
    assert run.attempts[0].handle == f"{run.run_id}-a1" and len(platform.attempts) == 1


def test_another_job_under_the_key_is_refused(submitter, job, platform, tmp_path):
    run = unasked(submitter, job)
    other = Submitter("platform", watch=False, home=tmp_path / "other")
    other.submit(job.replace(hyperparameters={"lr": "1"}), sets=["limits.max_wait=20m"], key="nightly")
    look(run)
    assert run.state is State.FAILED and "already used by run" in run.record.status.reason
    assert len(platform.attempts) == 1


def test_a_later_attempt_elsewhere_is_not_sent_a_second_time(submitter, job, platform, tmp_path, monkeypatch):
    """The first attempt was refused there, so that only the second one can be found."""
    patient = job.replace(retry={"max_attempts": 3, "on_events": ["capacity"]})
    run = unasked(submitter, patient)
    monkeypatch.setattr(retry, "CAPACITY_S", 0.0)
    Platform.fails["submit"] = [NoCapacity("no machines")]
    other = Submitter("platform", watch=False, home=tmp_path / "other")
    look(other.submit(patient, sets=["limits.max_wait=20m"], key="nightly"))
    assert list(platform.attempts) == [f"{run.run_id}-a2"]
    look(run)
    assert run.state is State.FAILED and "submitted from another machine" in run.record.status.reason
    again = submitter.submit(patient, sets=["limits.max_wait=20m"], key="nightly")
    assert again.adopted and list(platform.attempts) == [f"{run.run_id}-a2"]


def test_a_refused_submission_is_looked_for_before_the_next_try(submitter, job, platform):
    Platform.fails["submit"] = [NotReached("0 of 1 nodes can be reached")]
    run = submitter.submit(job, sets=["limits.max_wait=20m"], key="nightly")
    assert run.state is State.QUEUED
    Platform.fails["find"] = [CLOSED]
    look(run)
    assert platform.calls.count("submit") == 1
    look(run)
    assert platform.calls.count("submit") == 2 and len(platform.attempts) == 1


def test_nothing_is_sent_without_its_secrets(submitter, job, platform, monkeypatch):
    monkeypatch.setenv("TOKEN", "geheim")
    run = unasked(submitter, job.replace(secrets={"TOKEN": "env:TOKEN"}))
    monkeypatch.delenv("TOKEN")
    look(run)
    assert run.state is State.FAILED and "secret TOKEN: env:TOKEN is not set" in run.record.status.reason
    assert "submit" not in platform.calls


def test_the_wait_ends(submitter, job, platform):
    run = unasked(submitter, job)
    before = (datetime.now(UTC) - timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    with submitter.store.database.write() as db:
        db.execute("UPDATE attempts SET created_at = ?", (before,))
    look(run)
    assert run.state is State.FAILED and run.record.status.reason.endswith(
        "not tried again after 20m (limits.max_wait)"
    )
    assert submitter.submit(job, sets=["limits.max_wait=20m"], key="nightly").attempts[0].handle  # the key is free


def test_a_cancel_ends_it(submitter, job, platform, cli):
    run = unasked(submitter, job)
    assert cli("cancel", run.run_id)[0] == 0 and run.record.status.state is State.CANCELLED
    look(run)
    assert platform.attempts == {}
