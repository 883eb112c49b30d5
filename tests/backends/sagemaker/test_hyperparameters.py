"""The hyperparameters of a training job as SageMaker shows them, and the client that sends it."""

from __future__ import annotations

import json
import random

import pytest

from cloudtrain.backends.manifest import Manifest
from cloudtrain.backends.sagemaker import client, request
from cloudtrain.backends.sagemaker.hyperparameters import encode_manifest, object_folder
from tests.backends.sagemaker.oracle import violations
from tests.backends.sagemaker.test_request import GPU, made, orders_of


def shown(hyperparameters: dict, **changes) -> tuple[dict[str, str], request.BuiltRequest]:
    built = made({**GPU, "hyperparameters": hyperparameters, **changes})
    assert violations(built.request) == [] and built.problems == ()
    own = ("sagemaker_", "ct_manifest_")
    return {k: v for k, v in built.request["HyperParameters"].items() if not k.startswith(own)}, built


def test_hyperparameters_are_written_as_an_estimator_writes_them() -> None:
    given = {
        "epochs": 1,
        "lr": 5e-5,
        "model": "gpt2",
        "fp16": True,
        "none": None,
        "layers": [2, 4],
        "optim": {"b": 0.9},
    }
    written = {**{name: json.dumps(value) for name, value in given.items() if name != "optim"}, "optim.b": "0.9"}
    assert shown(given)[0] == written
    exact = {
        "tenth": "0.10",
        "many": "0.1000000000000000055511151231257827",
        "id": "007",
        "huge": "1e999",
        "text": "a b",
    }
    assert shown(exact)[0] == {**{name: json.dumps(text) for name, text in exact.items()}, "tenth": "0.1"}


def test_hyperparameters_beyond_the_limits_travel_in_the_manifest_and_are_said() -> None:
    texts = {"long": "x" * 2499, "fits": "x" * 2498, "sagemaker_program": "mine.py", "ct_manifest_0": "y"}
    found, built = shown(texts)
    assert set(found) == {"fits"} and built.request["HyperParameters"]["sagemaker_program"] == '".cloudtrain/launch.py"'
    (note,) = [note for note in built.notes if "does not show" in note]
    assert note.endswith("long, sagemaker_program, ct_manifest_0")
    assert orders_of(built).argv[1:] == [word for name, text in texts.items() for word in (f"--{name}", text)]
    found, built = shown({f"h{n}": n for n in range(120)})
    assert len(built.request["HyperParameters"]) == 100 and "h119" in "".join(built.notes)


def test_a_manifest_over_64_kib_is_an_object_beside_the_bundle() -> None:
    digits = random.Random(1).randbytes(80_000).hex()
    found, built = shown({"lr": 1}, args=[digits])
    assert found == {"lr": "1"} and not [name for name in built.request["HyperParameters"] if "ct_manifest" in name]
    (channel,) = [c for c in built.request["InputDataConfig"] if c["ChannelName"] == "cloudtrain-manifest"]
    content = encode_manifest(Manifest.from_dict(built.manifest.to_dict()))[1]
    uri = channel["DataSource"]["S3DataSource"]["S3Uri"]
    assert uri == object_folder("s3://my-bucket/cloudtrain", content)
    assert manifest_argv(content) == ["train.py", "--lr", "1", digits]


def manifest_argv(content: str) -> list[str]:
    from launcher import manifest

    return manifest.decode(manifest.pieces({}, "{}", content)).argv


CLIENTS = {  # a change of the request, and the field that needs boto3
    "wait": ({"StoppingCondition": {"MaxRuntimeInSeconds": 9, "MaxPendingTimeInSeconds": 7200}},
             "StoppingCondition.MaxPendingTimeInSeconds"),
    "mlflow": ({"MlflowConfig": {"MlflowResourceArn": "arn"}}, "MlflowConfig"),
    "a false": ({"EnableNetworkIsolation": False}, "EnableNetworkIsolation: False"),
    "gzip": ({"OutputDataConfig": {"S3OutputPath": "s3://b/k", "CompressionType": "GZIP"}},
             "OutputDataConfig.CompressionType: GZIP"),
}  # fmt: skip


@pytest.mark.parametrize("name", CLIENTS)
def test_a_field_that_the_estimator_cannot_set_needs_boto3(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "find_spec", lambda _: object())
    plain, (change, field) = made(GPU).request, CLIENTS[name]
    assert client.choose_client(plain, {}) == ("sdk", "the SageMaker SDK is installed")
    assert client.choose_client({**plain, **change}, {}) == (
        "boto3",
        f"the SageMaker SDK's estimator cannot set {field}",
    )
    (problem,) = client.find_problems({**plain, **change}, {"client": "sdk"})
    assert problem.path == "options.sagemaker.client" and field in problem.message
    assert client.find_problems({**plain, **change}, {"client": "boto3"}) == []
    monkeypatch.setattr(client, "find_spec", lambda _: None)
    assert client.choose_client(plain, {}) == ("boto3", "the SageMaker SDK is not installed")
