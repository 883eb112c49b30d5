"""Training jobs of SageMaker. The handle is the job's ARN.

What is sent is what `plan` printed: through the `HuggingFace` estimator of sagemaker<3, or through boto3 alone, which all
other questions use anyway (that SDK takes seconds to import). Nothing runs here while the job does.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import images
from cloudtrain.backends.api import FETCHABLE, Feature, Plan
from cloudtrain.backends.aws import Aws, AwsError, AwsUnreachable
from cloudtrain.backends.sagemaker import ecr, logs, request, status, toolkit
from cloudtrain.errors import BackendError, BadJob, CloudtrainError, MissingExtra, Problem, Unreachable
from cloudtrain.events import LogLine, State, Status
from cloudtrain.source import provenance

if TYPE_CHECKING:
    from pydantic import BaseModel

    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle

LATE_S = 120.0  # after its end a job's last lines may still be on their way to CloudWatch
DRAIN_S = 30.0  # how long they are waited for
LOOK_S = 5.0  # between two looks at a log that is followed


class SagemakerBackend:
    """Runs jobs as SageMaker training jobs."""

    name = "sagemaker"
    poll_s = 10.0
    features = frozenset(
        {
            Feature.MULTI_NODE,
            Feature.SPOT,
            Feature.NATIVE_RETRY,
            Feature.OBJECT_STORES,
            Feature.IMAGES,
            Feature.INSTANCE_TYPES,
        }
    )

    def __init__(self, options: Mapping[str, Any], workdir: Path) -> None:
        self.given, self.workdir = dict(options), workdir
        self.aws = Aws(self.name, options.get("region"), options.get("profile"), options.get("endpoint"))
        self.look_s = LOOK_S
        if options.get("endpoint"):  # a simulator, near and without quotas
            self.poll_s, self.look_s = 0.5, 0.2

    @classmethod
    def options(cls) -> type[BaseModel]:
        from cloudtrain.backends.sagemaker.options import SagemakerOptions

        return SagemakerOptions

    # -- plan and submit -----------------------------------------------------------------------------------------------

    def plan(self, job: Job, bundle: Bundle, run_id: str, attempt: int = 1) -> Plan:
        about = provenance.about(self.name, job, bundle)
        made = request.create_training_job(job, run_id, attempt, bundle.sha256, self.given, about)
        problems = list(made.problems)
        if self.given.get("entry") == "toolkit":
            problems += toolkit.problems((file.path for file in bundle.files), f"options.{self.name}.entry")
        if problems:
            raise BadJob(problems)
        return Plan(
            backend=self.name,
            run_id=run_id,
            attempt=attempt,
            request=made.request,
            bundle=bundle.to_dict(),
            manifest=made.manifest.to_dict(),
            job=job.to_dict(),
            retries="platform",
            price=made.price,
            notes=made.notes,
        )

    def submit(self, plan: Plan, bundle: Bundle) -> str:
        self._check_account()
        self._upload(plan, bundle)
        request = json.loads(json.dumps(plan.request))  # plain data, whatever the plan holds it in
        try:
            if self._client() == "sdk":
                from cloudtrain.backends.sagemaker.huggingface import create

                return create(self.aws, request)
            return str(self.aws.ask("sagemaker", "create_training_job", **request)["TrainingJobArn"])
        except AwsError as error:
            if error.code == "ResourceInUse" or error.resent or isinstance(error, Unreachable):
                return self._accepted_after_all(plan.attempt_id, request, error)
            raise

    def _accepted_after_all(self, attempt_id: str, request: Mapping[str, Any], error: AwsError) -> str:
        """Return the ARN of the job that a try without an answer has made; else raises what stands then.

        A refusal is one only where no earlier try of the same request has made the job.
        """
        try:
            found = self._describe(attempt_id)
        except BackendError as silence:
            said = f"{error.message}, and whether SageMaker has the job could not be asked: {silence.message}"
            raise AwsUnreachable(said, silence.hint, error.code) from None
        if found is None and error.code == "ResourceInUse":
            raise AwsUnreachable(f"SageMaker has a job {attempt_id}, but does not tell of it yet", "", error.code)
        if found is None:
            raise error
        if found.get("HyperParameters") != request["HyperParameters"]:
            said = f"there is a training job {attempt_id} already, and it is another one"
            raise AwsError(said, "submit again: the run gets another name") from None
        return str(found["TrainingJobArn"])

    def _client(self) -> str:
        asked = self.given.get("client") or "auto"
        here = find_spec("sagemaker") is not None
        if asked == "sdk" and not here:
            raise MissingExtra("options.sagemaker.client: sdk", self.name)
        return "sdk" if asked == "sdk" or (asked == "auto" and here) else "boto3"

    def _check_account(self) -> None:
        pinned = self.given.get("account")
        if pinned and (account := self.aws.account()) != pinned:
            said = f"the credentials are those of account {account}, the target is pinned to {pinned}"
            raise BackendError(said, "choose another profile, or change options.sagemaker.account")

    def _upload(self, plan: Plan, bundle: Bundle) -> None:
        """Put the bundle where the plan reads it, unless it is there; one request."""
        from cloudtrain.backends import s3

        place = plan.request["InputDataConfig"][-1]["DataSource"]["S3DataSource"]["S3Uri"]
        bucket, _, prefix = place.removeprefix("s3://").partition("/")
        name = prefix + request.OBJECT
        mark = self.workdir.parent / "sagemaker" / "uploaded" / bucket / bundle.sha256
        try:
            if mark.exists() and s3.there(self.aws, bucket, name):  # ours, of an earlier submit
                return
            key = self.given.get("kms_key")
            more = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": key} if key else {}
            s3.put_once(self.aws, bundle.path, bucket, name, self.look_s, **more)
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except OSError as error:
            raise BackendError(f"{error.filename} cannot be used: {error.strerror}", "free some disk space") from None

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def find(self, attempt_id: str) -> str | None:
        found = self._describe(attempt_id)
        if found is None:
            self._check_account()  # another account's answer would not be about this job
        return str(found["TrainingJobArn"]) if found else None

    def status(self, handle: str) -> Status:
        found = self._job(handle)
        if found is None:
            return Status(State.LOST, None, f"SageMaker knows no training job {handle.rpartition('/')[2]}")
        return status.status_of(found)

    def logs(self, handle: str, *, follow: bool = False, after: str | None = None) -> Iterator[LogLine]:
        name = handle.rpartition("/")[2]
        known: list[logs.Place] | None = None
        drain_until: float | None = None
        while True:
            found = self._job(handle)
            nodes = int(found["ResourceConfig"].get("InstanceCount") or 1) if found else 0
            known = logs.places(after, nodes) if known is None else known
            final = found is None or status.status_of(found).state.final
            began = found is not None and status.seconds_since_start(found) is not None
            late = final and found is not None and began and (status.seconds_since_end(found) or LATE_S) < LATE_S
            yield from logs.read(self.aws, name, known, over=final and not late)
            if not final and not follow:
                return
            if final and (not late or all(place.ended for place in known)):
                return
            if final:
                drain_until = drain_until or time.monotonic() + DRAIN_S
                if time.monotonic() > drain_until:
                    yield from logs.read(self.aws, name, known, over=True)
                    return
            time.sleep(self.look_s)

    def images(self, handle: str) -> dict[int, str]:
        """Return the image that a job names by its digest, or by a tag of ECR: then with the digest behind that tag now.

        SageMaker itself tells no digest. A watcher asks when it sees the job begin to run, soon after the image was
        pulled; of a tag that is asked for more than an hour after the job's start nothing is said, nor of a job without one.
        """
        found = self._job(handle)
        if found is None:
            return {}
        name = str(found["AlgorithmSpecification"].get("TrainingImage") or "")
        if not images.stands(name, status.seconds_since_start(found)):
            return {}
        image = ecr.exact(self.aws, name)
        return dict.fromkeys(range(int(found["ResourceConfig"].get("InstanceCount") or 1)), image) if image else {}

    def labels(self, handle: str) -> dict[str, str]:
        """Return a job's tags, those that every job of ours has left out."""
        found: dict[str, str] = {}
        more: dict[str, str] = {}
        while True:
            page = self.aws.ask("sagemaker", "list_tags", ResourceArn=handle, **more)
            found |= {tag["Key"]: tag["Value"] for tag in page["Tags"] if not tag["Key"].startswith("cloudtrain:")}
            if not page.get("NextToken"):
                return found
            more = {"NextToken": page["NextToken"]}

    def cancel(self, handle: str) -> None:
        try:
            self.aws.ask("sagemaker", "stop_training_job", TrainingJobName=handle.rpartition("/")[2])
        except AwsError as error:
            if error.code == "ValidationException":
                return  # it has ended already, or never was
            hint = "until it has ended it is billed: cancel again, or stop it in the console"
            raise type(error)(f"SageMaker has not confirmed the end: {error.message}", hint, error.code) from None

    def fetch(self, handle: str, into: Path, what: tuple[str, ...] = FETCHABLE) -> Path:
        from cloudtrain.backends import s3

        found = self._job(handle)
        if found is None:
            raise BackendError(f"SageMaker knows no training job {handle.rpartition('/')[2]}")
        into.mkdir(parents=True, exist_ok=True)
        output = f"{found['OutputDataConfig']['S3OutputPath']}/{found['TrainingJobName']}/output"
        for name, archive in (("model", "model.tar.gz"), ("outputs", "output.tar.gz")):
            if name in what:
                s3.unpack(self.aws, f"{output}/{archive}", into / name)
        place = (found.get("CheckpointConfig") or {}).get("S3Uri")
        if "checkpoints" in what and place:
            s3.bring(self.aws, f"{place}/", into / "checkpoints")
        return into

    def check(self) -> list[Problem]:
        from cloudtrain.backends.sagemaker import doctor

        return doctor.check(self.aws, self.given)

    @classmethod
    def discover(cls) -> dict[str, Any]:
        """Region, account, profile, bucket and role, as far as they can be found out."""
        from cloudtrain.backends.sagemaker import doctor

        try:
            return doctor.discover(os.environ.get("AWS_PROFILE"))
        except CloudtrainError:
            return {}

    def _job(self, handle: str) -> Mapping[str, Any] | None:
        """Return what is known of a handle's job, None when there is no such job in this account and region."""
        arn = status.ARN.fullmatch(handle)
        if arn is None:
            return None
        found = self._describe(arn["name"])
        return found if found and found["TrainingJobArn"] == handle else None

    def _describe(self, name: str) -> Mapping[str, Any] | None:
        try:
            return dict(self.aws.ask("sagemaker", "describe_training_job", TrainingJobName=name))
        except AwsError as error:
            # "Requested resource not found": the same code stands for requests that are wrong in other ways.
            if error.code == "ResourceNotFound" or (error.code == "ValidationException" and "not found" in str(error)):
                return None
            raise


def estimator(plan: Plan) -> Any:
    """Return the HuggingFace estimator of a plan, for those who go on to `.deploy()`; needs the extra `sagemaker`."""
    from cloudtrain.backends.sagemaker.huggingface import estimator as made

    options = (plan.job.get("options") or {}).get("sagemaker") or {}
    aws = Aws("sagemaker", options.get("region"), options.get("profile"), options.get("endpoint"))
    return made(aws, json.loads(json.dumps(plan.request)))
