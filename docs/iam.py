"""Write the IAM actions of docs/sagemaker.md from the calls that the backend makes; `--check` only says if it is current.

python docs/iam.py

Every command's calls are recorded by the simulator while the backend really does them. The tests of the backend compare
theirs with the page: a call that is not listed there fails the test that made it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

PAGE = Path(__file__).parent / "sagemaker.md"
BEGIN, END = (
    "<!-- Written by docs/iam.py; a test checks that it is current. -->",
    "<!-- end of what docs/iam.py wrote -->",
)
# An operation of an API and the IAM actions that it needs, where these are not of its own name.
NEEDS = {
    "s3:HeadBucket": ("s3:ListBucket",),
    "s3:ListObjectsV2": ("s3:ListBucket",),
    "s3:HeadObject": ("s3:GetObject",),
    "sagemaker:CreateTrainingJob": ("sagemaker:CreateTrainingJob", "sagemaker:AddTags", "iam:PassRole"),
    # https://docs.aws.amazon.com/AmazonECR/latest/userguide/image-push-iam.html (2026-11-25): what docker does with it
    "ecr:GetAuthorizationToken": (
        "ecr:GetAuthorizationToken",
        "ecr:BatchCheckLayerAvailability",
        "ecr:CompleteLayerUpload",
        "ecr:InitiateLayerUpload",
        "ecr:PutImage",
        "ecr:UploadLayerPart",
    ),
    "sts:GetCallerIdentity": (),  # needs no permission
}
ON = {
    "iam:PassRole": "the role",
    "s3": "the bucket",
    "logs": "`/aws/sagemaker/TrainingJobs`",
    "ecr:GetAuthorizationToken": "`*`",
    "ecr": "repositories",
}
OPTIONAL = {
    "iam:GetRole",
    "iam:ListRoles",
    "ecr:BatchGetImage",
    "ec2:DescribeInstanceTypes",
    "sagemaker:ListTrainingJobs",
}  # what is asked there is left out where it is denied


def actions(calls: list[str]) -> list[str]:
    """Return the IAM actions that calls (service:Operation) need, in order and once."""
    found = [action for call in calls for action in NEEDS.get(call, (call,))]
    return sorted(dict.fromkeys(found))


def record(folder: Path) -> dict[str, list[str]]:
    """Return the calls of every command against a simulator; blocking (some seconds)."""
    from cloudtrain.backends.sagemaker.backend import SagemakerBackend
    from cloudtrain.job.job import Job
    from cloudtrain.simulators.sagemaker.server import ACCOUNT, REGION, ROLE, Simulator
    from cloudtrain.source.bundle import Bundle

    simulator = Simulator(folder / "hosts")
    os.environ.update(simulator.environ)
    with urlopen(Request(f"{simulator.url}/moto-api/reset", method="POST"), timeout=60):
        pass  # moto's state is the process's: others may have used it
    found: dict[str, list[str]] = {}
    try:
        bucket = f"sagemaker-{REGION}-{ACCOUNT}"
        simulator.make_bucket(bucket)
        trust = {"Version": "2012-10-17", "Statement": [{"Principal": {"Service": "sagemaker.amazonaws.com"}}]}
        simulator.call("iam", "create_role", RoleName="training", AssumeRolePolicyDocument=json.dumps(trust))
        simulator.call("ecr", "create_repository", repositoryName="training")
        image = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/training:1"
        given = {"role": ROLE, "bucket": bucket, "region": REGION, "account": ACCOUNT, "image": image}
        options = {**given, "endpoint": simulator.url, "client": "boto3"}
        backend = SagemakerBackend(options, folder / "runs")
        source = folder / "source"
        source.mkdir()
        (source / "train.py").write_text(_SCRIPT)
        job = {"name": "iam", "source": str(source), "entrypoint": "train.py", "environment": {"requirements": "none"}}
        bundle = Bundle.make(source, folder / "bundles")

        def during(name: str, call: Callable[[], Any]) -> Any:
            before = len(simulator.calls)
            answer = call()
            found.setdefault(name, []).extend(simulator.calls[before:])
            return answer

        def submit(number: int) -> str:
            return backend.submit(backend.plan(Job.from_dict(job), bundle, "iam", number), bundle)

        during("init", SagemakerBackend.discover)
        during("doctor", backend.check)
        first = during("submit", lambda: submit(1))
        during("submit", lambda: submit(2))  # the source is there by now
        during("submit", lambda: backend.find("iam-a1"))
        during("submit --key, again", lambda: backend.labels(first))
        during("show, wait", lambda: backend.status(first))
        during("show, wait", lambda: backend.statuses([first]))
        while not list(backend.logs(first)):
            time.sleep(0.1)
        during("the image's digest", lambda: backend.images(first))
        during("cancel", lambda: backend.cancel(first))
        while not backend.status(first).state.final:
            time.sleep(0.1)
        during("logs", lambda: list(SagemakerBackend(options, folder / "runs").logs(first)))
        second = backend.find("iam-a2")
        assert second is not None
        while not backend.status(second).state.final:
            time.sleep(0.1)
        during("fetch", lambda: backend.fetch(second, folder / "out"))
        during("image push", lambda: backend.image_registry("cloudtrain-train"))
        during("rm", lambda: (backend.remains(second), backend.remove(second)))
        return found
    finally:
        simulator.close()


_SCRIPT = """\
import os, pathlib, sys, time
pathlib.Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"], "step").write_text("1")
if os.environ["CLOUDTRAIN_ATTEMPT"] == "1":
    time.sleep(600)
"""


def table(calls: dict[str, list[str]]) -> str:
    """Return the page's part: the actions of every command, and a policy with all of them."""
    rows = ["| for | actions |", "| --- | --- |"]
    for name in (
        "submit",
        "submit --key, again",
        "show, wait",
        "logs",
        "the image's digest",
        "cancel",
        "fetch",
        "rm",
        "image push",
        "doctor",
        "init",
    ):
        rows.append(f"| {name} | {', '.join(map(_said, actions(calls[name])))} |")
    return "\n".join([BEGIN, "", *rows, "", END])


def _said(action: str) -> str:
    place = ON.get(action) or ON.get(action.partition(":")[0])
    optional = " (if it is allowed)" if action in OPTIONAL else ""
    return f"`{action}`" + (f" on {place}" if place else "") + optional


def listed() -> set[str]:
    """Return the actions that the page lists now."""
    import re

    text = PAGE.read_text("utf-8")
    return set(re.findall(r"`([a-z0-9]+:[A-Z]\w+)`", text[text.index(BEGIN) : text.index(END)]))


def page(part: str) -> str:
    """Return the whole page with a new part."""
    text = PAGE.read_text("utf-8")
    return text[: text.index(BEGIN)] + part + text[text.index(END) + len(END) :]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        made = page(table(record(Path(folder))))
    if made == PAGE.read_text("utf-8"):
        return 0
    if "--check" in sys.argv:
        sys.stdout.write("docs/sagemaker.md is not current: run python docs/iam.py\n")
        return 1
    PAGE.write_text(made, "utf-8")
    sys.stdout.write("docs/sagemaker.md written\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
