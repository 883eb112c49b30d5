"""The keys of the job file: entrypoints, names, sources, and what follows from other keys."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudtrain.errors import BadJob
from cloudtrain.job.job import (
    Checkpoint,
    Job,
    Resources,
    fit_name,
)
from tests.job.test_job import job


def test_arg_styles():
    text = "hyperparameters: {b: true, f: false, n: null, x: {y: 1.10}, l: [1, -2]}\narg_style: "
    assert job(f"{text}argparse").argv()[1:] == ["--b", "--x.y", "1.10", "--l", "1", "-2"]
    assert job(f"{text}hf").argv()[1:] == ["--b", "true", "--f", "false", "--x", '{"y": 1.10}', "--l", "1", "-2"]
    assert job(f"{text}hydra").argv()[1:] == ["b=true", "f=false", "n=null", "x.y=1.10", "l=[1,-2]"]


@pytest.mark.parametrize(
    ("entrypoint", "command"),
    [
        ("train.py", ["train.py"]),
        ("./src//train.py", ["src/train.py"]),
        ("-m pkg.train", ["-m", "pkg.train"]),
        ("-m  pkg", ["-m", "pkg"]),
        ("run.sh", ["run.sh"]),
        ("a b'c.py", ["a b'c.py"]),
        ("a/../b.py", ["b.py"]),
    ],
)
def test_entrypoints(entrypoint, command):
    assert Job(name="x", entrypoint=entrypoint).argv() == command


@pytest.mark.parametrize(
    "bad",
    ["/train.py", "../train.py", "a/../../b.py", "", ".", "-m", "-m a b", "-m a-b", "--x", "train.py --lr 3", "~/t.py"],
)
def test_entrypoints_that_are_none(bad):
    with pytest.raises(BadJob) as caught:
        Job(name="x", entrypoint=bad)
    assert [problem.path for problem in caught.value.problems] == ["entrypoint"]


@pytest.mark.parametrize("name", ["a", "tiny-lm", "a1", "a--b", "a" * 30])
def test_names(name):
    assert Job(name=name, entrypoint="t.py").name == name


@pytest.mark.parametrize("name", ["", "1a", "-a", "a-", "a b", "é", "a" * 31, "a\n"])
def test_names_that_are_none(name):
    with pytest.raises(BadJob, match="is not a valid job name"):
        Job(name=name, entrypoint="t.py")


@pytest.mark.parametrize(("name", "fit"), [("A", "a"), ("a_b", "a-b"), ("My_Model-2", "my-model-2"), ("A__", "a")])
def test_names_that_are_made_fit(name, fit):
    made = Job(name=name, entrypoint="t.py")
    assert (made.name, made.renamed) == (fit, name)
    assert made.replace(num_nodes=2).renamed == name and Job(name=fit, entrypoint="t.py").renamed is None


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=50))
def test_any_text_can_be_made_a_name(text):
    assert Job(name=fit_name(text), entrypoint="t.py").name


def test_the_name_left_out(tmp_path):
    folder = tmp_path / "My Project_2"
    folder.mkdir()
    (folder / "job.yaml").write_text("entrypoint: train.py")
    assert Job.load(folder / "job.yaml").name == "my-project-2"
    assert Job(entrypoint="src/fine_tune.py").name == "fine-tune"
    assert Job(entrypoint="-m pkg.train").name == "train"
    assert Job(source=folder, trainer=True).name == "my-project-2"


def test_paths_stand_below_the_files_folder(tmp_path, monkeypatch):
    inner = tmp_path / "a b" / "c"
    inner.mkdir(parents=True)
    (inner / "job.yaml").write_text(
        "name: x\nrun: x\nsource: ..\noutput: out\ninputs: {a: d/, b: /abs, c: ~/e, d: 'gs://b/x'}"
    )
    monkeypatch.setenv("HOME", "/home/me")
    made = Job.load(inner / "job.yaml")
    assert made.source == str(tmp_path / "a b")
    assert made.output == f"{inner}/out"
    assert {key: item.uri for key, item in made.inputs.items()} == {
        "a": f"{inner}/d/",
        "b": "/abs",
        "c": "/home/me/e",
        "d": "gs://b/x",
    }
    monkeypatch.chdir(inner)
    assert Job.load("job.yaml") == made
    assert Job(name="x", run="x", source="q").source == f"{inner}/q"


@pytest.mark.parametrize("source", ["git+https://host/a/b@main", "git+ssh://git@host/a.git@v1", "git+file:///a/b"])
def test_git_sources_are_kept(source):
    assert Job(name="x", run="x", source=source).source == source


@pytest.mark.parametrize("source", ["https://host/a", "git@host:a/b", "git+http://host/a", "git+https://", "s3://a/b"])
def test_sources_that_are_none(source):
    with pytest.raises(BadJob, match="git\\+https"):
        Job(name="x", run="x", source=source)


def test_what_follows_from_other_fields():
    assert job("num_nodes: 2").parallelism.strategy == "ddp"
    assert job("resources: {accelerators: A100:4}").parallelism.strategy == "ddp"
    assert job("resources: {accelerators: A100}").parallelism.strategy == "none"
    assert job("num_nodes: 2\nentrypoint: t.py\nparallelism: {strategy: none}").parallelism.strategy == "none"
    assert job("resources: {use_spot: true}").retry.max_attempts == 3
    assert job("resources: {use_spot: true}\nretry: {max_attempts: 1}").retry.max_attempts == 1
    assert job("resources: {accelerators: 'A100:4'}\nprocesses_per_node: 2").processes == 2


def test_replace_lets_it_follow():
    made = job("resources: {use_spot: true}")
    assert made.replace(num_nodes=2).parallelism.strategy == "ddp"
    assert made.replace(resources=Resources()).retry.max_attempts == 1
    assert made.replace(num_nodes=2).replace(num_nodes=1) == made
    fixed = job("num_nodes: 2\nparallelism: {strategy: zero2}\nretry: {max_attempts: 7}").replace(num_nodes=1)
    assert (fixed.parallelism.strategy, fixed.retry.max_attempts) == ("zero2", 7)
    with pytest.raises(BadJob, match="num_nodes"):
        made.replace(num_nodes=0)
    assert made.num_nodes == 1


def test_requirements_are_decided_when_the_source_is_known():
    assert job().bind(["train.py", "requirements.txt"]).environment.requirements == "requirements.txt"
    assert job().bind(["train.py", "sub/requirements.txt"]).environment.requirements is None
    off = job("environment: {requirements: none}")
    assert off.bind(["requirements.txt"]).environment.requirements is None
    own = job("environment: {requirements: ./a/req.txt}")
    assert own.bind(["requirements.txt"]).environment.requirements == "a/req.txt"
    for made in (off, own, job(), job().bind([]), job().bind(["requirements.txt"])):
        again = Job.from_dict(json.loads(json.dumps(made.to_dict())))
        assert again == made and again.bind(["requirements.txt"]) == made.bind(["requirements.txt"])


def test_checkpoints_by_steps_or_time():
    assert (Checkpoint(every="500 steps").every_steps, Checkpoint(every="500 steps").every_s) == (500, None)
    assert Checkpoint(every="1 step").every_steps == 1
    assert (Checkpoint(every="90s").every_steps, Checkpoint(every="90s").every_s) == (None, 90)
