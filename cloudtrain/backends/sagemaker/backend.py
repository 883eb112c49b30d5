"""The backend `sagemaker`: submits, finds, cancels and fetches SageMaker training jobs. The handle is the job's ARN.

With a queue of AWS Batch it is the ARN of the service job, which becomes a training job later (queue.py).

It sends the request that `plan` printed, and no other, through the `HuggingFace` estimator of sagemaker<3 or boto3 alone.
All other calls use boto3, because that SDK takes seconds to import. No local process runs while the job runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import images
from cloudtrain.backends.api import (
    FETCHABLE,
    Backend,
    Facts,
    FoundAttempt,
    ImageRegistry,
    Plan,
    Requirement,
    Shell,
    TimeLimit,
    Traits,
)
from cloudtrain.backends.aws import Aws, AwsError
from cloudtrain.backends.sagemaker import client, fields, limits, listing, queue, request, status, submission
from cloudtrain.backends.sagemaker.machine import seen_types
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError, CloudtrainError, Problem, before_sending, first_request
from cloudtrain.events import LogLine, State, Status
from cloudtrain.source import provenance

if TYPE_CHECKING:
    from pydantic import BaseModel

    from cloudtrain.backends.price_lists import Downloads, Offer
    from cloudtrain.backends.sagemaker.logs import Position
    from cloudtrain.backends.store.files import Files
    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle

LOOK_S = 5.0  # between two requests for a log that is followed
# A read of one node is a DescribeLogStreams and two GetLogEvents: the last page repeats its token. An account and region may
# make 25 of each a second (https://docs.aws.amazon.com/AmazonCloudWatch/latest/logs/cloudwatch_limits_cwl.html, 2026-11-23);
# this is less than half of that.
LOGS_PER_S = 5.0


class SagemakerBackend(Backend):
    """Runs jobs as SageMaker training jobs."""

    name = "sagemaker"
    traits = Traits(
        keys=request.KEYS,
        packs=True,
        script_variables="sm_env",
        client="boto3",
        ci=Path(__file__).with_name("ci.yml"),
        prices="us-east-1",
        machines=Path(__file__).with_name("machines.csv"),
        rents="aws",
        machine_prefix="ml.",
        shell=True,
    )
    poll_s = 10.0
    variables = ("AWS_*", "BOTO_*", "*_PROXY", "*_proxy", "*_CA_BUNDLE", "SSL_CERT_*", "HOME")
    follow_s = LOOK_S

    def __init__(self, options: Mapping[str, Any], workdir: Path, clock: Clock = SYSTEM) -> None:
        self._options, self.workdir = dict(options), workdir
        self.aws = Aws(self.name, options.get("region"), options.get("profile"), options.get("endpoint"), clock)
        self._jobs = listing.DescribedJobs(self.aws)
        self._queue = queue.Queue(self.aws, self._options, workdir.parent / "sagemaker" / "batch")
        pause_s = 0.0 if options.get("endpoint") else 1 / listing.CALLS_PER_S
        self._list = listing.JobList(self.aws, self._jobs.describe, lambda: clock.sleep(pause_s))
        account = [str(options.get(name) or "") for name in ("endpoint", "region", "profile", "account")]
        self.group, self.calls_per_s = f"sagemaker {'/'.join(account)}", listing.CALLS_PER_S
        self.logs_per_s = LOGS_PER_S
        if options.get("endpoint"):  # a simulator: fast and without quotas
            self.poll_s, self.follow_s, self.calls_per_s, self.logs_per_s = 5.0, 0.2, 100.0, 100.0

    @classmethod
    def options(cls) -> type[BaseModel]:
        from cloudtrain.backends.sagemaker.options import SagemakerOptions

        return SagemakerOptions

    @classmethod
    def open_output(cls, uri: str, options: Mapping[str, Any]) -> Files | None:
        if not uri.startswith("s3://"):
            return None
        from cloudtrain.backends.store.open import opened

        return opened(uri, Aws(cls.name, options.get("region"), options.get("profile"), options.get("endpoint")))

    # -- plan and submit -----------------------------------------------------------------------------------------------

    def plan(self, job: Job, bundle: Bundle, run_id: str, attempt: int = 1) -> Plan:
        about = provenance.about(self.name, job, bundle)
        options = dict(self._options)
        with suppress(CloudtrainError):  # no boto3, or no region: `submit` says so
            options["region"] = self.aws.region
        seen = seen_types(self.workdir, str(options.get("region") or ""))
        built = request.build_request(job, run_id, attempt, bundle.sha256, options, about, seen)
        plan = built.plan(self.name, self._options, job, bundle, "platform")
        sent = queue.note(options) if options.get("queue") else client.note(plan.request, self._options)
        return replace(plan, notes=(*plan.notes, *filter(None, [sent])))

    def time_limit(self, plan: Plan) -> TimeLimit:
        return limits.time_limit(plan)

    def machine(self, plan: Plan) -> str:
        resources = plan.request["ResourceConfig"]
        groups = resources.get("InstanceGroups") or [resources]
        first = groups[0]
        if any(group["InstanceType"] != first["InstanceType"] for group in groups):
            return ""  # of other prices
        return f"sagemaker/{self._options.get('region') or ''}/{first['InstanceType']}"

    @classmethod
    def ci_values(cls, options: Mapping[str, Any]) -> Mapping[str, str]:
        role, account = str(options.get("role") or "").split(":"), options.get("account") or ""
        known = {
            "account": str(account).zfill(12) if account else (role[4] if len(role) > 5 else ""),
            "region": options.get("region"),
        }
        return super().ci_values(known)

    @classmethod
    def read_prices(cls, provider: str, region: str, key: str, downloads: Downloads) -> Offer:
        if provider != cls.name:
            return super().read_prices(provider, region, key, downloads)
        from cloudtrain.backends.sagemaker import prices

        return prices.read_prices(downloads, region)

    def facts(self, plan: Plan) -> Facts:
        return fields.find_facts(plan.request, self._options)

    def preflight(self, plan: Plan) -> None:
        self.aws.check_credentials()

    def submit(self, plan: Plan, bundle: Bundle) -> str:
        with before_sending():
            self._check_account()
            submission.upload(self.aws, plan, bundle, self.workdir.parent, self._options.get("kms_key"), self.follow_s)
        request = json.loads(json.dumps(plan.request))  # plain dicts and lists, whatever mapping types the plan holds
        with first_request():
            if self._options.get("queue"):
                return submission.submit_to_queue(self._queue, plan.attempt_id, request)
            return submission.submit_job(self.aws, self._jobs, plan.attempt_id, request, self._options)

    def _check_account(self) -> None:
        pinned = self._options.get("account")
        if pinned and (account := self.aws.account()) != pinned:
            message = f"the credentials are those of account {account}, the target is pinned to account {pinned}"
            raise BackendError(message, "use another AWS profile, or change options.sagemaker.account")

    def _check_account_is(self, accounts: list[str]) -> None:
        """Raise BackendError where the credentials are those of another account than the job's; [] checks nothing."""
        if accounts and (account := self.aws.account()) not in accounts:
            message = f"the credentials are those of account {account}, the job is in {accounts[0]}"
            raise BackendError(message, "use the AWS profile that submitted the job")

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def find(self, attempt_id: str) -> str | None:
        if self._options.get("queue"):
            found = self._queue.find(attempt_id)
            if found is None:
                self._check_account()
            return str(found["jobArn"]) if found else None
        job = self._jobs.describe(attempt_id)
        if job is None:  # in another account "not found" would mean nothing
            self._check_account()
            self._check_account_is(str(self._options.get("role") or "").split(":")[4:5])
        return str(job["TrainingJobArn"]) if job else None

    def status(self, handle: str) -> Status:
        if queue.is_service_job(handle):
            return self._status_in_queue(handle)
        job = self._job(handle)
        if job is None:
            arn = status.ARN.fullmatch(handle)
            self._check_account_is([arn["account"]] if arn else [])
            return Status(State.LOST, None, f"SageMaker has no training job {handle.rpartition('/')[2]}")
        return status.parse_status(job)

    def _status_in_queue(self, handle: str) -> Status:
        job = self._queue.describe(handle)
        arn = queue.training_job(job) if job else self._queue.training_job(handle)
        training = self.status(arn) if arn else None
        if job is not None:
            return queue.parse_status(job, training)
        if training is not None:  # Batch forgets ended jobs, SageMaker does not
            return training
        self._check_account_is([handle.split(":")[4]])
        return Status(State.LOST, None, f"AWS Batch has no service job {handle.rpartition('/')[2]}")

    def statuses(self, handles: Sequence[str]) -> dict[str, Status]:
        waiting = {handle for handle in handles if queue.is_service_job(handle)}
        live = self._queue.live() if waiting and self._options.get("queue") else {}
        live = {handle: job for handle, job in live.items() if handle in waiting}
        training = {arn: handle for handle, job in live.items() if (arn := queue.training_job(job))}
        handles = [*(handle for handle in handles if handle not in waiting), *training]
        if not handles:
            return {handle: queue.parse_status(job, None) for handle, job in live.items()}
        listed = self._list.statuses(set(handles))
        self._jobs.keep_listed(handles, listed)
        for handle, job in live.items():
            arn = queue.training_job(job)
            if arn is None or arn in listed:
                listed[handle] = queue.parse_status(job, listed.pop(arn, None) if arn else None)
        return listed

    def logs(self, handle: str, *, follow: bool = False, after: str | None = None) -> Iterator[LogLine]:
        from cloudtrain.backends.sagemaker import logs

        if queue.is_service_job(handle):
            while (arn := self._queue.training_job(handle)) is None:
                if not follow or self.status(handle).state.final:
                    return
                self.aws.clock.sleep(self.follow_s)
            handle = arn
        yield from logs.follow(
            self.aws,
            handle.rpartition("/")[2],
            partial(self._recent_job, handle),
            after,
            more=follow,
            pause_s=self.follow_s,
        )

    def images(self, handle: str) -> dict[int, str]:
        """Return node -> the container image with its digest; {} where the digest is not known.

        SageMaker reports no digest. For an ECR tag this returns the digest that the tag stands for now, and only within
        an hour of the job's start: later the tag may stand for another image. A watcher calls it when the job starts.
        """
        job = self._job(handle)
        if job is None:
            return {}
        name = str(job["AlgorithmSpecification"].get("TrainingImage") or "")
        if not images.tag_is_current(name, status.seconds_since_start(job, self.aws.clock)):
            return {}
        from cloudtrain.backends.sagemaker import ecr

        image = ecr.resolve_digest(self.aws, name)
        return dict.fromkeys(range(status.instance_count(job)), image) if image else {}

    def labels(self, handle: str) -> dict[str, str]:
        if queue.is_service_job(handle):
            tags = (self._queue.describe(handle) or {}).get("tags") or {}
            return {name: text for name, text in tags.items() if not name.startswith("cloudtrain:")}
        return listing.read_labels(self.aws, handle)

    def labelled(self, name: str, value: str, known: Container[str]) -> Iterator[FoundAttempt]:
        if self._options.get("queue"):
            return listing.labelled_in_queue(self._queue, name, value, known)
        return listing.labelled(self.aws, self._list, name, value, known)

    def remains(self, handle: str) -> dict[str, int | None]:
        return {handle: None} if self._job(handle) else {}

    def remove(self, handle: str) -> None:
        """Delete the record of a job that has ended; its output and its log stay."""
        if job := self._job(handle):
            self.aws.call("sagemaker", "delete_training_job", TrainingJobName=job["TrainingJobName"])

    def shell(self, handle: str, node: int, words: Sequence[str], *, stdin: bool, terminal: bool) -> Shell:
        from cloudtrain.backends.sagemaker import remote_debug

        job = self._job(handle)
        if job is None:
            raise BackendError(f"SageMaker has no job {handle.rpartition('/')[2]}")
        return remote_debug.shell(job, node, self.aws.region, self._options.get("profile"))

    def cancel(self, handle: str) -> None:
        if queue.is_service_job(handle):
            self._queue.cancel(handle)
            return
        try:
            self.aws.call("sagemaker", "stop_training_job", TrainingJobName=handle.rpartition("/")[2])
        except AwsError as error:
            if error.code == "ValidationException":
                return  # the job has ended, or does not exist
            hint = "it is billed until it ends: cancel again, or stop it in the SageMaker console"
            raise type(error)(
                f"SageMaker has not confirmed that the job ended: {error.message}", hint, error.code
            ) from None

    def fetch(self, handle: str, into: Path, what: tuple[str, ...] = FETCHABLE) -> Path:
        from cloudtrain.backends import checkpoints
        from cloudtrain.backends.store.s3 import S3

        job = self._job(handle)
        if job is None:
            raise BackendError(f"SageMaker has no training job {handle.rpartition('/')[2]}")
        into.mkdir(parents=True, exist_ok=True)
        output = S3(self.aws, f"{job['OutputDataConfig']['S3OutputPath']}/{job['TrainingJobName']}/output")
        for name, archive in (("model", "model.tar.gz"), ("outputs", "output.tar.gz")):
            if name in what:
                output.bring_archive(archive, into / name)
        checkpoints_uri = (job.get("CheckpointConfig") or {}).get("S3Uri")
        if "checkpoints" in what and checkpoints_uri:
            S3(self.aws, checkpoints_uri).bring("", into / "checkpoints", checkpoints.name_here)
        return into

    def packed(self, plan: Plan, what: str) -> str:
        archive = {"model": "model.tar.gz", "outputs": "output.tar.gz"}.get(what)
        if archive is None:
            return ""
        output = plan.request["OutputDataConfig"]
        if output.get("CompressionType") == "NONE":
            archive = archive.removesuffix(".tar.gz") + "/"
        return f"{output['S3OutputPath']}/{plan.request['TrainingJobName']}/output/{archive}"

    def packed_digest(self, uri: str) -> str:
        from cloudtrain.backends.store.files import digest_objects
        from cloudtrain.backends.store.s3 import S3

        return digest_objects(S3(self.aws, uri).at_uri())

    def check(self) -> list[Problem]:
        from cloudtrain.backends.sagemaker import doctor

        return doctor.check(self.aws, self._options, self.workdir)

    def image_registry(self, repository: str) -> ImageRegistry:
        from cloudtrain.backends.sagemaker import ecr

        return ecr.prepare_push(self.aws, repository)

    def permissions(self, plan: Plan | None, *, inside: bool = False) -> Mapping[str, Any]:
        return {f"{kind}.json": self.policy(kind, plan) for kind in ("trust", "role", "submit")}

    def enforcement(self, rules: Sequence[Requirement]) -> tuple[Mapping[str, Any], list[str]]:
        from cloudtrain.backends.sagemaker.denials import build_denials

        policy, notes = build_denials(rules)
        if self._options.get("queue"):
            notes.append(
                "IAM cannot enforce rules for jobs in a queue of AWS Batch, whose own role creates them: cloudtrain alone does"
            )
        return ({"rules.json": policy} if policy else {}), notes

    def policy(self, kind: str, plan: Plan | None) -> Mapping[str, Any]:
        from cloudtrain.backends.sagemaker.policy import build_policy

        return build_policy(kind, plan, self._options)

    @classmethod
    def discover(cls) -> dict[str, Any]:
        """Return region, account, profile, bucket and role, as far as the account's settings show them."""
        from cloudtrain.backends.sagemaker import doctor

        return doctor.discover(os.environ.get("AWS_PROFILE"))

    @classmethod
    def convert(cls, path: Path, backend: str) -> tuple[dict[str, Any], list[str]] | None:
        from cloudtrain.backends.sagemaker import estimator_call

        return estimator_call.convert_file(path, asks=bool(backend)) if path.suffix in (".py", ".ipynb") else None

    def estimator(self, plan: Plan) -> Any:
        from cloudtrain.backends.sagemaker.huggingface_estimator import build_estimator

        return build_estimator(self.aws, json.loads(json.dumps(plan.request)))

    def _job(self, handle: str) -> Mapping[str, Any] | None:
        """Return DescribeTrainingJob's answer for a handle, None if this account and region have no such job."""
        if queue.is_service_job(handle):
            handle = self._queue.training_job(handle) or ""
        arn = status.ARN.fullmatch(handle)
        if arn is None:
            return None
        job = self._jobs.describe(arn["name"])
        return job if job and job["TrainingJobArn"] == handle else None

    def _recent_job(self, handle: str, positions: Sequence[Position] | None) -> Mapping[str, Any] | None:
        """Return the job as it was seen not long ago; asks again where the log says that all nodes have ended.

        Who watches asks once in `poll_s`, and may read the log just before that.
        """
        job = self._jobs.recent(handle, 2 * self.poll_s)
        running = job is not None and not status.parse_status(job).state.final
        if job is None or (running and positions and all(position.ended for position in positions)):
            return self._job(handle)
        return job
