"""Configuration: where things live, which place is meant, and where every value came from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cloudtrain import Submitter
from cloudtrain.errors import BadJob, BadRequest, UnknownBackend
from cloudtrain.job import targets
from cloudtrain.job.job import Job

BACKENDS = ["local", "sagemaker", "ssh"]


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A project folder, the current one, beside a user's configuration folder."""
    monkeypatch.setenv("CLOUDTRAIN_CONFIG_HOME", str(tmp_path / "user"))
    (tmp_path / "user").mkdir()
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def user(project: Path) -> Path:
    return project.parent / "user" / "cloudtrain.toml"


def test_home(monkeypatch, tmp_path):
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(tmp_path / "a b"))
    assert targets.home() == tmp_path / "a b"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLOUDTRAIN_HOME", "rel")
    assert targets.home() == tmp_path / "rel"
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("CLOUDTRAIN_HOME", "~/ct")
    assert targets.home() == Path("/home/me/ct")
    for unset in ("", None):
        monkeypatch.setenv("CLOUDTRAIN_HOME", "") if unset == "" else monkeypatch.delenv("CLOUDTRAIN_HOME")
        import platformdirs

        assert targets.home() == platformdirs.user_data_path("cloudtrain")


def test_a_job_without_any_configuration(project):
    (project / "job.yaml").write_text("name: x\nnum_nodes: 2\ntrainer: true")
    found = targets.resolve("job.yaml", backends=BACKENDS)
    assert (found.target, found.backend, found.options) == ("local", "local", {})
    assert found.job == Job.load("job.yaml")
    assert found.origins["num_nodes"] == "job.yaml:2" and found.origins["image"] == "default"


def test_precedence_and_origins(project):
    user(project).write_text(
        '[defaults]\nnum_nodes = 1\nimage = "user"\noutput = "s3://user"\n[defaults.env]\n'
        'A = "user"\nB = "user"\nC = "user"\nD = "user"\n'
    )
    (project / "cloudtrain.toml").write_text(
        '[defaults]\nimage = "project"\noutput = "s3://project"\n[defaults.env]\nB = "p"\nC = "p"\nD = "p"\n'
    )
    (project / "job.yaml").write_text("name: x\noutput: s3://job\nenv:\n  C: job\n  D: job\ntrainer: true\n")
    found = targets.resolve("job.yaml", ["env.D=set", "min_nodes=1"], target="ssh", backends=BACKENDS)
    assert found.job.env == {"A": "user", "B": "p", "C": "job", "D": "set"}
    assert (found.job.num_nodes, found.job.image, found.job.output) == (1, "project", "s3://job")
    mine = {key: origin for key, origin in found.origins.items() if origin != "default"}
    assert mine == {
        "name": "job.yaml:1",
        "num_nodes": f"{user(project)}:2",
        "image": f"{project / 'cloudtrain.toml'}:2",
        "output": "job.yaml:2",
        "env.A": f"{user(project)}:6",
        "env.B": f"{project / 'cloudtrain.toml'}:5",
        "env.C": "job.yaml:4",
        "env.D": "--set",
        "min_nodes": "--set",
        "target": "--target",
        "trainer": "job.yaml:6",
    }
    assert set(found.origins) > {
        "resources.disk_gb",
        "parallelism.strategy",
        "retry.max_attempts",
        "limits.grace",
        "secrets",
        "source",
    }


def test_origins_of_short_and_nested_forms(project):
    (project / "job.yaml").write_text(
        "name: x\narg_style: hf\ninputs:\n  a: s3://b/c\n  b:\n    uri: s3://b/d\n"
        "secrets:\n  S: env:S\nhyperparameters:\n  m: {x: 1}\nargs: [a]\nentrypoint: t.py\n"
    )
    found = targets.resolve("job.yaml").origins
    assert {
        key: found[key]
        for key in ("inputs.a.uri", "inputs.a.mode", "inputs.b.uri", "secrets.S", "hyperparameters.m", "args")
    } == {
        "inputs.a.uri": "job.yaml:4",
        "inputs.a.mode": "default",
        "inputs.b.uri": "job.yaml:6",
        "secrets.S": "job.yaml:8",
        "hyperparameters.m": "job.yaml:10",
        "args": "job.yaml:11",
    }
    (project / "job.yaml").write_text("name: x\nhyperparameters:\n  a:\n    b: 1\ntrainer: true\n")
    assert targets.resolve("job.yaml").origins["hyperparameters.a.b"] == "job.yaml:4"


def test_numbers_of_toml_keep_their_text(project):
    (project / "cloudtrain.toml").write_text("[defaults.hyperparameters]\nlr = 3.0e-4\nwd = 1.10\nn = 3\nflag = true\n")
    assert targets.resolve({"name": "x", "entrypoint": "t.py"}).job.argv() == (
        ["t.py", "--lr", "3.0e-4", "--wd", "1.10", "--n", "3", "--flag"]
    )


def test_targets(project):
    (project / "cloudtrain.toml").write_text(
        '[targets.prod]\nbackend = "sagemaker"\nrole = "r"\ntags = {a = "1", b = "1"}\n[targets.lab]\nbackend = "ssh"\n'
        '[defaults]\ntarget = "lab"\n[defaults.options.sagemaker]\nrole = "default"\nregion = "default"\n'
    )
    (project / "job.yaml").write_text(
        "name: x\noptions:\n  sagemaker:\n    tags: {b: '2'}\n  ssh: {user: me}\ntrainer: true\n"
    )
    lab = targets.resolve("job.yaml", backends=BACKENDS)
    assert (lab.target, lab.backend, lab.options) == ("lab", "ssh", {"user": "me"})
    assert lab.origins["target"].endswith("cloudtrain.toml:8")
    prod = targets.resolve("job.yaml", ["options.sagemaker.extra=5"], target="prod", backends=BACKENDS)
    assert (prod.target, prod.backend, prod.job.target) == ("prod", "sagemaker", "prod")
    # defaults, below the target, below the job file, below --set
    assert prod.options == {"role": "r", "region": "default", "tags": {"a": "1", "b": "2"}, "extra": 5}
    assert prod.job.options["sagemaker"] == prod.options
    assert prod.origins["options.sagemaker.role"].endswith("cloudtrain.toml:3")
    assert prod.origins["options.sagemaker.tags.b"] == "job.yaml:4"
    assert targets.resolve("job.yaml", ["target=prod"], backends=BACKENDS).backend == "sagemaker"
    assert set(targets.named_targets()) == {"prod", "lab"} and targets.named_targets(project.parent) == {}


def test_a_target_may_bear_the_name_of_a_backend(project):
    (project / "cloudtrain.toml").write_text('[targets.ssh]\nbackend = "ssh"\nuser = "me"\n')
    found = targets.resolve({"name": "x", "trainer": True}, target="ssh", backends=BACKENDS)
    assert (found.target, found.backend, found.options) == ("ssh", "ssh", {"user": "me"})


def test_defaults_of_one_target_count_on_it_alone(project):
    config = project / "cloudtrain.toml"
    config.write_text(
        '[defaults]\noutput = "s3://all"\nlimits = {max_runtime = "1h"}\n[targets.prod]\nbackend = "sagemaker"\nregion = "r"\n'
        '[targets.prod.defaults]\noutput = "results"\nresources = {use_spot = true}\n'
    )
    (project / "job.yaml").write_text("name: x\ntrainer: true\n")
    here, there = (targets.resolve("job.yaml", target=name, backends=BACKENDS) for name in ("local", "prod"))
    assert (here.job.resources.use_spot, here.job.output) == (False, "s3://all")
    assert (
        there.job.resources.use_spot and there.job.output == f"{project}/results" and there.options == {"region": "r"}
    )
    assert there.job.limits.max_runtime == "1h" and there.origins["resources.use_spot"] == f"{config}:9"
    (project / "job.yaml").write_text("name: x\ntrainer: true\nresources: {use_spot: false}\n")
    assert not targets.resolve("job.yaml", target="prod", backends=BACKENDS).job.resources.use_spot
    for wrong, key in (
        ('target = "local"', "target"),
        ('resources = {accelerators = "A100"}', "resources.accelerators"),
    ):
        config.write_text(f'[targets.prod]\nbackend = "sagemaker"\n[targets.prod.defaults]\n{wrong}\n')
        with pytest.raises(
            BadJob, match=rf"cloudtrain.toml:4: targets.prod.defaults.{key}: cannot be set for one target"
        ):
            targets.resolve("job.yaml", target="prod", backends=BACKENDS)


def test_unknown_targets(project):
    with pytest.raises(UnknownBackend) as caught:
        targets.resolve({"name": "x", "trainer": True}, target="sagemakr", backends=BACKENDS)
    assert str(caught.value) == "there is no target sagemakr" and caught.value.exit_code == 2
    assert caught.value.hint == (
        "did you mean sagemaker? backends are local, sagemaker, ssh; targets are defined in cloudtrain.toml as [targets.NAME]"
    )
    (project / "cloudtrain.toml").write_text('[targets.prod]\nbackend = "sagemakr"\n')
    with pytest.raises(UnknownBackend, match="the target prod has no backend: sagemakr") as caught:
        targets.resolve({"name": "x", "trainer": True}, target="prod", backends=BACKENDS)
    with pytest.raises(UnknownBackend) as caught:
        targets.resolve({"name": "x", "trainer": True}, target="prd", backends=BACKENDS)
    assert caught.value.hint == "did you mean prod? backends are local, sagemaker, ssh; targets are prod"


def test_wrong_values_name_the_file_they_stand_in(project):
    (project / "cloudtrain.toml").write_text("[defaults]\nnum_nodes = 0\nnodes = 1\n")
    (project / "job.yaml").write_text("name: 1x\nenv: {A: 1, A: 2}\nrun: x\n")
    with pytest.raises(BadJob) as caught:
        targets.resolve("job.yaml", ["limits.grace=5", "bad"], backends=BACKENDS)
    assert {(problem.path, problem.file, problem.line) for problem in caught.value.problems} == {
        ("num_nodes", str(project / "cloudtrain.toml"), 2),
        ("nodes", str(project / "cloudtrain.toml"), 3),
        ("name", "job.yaml", 1),
        ("", "job.yaml", 2),
        ("limits.grace", "--set", None),
        ("", "--set", None),
    }


def test_problems_of_options_get_the_line_in_the_targets_file(project):
    from cloudtrain.errors import Problem

    (project / "cloudtrain.toml").write_text('[targets.lab]\nbackend = "ssh"\nhost = "a"\n')
    found = targets.resolve({"name": "x", "trainer": True}, target="lab", backends=BACKENDS)
    (problem,) = found.job.located([Problem("is not a known key", "options.ssh.host")])
    assert (problem.file, problem.line) == (str(project / "cloudtrain.toml"), 3)


def test_bad_toml_stops_at_once(project):
    (project / "cloudtrain.toml").write_text("[defaults\n")
    with pytest.raises(BadRequest, match="is not valid TOML: .*line 1"):
        targets.resolve({"name": "x", "trainer": True})


def test_the_project_is_the_job_files(project, tmp_path):
    other = tmp_path / "other" / "jobs"
    other.mkdir(parents=True)
    (other.parent / "cloudtrain.toml").write_text("[defaults]\nnum_nodes = 3\n")
    (other / "job.yaml").write_text("name: x\ntrainer: true")
    assert targets.resolve(other / "job.yaml").job.num_nodes == 3
    assert targets.resolve("{name: x, trainer: true}").job.num_nodes == 1


def test_objects_and_mappings_are_not_changed(project):
    (project / "cloudtrain.toml").write_text("[defaults]\nnum_nodes = 3\n[defaults.env]\nA = '1'\n")
    data = {"name": "x", "run": "x", "env": {"B": "2"}, "source": project}
    found = targets.resolve(data, ["env.C=3"])
    assert found.job.env == {"A": "1", "B": "2", "C": "3"} and data == {
        "name": "x",
        "run": "x",
        "env": {"B": "2"},
        "source": project,
    }
    job = Job(
        name="x", trainer=True, env={"B": "2"}, environment={"requirements": "none"}, resources={"use_spot": True}
    )
    found = targets.resolve(job, ["env.C=3"])
    assert found.job.env == {"A": "1", "B": "2", "C": "3"} and job.env == {"B": "2"}
    assert (found.job.num_nodes, found.job.parallelism.strategy, found.job.retry.max_attempts) == (3, "ddp", 3)
    assert found.job.bind(["requirements.txt"]).environment.requirements is None
    assert found.origins["env.B"] == "Job" and found.origins["num_nodes"].endswith("cloudtrain.toml:2")


def test_what_was_decided_for_a_job_follows_a_setting(project):
    stored = Job(name="x", trainer=True).to_dict()
    found = targets.resolve(Job.from_dict(stored), ["num_nodes=2", "resources.use_spot=true"]).job
    assert (found.num_nodes, found.parallelism.strategy, found.retry.max_attempts) == (2, "ddp", 3)
    again = targets.resolve(Job.from_dict(found.to_dict()), ["num_nodes=1", "resources.use_spot=false"]).job
    assert (again.parallelism.strategy, again.retry.max_attempts) == ("none", 1)
    fixed = Job.from_dict({**stored, "parallelism": {"strategy": "zero1"}, "retry": {"max_attempts": 9}})
    found = targets.resolve(fixed, ["num_nodes=2"]).job
    assert (found.parallelism.strategy, found.retry.max_attempts) == ("zero1", 9)


def test_importing_the_configuration_costs_little():
    heavy = ("pydantic", "yaml", "tomllib", "platformdirs", "difflib", "rich", "click")
    code = "from cloudtrain.job import targets; import sys; targets.home()\n"
    code += f"print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("source: ./nope\nnum_nodes: two\nrun: x\n", ("source", 1, "does not exist")),
        ("num_nodes: two\nentrypoint: trian.py\n", ("entrypoint", 2, "trian.py does not exist in")),
        ("num_nodes: two\nsource: job.yaml\nrun: x\n", ("source", 2, "is not a directory")),
    ],
)
def test_a_wrong_job_over_a_source_that_is_not_there_is_told_of_both(tmp_path, lines, told):
    (tmp_path / "job.yaml").write_text(lines)
    with pytest.raises(BadJob) as caught:
        targets.resolve(tmp_path / "job.yaml")
    found = {problem.path: problem for problem in caught.value.problems}
    path, line, said = told
    assert set(found) == {"num_nodes", path}
    assert found[path].line == line and said in found[path].message


def test_a_missing_option_says_where_it_is_written(project):
    with pytest.raises(BadJob) as caught:
        Submitter("slurm").plan({"source": str(project), "entrypoint": "train.py"})
    [problem] = caught.value.problems
    assert (problem.path, problem.message) == ("options.slurm.folder", "is missing")
    assert problem.hint == (
        'set folder = ... in section [targets.slurm] and backend = "slurm" of cloudtrain.toml,'
        " or pass --set options.slurm.folder=..."
    )
    (project / "cloudtrain.toml").write_text('[targets.cluster]\nbackend = "slurm"\n')
    with pytest.raises(BadJob) as caught:
        Submitter("cluster").plan({"source": str(project), "entrypoint": "train.py"})
    assert "in section [targets.cluster] of cloudtrain.toml" in caught.value.problems[0].hint


@pytest.mark.parametrize(
    "wrong",
    [{"source": "x" * 300}, {"source": "~nobodyhere/x"}, {"entrypoint": "y" * 300}, {"entrypoint": "a.py --lr 1"}],
)
def test_a_source_that_is_no_name_hides_no_other_problem(project, wrong):
    with pytest.raises(BadJob) as caught:
        targets.resolve({"source": str(project), **wrong, "num_nodes": "two"})
    paths = [problem.path for problem in caught.value.problems]
    assert "num_nodes" in paths and len(paths) == len(set(paths))


def test_candidates_of_lists(project):
    """Of several the first is resolved, its value where the item stands; a choice by hand replaces the list."""
    text = "trainer: true\ntarget: [local, ssh]\nresources:\n  accelerators:\n  - H100:8\n  - 0\n"
    (project / "job.yaml").write_text(text)
    found = targets.choices("job.yaml")
    assert found == [("local", "H100:8"), ("local", "0"), ("ssh", "H100:8"), ("ssh", "0")]
    first = targets.resolve("job.yaml", backends=BACKENDS)
    assert (first.target, first.job.target, first.job.resources.accelerators) == ("local", "local", "H100:8")
    last = targets.resolve("job.yaml", backends=BACKENDS, choice=found[-1])
    assert (last.backend, last.job.resources.gpus, last.origins["resources.accelerators"]) == ("ssh", 0, "job.yaml:6")
    assert targets.choices("job.yaml", ["resources.accelerators=A100"], target="ssh") == [(None, None)]
