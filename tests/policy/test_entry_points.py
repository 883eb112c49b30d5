"""The entry point cloudtrain.policies: a function of an installed package changes or refuses each job."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cloudtrain.backends import registry
from cloudtrain.errors import BadRequest
from cloudtrain.policy.checks import Refused
from cloudtrain.runs.planning.plan import Planner

PACKAGE = """\
def apply(job, context):
    if job.labels.get("team") == "sales":
        raise ValueError(f"sales trains nothing on {context.target} ({context.backend})")
    return job.replace(labels={**job.labels, "org": "acme"})

def broken(job, context):
    return 1 / 0

def nothing(job, context):
    pass

def strict(job, context):
    raise ValueError("nothing is allowed today")

def mover(job, context):
    return job.replace(target="elsewhere")
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch):
    """Install a package with a policy, as pip leaves it."""
    site = tmp_path / "site"
    info = site / "acme_rules-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "acme_rules.py").write_text(PACKAGE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-rules\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(site))

    def policy(function: str) -> None:
        (info / "entry_points.txt").write_text(f"[cloudtrain.policies]\nacme = acme_rules:{function}\n")
        registry._entry_points.cache_clear()  # as in a new process

    yield policy
    sys.modules.pop("acme_rules", None)


def test_it_changes_the_job_and_the_plan_says_so(project: Path, install, cli):
    install("apply")
    code, out, _ = cli("plan")
    assert code == 0 and 'the policy acme sets labels.org to the text "acme", was nothing' in out
    assert Planner().plan("job.yaml").job["labels"]["org"] == "acme"
    assert "acme, installed: acme_rules:apply" in cli("doctor", "local")[1]


def test_value_error_refuses(project: Path, install, cli):
    install("apply")
    code, _, err = cli("plan", "--set", "labels.team=sales")
    assert code == 2 and "sales trains nothing on prod (memory) (the policy acme)" in err


def test_code_and_rules_refuse_together_and_the_plan_names_both(project: Path, install, cli):
    install("apply")
    (project / "policy.toml").write_text('[rules.owner]\nlabels = {project = "*"}\n')
    code, _, err = cli("plan", "--set", "labels.team=sales")
    assert code == 2 and "labels.project: is not set" in err and "sales trains nothing on prod" in err
    code, out, _ = cli("plan", "--set", "labels.project=a")
    named = [line.split(None, 1)[1] for line in out.splitlines() if line.split()[:1] == ["policy"]]
    assert code == 0 and len(named) == 2 and named[1] == "acme (acme_rules:apply), installed code"
    cli("plan", "--set", "labels.project=a", "-o", "plan.json")
    (project / "policy.toml").write_text("[rules.runtime]\nmax_runtime = '1h'\n")
    install("strict")
    code, _, err = cli("submit", "plan.json")
    assert code == 2 and "limits.max_runtime" in err and "nothing is allowed today" in err
    install("apply")
    (project / "policy.toml").write_text('[rules.owner]\nlabels = {project = "*"}\n')
    code, out, _ = cli("submit", "plan.json")
    assert code == 0 and "no longer exists" not in out


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("broken", "acme_rules:broken.* fails: ZeroDivision"),
        ("nothing", "returned NoneType, not a job"),
        ("mover", "another target"),
    ],
)
def test_one_that_fails_lets_nothing_through(function: str, message: str, project: Path, install):
    install(function)
    with pytest.raises(BadRequest, match=message):
        Planner().plan("job.yaml")


def test_a_plan_from_before_the_installation_is_refused(project: Path, install, cli):
    cli("plan", "-o", "plan.json")
    install("apply")
    code, _, err = cli("submit", "plan.json")
    assert code == 2 and "labels.org" in err and "the plan was made without it" in err
    cli("plan", "-o", "plan.json")
    assert cli("submit", "plan.json")[0] == 0


def test_refused_is_a_bad_job(project: Path, install):
    install("apply")
    with pytest.raises(Refused):
        Planner().plan("job.yaml", sets=["labels.team=sales"])
