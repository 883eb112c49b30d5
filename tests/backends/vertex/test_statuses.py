"""Many custom jobs from one list of a simulator whose requests are counted, for both clients."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloudtrain import events
from cloudtrain.backends.vertex import jobs
from cloudtrain.backends.vertex.backend import VertexBackend
from cloudtrain.backends.vertex.local import VertexLocalBackend
from cloudtrain.backends.vertex.status import job_status
from cloudtrain.errors import Unreachable
from cloudtrain.events import State
from cloudtrain.job.units import format_time
from cloudtrain.runs.submit import Submitter
from cloudtrain.runs.watching.watch import Watcher
from cloudtrain.simulators.http import Fault
from cloudtrain.simulators.vertex.lifecycle import Behavior
from tests.backends.vertex.test_backend import Bench

MANY = 50
STATES = ("QUEUED", "PENDING", "RUNNING", "UPDATING", "CANCELLING", "SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED")
ENDED = {"SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED"}


@pytest.fixture
def paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A service that takes jobs and never runs them."""
    monkeypatch.setattr("cloudtrain.backends.http.PAUSE_S", 0.001)
    made = Bench(tmp_path, Behavior(execute=False))
    yield made
    made.simulator.close()


def change(paper: Bench, handle: str, state: str, **fields) -> None:
    times = {"startTime": format_time(1.8e9)} if state in ("RUNNING", "UPDATING", "CANCELLING") else {}
    times |= {"startTime": format_time(1.8e9), "endTime": format_time(1.8e9 + 60)} if state in ENDED else {}
    paper.simulator.jobs.change(handle.rpartition("/")[2], state=f"JOB_STATE_{state}", **times, **fields)


def create(paper: Bench, backend: VertexBackend, count: int, **labels: str) -> list[str]:
    plan, _ = paper.plan("print(1)")
    return [
        backend._create(plan.request["parent"], {**plan.request["customJob"], "labels": labels}) for _ in range(count)
    ]


@pytest.mark.parametrize("client", ["rest", "sdk"])
def test_many_attempts_are_one_list(paper: Bench, client: str):
    backend, rng = paper.backend(client=client), random.Random(3)
    handles = [backend.submit(*paper.plan("print(1)"))]
    handles += create(paper, backend, MANY - 1, cloudtrain_attempt="another")
    create(paper, backend, 5, team="nlp")
    missing = handles[0][:-1] + ("8" if handles[0][-1] != "8" else "9")
    for _ in range(3):
        drawn = {handle: rng.choice(STATES) for handle in handles}
        for handle, state in drawn.items():
            change(paper, handle, state)
        before = len(paper.simulator.server.requests)
        found = backend.statuses([*handles, missing])
        assert len(paper.simulator.server.requests) == before + 1, "no job is asked for by itself"
        assert found == {handle: backend.status(handle) for handle, state in drawn.items() if state not in ENDED}
    assert {status.state for status in found.values()} == {State.QUEUED, State.STARTING, State.RUNNING, State.STOPPING}


def test_a_list_has_pages_and_is_not_asked_for_nothing(paper: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jobs, "PAGE", 20)
    backend = paper.backend()
    handles = create(paper, backend, MANY, cloudtrain_attempt="some")
    asked = paper.asked("GET", r"/customJobs\?")
    assert set(backend.statuses(handles)) == set(handles)
    assert paper.asked("GET", r"/customJobs\?") == asked + 3
    assert backend.statuses([]) == {} and paper.asked("GET", r"/customJobs\?") == asked + 3


def test_a_list_that_fails_is_no_answer(paper: Bench):
    backend = paper.backend()
    handles = create(paper, backend, 1, cloudtrain_attempt="some")
    paper.simulator.faults.append(Fault("GET", r"/customJobs\?", times=20))
    with pytest.raises(Unreachable):
        backend.statuses(handles)


def test_projects_and_regions_are_groups(tmp_path: Path):
    options = [{"project": "a"}, {"project": "b"}, {"project": "a", "region": "europe-west4"}]
    assert len({VertexBackend(given, tmp_path).group for given in options}) == 3
    assert VertexLocalBackend({}, tmp_path).group


def test_what_vertex_says_of_a_job_that_waits_is_an_event(paper: Bench, home: Path):
    (home / "code").mkdir(parents=True)
    (home / "code" / "train.py").write_text("print(1)\n")
    place = {"project": "local", "bucket": "local", "endpoint": paper.simulator.url, "image": "any:1", "client": "rest"}
    run = Submitter("vertex", watch=False, **place).submit({"source": str(home / "code"), "entrypoint": "train.py"})
    handle = str(run.attempts[-1].handle)
    words = {"code": 8, "message": "Resources are insufficient in region: us-central1"}
    for state, fields in (("QUEUED", {}), ("PENDING", {}), ("PENDING", {"error": words}), ("RUNNING", {"error": {}})):
        change(paper, handle, state, **fields)
        assert Watcher(run.store, run.run_id).refresh() is not None
    assert [(event.data["state"], event.data["reason"]) for event in run.store.events(run.run_id, "status")] == [
        ("QUEUED", "Vertex AI: QUEUED"),
        ("STARTING", "Vertex AI: PENDING"),
        ("STARTING", "Vertex AI: PENDING: Resources are insufficient in region: us-central1"),
        ("RUNNING", ""),
    ]


def test_a_log_is_read_with_the_job_that_was_just_listed(paper: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cloudtrain.backends.vertex.backend.SIMULATED_S", 60.0)
    backend = paper.backend()
    handles = create(paper, backend, 3, cloudtrain_attempt="some")
    for handle in handles:
        change(paper, handle, "RUNNING")
    backend.statuses(handles)
    before = len(paper.simulator.server.requests)
    assert [line for handle in handles for line in backend.logs(handle)] == []
    read = [(method, path.partition("?")[0]) for method, path in paper.simulator.server.requests[before:]]
    assert read == [("POST", "/v2/entries:list")] * 3


def test_the_end_of_a_job_that_the_launcher_calls_lost_is_known():
    job = {"state": "JOB_STATE_FAILED", "startTime": format_time(1.8e9), "endTime": format_time(1.8e9 + 60)}
    handle = "projects/p/locations/us-central1/customJobs/1"
    event = {"state": "LOST", "code": 69, "reason": "no rank printed a line for 5 s (limits.max_silence)"}
    found = job_status(handle, job, "p", 0.0, lambda: event)
    assert (found.state, found.event, found.ended_at) == (State.LOST, events.ENDED, job["endTime"])
