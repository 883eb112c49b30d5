"""Lost answers of Vertex AI make no second job, and an upload that broke off is continued."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain.backends.store import gcs
from cloudtrain.backends.vertex import jobs
from cloudtrain.errors import BackendError, Unreachable
from cloudtrain.job.job import Job
from cloudtrain.simulators.http import Fault
from tests.backends.vertex.bench import CREATE, LIST, UPLOAD, Bench

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize("client", ["rest", "sdk"])
@pytest.mark.parametrize("status", [503, 500, 0])
@pytest.mark.parametrize("after", [True, False], ids=["after", "before"])
def test_an_answer_that_got_lost_makes_no_second_job(paper: Bench, client: str, status: int, after: bool):
    plan, bundle = paper.plan("print(1)")
    backend = paper.backend(client=client)
    paper.simulator.faults.append(Fault("POST", r"/customJobs(\?|$)", status, after=after))
    handle = backend.submit(plan, bundle)
    assert backend.find(plan.attempt_id) == handle == paper.backend().submit(plan, bundle)
    assert len(paper.simulator.jobs._jobs) == 1


def test_a_list_that_fails_is_not_an_absence(paper: Bench):
    plan, bundle = paper.plan("print(1)")
    paper.simulator.faults.append(Fault("GET", LIST, 503, times=99))
    with pytest.raises(BackendError, match="jobs cannot be listed"):
        paper.backend().submit(plan, bundle)
    assert paper.sent() == [] and paper.asked("GET", LIST) == 5


def test_lost_answer_and_lost_list_send_nothing_twice(paper: Bench):
    plan, bundle = paper.plan("print(1)")
    paper.simulator.faults += [Fault("POST", CREATE, 503, after=True), Fault("GET", LIST, 503, times=99, skip=1)]
    with pytest.raises(BackendError):
        paper.backend().submit(plan, bundle)
    paper.simulator.faults.clear()
    assert paper.backend().submit(plan, bundle) == paper.backend().find(plan.attempt_id)
    assert len(paper.sent()) == 1


@pytest.mark.parametrize("client", ["rest", "sdk"])
@pytest.mark.parametrize("status", [403, 503])
def test_what_cannot_be_found_out_is_not_refused(paper: Bench, client: str, status: int):
    plan, bundle = paper.plan("print(1)")
    paper.simulator.faults.append(Fault("POST", r"/customJobs(\?|$)", 503, after=True))
    paper.simulator.faults.append(Fault("GET", LIST, status, times=99, skip=1))
    with pytest.raises(Unreachable, match="did not answer whether"):
        paper.backend(client=client).submit(plan, bundle)
    assert len(paper.sent()) == 1


@pytest.mark.parametrize("client", ["rest", "sdk"])
def test_a_refusal_after_a_lost_answer_is_none_where_the_job_was_made(paper: Bench, client: str, monkeypatch):
    """A list may lag behind: the job is in none of the first three."""
    plan, bundle = paper.plan("print(1)")
    paper.simulator.faults.append(Fault("POST", r"/customJobs(\?|$)", 503, after=True))
    paper.simulator.faults.append(Fault("POST", r"/customJobs(\?|$)", 403, "denied", times=99))
    look, looks = jobs.CustomJobs.find, []

    def late(its, attempt_id):
        looks.append(attempt_id)
        return None if len(looks) <= 4 else look(its, attempt_id)

    monkeypatch.setattr(jobs.CustomJobs, "find", late)
    assert paper.backend(client=client).submit(plan, bundle) and len(paper.simulator.jobs._jobs) == 1


def test_labels_are_read_back(paper: Bench):
    plan, bundle = paper.plan("print(1)", labels={"team": "nlp"})
    backend = paper.backend()
    assert backend.labels(backend.submit(plan, bundle)) == {"team": "nlp"}


def test_unchanged_source_uploads_nothing(paper: Bench):
    plan, bundle = paper.plan("print(1)")
    backend = paper.backend()
    backend.submit(plan, bundle)
    assert paper.asked("POST", UPLOAD) == 1
    again = backend.plan(Job.from_dict(plan.job), bundle, "another-run")
    backend.submit(again, bundle)
    assert paper.asked("POST", UPLOAD) == 1 and len(paper.sent()) == 2


def test_an_upload_that_somebody_else_finishes_first_is_fine(paper: Bench):
    plan, bundle = paper.plan("print(1)")
    place = plan.request["source"]
    paper.simulator.faults.append(Fault("GET", r"/o/", 404, "No such object"))  # looked before the other had written
    paper.simulator.storage.put(place["bucket"], place["object"], b"theirs")
    assert paper.backend().submit(plan, bundle)
    assert paper.simulator.storage.read(place["bucket"], place["object"]) == b"theirs"


@pytest.mark.parametrize("status", [503, 0])
@pytest.mark.parametrize("after", [True, False], ids=["after", "before"])
def test_a_large_upload_goes_on_where_it_broke_off(paper: Bench, tmp_path: Path, monkeypatch, status, after):
    monkeypatch.setattr(gcs, "ONE_REQUEST", 1000)
    monkeypatch.setattr(gcs, "CHUNK", 256 << 10)
    data = bytes(range(256)) * 5000
    (tmp_path / "large").write_bytes(data)
    paper.simulator.faults.append(Fault("PUT", UPLOAD, status, skip=2, after=after))
    there = gcs.Gcs(paper.backend()._api, "gs://local")
    assert there.add("src/large", tmp_path / "large") is True
    assert paper.simulator.storage.read("local", "src/large") == data
    assert there.add("src/large", tmp_path / "large") is False
    assert paper.simulator.server.received_bytes < len(data) + (600 << 10), "it began anew"
