"""Sweep files as people have them: every key is honoured, or refused by its name, with all problems at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain.errors import BadJob
from cloudtrain.job.job import read as read_yaml
from cloudtrain.sweeps.file import Budget, read
from cloudtrain.sweeps.send import specification

LR = "parameters: {lr: {min: 0.001, max: 0.1}}"
# Written after the shapes in https://docs.wandb.ai/models/sweeps/define-sweep-configuration (2026-11-23).
TAKEN = {
    "random search": f"program: train.py\nmethod: random\nrun_cap: 9\nmetric: {{name: loss, goal: minimize}}\n{LR}",
    "grid": "program: train.py\nmethod: grid\nparameters: {bs: {values: [8, 16]}, opt: {value: adam}}",
    "bayes": f"program: train.py\nmethod: bayes\nrun_cap: 9\nmetric: {{name: val/acc, goal: maximize, target: 0.9}}\n{LR}",
    "hyperband from below": f"program: t.py\nmethod: random\nrun_cap: 9\nmetric: {{name: loss}}\n{LR}\n"
    "early_terminate: {type: hyperband, min_iter: 3, eta: 2}",
    "hyperband from above": f"program: t.py\nmethod: random\nrun_cap: 9\nmetric: {{name: loss}}\n{LR}\n"
    "early_terminate: {type: hyperband, max_iter: 27, s: 2, strict: true}",
    "nested": "program: t.py\nmethod: random\nrun_cap: 3\nparameters: {optim: {parameters: {lr: {min: 0.1, max: 0.2}}}}",
    "a command": 'program: t.py\nmethod: grid\nparameters: {a: {values: [1]}}\n'
    'command: ["${env}", "${interpreter}", "${program}", "--epochs", "3", "${args_no_boolean_flags}"]',
    "hydra": 'program: t.py\nmethod: grid\nparameters: {a: {values: [1]}}\n'
    'command: ["${env}", python3, "${program}", "${args_no_hyphens}"]',
    "a module": 'method: grid\nparameters: {a: {values: [1]}}\ncommand: [python, -m, pkg.train, "${args}"]',
    "an account": f"program: t.py\nmethod: random\nrun_cap: 2\nproject: p\nentity: e\nname: n\ndescription: d\n{LR}",
}  # fmt: skip
REFUSED = {
    "controller": (f"program: t.py\nmethod: random\nrun_cap: 2\ncontroller: {{type: local}}\n{LR}", "controller"),
    "a scheduler": (f"program: t.py\nmethod: random\nrun_cap: 2\nscheduler: {{engine: optuna}}\n{LR}", "scheduler"),
    "custom": (f"program: t.py\nmethod: custom\nrun_cap: 2\n{LR}", "method"),
    "torchrun": (f'program: t.py\nmethod: random\nrun_cap: 2\n{LR}\ncommand: [torchrun, "${{program}}"]', "command"),
    "args_json": (f'program: t.py\nmethod: random\nrun_cap: 2\n{LR}\ncommand: ["${{program}}", "${{args_json}}"]', "command"),
    "an environment variable": (
        f'program: t.py\nmethod: random\nrun_cap: 2\n{LR}\ncommand: ["${{program}}", "${{envvar:HOME}}"]', "command"),
    "no end": (f"program: t.py\nmethod: random\n{LR}", "run_cap"),
    "no metric": (f"program: t.py\nmethod: bayes\nrun_cap: 2\n{LR}", "metric"),
    "a grid of numbers": (f"program: t.py\nmethod: grid\n{LR}", "method"),
    "impute_while_running": (
        f"program: t.py\nmethod: random\nrun_cap: 2\nmetric: {{name: a, impute_while_running: best}}\n{LR}",
        "metric.impute_while_running"),
    "no job": (f"method: random\nrun_cap: 2\n{LR}", "job"),
    "an unknown key": (f"program: t.py\nmethod: random\nrun_cap: 2\nrunCap: 3\n{LR}", "runCap"),
}  # fmt: skip


def document(text: str) -> dict:
    return read_yaml(text + "\n")[0].value


@pytest.mark.parametrize("name", TAKEN)
def test_it_is_taken(name: str, tmp_path: Path):
    found = read(document(TAKEN[name]), tmp_path)
    assert found.parameters and found.job["entrypoint"] and (found.method == "grid" or found.budget.trials)


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_its_key(name: str, tmp_path: Path):
    text, path = REFUSED[name]
    with pytest.raises(BadJob) as caught:
        read(document(text), tmp_path)
    assert [problem.path for problem in caught.value.problems] == [path]


@pytest.mark.parametrize(
    ("keys", "path"),
    [("method: PBT", "method"), ("method: random\nearly_terminate: {type: pbt}", "early_terminate.type")],
)
def test_population_based_training_is_refused_by_name_with_what_to_use(keys: str, path: str, tmp_path: Path):
    with pytest.raises(BadJob) as caught:
        read(document(f"program: t.py\nrun_cap: 3\nmetric: loss\n{LR}\n{keys}"), tmp_path)
    (problem,) = caught.value.problems
    assert problem.path == path and "population-based training" in problem.message and "type: asha" in problem.hint


def test_all_problems_are_said_at_once(tmp_path: Path):
    with pytest.raises(BadJob) as caught:
        read(document("method: guess\nbudget: {trials: none}\nmax_parallel: 0\nparameters: {a: 1}\nseed: x"), tmp_path)
    assert {problem.path for problem in caught.value.problems} == {
        "method", "budget.trials", "run_cap", "max_parallel", "parameters.a", "seed", "job"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("command", "job", "given"),
    [
        (None, {"entrypoint": "t.py", "arg_style": "argparse"}, "python"),
        (["${program}", "${args_no_hyphens}"], {"entrypoint": "t.py", "arg_style": "hydra"}, "arguments"),
        (["python", "${program}"], {"entrypoint": "t.py"}, "file"),
        (["python", "-m", "a.b", "x", "${args_no_boolean_flags}"],
         {"entrypoint": "-m a.b", "arg_style": "argparse", "args": ["x", "${args}"]}, "arguments"),
        (["${program}", "${args}", "fit"], {"entrypoint": "t.py", "arg_style": "argparse", "args": ["fit"]}, "python"),
    ],
)  # fmt: skip
def test_a_command_becomes_a_job(command, job, given, tmp_path: Path):
    found = read(
        {"program": "t.py", "command": command, "method": "grid", "parameters": {"a": {"values": [True]}}}, tmp_path
    )
    assert found.job == {**job, "source": str(tmp_path)} and found.given == given
    values = {"python": {"hyperparameters.a": "True"}, "arguments": {"hyperparameters.a": True}, "file": {}}
    assert found.settings({"a": True}) == values[given]


@pytest.mark.parametrize("words", [["fit", "${args}"], ["fit", "${args}", "last"], ["${args}", "fit"]])
def test_the_words_of_a_command_keep_their_order(words: list[str], tmp_path: Path):
    """As Lightning's CLI needs it: `train.py fit --lr=0.1`."""
    keys = {
        "program": "t.py",
        "command": ["${program}", *words],
        "method": "grid",
        "parameters": {"lr": {"values": [1]}},
    }
    sweep = read(keys, tmp_path)
    from cloudtrain.job.job import Job
    from cloudtrain.sweeps.send import job_of_trial

    argv = Job.from_dict(job_of_trial(sweep, {"lr": 1})).argv()
    assert " ".join(argv) == " ".join(["t.py", *words]).replace("${args}", "--lr 1")


def test_a_parameter_may_be_any_key_of_the_job(tmp_path: Path):
    found = read(document(TAKEN["grid"]), tmp_path)
    assert found.settings({"processes_per_node": 2, "resources.accelerators": "A100:1", "env.X": "1", "lr": 0.1}) == {
        "processes_per_node": 2, "resources.accelerators": "A100:1", "env.X": "1", "hyperparameters.lr": 0.1
    }  # fmt: skip


def test_the_smaller_limit_of_trials_counts(tmp_path: Path):
    found = read({**document(TAKEN["random search"]), "budget": {"trials": 4, "hours": 2, "usd": 5.5}}, tmp_path)
    assert found.budget == Budget(4, 2, 5.5)


def test_a_job_file_keeps_its_own_folder(tmp_path: Path):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "job.yaml").write_text("name: tune\nsource: src\nentrypoint: train.py\n")
    found = read({"job": "jobs/job.yaml", "method": "grid", "parameters": {"a": {"values": [1]}}}, tmp_path)
    assert found.job["source"] == str(tmp_path / "jobs" / "src") and found.name == "tune"


def test_the_quickstart_is_tuned_by_its_sweep_file(home: Path):
    document, folder = read_yaml(Path(__file__).parents[2] / "examples" / "quickstart" / "sweep.yaml")
    found = read(document.value, folder)
    assert [parameter.name for parameter in found.searched] == ["learning_rate", "hidden_size"]
    spec = specification(home, document.value, found)
    assert spec["targets"] == ["local"] and spec["document"]["job"]["name"] == "quickstart"


BASE = f"program: t.py\nmethod: random\nmetric: {{name: loss}}\n{LR}\n"
BOUNDS = {
    "run_cap: {}": 10_000,
    "budget: {{trials: {}}}": 10_000,
    "run_cap: 2\nbudget: {{hours: {}}}": 10**8,
    "run_cap: 2\nbudget: {{usd: {}}}": 10**9,
    "run_cap: 2\nmax_parallel: {}": 1000,
    "run_cap: 2\nmax_failed: {}": 10_000,
    "run_cap: 2\nseed: {}": 2**32 - 1,
    "run_cap: 2\nearly_terminate: {{type: hyperband, max_iter: 27, s: {}}}": 60,
    "run_cap: 2\nearly_terminate: {{type: asha, min_iter: {}}}": 10**12,
    "run_cap: 2\nearly_terminate: {{type: asha, eta: {}}}": 1000,
}


@pytest.mark.parametrize(("text", "most"), BOUNDS.items())
def test_every_number_has_a_bound(tmp_path: Path, text: str, most: int) -> None:
    read(read_yaml(BASE + text.format(most))[0].value, tmp_path)
    for number in (most + 1, "9" * 400, ".inf", ".nan", 0 if "max_failed" not in text and "seed" not in text else -1):
        with pytest.raises(BadJob) as caught:
            read(read_yaml(BASE + text.format(number))[0].value, tmp_path)
        assert caught.value.problems


def test_a_grid_without_a_limit_has_a_bound(tmp_path: Path) -> None:
    def grid(count: int, more: str = "") -> object:
        text = f"program: t.py\nmethod: grid\nparameters: {{a: {{min: 1, max: {count}}}, b: {{min: 1, max: 100}}}}\n"
        return read(read_yaml(text + more)[0].value, tmp_path)

    grid(100)
    grid(101, "run_cap: 5")
    with pytest.raises(BadJob, match="a grid of 10,100 trials; at most 10,000 are allowed"):
        grid(101)


@pytest.mark.parametrize(
    "keys",
    [
        "distribution: q_uniform, min: 0, max: 1.0e+300, q: 1.0e-300",
        "distribution: log_normal, mu: 700, sigma: 100",
        "distribution: int_uniform, min: 0, max: 1" + "0" * 400,
    ],
)
def test_a_parameter_whose_values_no_float_holds_is_refused(tmp_path: Path, keys: str) -> None:
    text = f"program: t.py\nmethod: random\nrun_cap: 2\nparameters: {{a: {{{keys}}}}}\n"
    with pytest.raises(BadJob, match="parameters.a"):
        read(read_yaml(text)[0].value, tmp_path)


def test_a_trial_has_its_values_in_the_main_role_of_a_job(tmp_path: Path):
    from types import SimpleNamespace

    from cloudtrain.job import targets
    from cloudtrain.job.job import Job
    from cloudtrain.sweeps.send import job_of_trial, resolve

    (tmp_path / "train.py").touch()
    trainer = {"entrypoint": "train.py", "env": {"A": "1"}, "hyperparameters": {"lr": 1, "steps": 2}}
    job = {"source": str(tmp_path), "roles": {"trainer": trainer, "server": {"run": "serve"}}}
    sweep = read({"method": "grid", "parameters": {"lr": {"values": [3]}}}, tmp_path, job=job)
    made = resolve(SimpleNamespace(resolve=targets.resolve), sweep, {"lr": 3}, {}).job
    assert (
        made.argv() == Job.from_dict(job_of_trial(sweep, {"lr": 3})).argv() == ["train.py", "--lr", "3", "--steps", "2"]
    )
    assert made.env.keys() == {"A", "SWEEP_TRIAL"}
