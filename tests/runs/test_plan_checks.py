"""The checks of a plan: what each kind reads, the order of the notes, and how many lines are printed."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path

import pytest

from cloudtrain.backends import registry
from cloudtrain.cli import main
from cloudtrain.errors import BadJob
from cloudtrain.job.job import Job
from cloudtrain.runs.planning import attempts
from cloudtrain.runs.planning.checks import job as job_checks
from cloudtrain.runs.planning.checks.job import Case
from cloudtrain.runs.planning.checks.table import CHECKS
from cloudtrain.runs.planning.plan import Planner

PATH = "/scratch/out"
JOB = {
    "name": "Many_Notes",
    "entrypoint": "train.py",
    "args": ["--output_dir", PATH],
    "resources": {"accelerators": "H100:4", "usd_per_hour": 1},
    "processes_per_node": 1,
    "retry": {"max_attempts": 3},
    "labels": {"user": "somebody-else"},
    "keep": ["out"],
    "keep_limit": "3GB",
}
SSH = '[targets.lab]\nbackend = "ssh"\nhosts = [{address = "10.0.0.5"}]\n'


OF_NODES = {job_checks.refusals, job_checks.notes_of_nodes}  # the node's own code, which gets the source's folder


class Unread:
    """A source that no check may look at."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"{name} of the source was read")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "train.py").write_text("print('hello')\n")
    (tmp_path / "cloudtrain.toml").write_text(SSH)
    monkeypatch.chdir(tmp_path)
    return {**JOB, "source": str(tmp_path / "source"), "target": "lab"}


def test_every_check_of_the_package_is_in_the_table_and_each_once():
    modules = {inspect.getmodule(check) for check in CHECKS}
    takes_a_case = {
        function
        for module in modules
        for _, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and list(inspect.signature(function).parameters) == ["case"]
    }
    assert takes_a_case == set(CHECKS)
    assert len(CHECKS) == len(set(CHECKS))


def test_checks_of_the_job_read_no_source(job: dict, home: Path):
    planner = Planner(home=home)
    resolved = planner.resolve(job)
    plan = planner.plan_of(resolved, planner.package(resolved))
    case = Case(resolved.job, plan, Unread(), registry.create("local", {}, home))
    of_job = [check for check in CHECKS if inspect.getmodule(check) is job_checks and check not in OF_NODES]
    assert len(of_job) > 10
    assert [note for check in of_job for note in check(case)]


def test_what_loses_work_comes_first_and_what_costs_money_next(job: dict, home: Path):
    notes = Planner(home=home).plan(job).notes
    words = [
        "outside of the script's folder",
        "start from the beginning",
        "are idle",
        "keep_limit",
        "labels.user",
        "job name",
    ]
    places = [next(at for at, note in enumerate(notes) if word in note) for word in words]
    assert places == sorted(places), notes
    assert places[:4] == [0, 1, 2, 3]


def test_all_checks_name_their_problems_at_once(job: dict, home: Path):
    wrong = {"audit": True, "output": "/data/out", "parallelism": {"strategy": "fsdp"}}
    with pytest.raises(BadJob) as raised:
        Planner(home=home).plan({**job, **wrong})
    assert [problem.path for problem in raised.value.problems] == ["audit", "parallelism.strategy"]


def test_five_notes_are_printed_and_all_with_verbose(job: dict, home: Path, capsys: pytest.CaptureFixture[str]):
    Path("job.json").write_text(json.dumps(job))

    def printed(*options: str) -> str:
        assert main(["plan", "job.json", *options]) == 0
        return capsys.readouterr().out

    notes = json.loads(printed("--json"))["notes"]
    assert len(notes) > 5
    short, whole = (" ".join(printed(*options).split()) for options in ((), ("--verbose",)))
    assert [note in short for note in notes] == [True] * 5 + [False] * (len(notes) - 5)
    assert f"notes {len(notes) - 5} more: cloudtrain plan --verbose prints all" in short
    assert all(note in whole for note in notes) and "more: cloudtrain plan" not in whole


def test_texts_that_no_process_can_be_started_with_are_refused_with_their_keys(job: dict):
    """The bounds are those that a process here meets."""
    word = job_checks.WORD_BYTES - 1
    for changes, key in (
        ({"env": {"BIG": "x" * (word - len("BIG="))}}, ""),
        ({"env": {"BIG": "x" * (word - len("BIG=") + 1)}}, "env.BIG"),
        ({"env": {"BIG": "\u00e9" * (word // 2)}}, "env.BIG"),
        ({"args": ["x" * word]}, ""),
        ({"args": ["x" * (word + 1)]}, "args"),
        ({"args": ["--ids", *["x" * 250] * 9_000]}, "args"),
        ({"entrypoint": None, "args": [], "run": f"echo {'x' * word}"}, "run"),
        ({"env": {f"V{number:02}": "x" * 120_000 for number in range(18)}}, "env.V00"),
    ):
        assert _long_keys({**job, **changes}) == ([key] if key else []), key


def _long_keys(job: dict) -> list[str]:
    planner = Planner(None)
    try:
        planner.plan({name: value for name, value in job.items() if value is not None})
    except BadJob as error:
        return [problem.path for problem in error.problems if "Linux" in problem.message]
    return []


def test_a_value_that_args_give_too_is_refused_where_a_run_begins(job: dict):
    def found(attempt: int = 1, **changes: object) -> list[object]:
        made = Planner(None).plan(job | {"args": []})
        asked = Job.from_dict(made.job | {"args": ["--epochs", "4", "--lr=0.1"]} | changes)
        case = Case(asked, replace(made, attempt=attempt), Unread(), registry.create("local", {}, Path.cwd()))
        return list(job_checks.given_twice(case))

    (problem,) = found(hyperparameters={"lr": 0.2, "seed": 1})
    assert problem.path == "hyperparameters.lr" and "--lr=0.1" in problem.message
    assert """--set args='["--epochs", "4", "--lr=0.1"]'""" in problem.hint
    (note,) = found(attempt=2, hyperparameters={"epochs": 1})
    assert note.startswith("hyperparameters.epochs ") and note.endswith("--epochs 4")
    assert found(hyperparameters={"l": 1}) == [] == found(hyperparameters={"epochs": 1}, args=["epochs", "x=--epochs"])
    hydra = {"arg_style": "hydra", "hyperparameters": {"lr": 0.2}}
    assert len(found(**hydra, args=["lr=0.1"])) == 1 and found(**hydra, args=["lr", "model.lr=0.1"]) == []


def test_an_input_that_this_machine_lacks_is_refused_where_it_is_the_node(job: dict, tmp_path: Path):
    (tmp_path / "there").touch()
    lacking = str(tmp_path / "nowhere")
    inputs = {"a": "there", "b": f"file://{tmp_path}/there", "c": lacking, "d": f"file://{lacking}", "e": "s3://b/x"}
    Path("job.json").write_text(json.dumps(job | {"inputs": inputs, "target": "local"}))
    with pytest.raises(BadJob) as refused:
        Planner().plan("job.json")
    assert [problem.path for problem in refused.value.problems] == ["inputs.c", "inputs.d"]
    assert refused.value.problems[0].message == f"{lacking} does not exist on this machine"
    Planner("lab").plan("job.json")  # the nodes are other machines
    case = Case(Job.from_dict(job | {"inputs": {"c": lacking}, "after": ["earlier"]}), Planner("local").plan(job | {"args": []}),
                Unread(), registry.create("local", {}, tmp_path))  # fmt: skip
    assert list(job_checks.missing_inputs(case)) == [], "an earlier run may write it"


@pytest.mark.parametrize(("script", "count"), [("print(1)\n", 0), ("import torch\n", 1)])
def test_a_resume_says_no_word_of_gpus_that_the_submit_did_not(job: dict, home: Path, script: str, count: int):
    Path(job["source"], "train.py").write_text(script)
    plain = {name: job[name] for name in ("name", "entrypoint", "source")}
    plan = Planner("local", home=home).plan(plain)
    made, _ = attempts.replan(plan, 2, registry.create_for(plan, home), home)
    for notes in (plan.notes, made.notes):
        assert len([note for note in notes if "does not request GPUs" in note]) == count


def test_a_plan_says_where_secrets_come_from_and_which_are_not_set(job: dict, capsys: pytest.CaptureFixture[str]):
    Path("job.json").write_text(json.dumps(job | {"secrets": {"API_TOKEN": "env:NOBODY_SETS_THIS"}}))
    assert main(["plan", "job.json"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "secrets API_TOKEN from env:NOBODY_SETS_THIS; not set in this shell, so that submit refuses the job: API_TOKEN"
        in shown
    )
