"""The job file is read, and settings are laid over it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain.errors import BadJob, BadRequest
from cloudtrain.job import job as jobs
from cloudtrain.job.document import Document


def document(value=None) -> Document:
    return Document.of(value or {}, "job.yaml")


def test_a_name_is_a_file_and_anything_else_a_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("name: file")
    Path("name: x").write_text("name: odd")
    assert jobs.read("job.yaml")[0].value == {"name": "file"}
    assert jobs.read("name: x")[0].value == {"name": "odd"}
    assert jobs.read("name: y")[0].value == {"name": "y"}
    assert jobs.read("name: y\nnum_nodes: 2")[0].value == {"name": "y", "num_nodes": 2}
    assert jobs.read('{"name": "y"}')[0].value == {"name": "y"}
    assert jobs.read("job.yaml")[1] == tmp_path == jobs.read("name: y")[1]
    with pytest.raises(BadRequest, match="no job file"):
        jobs.read("other.yaml")


def test_an_empty_file_is_an_empty_job(tmp_path):
    (tmp_path / "job.yaml").write_text("# nothing\n")
    assert jobs.read(tmp_path / "job.yaml")[0].value == {}


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text\n", "5\n"])
def test_a_job_is_a_mapping(text, tmp_path):
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(BadJob, match="a job is a mapping") as caught:
        jobs.read(tmp_path / "job.yaml")
    assert caught.value.problems[0].line == 1


def test_a_folder_is_no_file_but_may_hold_one(tmp_path):
    with pytest.raises(BadRequest) as caught:
        jobs.read(tmp_path)
    assert caught.value.hint == "give the job file instead"
    (tmp_path / "job.yaml").write_text("name: x")
    with pytest.raises(BadRequest) as caught:
        jobs.read(tmp_path)
    assert caught.value.hint == f"give the file: {tmp_path / 'job.yaml'}"


@pytest.mark.parametrize(
    ("setting", "path"),
    [
        ("name=y", ("name",)),
        (" name =y", ("name",)),
        ("resources.disk_gb=y", ("resources", "disk_gb")),
        ("env.A=y", ("env", "A")),
        ("labels.a.b=y", ("labels", "a.b")),
        ("metrics.eval.loss=y", ("metrics", "eval.loss")),
        ("options.ssh.a.b=y", ("options", "ssh", "a", "b")),
        ("inputs.train.uri=y", ("inputs", "train", "uri")),
        ("hyperparameters.lr=y", ("hyperparameters", "lr")),
        ("hyperparameters.a.b.c=y", ("hyperparameters", "a.b.c")),
        ("hyperparameters.opt.lr=y", ("hyperparameters", "opt", "lr")),
        ("hyperparameters.opt.adam.beta=y", ("hyperparameters", "opt", "adam.beta")),
        ("hyperparameters.lr==", ("hyperparameters", "lr")),
    ],
)
def test_where_a_setting_goes(setting, path):
    made = jobs.apply_sets(document({"hyperparameters": {"opt": {"lr": 1}}}), [setting])
    at = made.value
    for key in path:
        at = at[key]
    assert at == ("=" if "==" in setting else "y")
    assert made.problems == []
    assert made.mark(path).file == "--set" and made.mark(path).line is None


def test_later_settings_win():
    made = jobs.apply_sets(document({"a": {"b": 1, "c": 2}}), ["a.b=2", "a.b=3", "a={d: 1}", "a.e=0x1F"])
    assert made.value == {"a": {"d": 1, "e": 31}}
    assert made.mark(("a", "e")).text == "0x1F"
    assert ("a", "b") not in made.marks


@pytest.mark.parametrize(
    ("setting", "message", "hint"),
    [
        ("name", "'name' is not a setting", "write --set key=value"),
        ("=x", "'=x' is not a setting", "write --set key=value"),
        ("args=[a", "this is not valid YAML", "put text that begins with [, { or a quote in quotes"),
        ("metrics.a=[0-9]+", "this is not valid YAML", "put text that begins with [, { or a quote in quotes"),
        ("name.x=1", "name is not a mapping", "set name itself"),
    ],
)
def test_settings_that_cannot_be(setting, message, hint):
    made = jobs.apply_sets(document({"name": "x"}), [setting, "num_nodes=2"])
    assert [(problem.message.startswith(message), problem.hint, problem.file) for problem in made.problems] == [
        (True, hint, "--set")
    ]
    assert made.value["num_nodes"] == 2


def test_values_are_texts_where_texts_are_wanted():
    made = jobs.read(
        "hyperparameters: {a: 1.10, b: [0x1F, true], c: {d: 1e-4}}\nenv: {A: True, B: ~}\nargs: [1.0, ~]\nnum_nodes: 2\n"
        "options: {x: {id: 007, n: 7, neg: -01, deep: [{id: 01}]}}"
    )[0]
    assert jobs.values(made) == {
        "hyperparameters": {"a": "1.10", "b": ["0x1F", True], "c": {"d": "1e-4"}},
        "env": {"A": "True", "B": None},
        "args": ["1.0", None],
        "num_nodes": 2,
        "options": {"x": {"id": "007", "n": 7, "neg": "-01", "deep": [{"id": "01"}]}},
    }
