"""What the simulated Vertex AI refuses as the service does: places, counts of accelerators, filters of its list."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.google import api_error
from cloudtrain.backends.http import Answer
from cloudtrain.backends.vertex.local import VertexLocalBackend
from cloudtrain.errors import BackendError
from cloudtrain.job.job import Job
from cloudtrain.simulators.http import ApiError
from cloudtrain.simulators.vertex.logs import parse_filter
from cloudtrain.simulators.vertex.validation import check_accelerators, check_job_filter, check_place
from tests.backends.vertex.bench import Bench

JOB = {"display_name": "my_job_1", "state": "JOB_STATE_RUNNING", "labels": {"team": "nlp"}}
JOB["create_time"] = JOB["createTime"] = "2026-11-23T12:00:00Z"
JOB["displayName"] = JOB["display_name"]


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ('state="JOB_STATE_SUCCEEDED" AND display_name:"my_job_*"', False),
        ('state!="JOB_STATE_FAILED" OR display_name="other"', True),
        ('state="JOB_STATE_FAILED" OR display_name:"my_job"', True),
        ('NOT display_name="my_job_1"', False),
        ('display_name:"my_*_1"', True),
        ('create_time>"2021-05-18T00:00:00Z"', True),
        ('createTime>="2026-11-23T12:00:00.000Z" AND displayName="my_job_1"', True),
        ("labels.team=nlp", True),
        ("labels.team=vision", False),
        ("labels.team:*", True),
        ("labels.other:*", False),
    ],
)
def test_filters_of_the_documentation_are_taken(text: str, matches: bool):
    check_job_filter(text)
    assert parse_filter(text)(JOB) is matches


def test_the_examples_of_the_sdks_docstring_are_taken():
    from google.cloud.aiplatform_v1.types import ListCustomJobsRequest

    examples = re.findall(r"- ``(.*)``\n", str(ListCustomJobsRequest.__doc__).partition("Some examples")[2])
    assert len(examples) == 6, examples
    for text in examples:
        check_job_filter(text)
        parse_filter(text)(JOB)


@pytest.mark.parametrize(
    "text", ["state>1", 'labels.team!="nlp"', "name=1", 'error.code="3"', 'create_time>"today"', "labels.team=nlp AND"]
)
def test_other_filters_are_refused(text: str):
    if text.endswith("AND"):
        text += " what"
    with pytest.raises(ApiError, match="Invalid filter"):
        check_job_filter(text)


@pytest.mark.parametrize(
    ("spec", "taken"),
    [
        ({"machineType": "a3-highgpu-8g", "acceleratorType": "NVIDIA_H100_80GB", "acceleratorCount": 8}, True),
        ({"machineType": "a3-highgpu-8g", "acceleratorType": "NVIDIA_H100_80GB", "acceleratorCount": 4}, False),
        ({"machineType": "a3-highgpu-8g", "acceleratorType": "NVIDIA_L4", "acceleratorCount": 8}, False),
        ({"machineType": "n1-standard-8", "acceleratorType": "NVIDIA_TESLA_T4", "acceleratorCount": 3}, False),
        ({"machineType": "quantum-1", "acceleratorType": "X", "acceleratorCount": 3}, True),
    ],
)
def test_a_machine_has_its_own_accelerators_alone(spec: dict[str, Any], taken: bool):
    if taken:
        check_accelerators(spec)
        return
    with pytest.raises(ApiError, match="is not supported for machine type"):
        check_accelerators(spec)


def test_a_region_and_a_bucket_have_to_be_there(paper: Bench):
    check_place("europe-west4")
    plan, bundle = paper.plan("print(1)")
    for change, text in (({"bucket": "no-such-bucket"}, "no-such-bucket"), ({"region": "us-middle1"}, "us-middle1")):
        backend = paper.backend(**change)
        job = backend.plan(Job.from_dict(plan.job), bundle, "a-run").request["customJob"]
        with pytest.raises(BackendError, match=text):
            backend._create(backend._parent, job)
    with pytest.raises(BackendError, match="us-middle1"):
        paper.backend(region="us-middle1").find("a-run-a1")


def test_the_server_refuses_such_machines_and_filters(paper: Bench):
    plan, bundle = paper.plan("print(1)")
    backend, job = paper.backend(), json.loads(json.dumps(plan.request["customJob"]))
    (pool,) = job["jobSpec"]["workerPoolSpecs"]
    pool["machineSpec"] = {"machineType": "a3-highgpu-8g", "acceleratorType": "NVIDIA_H100_80GB", "acceleratorCount": 4}
    with pytest.raises(BackendError, match="is not supported for machine type"):
        backend._create(backend._parent, job)
    with pytest.raises(BackendError, match="Invalid filter"):
        list(backend._list({"filter": 'labels.team!="nlp"'}))


def test_a_refused_machine_is_not_blamed_on_the_region():
    text = 'POST https://x/v1/projects/p/locations/r/customJobs: Accelerator "A" is not supported for machine type "m".'
    answer = Answer(400, {}, json.dumps({"error": {"message": text}}).encode())
    assert "region" not in str(api_error(answer, "Vertex AI did not accept the job"))


@pytest.mark.parametrize("state", ["JOB_STATE_PENDING", "JOB_STATE_SUCCEEDED"])
def test_a_job_of_this_machine_has_no_address_in_googles_console(tmp_path: Path, paper: Bench, state: str):
    handle = "projects/1/locations/us-central1/customJobs/2"
    assert VertexLocalBackend({}, tmp_path / "runs")._status(handle, {"state": state}).url is None
    assert str(paper.backend()._status(handle, {"state": state}).url).startswith("https://console.cloud.google.com/")
