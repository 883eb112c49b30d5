"""What goes wrong on the way to SageMaker: each fault a sentence with what to do, nothing twice, nothing lost."""

from __future__ import annotations

import json
import os
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from cloudtrain.backends import aws
from cloudtrain.backends.api import Plan
from cloudtrain.backends.sagemaker.backend import SagemakerBackend
from cloudtrain.errors import BackendError, MissingExtra, NoCapacity, NotReached, Unreachable
from cloudtrain.events import State
from cloudtrain.job.job import Job
from cloudtrain.simulators.sagemaker.server import Fault, Simulator
from cloudtrain.source.bundle import Bundle
from tests.backends.sagemaker.test_backend import BUCKET, options, simulator  # noqa: F401 - a fixture
from tests.conftest import wait_for


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """botocore's pauses grow from a random part of a second on; here they are as long as none."""
    from botocore.retries import standard

    monkeypatch.setattr(standard.ExponentialBackoff, "delay_amount", lambda *_: 0.0)


class Bench:
    """A backend on the simulator, and a plan that was not sent yet."""

    def __init__(self, simulator: Simulator, home: Path, tmp_path: Path) -> None:  # noqa: F811
        self.simulator, self.home, self.source = simulator, home, tmp_path / "source"
        self.source.mkdir()
        self.backend = self.connect()

    def connect(self, **more) -> SagemakerBackend:
        return SagemakerBackend(options(self.simulator, **more), self.home / "runs")

    def plan(self, script: str = "print('done')\n", name: str = "fault", **changes) -> tuple[Plan, Bundle]:
        (self.source / "train.py").write_text(script)
        data = {"name": "fault", "source": str(self.source), "entrypoint": "train.py"}
        job = Job.from_dict({**data, "environment": {"requirements": "none"}, **changes})
        bundle = Bundle.make(self.source, self.home / "bundles")
        return self.backend.plan(job, bundle, name), bundle

    def final(self, handle: str):
        wait_for(lambda: self.backend.status(handle).state.final, "its end")
        return self.backend.status(handle)

    def log_texts(self, handle: str) -> list[str]:
        return [line.text for line in self.backend.logs(handle) if line.rank == 0]

    def refusal(self, **more) -> BackendError:
        with pytest.raises(BackendError) as caught:
            self.connect(**more).submit(*self.plan())
        assert "\n" not in caught.value.message
        return caught.value


@pytest.fixture
def bench(simulator: Simulator, home: Path, tmp_path: Path) -> Bench:  # noqa: F811
    return Bench(simulator, home, tmp_path)


@pytest.mark.parametrize(
    ("action", "status", "code"),
    [
        ("CreateTrainingJob", 400, "ThrottlingException"),
        ("CreateTrainingJob", 429, "TooManyRequestsException"),
        ("CreateTrainingJob", 500, "InternalFailure"),
        ("CreateTrainingJob", 503, "ServiceUnavailable"),
        ("PutObject", 503, "SlowDown"),
        ("PutObject", 500, "InternalError"),
    ],
)
@pytest.mark.parametrize("committed", [False, True])
def test_what_passes_is_tried_again_and_done_once(bench: Bench, action, status, code, committed) -> None:
    bench.simulator.faults.append(Fault(action, status, code, times=3, committed=committed))
    plan, bundle = bench.plan()
    handle = bench.backend.submit(plan, bundle)
    assert [job.arn for job in bench.simulator.jobs.values()] == [handle]
    asked = sum(call.endswith(f":{action}") for call in bench.simulator.calls)
    assert asked >= (2 if committed else 4)


def test_a_job_whose_acceptance_was_never_heard_is_adopted(bench: Bench) -> None:
    bench.simulator.faults.append(Fault("CreateTrainingJob", 503, "ServiceUnavailable", times=99, committed=True))
    handle = bench.backend.submit(*bench.plan())
    assert handle == bench.backend.find("fault-a1")
    assert bench.final(handle).state is State.SUCCEEDED


def test_a_name_that_another_job_has_is_not_adopted(bench: Bench) -> None:
    first, bundle = bench.plan()
    bench.backend.submit(first, bundle)
    other, bundle = bench.plan(args=["another"])
    with pytest.raises(BackendError, match="different"):
        bench.backend.submit(other, bundle)


REFUSALS = {
    "expired": (
        "CreateTrainingJob",
        400,
        "ExpiredTokenException",
        "",
        "credentials of the environment have expired",
        "unset AWS_",
    ),
    "unknown": ("PutObject", 403, "InvalidAccessKeyId", "", "does not accept the credentials", "AWS_PROFILE"),
    "denied": ("CreateTrainingJob", 400, "AccessDeniedException", "", "denies sagemaker:CreateTrainingJob", "needs"),
    "denied role": (
        "CreateTrainingJob",
        400,
        "AccessDeniedException",
        "User: u is not authorized to perform: iam:PassRole on resource: arn:aws:iam::1:role/r because",
        "denies iam:PassRole on arn:aws:iam::1:role/r",
        "allow iam:PassRole",
    ),
    "denied bucket": ("PutObject", 403, "AccessDenied", "", "denies s3:PutObject", "permissions"),
    "quota": ("CreateTrainingJob", 400, "ResourceLimitExceeded", "limit is 0", "quota", "Service Quotas"),
    "capacity": ("CreateTrainingJob", 400, "CapacityError", "none left", "insufficient capacity", "try again"),
    "busy": ("CreateTrainingJob", 400, "ThrottlingException", "", "to send fewer requests", "some minutes"),
    "broken": ("CreateTrainingJob", 500, "InternalFailure", "", "failed on AWS's side", "try again"),
    "closed": ("CreateTrainingJob", 0, "", "", "cannot be reached", "network"),
    "busy bucket": ("PutObject", 503, "SlowDown", "", "to send fewer requests", "some minutes"),
    "no bucket": ("PutObject", 404, "NoSuchBucket", "", "no such bucket", "options.sagemaker.bucket"),
    "validation": ("CreateTrainingJob", 400, "ValidationException", "bad role", "was refused: bad role", ""),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_is_a_sentence_with_what_to_do(bench: Bench, name: str) -> None:
    action, status, code, message, sentence, hint = REFUSALS[name]
    bench.simulator.faults.append(Fault(action, status, code, times=99, message=message or "injected"))
    error = bench.refusal()
    assert sentence in error.message and hint in error.hint, (error.message, error.hint)
    assert isinstance(error, NoCapacity) is (name in ("quota", "capacity"))
    assert isinstance(error, Unreachable) is (name in ("busy", "broken", "closed"))
    assert isinstance(error, NotReached) is (name == "busy bucket"), "nothing was sent before the upload"
    assert bench.simulator.jobs == {}


def test_a_failure_on_awss_side_has_its_request_id() -> None:
    answer = {"Error": {"Code": "InternalFailure"}, "ResponseMetadata": {"HTTPStatusCode": 500, "RequestId": "r-17"}}
    error = aws.Aws("sagemaker", None, None, None).explain(ClientError(answer, "CreateTrainingJob"), "sagemaker:Create")
    assert error.message == f"sagemaker:Create failed on AWS's side {aws.TRIES} times (InternalFailure) (request r-17)"


@pytest.mark.parametrize("first", [(0, "closed"), (500, "InternalFailure")])
@pytest.mark.parametrize("then", ["AccessDeniedException", "ResourceLimitExceeded", "ThrottlingException"])
def test_a_refusal_of_a_later_try_is_none_where_an_earlier_one_was_accepted(bench: Bench, first, then) -> None:
    status, code = first
    bench.simulator.faults.append(Fault("CreateTrainingJob", status, code, committed=True))
    bench.simulator.faults.append(Fault("CreateTrainingJob", 400, then, times=99))
    assert bench.backend.submit(*bench.plan()) == bench.backend.find("fault-a1")


@pytest.mark.parametrize("status", [0, 500])
@pytest.mark.parametrize("code", ["AccessDeniedException", "ExpiredTokenException", "ThrottlingException"])
def test_what_cannot_be_found_out_is_not_refused(bench: Bench, status: int, code: str) -> None:
    bench.simulator.faults.append(Fault("CreateTrainingJob", status, times=99, committed=True))
    bench.simulator.faults.append(Fault("DescribeTrainingJob", 400, code, times=99))
    assert isinstance(bench.refusal(), Unreachable) and list(bench.simulator.jobs) == ["fault-a1"]


def test_only_the_platforms_word_means_that_there_is_no_job(bench: Bench) -> None:
    assert bench.backend.find("fault-a1") is None
    bench.simulator.faults.append(Fault("DescribeTrainingJob", 400, "ValidationException", message="bad name"))
    with pytest.raises(BackendError, match="bad name"):
        bench.backend.find("fault-a1")
    with pytest.raises(BackendError, match="pinned to account 999"):
        bench.connect(account="999999999999").find("fault-a1")


def test_labels_are_read_back(bench: Bench) -> None:
    handle = bench.backend.submit(*bench.plan(labels={"team": "nlp"}))
    assert bench.backend.labels(handle) == {"team": "nlp"}


def test_nobody_there(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aws, "TRIES", 2)
    error = bench.refusal(endpoint="http://127.0.0.1:9")
    assert "cannot be reached" in error.message


def test_without_boto3_the_extra_is_named(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("boto3", "botocore")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("boto3", "botocore"):
        monkeypatch.setitem(sys.modules, name, None)  # as where they are not installed
    with pytest.raises(MissingExtra) as caught:
        bench.connect().status("arn:aws:sagemaker:us-east-1:123456789012:training-job/x-a1")
    assert "cloudtrain[sagemaker]" in caught.value.hint


def test_without_credentials(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    assert "no AWS credentials" in bench.refusal().message
    assert "profile" in bench.refusal(profile="nobody").hint


def test_another_account_is_refused_before_anything_is_uploaded(bench: Bench) -> None:
    error = bench.refusal(account="999999999999")
    assert "123456789012" in error.message and "999999999999" in error.message
    assert bench.simulator.calls == ["sts:GetCallerIdentity"] and bench.simulator.uploaded_bytes == 0
    assert bench.connect(account="123456789012").submit(*bench.plan())


def test_unchanged_source_uploads_nothing(bench: Bench) -> None:
    bench.backend.submit(*bench.plan(name="first"))
    assert bench.simulator.uploaded_bytes > 0
    bench.simulator.uploaded_bytes = 0
    bench.connect().submit(*bench.plan(name="second", args=["--lr", "2"]))
    assert bench.simulator.uploaded_bytes == 0
    place = Path(bench.home / "sagemaker")
    assert list(place.rglob("*"))
    keys = bench.simulator.call("s3", "list_objects_v2", Bucket=BUCKET, Prefix="cloudtrain/code/")["Contents"]
    assert len(keys) == 1
    bench.simulator.call("s3", "delete_object", Bucket=BUCKET, Key=keys[0]["Key"])
    bench.simulator.uploaded_bytes = 0
    handle = bench.connect().submit(*bench.plan(name="third"))
    assert bench.simulator.uploaded_bytes > 0, "somebody has emptied the bucket"
    assert bench.final(handle).state is State.SUCCEEDED


def test_another_machine_has_uploaded_it(bench: Bench, tmp_path: Path) -> None:
    bench.backend.submit(*bench.plan(name="first"))
    elsewhere = SagemakerBackend(options(bench.simulator), tmp_path / "elsewhere" / "runs")
    handle = elsewhere.submit(*bench.plan(name="second"))  # the conditional PUT is refused, which is as good
    assert bench.final(handle).state is State.SUCCEEDED


# -- ends -------------------------------------------------------------------------------------------------------------

RESUMES = (
    "import os, pathlib, signal, sys, time\n"
    "path = pathlib.Path(os.environ['CLOUDTRAIN_CHECKPOINT_DIR'], 'step')\n"
    "if path.exists(): print('resumed at', path.read_text(), flush=True); sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, lambda *_: (path.write_text('41'), sys.exit(75)))\n"
    "print('waiting', flush=True)\n"
    "time.sleep(600)\n"
)


def test_a_spot_machine_is_taken_away_and_another_goes_on(bench: Bench) -> None:
    handle = bench.backend.submit(*bench.plan(RESUMES, resources={"use_spot": True, "cpus": 4}))
    wait_for(lambda: "waiting" in bench.log_texts(handle), "its start")
    bench.simulator.preempt("fault-a1")
    assert bench.final(handle).state is State.SUCCEEDED
    assert bench.log_texts(handle) == ["waiting", "resumed at 41"]
    lines = list(bench.backend.logs(handle))
    assert [line.seq for line in lines] == list(range(len(lines))), "numbers go on over the restart"
    assert list(bench.backend.logs(handle, after=lines[3].cursor)) == lines[4:]


def test_no_machines_is_told_and_can_be_followed_by_another_attempt(bench: Bench) -> None:
    bench.simulator.behavior.capacity_errors = 1
    status = bench.final(bench.backend.submit(*bench.plan()))
    assert (status.state, status.event, status.exit_code) == (State.FAILED, "capacity", None)
    assert "no such machines" in status.reason and status.ended_at and not status.billable_s
    assert bench.final(bench.backend.submit(*bench.plan(name="again"))).state is State.SUCCEEDED


def test_what_is_billed_is_told(bench: Bench) -> None:
    status = bench.final(bench.backend.submit(*bench.plan(num_nodes=2)))
    assert status.state is State.SUCCEEDED and status.billable_s and status.billable_s % 2 == 0


def test_roles_have_instance_groups_of_their_own(bench: Bench) -> None:
    server = {"run": "echo up; exec sleep 600", "resources": {"instance_type": "ml.m5.large"}, "ready": "line:up"}
    types = {"trainer": {"num_nodes": 2, "after": ["server"]}, "server": server}
    script = (
        "import json, os\nfound = json.load(open(os.environ['SAGEMAKER_BASE_DIR'] + '/input/config/resourceconfig.json'))\n"
        "print(os.environ['RANK'], os.environ['WORLD_SIZE'], found['current_instance_type'], end=' ')\n"
        "print(os.environ['SM_CURRENT_INSTANCE_GROUP'])"
    )
    resources = {"instance_type": "ml.c5.xlarge"}
    handle = bench.backend.submit(*bench.plan(script, roles=types, resources=resources, processes_per_node=1))
    assert bench.final(handle).state is State.SUCCEEDED
    lines = sorted((line.node, line.text) for line in bench.backend.logs(handle) if line.rank >= 0)
    assert lines == [(0, "0 2 ml.c5.xlarge trainer"), (1, "1 2 ml.c5.xlarge trainer"), (2, "up")]
    assert bench.backend.status(handle).billable_s % 3 == 0


def test_somebody_else_puts_the_same_source_at_the_same_time(bench: Bench) -> None:
    bench.simulator.faults.append(Fault("PutObject", 409, "ConditionalRequestConflict", times=2))
    assert bench.final(bench.backend.submit(*bench.plan())).state is State.SUCCEEDED


def test_a_missing_object_that_may_not_be_listed(bench: Bench) -> None:
    bench.backend.submit(*bench.plan(name="first"))
    key = bench.simulator.call("s3", "list_objects_v2", Bucket=BUCKET, Prefix="cloudtrain/code/")["Contents"][0]["Key"]
    bench.simulator.call("s3", "delete_object", Bucket=BUCKET, Key=key)
    bench.simulator.faults.append(Fault("HeadObject", 403, "Forbidden"))
    assert bench.final(bench.backend.submit(*bench.plan(name="second"))).state is State.SUCCEEDED


def test_a_limit_of_the_launcher_is_a_time_out_and_not_a_failure(bench: Bench) -> None:
    handle = bench.backend.submit(*bench.plan("import time\ntime.sleep(600)\n", limits={"max_runtime": "2s"}))
    assert bench.final(handle).state is State.TIMED_OUT


def test_a_refusal_on_the_node_says_why(bench: Bench) -> None:
    missing = {"TOKEN": "aws-secretsmanager:nobody"}
    status = bench.final(bench.backend.submit(*bench.plan(secrets=missing)))
    assert (status.state, status.exit_code) == (State.FAILED, 78) and "TOKEN was not found" in status.reason


def test_a_command_that_is_not_there_is_seen_in_the_log(bench: Bench) -> None:
    bench.backend = bench.connect(python="no-such-python")
    handle = bench.backend.submit(*bench.plan())
    assert bench.final(handle).exit_code == 127
    assert any("no-such-python" in line.text for line in bench.backend.logs(handle))


def test_an_archive_that_leads_out_is_refused(bench: Bench, tmp_path: Path) -> None:
    handle = bench.backend.submit(*bench.plan())
    bench.final(handle)
    raw = BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("../../outside"), BytesIO())
    key = "cloudtrain/runs/fault/fault-a1/output/model.tar.gz"
    bench.simulator.call("s3", "put_object", Bucket=BUCKET, Key=key, Body=raw.getvalue())
    with pytest.raises(BackendError, match="cannot be unpacked"):
        bench.backend.fetch(handle, tmp_path / "deep" / "into")
    # Not the whole of tmp_path: the simulator removes folders of its host meanwhile.
    assert not (tmp_path / "outside").exists() and not list((tmp_path / "deep").rglob("outside"))


def test_a_refused_cancel_says_that_it_is_still_billed(bench: Bench) -> None:
    handle = bench.backend.submit(*bench.plan("import time\ntime.sleep(600)\n"))
    bench.simulator.faults.append(Fault("StopTrainingJob", 400, "AccessDeniedException", times=1))
    with pytest.raises(BackendError) as caught:
        bench.backend.cancel(handle)
    assert "has not confirmed" in caught.value.message and "billed" in caught.value.hint
    bench.backend.cancel(handle)
    assert bench.final(handle).state is State.CANCELLED


def test_another_account_does_not_know_the_job_and_that_means_nothing(bench: Bench) -> None:
    elsewhere = bench.connect(role=f"arn:aws:iam::{'9' * 12}:role/training")
    with pytest.raises(BackendError, match="of account 123456789012, the job is in 999999999999"):
        elsewhere.find("fault-a1")
    handle = f"arn:aws:sagemaker:us-east-1:{'9' * 12}:training-job/fault-a1"
    with pytest.raises(BackendError, match="the job is in 999999999999"):
        bench.backend.status(handle)
    assert bench.backend.status(handle.replace("9" * 12, "123456789012")).state is State.LOST


def test_doctor_accepts_the_role_of_its_policies(bench: Bench) -> None:
    assert "options.sagemaker.role" in {problem.path for problem in bench.backend.check()}, "it is not there yet"
    # moto's IAM reads both as AWS's does.
    trust, role = (json.dumps(bench.backend.policy(kind, None)) for kind in ("trust", "role"))
    bench.simulator.call("iam", "create_role", RoleName="training", AssumeRolePolicyDocument=trust)
    bench.simulator.call("iam", "put_role_policy", RoleName="training", PolicyName="cloudtrain", PolicyDocument=role)
    assert bench.backend.check() == []
    paths = {problem.path for problem in bench.connect(bucket="nowhere", account="9" * 12, role=None).check()}
    assert paths == {"options.sagemaker.bucket", "options.sagemaker.account", "options.sagemaker.role"}
    options = SagemakerBackend.discover()
    assert options["account"] == "123456789012" and options["region"] == "us-east-1"
    assert options["role"].endswith(":role/training")


def test_init_writes_a_target_that_can_be_submitted_to(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cloudtrain.cli import main
    from cloudtrain.job import targets

    trust = {"Version": "2012-10-17", "Statement": [{"Principal": {"Service": "sagemaker.amazonaws.com"}}]}
    bench.simulator.call(
        "iam", "create_role", RoleName="AmazonSageMaker-Execution", AssumeRolePolicyDocument=json.dumps(trust)
    )
    bench.simulator.make_bucket("sagemaker-us-east-1-123456789012")
    monkeypatch.chdir(bench.source)
    assert main(["init", "-t", "sagemaker", "--trainer"]) == 0
    options = targets.named_targets()["sagemaker"].options.value
    assert options == {
        "region": "us-east-1",
        "account": "123456789012",
        "bucket": "sagemaker-us-east-1-123456789012",
        "role": "arn:aws:iam::123456789012:role/AmazonSageMaker-Execution",
    }
    SagemakerBackend.options().model_validate(options)
    assert main(["doctor", "sagemaker"]) == 0
    Path("call.py").write_text('Estimator(entry_point="t.py", role="AmazonSageMaker-Execution").fit()')
    assert main(["init", "--from", "call.py", "-o", "one.yaml", "-t", "sagemaker"]) == 0
    assert options["role"] in Path("one.yaml").read_text()
    assert main(["init", "--from", "call.py", "-o", "two.yaml"]) == 0
    assert "# options.sagemaker.role: write the ARN of AmazonSageMaker-Execution" in Path("two.yaml").read_text()
    (problem,) = bench.connect(role="AmazonSageMaker-Execution").check()
    assert f"write {options['role']}" in problem.hint
