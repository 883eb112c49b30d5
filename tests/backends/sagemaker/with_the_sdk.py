"""Runs in an environment that has sagemaker<3: what its HuggingFace estimator makes of our plans, as JSON.

with_the_sdk.py requests JOBS      {name: [request]} -> {name: the request that `fit` sends}
with_the_sdk.py submit HOME PLAN   submits a plan with client: sdk and prints the handle and the estimator's model
with_the_sdk.py outcome HOME PLAN  submits a plan with client: sdk and prints the handle, or the classes of the error
with_the_sdk.py refusals REQUEST   what either client says of each of ANSWERS: {answer: [of boto3, of the SDK]}
with_the_sdk.py models PLAN IMAGE  the inference images of models that were trained in IMAGE ...
with_the_sdk.py describe JOBS      {name: [request, code]} -> the hyperparameters that moto describes: of the request by
                                   either client, and of the code itself, a notebook that calls an estimator
with_the_sdk.py image REGION       the SDK's own address of the newest Hugging Face training image
"""

import json
import os
import sys
import tempfile
from contextlib import chdir
from pathlib import Path


def requests(given: dict) -> dict:
    from cloudtrain.backends.aws import Aws
    from cloudtrain.backends.sagemaker.huggingface_estimator import build_estimator, fit_inputs

    built = {}

    class Enough(Exception):
        pass

    def keep(params: dict, **_) -> None:
        built[name] = params
        raise Enough

    for name, request in given.items():
        aws = Aws("sagemaker", "us-east-1", None, None)
        aws.client("sagemaker").meta.events.register("provide-client-params.sagemaker.CreateTrainingJob", keep)
        made = build_estimator(aws, request)
        try:
            experiment = request.get("ExperimentConfig")
            made.fit(fit_inputs(request), False, job_name=request["TrainingJobName"], experiment_config=experiment)
        except Enough:
            pass
    return built


def submit(home: str, plan_file: str) -> dict:
    from sagemaker.telemetry import telemetry_logging

    from cloudtrain.backends.api import Plan
    from cloudtrain.backends.sagemaker.backend import SagemakerBackend
    from cloudtrain.source.bundle import Bundle

    reported: list[str] = []
    telemetry_logging._requests_helper = lambda url, _timeout: reported.append(url)
    plan = Plan.from_json(Path(plan_file).read_text())
    bundle = Bundle.stored(Path(home) / "bundles", str(plan.bundle["sha256"]))
    backend = SagemakerBackend(plan.job["options"]["sagemaker"], Path(home) / "runs")
    handle = backend.submit(plan, bundle)
    made = backend.estimator(plan)
    return {"handle": handle, "kind": type(made).__name__, "model": made.model_data, "reported": reported}


def models(plan_file: str, *images: str) -> list:
    """Create a model of the estimator of a plan, as if it had been trained in each image."""
    import dataclasses

    from cloudtrain.backends.api import Plan
    from cloudtrain.backends.sagemaker.backend import SagemakerBackend
    from cloudtrain.errors import BackendError

    plan, answers = Plan.from_json(Path(plan_file).read_text()), []
    backend = SagemakerBackend(plan.job["options"]["sagemaker"], Path())
    for image in images:
        specification = {**plan.request["AlgorithmSpecification"], "TrainingImage": image}
        changed = dataclasses.replace(plan, request={**plan.request, "AlgorithmSpecification": specification})
        made = backend.estimator(changed)
        try:
            model = made.create_model()
            serving = model.image_uri or model.serving_image_uri("us-east-1", "ml.g5.xlarge")
            answers.append([serving, model.model_data])
        except BackendError as error:
            answers.append([error.message, made.create_model(image_uri="mine:1").image_uri])
    return answers


def outcome(home: str, plan_file: str) -> dict:
    from botocore.retries import standard

    from cloudtrain.backends.api import Plan
    from cloudtrain.backends.sagemaker.backend import SagemakerBackend
    from cloudtrain.errors import BackendError
    from cloudtrain.source.bundle import Bundle

    standard.ExponentialBackoff.delay_amount = lambda *_: 0.0
    plan = Plan.from_json(Path(plan_file).read_text())
    bundle = Bundle.stored(Path(home) / "bundles", str(plan.bundle["sha256"]))
    try:
        return {
            "handle": SagemakerBackend(plan.job["options"]["sagemaker"], Path(home) / "runs").submit(plan, bundle),
            "kinds": [],
        }
    except BackendError as error:
        return {"kinds": [kind.__name__ for kind in type(error).__mro__], "message": error.message}


ANSWERS = {
    "quota": (400, "ResourceLimitExceeded", "The account-level service limit 'ml.p5' is 0 Instances"),
    "capacity": (400, "CapacityError", "Unable to provision requested ML compute capacity"),
    "denied": (400, "AccessDeniedException", "User: a is not authorized to perform: iam:PassRole on resource: r"),
    "invalid": (400, "ValidationException", "1 validation error detected"),
    "name in use": (400, "ResourceInUse", "The name is in use"),
    "throttled": (400, "ThrottlingException", "Rate exceeded"),
    "expired": (400, "ExpiredTokenException", "The security token included in the request is expired"),
    "clock": (403, "InvalidSignatureException", "Signature expired"),
    "unknown key": (403, "UnrecognizedClientException", "The security token included in the request is invalid"),
    "outage": (503, "ServiceUnavailable", "x"),
    "a proxy's error": (502, "", ""),
    "a proxy's page": (200, "", ""),
    "no answer": "ReadTimeoutError",
    "no service": "EndpointConnectionError",
    "certificate": "SSLError",
    "a plugin fails": ValueError("while the answer was read"),
    "a disk": OSError(28, "No space left on device"),
}


def refusals(request_file: str) -> dict:
    import io

    from botocore import exceptions
    from botocore.awsrequest import AWSResponse
    from botocore.retries import standard

    from cloudtrain.backends.aws import Aws
    from cloudtrain.backends.sagemaker import submission

    standard.ExponentialBackoff.delay_amount = lambda *_: 0.0
    request = json.loads(Path(request_file).read_text())
    aws = Aws("sagemaker", "us-east-1", None, None)

    def respond(request, **_) -> AWSResponse:  # noqa: ANN001
        if isinstance(given, str):
            raise getattr(exceptions, given)(endpoint_url=request.url, error="not trusted")
        if isinstance(given, Exception):
            raise given
        status, code, message = given
        response = AWSResponse(request.url, status, {}, io.BytesIO())
        response._content = json.dumps({"__type": code, "message": message}).encode() if code else b""
        return response

    aws.client("sagemaker").meta.events.register("before-send.sagemaker.CreateTrainingJob", respond)
    found = {}
    for name, given in ANSWERS.items():  # noqa: B007 - `respond` reads it
        found[name] = []
        for client in ("boto3", "sdk"):
            try:
                submission._create(aws, request, {"client": client})
            except Exception as error:
                said = [type(error).__name__, getattr(error, "message", ""), getattr(error, "hint", "")]
                found[name].append([*said, getattr(error, "resent", None)])
    return found


def describe(given: dict) -> dict:
    import sagemaker
    from moto import mock_aws
    from sagemaker.telemetry import telemetry_logging

    from cloudtrain.backends.aws import Aws
    from cloudtrain.backends.sagemaker import huggingface_estimator

    telemetry_logging._requests_helper = lambda *_: None
    sagemaker.get_execution_role = lambda: "arn:aws:iam::123456789012:role/training"
    sagemaker.Session.logs_for_job = lambda *_, **__: None  # moto runs nothing
    os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
    found = {}
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path("heads").symlink_to(Path(__file__).with_name("heads"))
        for name, (request, code) in given.items():

            def by_boto3(aws: Aws, request: dict = request) -> None:
                aws.call("sagemaker", "create_training_job", **request)

            def by_sdk(aws: Aws, request: dict = request) -> None:
                huggingface_estimator.submit(aws, request)

            def by_notebook(_: Aws, code: str = code) -> None:
                with chdir("." if "source_dir" in code else "heads"):
                    exec(code, {})  # noqa: S102

            found[name] = []
            for send in (by_boto3, by_sdk, by_notebook):
                with mock_aws():
                    aws = Aws("sagemaker", "us-east-1", None, None)
                    send(aws)
                    (job,) = aws.call("sagemaker", "list_training_jobs")["TrainingJobSummaries"]
                    job = aws.call("sagemaker", "describe_training_job", TrainingJobName=job["TrainingJobName"])
                    found[name].append(job["HyperParameters"])
    return found


def image(region: str) -> str:
    from sagemaker import image_uris

    wanted = {"version": "4.56.2", "py_version": "py312", "base_framework_version": "pytorch2.8.0"}
    return image_uris.retrieve("huggingface", region, image_scope="training", instance_type="ml.g5.xlarge", **wanted)


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    if what == "requests":
        print(json.dumps(requests(json.loads(Path(words[0]).read_text()))))
    elif what == "describe":
        print(json.dumps(describe(json.loads(Path(words[0]).read_text()))))
    elif what == "outcome":
        print(json.dumps(outcome(*words)))
    elif what == "refusals":
        print(json.dumps(refusals(*words)))
    elif what == "models":
        print(json.dumps(models(*words)))
    elif what == "submit":
        print(json.dumps(submit(*words)))
    else:
        print(json.dumps({region: image(region) for region in words}))
