"""What platforms enforce: IAM denials by the rules of IAM's evaluation, an admission policy by Google's CEL.

The IAM policy of the page was also evaluated by a simulator that is not ours: docs/platforms-evidence.md.
"""

from __future__ import annotations

import copy
import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from cel_expr_python import cel

from cloudtrain.backends import registry
from cloudtrain.backends.kubernetes import admission as kubernetes
from cloudtrain.backends.kubernetes.request import Request
from cloudtrain.backends.plan import Requirement
from cloudtrain.backends.sagemaker import denials as iam
from cloudtrain.job.job import Job
from cloudtrain.policy import enforce, files
from cloudtrain.runs.planning.plan import Planner
from cloudtrain.source.bundle import Bundle
from tests.policy.test_page import FILES

GOOD = {  # the keys of a request that all rules of the page allow
    "sagemaker:InstanceTypes": ["ml.g5.xlarge"],
    "sagemaker:MaxRuntimeInSeconds": 18900,
    "aws:RequestedRegion": "eu-west-1",
    "aws:PrincipalAccount": "123456789012",
    "aws:RequestTag/team": "nlp",
    "aws:RequestTag/project": "summaries",
}
BAD = {
    "sagemaker:InstanceTypes": ["ml.g5.xlarge", "ml.p5.48xlarge"],  # one of several groups
    "sagemaker:MaxRuntimeInSeconds": 24 * 3600 + 901,
    "aws:RequestedRegion": "us-east-1",
    "aws:PrincipalAccount": "999999999999",
    "aws:RequestTag/team": "sales",
    "aws:RequestTag/project": "",
}


@pytest.fixture
def rules(tmp_path: Path) -> list[Requirement]:
    """The rules of the page."""
    path = tmp_path / "policy.toml"
    path.write_text(FILES["policy.toml"])
    return of_file(path)


def of_file(path: Path, backend: str = "sagemaker") -> list[Requirement]:
    return list(enforce.requirements([files.read(path)], "", backend))


def denies(statement: dict[str, Any], keys: dict[str, Any]) -> bool:
    """Return whether a statement denies a request, by AWS' rules for keys that a request lacks.

    https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_elements_condition_operators.html (2026-11-25)
    """
    ((test, condition),) = statement["Condition"].items()
    ((key, wanted),) = condition.items()
    values = wanted if isinstance(wanted, list) else [wanted]
    has = key in keys
    if test == "Null":
        return has == (wanted == "false")
    if test == "ForAnyValue:StringNotLike":
        return has and any(not any(fnmatchcase(one, pattern) for pattern in values) for one in keys[key])
    if test == "StringNotLike":
        return not has or not any(fnmatchcase(keys[key], pattern) for pattern in values)
    if test == "NumericGreaterThan":
        return has and keys[key] > int(wanted)
    assert test == "Bool"
    return has and str(keys[key]).lower() == wanted


def denied(policy: dict[str, Any], keys: dict[str, Any]) -> bool:
    assert {statement["Effect"] for statement in policy["Statement"]} == {"Deny"}
    assert {tuple(statement["Action"]) for statement in policy["Statement"]} == {("sagemaker:CreateTrainingJob",)}
    return any(denies(statement, keys) for statement in policy["Statement"])


def test_iam_denies_what_rules_refuse_and_requests_without_the_key(rules):
    policy, notes = iam.build_denials(rules)
    assert policy and not denied(policy, GOOD)
    for key in GOOD:
        assert denied(policy, {name: value for name, value in GOOD.items() if name != key}), f"a request without {key}"
    for key, value in BAD.items():
        assert denied(policy, {**GOOD, key: value}), key
    assert {note.split(" enforce ")[1].split(" (")[0] for note in notes} == {
        "backends", "max_cost", "output", "image_by_digest", "set resources.use_spot",
    }  # fmt: skip
    sids = [statement["Sid"] for statement in policy["Statement"]]
    assert len(set(sids)) == len(sids) and all(sid.isalnum() for sid in sids)
    assert len(json.dumps(policy, separators=(",", ":"))) < 6144, "IAM's limit of a managed policy"


def test_without_the_null_check_a_request_without_the_key_passes(rules):
    """What the second statements are for."""
    policy, _ = iam.build_denials(rules)
    assert policy
    first = {"Statement": [each for each in policy["Statement"] if "Null" not in each["Condition"]]}
    lacks = {name: value for name, value in GOOD.items() if name != "sagemaker:InstanceTypes"}
    assert not denied(first, lacks) and denied(policy, lacks)


def test_a_plan_that_the_rules_allow_is_one_that_iam_allows(rules, tmp_path: Path, monkeypatch):
    for name, text in {**FILES, "train.py": "print(1)\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    request = Planner().plan("job.yaml", sets=["limits.max_runtime=24h", "limits.max_cost=100 USD"]).request
    tags = {f"aws:RequestTag/{tag['Key']}": tag["Value"] for tag in request["Tags"]}
    sent = {
        **GOOD,
        **tags,
        "sagemaker:InstanceTypes": [request["ResourceConfig"]["InstanceType"]],
        "sagemaker:MaxRuntimeInSeconds": request["StoppingCondition"]["MaxRuntimeInSeconds"],
    }
    policy, _ = iam.build_denials(rules)
    assert policy and not denied(policy, sent)


def test_network_isolation_is_denied_by_its_own_key(tmp_path: Path):
    (tmp_path / "p.toml").write_text("[rules.cut]\nnetwork_isolation = true\n")
    policy, _ = iam.build_denials(of_file(tmp_path / "p.toml"))
    assert policy and not denied(policy, {"sagemaker:NetworkIsolation": True})
    assert denied(policy, {"sagemaker:NetworkIsolation": False}) and denied(policy, {})


# -- Kubernetes: the expressions are evaluated by Google's CEL -------------------------------------------------------

KUBE = """
[rules.owner]
labels = {team = ["nlp", "vis*"], project = "*"}
[rules.machines]
why = "small machines first"
instance_types = ["g5.*"]
image_by_digest = true
images = ["r/*", "ghcr.io/acme/train@*"]
max_runtime = "2h"
spot = true
"""
SPOT = {"spot_selector": {"karpenter.sh/capacity-type": "spot"}}
JOB = {
    "entrypoint": "train.py",
    "labels": {"team": "nlp", "project": "x"},
    "resources": {"instance_type": "g5.xlarge", "use_spot": True},
    "limits": {"max_runtime": "2h", "grace": "10m"},
    "image": "r/i@sha256:" + "0" * 64,
    "num_nodes": 2,
}


@pytest.fixture
def admit(tmp_path: Path, monkeypatch):
    """Return what an admission policy says of a job's manifest: its messages."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "p.toml").write_text(KUBE)
    (policy, binding), notes = kubernetes.build_policy(of_file(tmp_path / "p.toml"), {**SPOT, "namespace": "ml"})
    assert notes == [] and binding["spec"]["policyName"] == policy["metadata"]["name"]
    bundle = Bundle.make(tmp_path, tmp_path / "home" / "bundles")

    def manifest(kind: str = "job", **changes: Any) -> dict[str, Any]:
        job = Job(**{"source": ".", **copy.deepcopy(JOB), **changes})
        request = Request(job, bundle, "run", 1, {**SPOT, "kind": kind})
        assert not request.problems
        return request.main

    def messages(obj: dict[str, Any], old: dict[str, Any] | None = None) -> list[str]:
        return evaluate(policy["spec"], obj, old)

    return manifest, messages


def evaluate(spec: dict[str, Any], obj: dict[str, Any], old: dict[str, Any] | None = None) -> list[str]:
    """Return the messages of validations that do not hold, as an API server evaluates them."""
    env = cel.NewEnv(variables=dict.fromkeys(("object", "oldObject", "request", "variables"), cel.Type.DYN))
    data = {"object": obj, "oldObject": old, "request": {"operation": "UPDATE" if old else "CREATE"}}

    def value(expression: str, more: dict[str, Any]) -> Any:
        return env.compile(expression).eval(data={**data, **more}).value()

    if not all(value(each["expression"], {"variables": {}}) for each in spec.get("matchConditions", ())):
        return []
    variables = {each["name"]: plain(value(each["expression"], {"variables": {}})) for each in spec["variables"]}
    return [
        each["message"]
        for each in spec["validations"]
        if value(each["expression"], {"variables": variables}) is not True
    ]


def plain(value: Any) -> Any:
    """Return a value of CEL as Python's."""
    value = value.value() if hasattr(value, "value") and callable(value.value) else value
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_the_admission_policy_takes_our_jobs_and_refuses_others(kind: str, admit):
    manifest, messages = admit
    assert messages(manifest(kind)) == []
    for changes, text in (
        ({"labels": {"team": "sales", "project": "x"}}, "label team must be nlp or vis*"),
        ({"labels": {"team": "vision"}}, "label project must be *"),
        ({"resources": {"instance_type": "p5.48xlarge", "use_spot": True}}, "resources.instance_type must be g5.*"),
        ({"image": "r/i:latest"}, "images must be name@sha256:..."),
        ({"image": "x/r/i@sha256:" + "0" * 64}, "images must be r/* or ghcr.io/acme/train@*"),
        ({"limits": {"max_runtime": "4h"}}, "limits.max_runtime must be at most 2h"),
        ({"resources": {"instance_type": "g5.xlarge"}}, "resources.use_spot must be true"),
    ):
        (message,) = messages(manifest(kind, **changes))
        assert text in message and message.startswith(("rule owner: ", "rule machines: "))
    assert len(messages({"kind": "Job", "metadata": {}, "spec": {"template": {"spec": {"containers": []}}}})) == 5


@pytest.mark.parametrize("kind", ["containers", "initContainers"])
def test_every_container_of_a_pod_needs_an_image_by_digest(kind: str, admit):
    manifest, messages = admit
    job = manifest()
    job["spec"]["template"]["spec"].setdefault(kind, []).append({"name": "more", "image": "r/i:latest"})
    (message,) = messages(job)
    assert "images must be name@sha256:..." in message


def test_the_api_server_refuses_in_the_targets_namespace_alone(tmp_path: Path):
    (tmp_path / "p.toml").write_text(KUBE)
    (policy, binding), _ = kubernetes.build_policy(of_file(tmp_path / "p.toml"), {**SPOT, "namespace": "ml"})
    assert policy["spec"]["failurePolicy"] == "Fail", "an expression that fails lets no job through"
    assert binding["spec"]["validationActions"] == ["Deny"], "not a warning"
    assert binding["spec"]["matchResources"] == {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ml"}}
    }
    resources = {
        (rule["apiGroups"][0], *rule["resources"]) for rule in policy["spec"]["matchConstraints"]["resourceRules"]
    }
    assert resources == {("batch", "jobs"), ("jobset.x-k8s.io", "jobsets")}
    for rule in policy["spec"]["matchConstraints"]["resourceRules"]:
        assert set(rule["operations"]) == {"CREATE", "UPDATE"}


def test_an_older_job_can_still_be_cancelled_under_a_newer_policy(admit):
    manifest, messages = admit
    old = manifest(image="r/i:latest")
    cancelled = copy.deepcopy(old)
    cancelled["spec"]["suspend"] = True
    assert messages(cancelled, old) == []
    cancelled["spec"]["template"]["spec"]["nodeSelector"] = {"node.kubernetes.io/instance-type": "p5"}
    assert messages(cancelled, old), "a change of its pods is checked"


def test_a_pattern_is_a_whole_value(admit, tmp_path: Path):
    assert kubernetes._regex("a.b*c?[!x]") == r"a\.b.*c.[^x]"
    manifest, messages = admit
    assert messages(manifest(labels={"team": "nlpx", "project": "x"}))


def test_vertex_ai_holds_regions_and_says_what_it_cannot_hold(rules, tmp_path: Path):
    (tmp_path / "p.toml").write_text('[rules.eu]\nregions = ["europe-west4"]\nmax_runtime = "1h"\n')
    documents, notes = enforce.build(
        [files.read(tmp_path / "p.toml")], "gcp", registry.create("vertex", {"project": "acme"}, tmp_path)
    )
    assert documents["regions.json"] == {
        "name": "projects/acme/policies/gcp.resourceLocations",
        "spec": {"rules": [{"values": {"allowedValues": ["in:europe-west4-locations"]}}]},
    }
    assert notes == [
        "Google Cloud cannot enforce max_runtime (rule eu of the policy): cloudtrain alone checks it, at plan and submit"
    ]
    assert enforce.build([], "lab", registry.create("local", {}, tmp_path))[0] == {}
