"""The IAM policies that `doctor --policy` prints: minimal for a plain target, and each option's actions as the page says."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from moto.iam.aws_managed_policies import aws_managed_policies_data

from cloudtrain.backends.sagemaker.backend import SagemakerBackend
from cloudtrain.cli import main
from cloudtrain.errors import BadRequest
from cloudtrain.job.job import Job
from cloudtrain.runs.planning.plan import Planner
from tests.backends.sagemaker.test_backend import iam

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "sagemaker-admin.md").read_text()
ROLE = "arn:aws:iam::123456789012:role/training"
TARGET = {"role": ROLE, "bucket": "my-bucket", "region": "us-east-1", "account": "123456789012"}
VPC = {"subnets": ["subnet-1"], "security_groups": ["sg-1"]}
OPTIONS = {  # the page's name -> options that add it, and those that these need
    "kms_key": ({"kms_key": "alias/results"}, {}),
    "volume_kms_key": ({"volume_kms_key": "12345678-1234-1234-1234-123456789012"}, {}),
    "subnets": (VPC, {}),
    "registry_credentials": (
        {"registry_credentials": "arn:aws:lambda:us-east-1:123456789012:function:login"},
        {**VPC, "private_registry": True},
    ),
    "remote_debug": ({"remote_debug": True}, {}),
    "training_plan": ({"training_plan": "arn:aws:sagemaker:us-east-1:123456789012:training-plan/big"}, {}),
    "experiment": ({"experiment": {"name": "mnist"}}, {}),
}
OF_JOBS = {
    "efs:// inputs": {"inputs": {"x": "efs://fs-0123456789abcdef0/data"}},
    "fsx:// inputs": {"inputs": {"x": "fsx://fs-0123456789abcdef0/mount/data"}},
    "secrets": {"secrets": {"TOKEN": "aws-secretsmanager:team/token"}},
}
# IAM's actions that are no operation of their own name (Service Authorization Reference, 2026-11-23).
NO_OPERATION = {"s3:ListBucket", "iam:PassRole", "lambda:InvokeFunction", "sts:TagSession"}
SERVICES = {"elasticfilesystem": "efs"}  # the name in IAM -> botocore's
WITHOUT_MODEL = {"ssmmessages"}  # the agent's own protocol, which no SDK has


def statements(kind: str, options: Mapping[str, Any], job: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    plan = None
    if job is not None:
        written = {"name": "p", "entrypoint": "train.py", "image": "any", "environment": {"requirements": "none"}}
        plan = Planner("sagemaker", **options).plan(Job.from_dict({**written, **job}))
    return list(SagemakerBackend(options, Path()).policy(kind, plan)["Statement"])


def actions(*given: Any, **named: Any) -> set[str]:
    return {action for statement in statements(*given, **named) for action in statement["Action"]}


def listed(cell: str) -> set[str]:
    return set(re.findall(r"`(\w+:\w+)`", cell))


def rows() -> dict[str, tuple[set[str], set[str]]]:
    """Return the page's options and the actions that each adds to the role and to who submits."""
    table = PAGE[PAGE.index("| option |") : PAGE.index("- `session_chaining`")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    return {name.replace("`", ""): (listed(role), listed(submit)) for name, role, submit in cells}


@pytest.fixture
def source(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("print(1)\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_plain_target_gets_the_least():
    assert actions("trust", TARGET) == {"sts:AssumeRole"}
    assert actions("role", TARGET) == {
        *("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:ListBucket", "cloudwatch:PutMetricData"),
        *("logs:CreateLogGroup", "logs:CreateLogStream", "logs:PutLogEvents", "logs:DescribeLogStreams"),
        *("ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer", "ecr:BatchCheckLayerAvailability"),
        "ecr:GetAuthorizationToken",
    }
    by_name = {statement["Sid"]: statement for statement in statements("role", {**TARGET, "prefix": "team"})}
    assert by_name["Read"]["Resource"] == ["arn:aws:s3:::my-bucket/team/*"]
    assert by_name["Write"]["Resource"] == ["arn:aws:s3:::my-bucket/team/runs/*"]
    assert {name for name, statement in by_name.items() if "*" in statement["Resource"]} == {"Metrics", "Registry"}


PUSHES = ["ecr:CreateRepository", "ecr:DescribeRepositories", "ecr:GetAuthorizationToken", "ecr:PutImage"]
PUSHES += [
    "ecr:BatchCheckLayerAvailability",
    "ecr:InitiateLayerUpload",
    "ecr:UploadLayerPart",
    "ecr:CompleteLayerUpload",
]


def test_who_submits_may_do_what_the_backend_calls():
    """The page's list is recorded from the backend's calls; init alone lists roles, image push alone writes to ECR."""
    assert actions("submit", TARGET) == iam.listed() - {"iam:ListRoles", *PUSHES}
    for written in (ROLE, "training"):  # a name, which doctor resolves
        made = statements("submit", {**TARGET, "role": written})
        passed = next(statement for statement in made if "iam:PassRole" in statement["Action"])
        assert passed["Resource"] == [ROLE]
    assert passed["Condition"] == {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_adds_its_actions(name: str):
    asked, needed = OPTIONS[name]
    before, after = {**TARGET, **needed}, {**TARGET, **needed, **asked}
    role, submit = rows()[name]
    assert actions("role", after) - actions("role", before) == role
    assert actions("submit", after) - actions("submit", before) == submit
    assert actions("trust", after) == {"sts:AssumeRole"}


@pytest.mark.parametrize("name", OF_JOBS)
@pytest.mark.usefixtures("source")
def test_a_job_adds_its_actions(name: str):
    options = {**TARGET, **VPC}
    role, submit = rows()[name]
    assert actions("role", options, OF_JOBS[name]) - actions("role", options, {}) == role
    assert actions("submit", options, OF_JOBS[name]) - actions("submit", options, {}) == submit


def test_the_page_has_every_option():
    assert set(rows()) == {*OPTIONS, *OF_JOBS}
    assert actions("trust", {**TARGET, "session_chaining": True}) == {"sts:AssumeRole", "sts:TagSession"}
    private = {**TARGET, **VPC, "private_registry": True}
    assert not any(action.startswith("ecr:") for kind in ("role", "submit") for action in actions(kind, private))
    plan = OPTIONS["training_plan"][0]
    used = [
        part for part in statements("submit", {**TARGET, **plan}) if "sagemaker:CreateTrainingJob" in part["Action"]
    ]
    assert used[1]["Resource"] == [
        plan["training_plan"],
        "arn:aws:sagemaker:us-east-1:123456789012:reserved-capacity/*",
    ]


def test_training_plans_and_file_systems_need_what_aws_own_policy_has():
    """The oracle is AmazonSageMakerFullAccess, as moto has it of AWS."""
    policies = json.loads(aws_managed_policies_data)
    full = {part.get("Sid"): part for part in policies["AmazonSageMakerFullAccess"]["Document"]["Statement"]}
    of_plans = full["AllowUseOfTrainingPlanResources"]
    (ours,) = [
        part
        for part in statements("submit", {**TARGET, **OPTIONS["training_plan"][0]})
        if "sagemaker:DescribeTrainingPlan" in part["Action"]
    ]
    assert {action for action in of_plans["Action"] if "Cluster" not in action} == set(ours["Action"])
    kinds = [{arn.split(":")[5].partition("/")[0] for arn in part["Resource"]} for part in (of_plans, ours)]
    assert kinds[0] == kinds[1] == {"training-plan", "reserved-capacity"}
    for name in ("efs:// inputs", "fsx:// inputs"):
        assert rows()[name][0] <= set(full["AllowAWSServiceActions"]["Action"])


@pytest.mark.usefixtures("source")
def test_the_resources_are_the_jobs_own():
    job = {
        "image": "210987654321.dkr.ecr.eu-west-1.amazonaws.com/team/train:1",
        "inputs": {"a": "s3://data/train", "b": "s3://data/one.csv", "c": {"uri": "s3://web/x", "mode": "stream"}},
        "output": "s3://results/team",
        "secrets": {"TOKEN": "aws-secretsmanager:team/token"},
    }
    by_name = {statement["Sid"]: statement["Resource"] for statement in statements("role", TARGET, job)}
    s3 = "arn:aws:s3:::"
    assert by_name["Read"] == [
        *(f"{s3}my-bucket/cloudtrain/*", f"{s3}results/team/*"),
        *(f"{s3}data/train/*", f"{s3}data/one.csv*", f"{s3}web/x/*"),
    ]
    assert by_name["Write"] == [f"{s3}results/team/*"]
    assert by_name["List"] == [f"{s3}my-bucket", f"{s3}results", f"{s3}data", f"{s3}web"]
    assert by_name["Image"] == ["arn:aws:ecr:eu-west-1:210987654321:repository/team/train"]
    assert by_name["Secrets"] == ["arn:aws:secretsmanager:us-east-1:123456789012:secret:team/token-??????"]


def test_a_key_is_an_arn_an_id_or_an_alias():
    def key(written: str) -> dict[str, Any]:
        return next(part for part in statements("role", {**TARGET, "kms_key": written}) if part["Sid"] == "ResultsKey")

    arn = "arn:aws:kms:us-east-1:123456789012:key/abc"
    assert key(arn)["Resource"] == key("abc")["Resource"] == [arn]
    for alias in ("alias/x", "arn:aws:kms:us-east-1:123456789012:alias/x"):
        assert key(alias)["Resource"] == ["arn:aws:kms:us-east-1:123456789012:key/*"]
        assert key(alias)["Condition"] == {"ForAnyValue:StringEquals": {"kms:ResourceAliases": "alias/x"}}


def test_every_action_exists():
    """botocore's models have an operation of each action's name."""
    everything = {**TARGET, "session_chaining": True}
    for asked, _ in OPTIONS.values():
        everything |= asked
    found = {action for row in rows().values() for actions_of_one in row for action in actions_of_one}
    found |= {action for kind in ("trust", "role", "submit") for action in actions(kind, everything)}
    session = botocore.session.get_session()
    for action in sorted(found - NO_OPERATION):
        service, _, operation = action.partition(":")
        if service not in WITHOUT_MODEL:
            model = session.get_service_model(SERVICES.get(service, service))
            assert operation in model.operation_names, action


def test_the_command_prints_a_policy(source: Path, capsys: pytest.CaptureFixture[str]):
    toml = re.search(r"```toml\n(.*?)```", (DOCS / "sagemaker.md").read_text(), re.DOTALL)
    assert toml
    (source / "cloudtrain.toml").write_text(toml[1])
    for kind in ("trust", "role", "submit"):
        assert main(["doctor", "prod", "--policy", kind]) == 0
        assert json.loads(capsys.readouterr().out)["Statement"] == statements(kind, TARGET)
    (source / "job.yaml").write_text(
        "name: j\nentrypoint: train.py\nimage: any\ninputs: {x: s3://data/train/}\ntarget: prod\n"
    )
    assert main(["doctor", "--job", "job.yaml", "--policy", "role"]) == 0
    assert "arn:aws:s3:::data/train/*" in capsys.readouterr().out
    assert main(["doctor", "local", "--policy", "role"]) == 2
    with pytest.raises(BadRequest, match=r"options\.sagemaker\.role is not given"):
        statements("submit", {"bucket": "my-bucket"})
