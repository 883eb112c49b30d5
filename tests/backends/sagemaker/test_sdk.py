"""The estimator's path, in an environment of its own (tests/lab/sdk.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.sagemaker import machine
from cloudtrain.backends.sagemaker.backend import SagemakerBackend
from cloudtrain.job.job import Job
from cloudtrain.simulators.sagemaker.server import Fault, Simulator
from cloudtrain.source.bundle import Bundle
from tests.backends.sagemaker.test_backend import options, simulator  # noqa: F401 - a fixture
from tests.backends.sagemaker.test_request import CASES, made
from tests.lab.sdk import run


def ask(sdk: Path, *words: object, **env: str) -> Any:
    return json.loads(run(sdk, Path(__file__).with_name("with_the_sdk.py"), *words, **env))


@pytest.mark.timeout(1200)
def test_the_estimator_builds_exactly_the_planned_request(sdk: Path, tmp_path: Path) -> None:
    planned = {name: made(*case).request for name, case in CASES.items() if name != "boto3_only"}
    assert len(planned) == 13
    (tmp_path / "requests.json").write_text(json.dumps(planned))
    assert ask(sdk, "requests", tmp_path / "requests.json") == planned


@pytest.mark.timeout(1200)
def test_both_clients_send_what_plan_printed(sdk: Path, simulator: Simulator, home: Path, tmp_path: Path) -> None:  # noqa: F811
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text("print('hello')\n")
    bundle = Bundle.make(source, home / "bundles")
    calls = {}
    for client in ("sdk", "boto3"):
        chosen = options(simulator, client=client)
        changes = {
            "labels": {"team": "nlp"},
            "hyperparameters": {"lr": 5e-5, "model": "a b"},
            "args": ["", "a b", "é"],
            "options": {"sagemaker": chosen},
        }
        job = Job.from_dict({"name": "both", "source": str(source), "entrypoint": "train.py", **changes})
        backend = SagemakerBackend(chosen, home / "runs")
        plan = backend.plan(job, bundle, f"both-{client}")
        simulator.calls.clear()
        if client == "sdk":
            (tmp_path / "plan.json").write_text(plan.to_json())
            submitted_job = ask(sdk, "submit", home, tmp_path / "plan.json", **simulator.environ)
            assert submitted_job["kind"] == "HuggingFace" and submitted_job["model"].endswith(
                f"/{plan.attempt_id}/output/model.tar.gz"
            )
            assert submitted_job["reported"] == []  # the SDK's telemetry
            handle = submitted_job["handle"]
            tag = "2.6.0-transformers4.51.3-gpu-py312-cu124-ubuntu22.04"
            trained_in = [f"1.dkr.ecr.us-east-1.amazonaws.com/huggingface-pytorch-training:{tag}"]
            trained_in.append(machine.default_image("us-east-1"))
            listed, not_listed = ask(sdk, "models", tmp_path / "plan.json", *trained_in, **simulator.environ)
            assert "/huggingface-pytorch-inference:2.6.0-transformers4.51.3-gpu-py312-" in listed[0]
            assert listed[1] == submitted_job["model"]
            assert "no inference image with transformers 4.56.2 and torch 2.8.0" in not_listed[0]
            assert not_listed[1] == "mine:1"
        else:
            handle = backend.submit(plan, bundle)
        sent = simulator.calls[: simulator.calls.index("sagemaker:CreateTrainingJob") + 1]
        calls[client] = sent
        assert backend.find(plan.attempt_id) == handle
        described = simulator.call("sagemaker", "describe_training_job", TrainingJobName=plan.attempt_id)[
            "HyperParameters"
        ]
        assert (described["lr"], described["model"]) == ("5e-05", '"a b"')
        assert simulator.jobs[plan.attempt_id].request == json.loads(json.dumps(plan.request))
    assert len(calls["sdk"]) <= 3 and len(calls["boto3"]) <= 3, calls


@pytest.mark.timeout(1200)
def test_a_default_of_the_sdk_that_changes_the_job_is_refused_by_name(
    sdk: Path,
    simulator: Simulator,  # noqa: F811
    home: Path,
    tmp_path: Path,
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "train.py").write_text("print('hello')\n")
    bundle = Bundle.make(tmp_path / "source", home / "bundles")
    chosen = options(simulator, client="sdk")
    data = {"name": "changed", "source": str(tmp_path / "source"), "entrypoint": "train.py"}
    plan = SagemakerBackend(chosen, home / "runs").plan(
        Job.from_dict({**data, "options": {"sagemaker": chosen}}), bundle, "changed"
    )
    (tmp_path / "plan.json").write_text(plan.to_json())
    defaults = {"Environment": {"A": "b"}}
    config = {"SchemaVersion": "1.0", "SageMaker": {"TrainingJob": defaults}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    env = {**simulator.environ, "SAGEMAKER_USER_CONFIG_OVERRIDE": str(tmp_path / "config.yaml")}
    refused = ask(sdk, "outcome", home, tmp_path / "plan.json", **env)
    assert (
        "Unreachable" not in refused["kinds"]
        and "would send a different Environment than the plan" in refused["message"]
    )
    assert simulator.jobs == {}


@pytest.mark.timeout(1200)
def test_the_table_of_images_is_the_sdks(sdk: Path) -> None:
    regions = sorted(machine.REGISTRIES)
    assert ask(sdk, "image", *regions) == {region: machine.default_image(region) for region in regions}


@pytest.mark.timeout(1200)
def test_an_outage_of_the_estimators_is_no_refusal(sdk: Path, simulator: Simulator, home: Path, tmp_path: Path) -> None:  # noqa: F811
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text("print('hello')\n")
    bundle = Bundle.make(source, home / "bundles")
    chosen = options(simulator, client="sdk")
    job = Job.from_dict(
        {"name": "lost", "source": str(source), "entrypoint": "train.py", "options": {"sagemaker": chosen}}
    )
    backend = SagemakerBackend(chosen, home / "runs")

    def submitted(name: str, *faults: Fault) -> dict:
        plan = backend.plan(job, bundle, name)
        (tmp_path / "plan.json").write_text(plan.to_json())
        simulator.faults[:] = faults
        return ask(sdk, "outcome", home, tmp_path / "plan.json", **simulator.environ)

    lost = Fault("CreateTrainingJob", 0, times=99, committed=True)
    silent = Fault("DescribeTrainingJob", 503, "ServiceUnavailable", times=99)
    assert submitted("found", lost)["handle"] == backend.find("found-a1")
    assert "Unreachable" in submitted("unknown", lost, silent)["kinds"] and "unknown-a1" in simulator.jobs
    assert (
        "NoCapacity" in submitted("quota", Fault("CreateTrainingJob", 400, "ResourceLimitExceeded", times=9))["kinds"]
    )
    denied = submitted("denied", Fault("CreateTrainingJob", 400, "AccessDeniedException", times=9))
    assert {"Unreachable", "NoCapacity"}.isdisjoint(denied["kinds"])


@pytest.mark.timeout(1200)
def test_both_clients_say_the_same_of_every_refusal(sdk: Path, tmp_path: Path) -> None:
    """In the SDK's environment: the class, message and hint of a table of answers, and of calls that get none."""
    (tmp_path / "request.json").write_text(json.dumps(made(*CASES["user_script"]).request))
    answers = ask(sdk, "refusals", tmp_path / "request.json")
    assert len(answers) == 17 and {name: boto3 for name, (boto3, _) in answers.items()} == {
        name: by_sdk for name, (_, by_sdk) in answers.items()
    }
    kinds = {name: boto3[0] for name, (boto3, _) in answers.items()}
    lost = (
        "throttled",
        "outage",
        "a proxy's error",
        "a proxy's page",
        "no answer",
        "certificate",
        "a plugin fails",
        "a disk",
    )
    assert {name for name, kind in kinds.items() if kind == "AwsUnreachable"} == set(lost)
    assert {kinds[name] for name in ("quota", "capacity")} == {"AwsNoCapacity"} and kinds[
        "no service"
    ] == "AwsNoService"
