"""What a JOB argument means."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from cloudtrain.backends.api import Plan
from cloudtrain.cli import main
from cloudtrain.cli.view.jobs import JobInput, parse_job_words, script_job
from cloudtrain.cli.view.options import JobWords
from cloudtrain.errors import BadRequest
from cloudtrain.job import targets
from cloudtrain.job.job import Job

HOSTILE = [
    "with space",
    'quote"s',
    "apo'strophe",
    "new\nline",
    "dollar $HOME",
    "ünïcode",
    "-dash",
    "a;b",
    "back\\slash",
]


@pytest.fixture(autouse=True)
def _here(project: Path) -> Path:
    return project


def git(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    return folder


def script_at(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("print('hello')\n")
    return path


def test_a_script_outside_git_is_packaged_with_its_folder(tmp_path):
    script = script_at(tmp_path / "away" / "My Model_2.py")
    job = script_job(script, ["--lr", "1"])
    assert job == {
        "name": "my-model-2",
        "source": str(script.parent),
        "entrypoint": "My Model_2.py",
        "args": ["--lr", "1"],
    }


def test_in_git_the_folder_one_stands_in_is_the_source(tmp_path, monkeypatch):
    root = git(tmp_path / "repo")
    script = script_at(root / "a" / "b" / "train.py")
    for here, source, entrypoint in (
        (root, root, "a/b/train.py"),
        (root / "a", root / "a", "b/train.py"),
        (root / "a" / "b", root / "a" / "b", "train.py"),
    ):
        monkeypatch.chdir(here)
        assert (script_job(script)["source"], script_job(script)["entrypoint"]) == (str(source), entrypoint)


def test_from_elsewhere_the_work_tree_is_the_source(tmp_path, monkeypatch):
    root = git(tmp_path / "repo")
    script = script_at(root / "a" / "train.py")
    (root / "c").mkdir()
    for here in (tmp_path, root / "c"):  # above the work tree, and beside the script
        monkeypatch.chdir(here)
        assert script_job(script)["source"] == str(root)


def test_a_nested_work_tree_is_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(git(tmp_path / "outer"))
    script = script_at(git(tmp_path / "outer" / "inner") / "train.py")
    assert script_job(script)["source"] == str(tmp_path / "outer" / "inner")


@pytest.mark.parametrize("name", HOSTILE)
def test_any_folder_and_any_script_name(tmp_path, name, monkeypatch):
    script = script_at(tmp_path / name / f"{name.lstrip('-')}.py")
    found = parse_job_words(JobWords(str(script)))
    assert isinstance(found, JobInput)
    job = Job.from_dict(found.job)
    assert job.source == str(script.parent)
    assert job.entrypoint == script.name
    assert job.argv() == [script.name]


def test_a_script_that_begins_with_a_dash_is_refused(project):
    script_at(project / "-train.py")
    with pytest.raises(BadRequest, match="begins with a dash"):
        parse_job_words(JobWords("./-train.py"))


@pytest.mark.parametrize("name", ["run.sh", "train"])
def test_other_scripts(project, name):
    (project / name).write_text("#!/bin/sh\necho hello\n")
    found = parse_job_words(JobWords(name))
    assert isinstance(found, JobInput) and found.job["entrypoint"] == name


def test_a_job_file_with_more_arguments(project):
    (project / "job.yaml").write_text('entrypoint: train.py\nargs: [a, "1.10", no]\n')
    found = parse_job_words(JobWords("job.yaml", ("--x", 'b "c"', "")))
    assert isinstance(found, JobInput) and found.job == Path("job.yaml")
    assert Job.load(found.job, found.sets).args == ["a", "1.10", "no", "--x", 'b "c"', ""]


def test_set_args_and_more_arguments_add_up(project):
    (project / "job.yaml").write_text("entrypoint: train.py\nargs: [a]\n")
    found = parse_job_words(JobWords("job.yaml", ("c",), ("args=[b]",)))
    assert isinstance(found, JobInput)
    assert Job.load(project / "job.yaml", found.sets).args == ["b", "c"]


def test_short_options_are_settings_and_win(project):
    (project / "job.yaml").write_text("entrypoint: train.py\nnum_nodes: 8\n")
    found = parse_job_words(JobWords("job.yaml", sets=("num_nodes=3",), gpus="A100:8", nodes="2", processes="4"))
    assert isinstance(found, JobInput)
    job = Job.load(project / "job.yaml", found.sets)
    assert (job.num_nodes, job.processes, job.resources.accelerators) == (2, 4, "A100:8")


@pytest.mark.parametrize("text", [None, ".", "job.yaml", "../project"])
def test_ways_to_name_the_job_file(project, text):
    (project / "job.yaml").write_text("entrypoint: train.py\n")
    found = parse_job_words(JobWords(text))
    assert isinstance(found, JobInput)
    assert Path(found.job).resolve() == project / "job.yaml"  # type: ignore[arg-type]


def test_json_is_a_plan_or_a_job(project, cli):
    cli("plan", "train.py", "-o", "plan.json")
    assert isinstance(parse_job_words(JobWords("plan.json")), Plan)
    (project / "job.json").write_text(json.dumps({"entrypoint": "train.py"}))
    assert isinstance(parse_job_words(JobWords("job.json")), JobInput)
    for more in ({"args": ("x",)}, {"sets": ("name=x",)}, {"nodes": "2"}):
        with pytest.raises(BadRequest, match="unchanged"):
            parse_job_words(JobWords("plan.json", **more))


@pytest.mark.parametrize(
    ("gpus", "meant"), [("A100:8", "A100:8"), ("8xA100", "A100:8"), ("A100x8", "A100:8"), ("H100", "H100")]
)
def test_ways_to_write_gpus(project, gpus, meant):
    found = parse_job_words(JobWords("train.py", gpus=gpus))
    assert isinstance(found, JobInput) and found.sets == (f"resources.accelerators={meant}",)


@pytest.mark.parametrize("gpus", ["1", "A100:many", "", "8", "A100:0", "A100x0", "0xA100", "A100 8"])
def test_gpus_that_mean_nothing_are_refused_by_the_flags_name(project, gpus):
    with pytest.raises(BadRequest, match="--gpus"):
        parse_job_words(JobWords("train.py", gpus=gpus))


def test_environment_variables(project, monkeypatch, capsys):
    monkeypatch.setenv("MODE", "fast")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    words = JobWords("train.py", env=("A=1", "B=[x: {", "C=", "MODE", "HF_TOKEN"))
    found = parse_job_words(words)
    assert isinstance(found, JobInput)
    job = targets.resolve(found.job, found.sets).job
    assert job.env == {"A": "1", "B": "[x: {", "C": "", "MODE": "fast"} and job.secrets == {
        "HF_TOKEN": ["env:HF_TOKEN"]
    }
    assert "hf_secret" not in str(found) and "sent as a secret" in capsys.readouterr().err
    with pytest.raises(BadRequest, match="--env NOPE: this variable is not set in your shell"):
        parse_job_words(JobWords("train.py", env=("NOPE",)))


def test_a_command_beside_a_job_file_is_a_command_only_when_it_is_a_program(project, capsys):
    (project / "job.yaml").write_text("entrypoint: train.py\n")
    found = parse_job_words(JobWords(args=("torchrun", "train.py")))
    assert isinstance(found, JobInput) and found.job["entrypoint"] == ["torchrun", "train.py"]
    assert "job.yaml is not used" in capsys.readouterr().err
    found = parse_job_words(JobWords(args=("no-such-program",)))
    assert isinstance(found, JobInput) and found.job == Path("job.yaml")


def test_a_module_and_a_file_exclude_each_other(project):
    with pytest.raises(BadRequest, match="both the module"):
        parse_job_words(JobWords("train.py", module="pkg.mod"))


@pytest.mark.parametrize(
    ("name", "hint"),
    [("nb.ipynb", "jupyter nbconvert --to script nb.ipynb"), ("job.txt", "cloudtrain init creates a job file")],
)
def test_a_file_of_another_kind_is_refused_with_what_to_do(project, name, hint):
    (project / name).write_text("{}")
    with pytest.raises(BadRequest) as caught:
        parse_job_words(JobWords(job=name))
    assert hint in caught.value.hint


@pytest.mark.parametrize(("job", "said"), [("train.py", "is a script"), (None, "is no job"), (5, "is no job")])
def test_what_is_no_job_is_refused_in_python_too(project, job, said):
    script_at(project / "train.py")
    with pytest.raises(BadRequest, match=said):
        targets.resolve(job)


def test_init_writes_no_file_that_is_no_job_file(project, capsys):
    assert main(["init", "-o", "job.txt"]) == 2
    assert "write -o job.yaml" in capsys.readouterr().err
    assert not (project / "job.txt").exists()
