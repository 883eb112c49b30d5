"""policy.toml: what rules refuse and set, for first plans, stored plans and every later attempt of a run."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from cloudtrain.backends.api import Facts
from cloudtrain.errors import BadRequest
from cloudtrain.events import State
from cloudtrain.job.job import Job
from cloudtrain.policy import checks, files
from cloudtrain.policy.checks import Refused
from cloudtrain.policy.files import BadPolicy
from cloudtrain.runs.planning.plan import Planner
from cloudtrain.runs.sending.resume import send_copy, send_next
from cloudtrain.runs.submit import Submitter
from cloudtrain.testing.memory import MemoryBackend
from tests.policy.conftest import Cloud
from tests.runs.steps import newest, watch

TEAM = '[rules.team]\nwhy = "costs are split by team"\nlabels = {team = ["nlp", "vision"]}\n'
UUID = "8f1a0c6e-52b3-4d7e-9a0b-3c4d5e6f7a8b"


def refusal(job: object, **changes) -> list[str]:
    with pytest.raises(Refused) as error:
        Planner().plan(job, **changes)
    assert error.value.exit_code == 2
    return [str(problem) for problem in error.value.problems]


def test_a_refusal_names_the_key_the_rule_and_both_lines(project: Path):
    (project / "policy.toml").write_text(TEAM)
    (project / "job.yaml").write_text("entrypoint: train.py\nlabels:\n  team: sales\n")
    (text,) = refusal("job.yaml")
    assert text.startswith("job.yaml:3: labels.team: is sales; the policy requires nlp or vision")
    assert f"(rule team, {project}/policy.toml:3: costs are split by team)" in text


def test_a_cap_that_cannot_be_compared_is_said_first(project: Path):
    (project / "policy.toml").write_text('[rules.cap]\nmax_cost = "20 USD"\nmax_usd_per_hour = 5\n')
    (project / "cloudtrain.toml").write_text('[targets.lab]\nbackend = "ssh"\nhosts = [{address = "10.0.0.5"}]\n')
    (project / "job.yaml").write_text("entrypoint: train.py\n")
    notes = Planner().plan("job.yaml", sets=["target=lab"]).notes
    assert [note.split()[2] for note in notes[:2]] == ["max_cost", "max_usd_per_hour"]
    assert "(rule cap, " in notes[0] and "usd_per_hour of the target" in notes[0]
    assert not any("was not checked" in note for note in Planner().plan("job.yaml", sets=["target=local"]).notes), (
        "it is free"
    )
    priced = ["target=lab", "resources.usd_per_hour=4", "limits.max_runtime=1h"]
    assert not any("was not checked" in note for note in Planner().plan("job.yaml", sets=priced).notes)


WRONG = {  # a rule, the key that it refuses, and settings with which it does not
    'targets = ["lab"]': ("target", None),
    'backends = "sage*"': ("target", None),
    'accounts = ["9999"]': ("options.memory.account", None),
    'regions = "us-*"': ("options.memory.region", None),
    'instance_types = ["g5.*"]': ("resources.instance_type", ["resources.instance_type=g5.xlarge"]),
    'output = "s3://acme/*"': ("output", ["output=s3://acme/runs"]),
    "image_by_digest = true": ("image", ["image=r/n@sha256:" + "0" * 64]),
    'images = ["ghcr.io/acme/*", "python:3.1?"]': ("image", ["image=ghcr.io/acme/train:1"]),
    "spot = true": ("resources.use_spot", ["resources.use_spot=true"]),
    "network_isolation = true": ("options.memory.isolate", ["options.memory.isolate=true"]),
    'max_runtime = "2h"': ("limits.max_runtime", ["limits.max_runtime=2h"]),
    'max_cost = "10 USD"': ("limits.max_cost", ["resources.usd_per_hour=1", "limits.max_runtime=1h"]),
    "max_usd_per_hour = 10": ("resources", ["resources.usd_per_hour=10"]),
    "max_gpus = 2": ("resources", ["resources.accelerators=A100:2"]),
    'labels = {team = "*"}': ("labels.team", ["labels.team=x"]),
}


@pytest.mark.parametrize("rule", WRONG)
def test_each_requirement_refuses_and_allows(rule: str, project: Path, monkeypatch):
    monkeypatch.setattr(MemoryBackend, "options", classmethod(lambda cls: _Any))
    path, allowed = WRONG[rule]
    (project / "policy.toml").write_text(f"[rules.one]\n{rule}\n")
    sets = ["resources.usd_per_hour=100"]
    (text,) = refusal("job.yaml", sets=sets)
    assert f"{path}: " in text and "(rule one, " in text and "policy.toml:2" in text
    if allowed:
        Planner().plan("job.yaml", sets=[*sets, *allowed])
    else:
        (project / "policy.toml").write_text(f'[rules.one]\non = ["ssh"]\n{rule}\n')
        Planner().plan("job.yaml")


class _Any:
    """Options of a backend that takes any."""

    @classmethod
    def model_validate(cls, options):
        return options


def test_every_requirement_is_tried():
    assert {rule.split(" ")[0] for rule in WRONG} == set(files.REQUIREMENTS)


def test_all_rules_of_all_policies_are_reported_at_once(project: Path, tmp_path: Path, monkeypatch):
    config = tmp_path / "mine"
    config.mkdir()
    monkeypatch.setenv("CLOUDTRAIN_CONFIG_HOME", str(config))
    (config / "policy.toml").write_text('[rules.short]\nmax_runtime = "1h"\n')
    (project / "policy.toml").write_text(TEAM + '[rules.out]\noutput = "s3://acme/*"\n')
    assert len(refusal("job.yaml")) == 3


def test_what_a_rule_sets_is_in_the_plan_with_its_reason(project: Path, cli):
    rule = '[rules.org]\nwhy = "one invoice"\nset = {"labels.org" = "acme", "limits.max_runtime" = "1h"}\n'
    (project / "policy.toml").write_text(rule)
    plan = Planner().plan("job.yaml")
    assert plan.job["labels"]["org"] == "acme" and plan.manifest["max_runtime_s"] == 3600
    code, out, _ = cli("plan")
    assert code == 0
    assert (
        f'the policy sets labels.org to the text "acme", was nothing (rule org, {project}/policy.toml:3: one invoice)'
        in out
    )
    assert 'sets limits.max_runtime to the text "1h", was the text "24h"' in out
    assert f"policy  {project}/policy.toml (1 rule, sha256 " in out
    (project / "job.yaml").write_text("entrypoint: train.py\nlabels: {org: acme}\nlimits: {max_runtime: 1h}\n")
    assert "the policy sets" not in cli("plan")[1], "nothing was changed"


def test_what_a_rule_sets_wins_over_set_and_over_options_from_python(project: Path, monkeypatch):
    monkeypatch.setattr(MemoryBackend, "options", classmethod(lambda cls: _Any))
    (project / "policy.toml").write_text('[rules.off]\nset = {"options.memory.isolate" = true}\n')
    plan = Planner(isolate=False).plan("job.yaml", sets=["options.memory.isolate=false"])
    assert plan.job["options"]["memory"]["isolate"] is True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[rules.a]\nmax_runtimes = '1h'",
            "policy.toml:2: rules.a.max_runtimes: is not known (did you mean max_runtime?)",
        ),
        ("[rules.a]\nbudget = 8", "max_cost"),
        ("[rules.a]\ntags = 'x'", "rules.a.tags: is not known (did you mean labels?)"),
        ("[rules.a]\nbudget = 8", ", on, why, set"),
        ("[rules.a]\nspot = false", "policy.toml:2: rules.a.spot: can only be true"),
        ("[rules.a]\nmax_gpus = 1.5", "policy.toml:2: rules.a.max_gpus: is not such a count (write a whole number"),
        ("[rules.a]\nmax_usd_per_hour = '5 USD'", "policy.toml:2: rules.a.max_usd_per_hour: is not such an amount"),
        ("[rules.a]\nmax_cost = 5", "policy.toml:2: rules.a.max_cost: is not such an amount"),
        ("[rules.a]\nregions = []", "policy.toml:2: rules.a.regions: allows nothing"),
        ("[rules.a]\nwhy = 'x'", "policy.toml:1: rules.a: requires nothing"),
        ("[rules.a]\nset = {entrypoint = 'x.py'}", 'policy.toml:2: rules.a.set: cannot set the text "entrypoint"'),
        ("[rule.a]\nspot = true", "policy.toml: rule: is not a known table"),
        ("[rules.a]\nspot = true\nspot = true", "is not valid TOML"),
        ("", "rules: holds no rule"),
    ],
)
def test_a_policy_that_is_wrong_lets_nothing_through(text: str, message: str, project: Path):
    (project / "policy.toml").write_text(text)
    with pytest.raises(BadRequest) as error:
        Planner().plan("job.yaml")
    assert message in str(error.value)


def test_a_stored_plan_is_checked_again(project: Path, cli):
    assert cli("plan", "-o", "plan.json")[0] == 0
    (project / "policy.toml").write_text(TEAM + '[rules.org]\nset = {"labels.org" = "acme"}\n')
    code, _, err = cli("submit", "plan.json")
    assert (
        code == 2
        and "labels.team: is not set" in err
        and 'labels.org: is nothing, the policy sets the text "acme"' in err
    )
    assert not MemoryBackend.attempts
    (project / "policy.toml").unlink()
    assert cli("submit", "plan.json")[0] == 0


def test_rerun_resume_and_the_watchers_retry_are_checked(project: Path):
    submitter = Submitter(watch=False)
    job = project / "job.yaml"
    job.write_text("entrypoint: train.py\nretry: {max_attempts: 9}\nlabels: {team: nlp}\n")
    (project / "policy.toml").write_text(TEAM)
    run = submitter.submit(job)
    MemoryBackend.finish(newest(run), State.LOST, 1)
    (project / "policy.toml").write_text(TEAM.replace("nlp", "speech"))
    watch(run)
    assert (
        run.record.status.state is State.LOST
        and "the policy refuses" in run.record.status.reason
        and "speech" in run.record.status.reason
    )
    for sets in ([], ["limits.max_runtime=3h"], ["env.A=b"]):
        with pytest.raises(Refused, match="rule team"):
            send_next(run.store, run.run_id, sets=sets, target=None, watch=False)
        with pytest.raises(Refused, match="rule team"):
            send_copy(run.store, run.run_id, sets=sets, source=None, key=None, watch=False)
    assert len(MemoryBackend.attempts) == 1


def test_a_run_is_resumed_under_its_policy_from_another_folder(project: Path, tmp_path: Path, monkeypatch):
    (project / "policy.toml").write_text(TEAM)
    job = Job(entrypoint="train.py", source=str(project), labels={"team": "nlp"})
    run = Submitter("memory", watch=False).submit(job)
    MemoryBackend.finish(newest(run), State.FAILED, 1)
    watch(run)
    monkeypatch.chdir(tmp_path)
    (project / "policy.toml").write_text(TEAM.replace("nlp", "speech"))
    with pytest.raises(Refused):
        send_copy(run.store, run.run_id, sets=[], source=None, key=None, watch=False)
    (project / "policy.toml").unlink()
    _, notes = send_copy(run.store, run.run_id, sets=[], source=None, key=None, watch=False)
    plan = run.store.attempts(run.store.runs(limit=1)[0].run_id)[-1].plan
    assert any("no longer exists: its rules were not checked" in note for note in plan.notes), notes


def test_the_policies_of_the_source_and_of_the_scripts_folder_hold_from_any_folder(
    project: Path, tmp_path: Path, monkeypatch, cli
):
    """A script by its path, a job file with a source elsewhere, and a stored plan of either."""
    (project / "sub").mkdir()
    (project / "sub" / "train.py").write_text("print(1)\n")
    subprocess.run(["git", "init", "-q", project], check=True)  # so that the whole project is packaged
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "cloudtrain.toml").write_text((project / "cloudtrain.toml").read_text())
    (elsewhere / "job.yaml").write_text(f"source: {project}\nentrypoint: sub/train.py\n")
    monkeypatch.chdir(elsewhere)
    assert cli("plan", "job.yaml", "-o", "plan.json")[0] == 0
    (elsewhere / "policy.toml").write_text('[rules.here]\nmax_runtime = "1h"\n')
    (project / "policy.toml").write_text(TEAM)
    (project / "sub" / "policy.toml").write_text('[rules.out]\noutput = "s3://acme/*"\n')
    for words in (["plan", f"{project}/sub/train.py"], ["plan", "job.yaml"], ["submit", "plan.json"]):
        code, _, err = cli(*words)
        assert code == 2, (words, err)
        for rule in ("rule here", "rule team", "rule out"):
            assert rule in err, (words, err)
    given = ["--set", "labels.team=nlp", "--set", "limits.max_runtime=1h", "--set", "output=s3://acme/runs"]
    code, out, err = cli("plan", *given, f"{project}/sub/train.py")
    assert code == 0, err
    for folder in (elsewhere, project, project / "sub"):
        assert f"{folder}/policy.toml (1 rule" in out, "the plan names each file that counts"


def test_candidates_and_trials_are_checked(project: Path, cli):
    (project / "cloudtrain.toml").write_text('[targets.a]\nbackend = "memory"\n[targets.b]\nbackend = "memory"\n')
    (project / "policy.toml").write_text('[rules.only]\ntargets = ["b"]\n')
    plan = Planner().plan(Job(entrypoint="train.py", source=".", target=["a", "b"]))
    assert [(row["target"], bool(row["why_not"])) for row in plan.candidates] == [("b", False), ("a", True)]
    sweep = {
        "method": "grid",
        "parameters": {"lr": {"values": ["1", "2"]}},
        "job": {"entrypoint": "train.py", "target": "a"},
    }
    (project / "sweep.yaml").write_text(json.dumps(sweep))
    code, out, err = cli("sweep", "sweep.yaml")
    assert code == 2 and "rule only" in err, (code, out, err)


def test_a_policy_without_rules_for_machines_of_ones_own_does_not_refuse_them(project: Path):
    text = '[rules.cloud]\naccounts = "1"\nregions = "x"\ninstance_types = "y"\nspot = true\nmax_cost = "1 USD"\n'
    (project / "policy.toml").write_text(text + "image_by_digest = true\n")
    Planner("local").plan("job.yaml")
    (project / "policy.toml").write_text("[rules.cut]\nnetwork_isolation = true\n")
    (text,) = refusal_on("local")
    assert "must have network isolation, which local does not offer" in text


def refusal_on(target: str) -> list[str]:
    with pytest.raises(Refused) as error:
        Planner(target).plan("job.yaml")
    return [str(problem) for problem in error.value.problems]


def test_a_job_cannot_state_less_than_the_known_price(project: Path):
    sagemaker = {"role": "arn:aws:iam::123456789012:role/job", "region": "us-east-1", "bucket": "acme-runs"}
    (project / "cloudtrain.toml").write_text(
        "[targets.own]\nbackend = 'sagemaker'\nusd_per_hour = 0.5\n"
        + "".join(f"{key} = {json.dumps(value)}\n" for key, value in sagemaker.items())
    )
    (project / "policy.toml").write_text('[rules.cost]\nmax_cost = "5 USD"\n')
    sets = ["resources.instance_type=ml.g5.xlarge", "limits.max_runtime=1h", "image=r/n:1"]
    sets += [f"options.sagemaker.{key}={value}" for key, value in sagemaker.items()]
    for cheap in ("resources.usd_per_hour=0.01", "resources.usd_per_hour=0"):
        with pytest.raises(Refused) as error:
            Planner("sagemaker").plan("job.yaml", sets=[*sets, cheap])
        (text,) = map(str, error.value.problems)
        assert cheap.partition("=")[0] in text and "a job cannot state less" in text, text
    for other, why in (
        ("x9.xlarge", "the price is not known"),
        ("g4dn.xlarge", r"makes 0\.53 USD an hour, the known price"),
    ):
        with pytest.raises(Refused, match=why):
            Planner("sagemaker").plan("job.yaml", sets=[*sets, f"resources.priced_as=aws/us-east-1/{other}"])
    Planner("sagemaker").plan("job.yaml", sets=[*sets, "resources.usd_per_hour=2"])
    assert Planner("own").plan("job.yaml", sets=sets).price["usd_per_hour"] == 0.5, "the target may"


def test_the_price_of_an_hour_is_that_of_all_nodes_and_must_be_known(project: Path):
    (project / "policy.toml").write_text("[rules.price]\nmax_usd_per_hour = 3\n")
    options = {"role": "arn:aws:iam::123456789012:role/job", "region": "us-east-1", "bucket": "acme-runs"}
    sets = ["image=r/n:1", *(f"options.sagemaker.{key}={value}" for key, value in options.items())]
    two = ["resources.instance_type=ml.g5.xlarge", "num_nodes=2"]
    Planner("sagemaker").plan("job.yaml", sets=[*sets, two[0]])
    for more, wrong in (
        (["num_nodes=3"], r"cost 4\.2\d USD an hour; the policy allows at most 3 USD"),
        (["resources.instance_type=ml.unheard.of", "resources.accelerators=A10G:1"], "cost an unknown sum an hour"),
        (["resources.usd_per_hour=0.01"], "under max_usd_per_hour a job cannot state less"),
    ):
        with pytest.raises(Refused, match=wrong):
            Planner("sagemaker").plan("job.yaml", sets=[*sets, *two, *more])


def test_a_rule_sets_the_audit_in_the_output(project: Path):
    (project / "policy.toml").write_text("[rules.all]\nset = {audit = true}\n")
    assert Planner().plan("job.yaml", sets=["output=s3://acme/runs"]).job["audit"] is True


def test_a_backend_from_elsewhere_that_says_nothing_is_refused(project: Path, monkeypatch):
    monkeypatch.delattr("tests.policy.conftest.Cloud.facts")
    policy = _policy(
        project, '[rules.a]\naccounts = "1"\ninstance_types = "g5"\nimage_by_digest = true\nimages = "r/*"\n'
    )
    plan = _plan_of_memory(project)
    found = checks.find_problems([policy], plan, MemoryBackend({}, project))
    assert [problem.message.split(";")[0].split(",")[0] for problem in found] == [
        "is not set",
        "is not set",
        "is not known",
        "is not known",
    ]


@pytest.mark.parametrize("on", ["prod", "memory", "mem*"])
def test_a_rule_is_for_a_target_or_for_a_backend(on: str, project: Path):
    (project / "policy.toml").write_text(f'[rules.one]\non = ["lab", "{on}"]\nspot = true\n')
    assert len(refusal("job.yaml")) == 1
    (project / "policy.toml").write_text('[rules.one]\non = ["lab", "ssh"]\nspot = true\n')
    assert any('"lab" matches no target or backend' in note for note in Planner().plan("job.yaml").notes)


@pytest.mark.parametrize("on", ['["rod"]', '["memry", "lab-*"]'])
def test_a_name_that_would_switch_a_rule_off_is_refused(on: str, project: Path, cli):
    (project / "policy.toml").write_text(f"[rules.one]\non = {on}\nspot = true\n")
    for command in ("plan", "submit"):
        code, _, err = cli(command, "job.yaml")
        assert code == 2 and "rule one" in err and "policy.toml:2" in err and "is known here (did you mean" in err
    code, out, err = cli("doctor", "local")
    assert code != 0 and "matches no target or backend" in out + err


def test_a_target_of_other_machines_is_made_known_in_the_configuration(project: Path, cli):
    """An organisation's rule for a target that only some machines have locks nobody out: the refusal names the way."""
    (project / "policy.toml").write_text('[rules.one]\non = ["prod-eu"]\nspot = true\n')
    code, _, err = cli("plan", "job.yaml")
    assert code == 2 and '[targets.prod-eu] with backend = "..." in cloudtrain.toml' in " ".join(err.split())
    with open(project / "cloudtrain.toml", "a") as file:
        file.write('\n[targets.prod-eu]\nbackend = "sagemaker"\n')
    assert cli("plan", "job.yaml")[0] == 0


def test_a_name_that_only_narrows_a_rule_is_a_note(project: Path, cli):
    (project / "policy.toml").write_text(
        '[rules.one]\ntargets = ["prod", "prd"]\nbackends = ["memory", "sagmaker"]\n'
        'instance_types = ["ml.g5.*", "ml.g5.xlrge", "*"]\n'
        f'accounts = ["12345678901", "123456789012", "my-project", "1*", "{UUID}"]\n'
    )
    (project / "job.yaml").write_text("entrypoint: train.py\nresources: {instance_type: x1}\n")
    notes = " ".join(Planner().plan("job.yaml").notes)
    for name in ("prd", "sagmaker", "ml.g5.xlrge"):
        assert f'"{name}" matches no ' in notes
    assert '"12345678901" is no AWS account' in notes
    for known in ("prod", "ml.g5.*", "123456789012", "my-project", "1*", UUID):
        assert f'"{known}"' not in notes
    code, out, err = cli("doctor", "local")
    assert code != 0 and '"ml.g5.xlrge" matches no ' in out + err


def test_what_a_plan_leaves_open_is_refused(project: Path):
    """The runtime that a plan does not name, a cost without a bound, and each image of several."""

    class Pods(Cloud):
        def facts(self, plan) -> Facts:
            return Facts("1234", "eu-west-1", (), ("r/n@sha256:" + "0" * 64, "r/sidecar:1"), False)

    rules = 'max_runtime = "23h"\nmax_cost = "9 USD"\nimage_by_digest = true\nimages = "r/n@*"\n'
    policy = _policy(project, f"[rules.a]\n{rules}")
    plan = _plan_of_memory(project)
    plan = replace(plan, job={**plan.job, "limits": {}}, price={"usd": 1}, at_most={"unbounded": "no end"})
    found = checks.find_problems([policy], plan, Pods({}, project))
    assert [problem.message.split(";")[0] for problem in found] == [
        "is 24h",
        "is unknown (no end)",
        "is r/sidecar:1",
        "is r/sidecar:1",
    ]


def test_max_gpus_counts_all_nodes_and_refuses_what_is_not_known(project: Path):
    (project / "policy.toml").write_text("[rules.gpus]\nmax_gpus = 8\n")
    sets = ["target=local", "resources.accelerators=A100:4"]
    assert Planner().plan("job.yaml", sets=sets)
    assert Planner().plan("job.yaml", sets=["target=local", "resources.accelerators=0"])
    (text,) = refusal("job.yaml", sets=["target=local", "resources.accelerators=A100:16"])
    assert "resources: have 16 GPUs on 1 node; the policy allows at most 8 (rule gpus, " in text
    (text,) = refusal("job.yaml", sets=["target=local"])  # its ranks use all GPUs of this machine
    assert "resources: have an unknown number of GPUs; the policy allows at most 8" in text


def _policy(project: Path, text: str) -> files.Policy:
    path = project / "other.toml"
    path.write_text(text)
    return files.read(path)


def _plan_of_memory(project: Path):
    from cloudtrain.backends.api import Plan
    from cloudtrain.source.bundle import Bundle

    bundle = Bundle.make(project, project.parent / "bundles")
    plan = MemoryBackend({}, project).plan(Job(entrypoint="train.py", source="."), bundle, "r")
    assert isinstance(plan, Plan)
    return plan


def test_an_old_plan_without_policies_is_still_read(project: Path):
    from cloudtrain.backends.api import Plan

    data = json.loads(Planner().plan("job.yaml").to_json())
    del data["policies"]
    assert Plan.from_json(json.dumps(data)).policies == ()


def test_the_policy_of_a_broken_file_stops_the_plan_and_not_other_commands(project: Path, cli):
    (project / "policy.toml").write_text("[rules.a]\nspot = 1\n")
    with pytest.raises(BadPolicy):
        Planner().plan("job.yaml")
    assert cli("ls")[0] == 0
    code, out, _ = cli("doctor", "local")
    assert code == 1 and "rules.a.spot: can only be true" in out


def test_a_refused_account_is_that_of_the_option_that_says_who_pays(project: Path):
    (project / "policy.toml").write_text('[rules.one]\naccounts = ["9999"]\n')
    vertex = ["target=vertex", "image=r/n:1", "options.vertex.project=acme", "options.vertex.bucket=results"]
    (text,) = refusal("job.yaml", sets=vertex)
    assert "options.vertex.project: is acme" in text
    azure = ["target=azureml", "image=r/n:1", f"options.azureml.subscription={UUID}", "options.azureml.workspace=place"]
    azure += ["options.azureml.resource_group=group", "options.azureml.store=az://jobs@account"]
    (text,) = refusal("job.yaml", sets=azure)
    assert f"options.azureml.subscription: is {UUID}" in text
