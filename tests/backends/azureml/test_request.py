"""What Azure Machine Learning receives: equal to what azure-ai-ml renders, and what is refused."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends import registry
from cloudtrain.backends.api import Plan
from cloudtrain.backends.azureml import request
from cloudtrain.backends.azureml.options import AzuremlOptions
from cloudtrain.backends.manifest import Manifest, sent_record
from cloudtrain.errors import BadJob
from cloudtrain.job.job import Job
from cloudtrain.runs.planning.plan import Planner
from cloudtrain.source.bundle import Bundle
from tests.backends.azureml.shapes import IMAGE, OPTIONS, SHAPES

GOLDEN = Path(__file__).parents[2] / "golden" / "azureml"


def plan_of(folder: Path, changes: dict[str, Any], options: dict[str, Any] | None = None) -> Plan:
    source = folder / "source"
    source.mkdir(exist_ok=True)
    (source / "script.py").write_text("print(1)")
    data = {"name": "a", "source": str(source), "entrypoint": "script.py", "environment": {"requirements": "none"}}
    job = Job.from_dict({k: v for k, v in {**data, **IMAGE, **changes}.items() if v is not None})
    chosen = AzuremlOptions(**{**OPTIONS, **(options or {})}).model_dump()
    return request.build(job, Bundle.make(source, folder / "bundles"), "run", 1, chosen)


def refusals(folder: Path, changes: dict[str, Any], options: dict[str, Any] | None = None) -> set[str]:
    with pytest.raises(BadJob) as refused:
        plan_of(folder, changes, options)
    assert all(problem.message and problem.hint for problem in refused.value.problems), "what to do"
    return {problem.path for problem in refused.value.problems}


@pytest.mark.parametrize("name", SHAPES)
def test_a_request_is_what_the_sdk_renders(name: str, tmp_path: Path):
    changes, options, _ = SHAPES[name]
    sent = json.loads(json.dumps(plan_of(tmp_path, changes, options).request["job"]))
    own = sent["properties"]
    assert own["command"].count("${{inputs.source}}") == 1 and "CLOUDTRAIN_MANIFEST_0" in own["environmentVariables"]
    own["command"], own["environmentVariables"] = "COMMAND ${{inputs.source}}", {"NAME": "VALUE"}
    own["environmentId"] = re.sub(r"/versions/[0-9a-f]{32}$", "/versions/VERSION", own["environmentId"])
    own["inputs"]["source"]["uri"] = "https://place/SOURCE"
    assert sent == json.loads((GOLDEN / f"{name}.json").read_text())


def test_the_golden_files_are_the_shapes():
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(SHAPES)


def test_nodes_find_their_bundle_their_place_and_their_orders(tmp_path: Path):
    plan = plan_of(tmp_path, {"num_nodes": 2})
    own = plan.request["job"]["properties"]
    words = shlex.split(own["command"])
    assert words[:5] == ["exec", "env", "-u", "LOCAL_RANK", "CLOUDTRAIN_SOURCE=${{inputs.source}}"]
    assert words[5:7] == ["python", "-c"] and words[7].endswith('launch.py"])\n') and len(words) == 8
    assert own["inputs"]["source"]["uri"].startswith("https://account.blob.core.windows.net/jobs/home/bundles/")
    assert own["environmentVariables"]["CLOUDTRAIN_SOURCE_SHA256"] == plan.bundle["sha256"]
    assert sent_record(own["environmentVariables"])["manifest"]["output"] == "az://jobs@account/home/runs"
    assert "CLOUDTRAIN_NODE_RANK" not in own["environmentVariables"], "RANK says it"
    alone = plan_of(tmp_path, {}).request["job"]["properties"]
    assert alone["environmentVariables"]["CLOUDTRAIN_NODE_RANK"] == "0" and "distribution" not in alone


def test_the_launcher_finds_what_azure_brings_from_datastores(tmp_path: Path):
    changes, options, _ = SHAPES["datastores"]
    plan = plan_of(tmp_path, changes, options)
    words = shlex.split(plan.request["job"]["properties"]["command"])
    assert words[3:6] == [f"CLOUDTRAIN_AZUREML_INPUT_{name.upper()}=${{{{inputs.input_{name}}}}}"
                          for name in ("train_set", "labels", "web")]  # fmt: skip
    assert words[6] == "CLOUDTRAIN_RUN_DIR=${{outputs.results}}"
    made = sent_record(plan.request["job"]["properties"]["environmentVariables"])["manifest"]
    assert made["output"] is None and made["inputs"]["train-set"]["variable"] == "CLOUDTRAIN_AZUREML_INPUT_TRAIN_SET"
    assert {item["mode"] for item in made["inputs"].values()} == {"given"}


ELSEWHERE: dict[str, dict[str, Any]] = {
    "akash": {"store": "s3://b/x", "max_usd_per_hour": 1},
    "kubernetes": {},
    "local": {},
    "sagemaker": {"role": "arn:aws:iam::123456789012:role/t", "bucket": "bucket", "region": "us-east-1"},
    "sagemaker-local": {},
    "slurm": {"folder": "/shared"},
    "ssh": {"hosts": [{"address": "10.0.0.1"}]},
    "vertex": {"project": "project", "bucket": "bucket", "region": "us-central1"},
    "vertex-local": {},
}


@pytest.mark.parametrize("backend", sorted(ELSEWHERE))
def test_datastores_are_refused_elsewhere(backend: str, tmp_path: Path, home: Path):
    assert {*ELSEWHERE, request.NAME} == set(registry.names())
    (tmp_path / "train.py").write_text("print(1)")
    place, options = "azureml://datastores/a/paths/b", {backend: ELSEWHERE[backend]}
    image = (
        {"image": "123456789012.dkr.ecr.us-east-1.amazonaws.com/t:1"}
        if "image" in registry.traits(backend).keys
        else {}
    )
    job = {"name": "a", "source": str(tmp_path), "entrypoint": "train.py", "options": options, **image}
    for path, keys in (("inputs.d.uri", {"inputs": {"d": place}}), ("output", {"output": place})):
        with pytest.raises(BadJob) as refused:
            Planner(backend, home=home).plan({**job, **keys})
        assert [
            problem.message for problem in refused.value.problems if problem.path == path and place in problem.message
        ]


def test_an_output_of_the_job_is_used(tmp_path: Path):
    plan = plan_of(tmp_path, {"output": "s3://bucket/x"})
    assert Manifest.from_dict(plan.manifest).output == "s3://bucket/x"


@pytest.mark.parametrize(
    "changes,options,paths",
    [
        ({"image": None}, {}, {"image"}),
        ({}, {"environment": "azureml:x@latest"}, {"image"}),
        ({"resources": {"use_spot": True}}, {"compute": "gpus"}, {"resources.use_spot"}),
        ({"resources": {"accelerators": "H100:3"}}, {}, {"resources.accelerators"}),
        ({"output": "/data"}, {}, {"output"}),
        ({"labels": {"x": "y" * 257, "cloudtrain_run": "z"}}, {}, {"labels.x", "labels.cloudtrain_run"}),
        (
            {"inputs": {"d": "/data", "e": {"uri": "az://c@a/x", "mode": "mount"}}},
            {},
            {"inputs.d.uri", "inputs.e.mode"},
        ),
        ({"inputs": {"d": "azureml://datastores/x", "e": "azureml:y:1"}}, {}, {"inputs.d.uri", "inputs.e.uri"}),
        ({"output": "azureml://datastores/x/paths/"}, {}, {"output"}),
        ({"output": "azureml://datastores/x/paths/y", "audit": True}, {}, {"audit"}),
    ],
)
def test_what_cannot_run_is_refused_with_its_place(changes: dict, options: dict, paths: set[str], tmp_path: Path):
    assert refusals(tmp_path, changes, options) == paths


@pytest.mark.parametrize(
    "options",
    [
        {"store": "s3://bucket"},
        {"store": "az://container/without/account"},
        {"workspace": "x"},
        {"workspace": "w" * 34},
        {"compute": "c" * 33},
        {"client_id": "x"},
        {"priority": "low", "compute": "gpus"},
        {"subscription": "mine"},
        {"ssh_public_key": "ssh-ed25519 AAAA"},
        {"ssh_public_key": "a\nb", "compute": "gpus"},
    ],
)
def test_options_that_azure_would_refuse_are_refused(options: dict):
    AzuremlOptions(**OPTIONS)
    with pytest.raises(ValueError):
        AzuremlOptions(**{**OPTIONS, **options})


@pytest.mark.parametrize(
    "seconds,text", [(1, "PT1S"), (3600, "PT1H"), (90061, "P1DT1H1M1S"), (172800, "P2D"), (60, "PT1M")]
)
def test_durations_are_iso_8601(seconds: int, text: str):
    assert request.iso(seconds) == text
