"""Many training jobs from few calls of a simulator whose calls are counted, and SageMaker's words for a job that waits."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from botocore.retries import standard

from cloudtrain.backends import aws
from cloudtrain.backends.sagemaker import listing
from cloudtrain.backends.sagemaker.backend import SagemakerBackend
from cloudtrain.errors import Unreachable
from cloudtrain.events import State
from cloudtrain.runs.submit import Submitter
from cloudtrain.runs.watching.watch import Watcher
from cloudtrain.simulators.sagemaker.server import ROLE, Fault, Simulator
from cloudtrain.simulators.sagemaker.training_job import TrainingJob
from tests.backends.sagemaker.test_backend import options, simulator  # noqa: F401 - a fixture

MANY = 50
LIVE = ("Starting", "Pending", "Downloading", "Training", "Uploading", "Interrupted")
ENDS = (("Completed", "Completed", ""), ("Failed", "Failed", "AlgorithmError: it broke, exit code: 3"),
        ("Failed", "Failed", "CapacityError: no machines"), ("Stopped", "MaxRuntimeExceeded", ""))  # fmt: skip


@pytest.fixture
def backend(simulator: Simulator, home: Path) -> SagemakerBackend:  # noqa: F811
    return SagemakerBackend(options(simulator), home / "runs")


def create(simulator: Simulator, *names: str) -> list[str]:  # noqa: F811
    """Create jobs that wait for machines; return their ARNs."""
    simulator.behavior.pending_s = 600.0
    request = {
        "AlgorithmSpecification": {"TrainingImage": "any", "TrainingInputMode": "File"},
        "RoleArn": ROLE,
        "OutputDataConfig": {"S3OutputPath": "s3://training/out"},
        "ResourceConfig": {"InstanceCount": 1, "InstanceType": "ml.m5.xlarge", "VolumeSizeInGB": 30},
        "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
    }
    return [simulator.call("sagemaker", "create_training_job", TrainingJobName=name, **request)["TrainingJobArn"]
            for name in names]  # fmt: skip


def draw(simulator: Simulator, name: str, rng: random.Random) -> None:  # noqa: F811
    """Bring a job into a drawn state."""
    job = simulator.jobs[name]
    secondary = rng.choice((*LIVE, *LIVE, *LIVE, *ENDS))
    if isinstance(secondary, str):
        job._transition(secondary, f"the message of {secondary}")
    else:
        end(job, *secondary)


def end(job: TrainingJob, *status: str) -> None:
    """End a job that waits for machines."""
    job._end(*status)
    job._stop.set()


def calls_of(simulator: Simulator, function) -> list[str]:  # noqa: F811
    simulator.calls.clear()
    function()
    return [call.removeprefix("sagemaker:") for call in simulator.calls]


def test_many_attempts_in_drawn_states(simulator: Simulator, backend: SagemakerBackend):  # noqa: F811
    rng = random.Random(11)
    handles = create(simulator, *(f"drawn-{n}" for n in range(MANY)))
    missing = handles[0].replace("drawn-0", "nobody")
    found: dict = {}
    for _ in range(4):
        for name in rng.sample(sorted(simulator.jobs), 20):
            draw(simulator, name, rng)
        found = backend.statuses([*handles, missing])
        assert found == {handle: backend.status(handle) for handle in handles}
    assert {status.state for status in found.values()} >= {State.QUEUED, State.STARTING, State.RUNNING, State.FAILED}


def test_only_what_changed_is_described(simulator: Simulator, backend: SagemakerBackend):  # noqa: F811
    handles = create(simulator, *(f"many-{n}" for n in range(MANY)))
    ask = lambda: backend.statuses(handles)  # noqa: E731
    assert calls_of(simulator, ask) == ["ListTrainingJobs"] + ["DescribeTrainingJob"] * MANY
    assert calls_of(simulator, ask) == ["ListTrainingJobs"]
    simulator.jobs["many-3"]._started = simulator.jobs["many-3"]._created
    simulator.jobs["many-3"]._transition("Training", "")
    end(simulator.jobs["many-4"], "Completed", "Completed")
    assert calls_of(simulator, ask) == ["ListTrainingJobs"] + ["DescribeTrainingJob"] * 2
    assert calls_of(simulator, ask) == ["ListTrainingJobs"]
    assert calls_of(simulator, lambda: backend.statuses(handles[:1])) == ["ListTrainingJobs"]


def test_the_list_is_read_as_far_as_it_has_to_be(simulator: Simulator, backend: SagemakerBackend, monkeypatch):  # noqa: F811
    monkeypatch.setattr(listing, "PAGE", 5)
    others = create(simulator, *(f"older-{n}" for n in range(20)))
    ours = create(simulator, *(f"ours-{n}" for n in range(8)))
    create(simulator, *(f"newer-{n}" for n in range(4)))
    ask = lambda *more: calls_of(simulator, lambda: backend.statuses([*ours, *more])).count("ListTrainingJobs")  # noqa: E731
    assert ask() == 3, "12 jobs are on three pages"
    gone = ours[0].replace("ours-0", "gone")
    monkeypatch.setattr(listing, "PAGES", 4)
    assert ask(gone) == 4, "it is searched for once"
    assert ask(gone) == 3
    assert set(backend.statuses([*ours, *others[:1]])) == set(ours), "further back than it is read"


def test_jobs_that_a_call_does_not_ask_for_are_remembered(simulator: Simulator, backend: SagemakerBackend):  # noqa: F811
    handles = create(simulator, *(f"many-{n}" for n in range(6)))
    for some in (handles[:4], handles[4:]):
        backend.statuses(some)
    for some in (handles[:4], handles[4:], handles):
        assert calls_of(simulator, lambda some=some: backend.statuses(some)) == ["ListTrainingJobs"]
    simulator.calls.clear()
    assert list(backend.logs(handles[0])) == [] and "sagemaker:DescribeTrainingJob" not in simulator.calls


def test_pages_are_read_at_the_rate_that_aws_allows(simulator: Simulator, backend: SagemakerBackend, monkeypatch):  # noqa: F811
    monkeypatch.setattr(listing, "PAGE", 3)
    waits: list[int] = []
    jobs = listing.JobList(backend.aws, backend._jobs.describe, lambda: waits.append(len(waits)))
    handles = create(simulator, *(f"many-{n}" for n in range(12)))
    assert calls_of(simulator, lambda: jobs.statuses(handles)).count("ListTrainingJobs") == 4 and len(waits) == 3
    monkeypatch.setattr(listing, "PAGES", 1)
    assert set(jobs.statuses(handles)) == set(handles), "as many pages as they fill"


def test_a_client_is_made_once_for_all_threads(simulator: Simulator, backend: SagemakerBackend):  # noqa: F811
    """The thread that asks for states and those that read logs begin together."""
    session, made = backend.aws.session, []

    class Slow:
        region_name = session.region_name

        def client(self, service: str, **values: object) -> object:
            made.append(service)
            time.sleep(0.2)
            return session.client(service, **values)

    backend.aws.__dict__["session"] = Slow()
    with ThreadPoolExecutor(4) as pool:
        clients = list(pool.map(backend.aws.client, ["logs"] * 4))
    assert made == ["logs"] and clients == [clients[0]] * 4


def test_a_message_that_changes_alone_is_read_again(simulator: Simulator, backend: SagemakerBackend, monkeypatch):  # noqa: F811
    handles = create(simulator, *(f"slow-{n}" for n in range(8)))
    assert set(backend.statuses(handles)) == set(handles)
    job = simulator.jobs["slow-0"]
    job._transitions[-1]["StatusMessage"] = "Insufficient capacity error from EC2 while launching instances, retrying!"
    assert "capacity" not in backend.statuses(handles)[handles[0]].reason
    monkeypatch.setattr(listing, "RECHECK_S", 0.0)
    asked = calls_of(simulator, lambda: backend.statuses(handles))
    assert asked == ["ListTrainingJobs"] + ["DescribeTrainingJob"] * listing.RECHECKS
    for _ in range(2):
        status = backend.statuses(handles)[handles[0]]
    assert status == backend.status(handles[0]) and "Insufficient capacity" in status.reason
    assert status.reason.startswith("SageMaker: Starting: ")


def test_what_is_half_written_is_read_again(simulator: Simulator, backend: SagemakerBackend, monkeypatch):  # noqa: F811
    (handle,) = create(simulator, "half")
    job = simulator.jobs["half"]
    job._transition("Training", "")
    assert backend.statuses([handle])[handle].started_at is None
    job._started = job._created
    assert backend.statuses([handle])[handle].started_at is not None, "though the list has not changed"
    describe = job.describe
    monkeypatch.setattr(job, "describe", lambda: {**describe(), "SecondaryStatus": "Starting"})
    old = job.describe()
    monkeypatch.undo()
    job._transition("Uploading", "")
    answers = [old]
    monkeypatch.setattr(
        backend._list, "_describe", lambda name: answers.pop() if answers else backend._jobs.describe(name)
    )
    first, second = (backend.statuses([handle])[handle] for _ in range(2))
    assert first.state is State.STARTING and second == backend.status(handle), (
        "an answer older than the list is not kept"
    )


def test_an_account_that_may_not_list_asks_job_by_job(simulator: Simulator, backend: SagemakerBackend):  # noqa: F811
    handles = create(simulator, "one")
    simulator.faults.append(Fault("ListTrainingJobs", 400, "AccessDeniedException"))
    assert calls_of(simulator, lambda: [backend.statuses(handles) for _ in range(3)]) == ["ListTrainingJobs"]
    assert backend.statuses(handles) == {}


def test_a_list_that_fails_is_no_answer(simulator: Simulator, backend: SagemakerBackend, monkeypatch):  # noqa: F811
    monkeypatch.setattr(standard.ExponentialBackoff, "delay_amount", lambda *_: 0.0)  # botocore's pauses
    handles = create(simulator, "one")
    simulator.faults.append(Fault("ListTrainingJobs", 400, "ThrottlingException", times=aws.TRIES))
    with pytest.raises(Unreachable, match="fewer requests"):
        backend.statuses(handles)
    assert set(backend.statuses(handles)) == set(handles)


def test_the_groups_of_two_accounts_differ(tmp_path: Path):
    groups = {SagemakerBackend({"region": region, "profile": profile}, tmp_path).group
              for region in ("us-east-1", "eu-west-1") for profile in ("a", "b")}  # fmt: skip
    assert len(groups) == 4


def test_a_secondary_status_that_changes_is_an_event(simulator: Simulator, home: Path, tmp_path: Path):  # noqa: F811
    simulator.behavior.pending_s = 600.0
    (tmp_path / "train.py").write_text("print(1)\n")
    run = Submitter("sagemaker", watch=False, **options(simulator)).submit(
        {"source": str(tmp_path), "entrypoint": "train.py"}
    )
    job = simulator.jobs[run.attempts[-1].attempt_id]
    seen = []
    for secondary, message in (("Pending", "Training job waiting for capacity"), ("Downloading", ""), ("Training", "go"),
                               ("Uploading", "")):  # fmt: skip
        job._transition(secondary, message)
        assert Watcher(run.store, run.run_id).refresh() is not None
        seen.append((run.record.status.state.value, run.record.status.reason))
    assert seen == [
        ("QUEUED", "SageMaker: Pending: Training job waiting for capacity"),
        ("STARTING", "SageMaker: Downloading"),
        ("RUNNING", "SageMaker: Training"),
        ("RUNNING", "SageMaker: Uploading"),
    ]
    events = [(event.data["state"], event.data["reason"]) for event in run.store.events(run.run_id, "status")]
    assert events == seen
