"""What the backend local does where another submit was faster, files are damaged, or a call is for what is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain.errors import BackendError, BadJob, StoreError
from cloudtrain.job.job import Job
from cloudtrain.nodes import supervisor
from cloudtrain.source.bundle import Bundle
from tests.backends.local.test_folders import PYTHON, backend, prepare, starts

__all__ = ["backend", "prepare", "starts"]  # fixtures


@pytest.mark.parametrize("faster", [True, False])
def test_a_source_that_another_submit_has_unpacked_meanwhile_is_used(backend, prepare, starts, monkeypatch, faster):
    def extract(self: Bundle, into: Path) -> None:
        if faster:
            into.mkdir()
        raise StoreError("the folder is there")

    monkeypatch.setattr(Bundle, "extract", extract)
    plan, bundle = prepare()
    if faster:
        assert backend.submit(plan, bundle) and len(starts.given) == 1
    else:
        with pytest.raises(StoreError, match="the folder is there"):
            backend.submit(plan, bundle)
        assert not starts.given


@pytest.mark.parametrize("text", ["{", "[" * 100_000, None])
def test_an_attempt_without_a_request_that_can_be_read_is_not_found(backend, prepare, text: str | None):
    plan, bundle = prepare()
    handle = backend.submit(plan, bundle)
    assert backend.find(plan.attempt_id) == handle
    request = Path(handle) / "request.json"
    request.unlink()
    if text is not None:
        request.write_text(text)
    assert backend.find(plan.attempt_id) is None and backend.nodes(handle) == []


def test_an_attempt_has_begun_where_all_its_nodes_have(backend, prepare, monkeypatch):
    plan, bundle = prepare(num_nodes=2)
    handle = backend.submit(plan, bundle)
    begun = {"node-0"}
    monkeypatch.setattr(supervisor, "has_begun", lambda node: node.name in begun)
    assert backend.find(plan.attempt_id) is None
    begun.add("node-1")
    assert backend.find(plan.attempt_id) == handle


def test_a_program_beside_a_rank_is_one_of_the_jobs_python(backend, prepare):
    handle = backend.submit(*prepare(num_nodes=2))
    shell = backend.shell(handle, 1, ["-c", "print(1)", "a b"], stdin=False, terminal=False)
    assert shell.argv == (PYTHON, "-c", "print(1)", "a b")
    with pytest.raises(BackendError, match="there is no node 2: they are counted from 0, and the last is 1"):
        backend.shell(handle, 2, [], stdin=False, terminal=False)


def test_all_problems_of_a_job_come_at_once(backend, prepare, tmp_path):
    _, bundle = prepare()
    service = {"run": "serve", "ports": [8000]}
    job = Job.from_dict(
        {
            "name": "r",
            "source": str(tmp_path / "source"),
            "inputs": {"data": {"uri": "https://example.org/x", "mode": "copy"}},
            "roles": {"trainer": {"entrypoint": "train.py"}, "one": service, "other": service},
        }
    )
    with pytest.raises(BadJob) as caught:
        backend.plan(job, bundle, "r")
    assert [problem.path for problem in caught.value.problems] == ["roles.other.ports", "inputs.data.uri"]


def test_the_launcher_ends_a_job_at_its_limit(backend, prepare):
    plan, _ = prepare(limits={"max_runtime": "1h", "grace": "30s"})
    assert backend.time_limit(plan).seconds == 3630
