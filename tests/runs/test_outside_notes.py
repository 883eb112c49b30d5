"""A plan says which results cannot come home: those in a folder outside of the script's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain.backends import registry
from cloudtrain.backends.plan import Plan
from cloudtrain.errors import Problem
from cloudtrain.job.job import Job
from cloudtrain.runs.planning.checks import source as source_checks
from cloudtrain.runs.planning.checks.job import Case
from cloudtrain.runs.planning.plan import Planner
from cloudtrain.source.texts import Texts

DEFAULT = 'p.add_argument("--output_dir", type=str, default="/tmp/out")\n'


def outside(job: Job, folder: Path, backend: str, request: dict | None = None, attempt: int = 1) -> list:
    plan = Plan(backend, "run", attempt, request=request or {}, bundle={}, manifest={}, job={})
    made_by = registry.create("local", {}, folder)
    return list(source_checks.results_outside(Case(job, plan, Texts(folder, ["train.py"], "train.py"), made_by)))


@pytest.mark.parametrize(
    ("script", "keys", "named"),
    [
        (DEFAULT, {}, "train.py:1: output_dir /tmp/out"),
        (DEFAULT, {"args": ["--output_dir", "out"]}, ""),
        ('out_dir = "~/results"\n', {}, "train.py:1: out_dir ~/results"),
        ('out_dir = "out"\ndata_dir = "/data"\n', {}, ""),
        ('# out_dir = "/tmp/out"\n', {}, ""),
        ("", {"args": ["--output_dir", "/tmp/out"]}, "--output_dir /tmp/out"),
        ("", {"args": ["--save-dir=/scratch/x"]}, "--save-dir /scratch/x"),
        ("", {"hyperparameters": {"output_dir": "/tmp/out"}}, "--output_dir /tmp/out"),
        ("", {"args": ["--model_path", "/models/a", "--data_dir", "/data"]}, ""),
        ("", {"args": ["--output_dir", "{model_dir}"]}, ""),
        ("", {"args": ["--output_dir", "/opt/ml/model"]}, ""),
        ("", {"args": ["--logging_dir", "/dev/null"]}, ""),
    ],
)
def test_a_folder_for_results_outside_of_the_source_is_named(tmp_path: Path, script: str, keys: dict, named: str):
    (tmp_path / "train.py").write_text(script)
    job = Job(source=tmp_path, entrypoint="train.py", **keys)
    found = outside(job, tmp_path, "kubernetes")
    assert len(found) == bool(named)
    if named:
        text = found[0].message if isinstance(found[0], Problem) else found[0]
        assert text.startswith(f"{named} is outside of the script's folder: its files are not copied back")
        assert text.partition(";")[0].endswith("and the next attempt does not find them")
    assert any(isinstance(each, Problem) for each in found) == bool(keys and named), "a default may be unused"


@pytest.mark.parametrize("backend", ["sagemaker", "sagemaker-local", "vertex", "vertex-local", "kubernetes", "akash"])
def test_a_folder_that_does_not_come_home_is_refused_with_the_way_to_write_it(tmp_path: Path, backend: str):
    (tmp_path / "train.py").write_text("")
    job = {"source": tmp_path, "entrypoint": "train.py"}
    (problem,) = outside(Job(**job, args=["--output_dir", "/tmp/out"]), tmp_path, backend)
    assert str(problem).startswith("args: --output_dir /tmp/out is outside of the script's folder")
    assert problem.hint == "write --output_dir out, or set keep: none if nothing of it is needed"
    (problem,) = outside(Job(**job, hyperparameters={"save_dir": "~/out"}), tmp_path, backend)
    assert problem.path == "hyperparameters.save_dir"
    for keys in (
        {"args": ["--output_dir", "/tmp/out"], "keep": "none"},
        {"args": ["--logging_dir", "/tmp/logs"]},
        {"args": ["--output_dir", "/data/x/out"], "output": "/data/x"},
        {"args": ["--output_dir", "/data/out"], "inputs": {"data": "/data"}},
    ):
        (note,) = outside(Job(**job, **keys), tmp_path, backend)
        assert isinstance(note, str), keys


def test_a_run_that_was_sent_so_can_be_resumed(tmp_path: Path):
    (tmp_path / "train.py").write_text("")
    job = Job(source=tmp_path, entrypoint="train.py", args=["--output_dir", "/tmp/out"])
    assert isinstance(outside(job, tmp_path, "vertex")[0], Problem)
    assert isinstance(outside(job, tmp_path, "vertex", attempt=2)[0], str)


def test_a_folder_on_a_volume_that_the_pods_mount_is_not_refused(tmp_path: Path):
    (tmp_path / "train.py").write_text("")
    job = Job(source=tmp_path, entrypoint="train.py", args=["--output_dir", "/data/out"])
    mounted = {"spec": {"containers": [{"volumeMounts": [{"name": "a", "mountPath": "/data"}]}]}}
    (note,) = outside(job, tmp_path, "kubernetes", mounted)
    assert "finds them only on a disk that all nodes share" in note
    assert isinstance(outside(job, tmp_path, "kubernetes")[0], Problem)


def test_an_absolute_folder_may_stay_where_the_next_attempt_finds_it(tmp_path: Path):
    (tmp_path / "train.py").write_text("")
    job = Job(source=tmp_path, entrypoint="train.py", args=["--checkpoint_dir", "/nfs/out"])
    assert outside(job, tmp_path, "local") == []
    for backend in ("ssh", "slurm"):
        (note,) = outside(job, tmp_path, backend)
        assert note.partition(";")[0].endswith("the next attempt finds them only on a disk that all nodes share")


@pytest.mark.parametrize(
    ("script", "keys", "noted"),
    [
        ("", {"args": ["--model_name_or_path", "meta-llama/Llama-3.1-8B"]}, True),
        ("", {"hyperparameters": {"model": "meta-llama/Llama-3.1-8B"}}, True),
        ("", {"args": ["--model_name_or_path", "meta-llama/Llama-3.1-8B"], "keep_limit": "200GB"}, False),
        ("", {"args": ["--model_name_or_path", "meta-llama/Llama-3.1-8B"], "keep": "none"}, False),
        ("from peft import LoraConfig\n", {"args": ["--model_name_or_path", "meta-llama/Llama-3.1-8B"]}, False),
        ("from peft import LoraConfig\n", {"args": ["--model_name_or_path", "meta-llama/Llama-3.1-70B"]}, True),
        ("", {"args": ["--model_name_or_path", "gpt2"]}, False),
        ("", {"args": ["--model_name_or_path", "nobody/knows-this"]}, False),
    ],
)
def test_a_model_larger_than_what_is_copied_back_is_named(tmp_path: Path, script: str, keys: dict, noted: bool):
    (tmp_path / "train.py").write_text(script)
    job = {"name": "x", "source": str(tmp_path), "entrypoint": "train.py", "environment": {"requirements": "none"}}
    notes = [
        note for note in Planner(home=tmp_path / "home").plan(job | keys).notes if "copied back: set keep_limit" in note
    ]
    assert len(notes) == noted


def test_a_limit_that_limits_nothing_is_named(tmp_path: Path):
    (tmp_path / "train.py").write_text("")
    job = {"name": "x", "source": str(tmp_path), "entrypoint": "train.py", "keep_limit": "3GB"}
    note = "keep_limit has no effect: it limits keep: auto only"
    assert note not in Planner(home=tmp_path / "home").plan(job).notes
    for keep in ("none", ["out"]):
        assert note in Planner(home=tmp_path / "home").plan({**job, "keep": keep}).notes
