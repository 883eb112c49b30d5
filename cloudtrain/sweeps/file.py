"""The sweep file: W&B's keys as people have them, and ours for the job, targets, budget and parallel trials.

Every key is honoured or refused by its name. `read` gives what is wrong with a file all at once.
"""

from __future__ import annotations

import math
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloudtrain.errors import BadJob, BadRequest, Problem
from cloudtrain.source.node_code import CALL
from cloudtrain.sweeps.early_stop import EarlyStop
from cloudtrain.sweeps.space import CONDITIONAL, Parameter, is_number, parse, shown

METHODS = {
    "random": "random",
    "grid": "grid",
    "bayes": "tpe",  # W&B's own Gaussian process is not here
    "tpe": "tpe",
    "nsga2": "nsga2",
    "cmaes": "cmaes",
}
WANDB = (
    "name", "description", "program", "command", "job", "method", "metric", "metrics", "parameters", "early_terminate",
    "run_cap", "project", "entity", "image_uri", "apiVersion", "kind",
)  # fmt: skip
OURS = ("target", "budget", "max_parallel", "max_failed", "seed")
REFUSED = {
    "controller": "not needed: this machine's watcher runs the sweep. Remove it",
    "scheduler": "use method: bayes, random, grid, tpe, nsga2 or cmaes",
    "conditions": CONDITIONAL,
}
# Population-based training, as other tools name it: it copies checkpoints between trials that run.
POPULATION = ("pbt", "pb2", "pbt_replay", "population", "population_based", "population_based_training")
NO_POPULATION = (
    "use method: tpe with early_terminate: {type: asha}, and make the schedule's values parameters, as in warmup_steps"
)
_METRIC = ("name", "goal", "target", "impute")
_JOB_KEYS = re.compile(
    r"(hyperparameters|env|resources|parallelism|environment|limits|checkpoint|options)\..+|num_nodes|processes_per_node"
)
# As the job's hyperparameters, the same with True and False as Python writes them (W&B's ${args}), or only in the file that
# WANDB_SWEEP_PARAM_PATH names, which all have.
GIVEN = ("arguments", "python", "file")
DEFAULT_PARALLEL, DEFAULT_FAILED = 4, 5
MOST_TRIALS = 10_000  # each is a run, and the next one is drawn by the values of all before
MOST_PARALLEL = 1000
MOST_SEED = 2**32 - 1  # of numpy's generators
MOST_HOURS, MOST_USD = 10**8, 10**9


@dataclass(frozen=True)
class Metric:
    """What a sweep optimizes: the last value of a metric that trials report."""

    name: str
    goal: str = "minimize"
    target: float | None = None  # the sweep ends when a trial has reached it
    impute: str = "worst"  # the value of a failed trial: worst of all, or its own latest or best

    def is_better(self, value: float, other: float) -> bool:
        return value < other if self.goal == "minimize" else value > other

    def is_reached(self, value: float | None) -> bool:
        if value is None or self.target is None:
            return False
        return value <= self.target if self.goal == "minimize" else value >= self.target


@dataclass(frozen=True)
class Budget:
    """What a sweep may use; None for no limit. Hours are of all its trials' nodes together."""

    trials: int | None = None
    hours: float | None = None
    usd: float | None = None


@dataclass(frozen=True)
class SweepFile:
    """A sweep file that was read and checked."""

    name: str
    method: str  # a value of METHODS
    job: Mapping[str, Any]  # job file's keys, without the trial's
    folder: Path  # to which its relative paths belong
    parameters: Sequence[Parameter]
    metrics: Sequence[Metric]
    early_stop: EarlyStop | None
    budget: Budget
    targets: Sequence[str | None]
    max_parallel: int
    max_failed: int
    seed: int
    notes: Sequence[str] = field(default=())
    given: str = "arguments"  # how the script gets its parameters, one of GIVEN

    @property
    def of_calls(self) -> bool:
        """Whether its trials are calls of a function: each runs, whatever others return or raise, and none twice."""
        return self.job.get("entrypoint") == CALL

    @property
    def searched(self) -> list[Parameter]:
        """Its parameters without the constant ones."""
        return [parameter for parameter in self.parameters if parameter.distribution != "constant"]

    def settings(self, trial: Mapping[str, Any]) -> dict[str, Any]:
        """Return the job's keys that a trial sets, by dotted path."""
        found = {}
        for name, value in trial.items():
            if _JOB_KEYS.fullmatch(name):
                found[name] = value
            elif self.given != "file":
                text = self.given == "python" and isinstance(value, bool)
                found[f"hyperparameters.{name}"] = str(value) if text else value
        return found


def read(document: Mapping[str, Any], folder: Path, *, job: Mapping[str, Any] | None = None) -> SweepFile:
    """Return the sweep of a document; raises BadJob with all of its problems. Reads the job file that it names.

    Args:
        document: a sweep file's keys.
        folder: to which its relative paths belong.
        job: the job's keys, where the sweep is a section of a job file.
    """
    problems = _wrong_keys(document)
    notes: list[str] = []
    method = str(document.get("method", ""))
    if method not in METHODS:
        known = f"one of {', '.join(METHODS)}"
        if method.lower() in POPULATION:
            problems.append(Problem(f"{method} (population-based training) is not supported", "method", NO_POPULATION))
        else:
            problems.append(Problem(f"is {method!r}" if method else "is missing", "method", known))
    elif method == "bayes":
        notes.append("method bayes uses TPE (Optuna), not W&B's Gaussian process")
    parameters, wrong = parse(document.get("parameters") or {})
    problems += wrong
    metrics = _metrics(document, problems)
    _check_method(document, method, parameters, metrics, problems)
    stop = _early_stop(document, metrics, problems)
    job, given = _job(document, folder, job, problems)
    budget = _budget(document, problems)
    numbers = {
        "max_parallel": _whole(document, "max_parallel", DEFAULT_PARALLEL, 1, MOST_PARALLEL, problems),
        "max_failed": _whole(document, "max_failed", DEFAULT_FAILED, 0, MOST_TRIALS, problems),
        "seed": _whole(document, "seed", secrets.randbelow(1 << 31), 0, MOST_SEED, problems),
    }
    targets = _targets(document, problems)
    if problems:
        raise BadJob(problems)
    if METHODS[method] != "grid" and budget.trials is None and budget.hours is None and budget.usd is None:
        raise BadJob(
            [
                Problem(
                    "the sweep has no limit on its number of trials",
                    "run_cap",
                    "set run_cap: 20, or budget: with trials, hours or usd",
                )
            ]
        )
    name = str(document.get("name") or job.get("name") or folder.name)
    return SweepFile(
        name,
        METHODS[method],
        job,
        folder,
        parameters,
        metrics,
        stop,
        budget,
        targets,
        notes=notes,
        given=given,
        **numbers,
    )


def _wrong_keys(document: Mapping[str, Any]) -> list[Problem]:
    problems = [Problem(f"is not supported for sweeps: {REFUSED[key]}", key) for key in document if key in REFUSED]
    for key in document.keys() - {*WANDB, *OURS, *REFUSED}:
        problems.append(Problem("is not a key of a sweep file", key, f"one of {', '.join((*WANDB, *OURS))}"))
    if document.get("kind", "sweep") != "sweep":
        problems.append(Problem(f"is {document['kind']!r}, not sweep", "kind"))
    return problems


def _check_method(
    document: Mapping[str, Any],
    method: str,
    parameters: Sequence[Parameter],
    metrics: Sequence[Metric],
    problems: list[Problem],
) -> None:
    """Add what does not go with the method: a grid without an end, several metrics, none."""
    if method == "grid" and not problems:
        try:
            size = math.prod(len(parameter.steps()) for parameter in parameters)
            if size > MOST_TRIALS and document.get("run_cap") is None and not document.get("budget"):
                words = f"a grid of {size:,} trials; at most {MOST_TRIALS:,} are allowed"
                raise ValueError(f"{words}: set run_cap, or write method: random")
        except ValueError as error:
            problems.append(Problem(str(error), "method"))
    if len(metrics) > 1 and METHODS.get(method) not in ("tpe", "nsga2", "random", "grid"):
        problems.append(
            Problem(f"method {method} optimizes one metric only", "metrics", "name one metric, or write method: nsga2")
        )
    if method not in ("random", "grid") and method in METHODS and not metrics:
        problems.append(Problem("is missing: this method needs a metric to optimize", "metric"))


def _targets(document: Mapping[str, Any], problems: list[Problem]) -> list[str | None]:
    targets = document.get("target")
    listed = targets if isinstance(targets, list) else [targets]
    if not all(target is None or isinstance(target, str) for target in listed) or not listed:
        problems.append(Problem("must be a target's name or a list of names", "target"))
    return listed


def _metrics(document: Mapping[str, Any], problems: list[Problem]) -> list[Metric]:
    one, several = document.get("metric"), document.get("metrics")
    if one is not None and several is not None:
        problems.append(Problem("and metric cannot be combined", "metrics"))
    found = []
    for at, given in enumerate(several if isinstance(several, list) else [one] if one is not None else []):
        path = f"metrics.{at}" if several else "metric"
        given = {"name": given} if isinstance(given, str) else given
        if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
            problems.append(Problem("needs a name", path))
            continue
        for key in given.keys() - set(_METRIC):
            problems.append(Problem(f"is not a key of metric; it has {', '.join(_METRIC)}", f"{path}.{key}"))
        metric = Metric(given["name"], given.get("goal", "minimize"), given.get("target"), given.get("impute", "worst"))
        if metric.goal not in ("minimize", "maximize"):
            problems.append(Problem(f"is {metric.goal!r}: minimize or maximize", f"{path}.goal"))
        if metric.impute not in ("worst", "best", "latest"):
            problems.append(Problem(f"is {metric.impute!r}: worst, best or latest", f"{path}.impute"))
        if metric.target is not None and not is_number(metric.target):
            problems.append(Problem(f"is {shown(metric.target)}, not a number", f"{path}.target"))
        found.append(metric)
    return found


def _early_stop(document: Mapping[str, Any], metrics: Sequence[Metric], problems: list[Problem]) -> EarlyStop | None:
    given = document.get("early_terminate")
    if given is None:
        return None
    if isinstance(given, Mapping) and str(given.get("type")).lower() in POPULATION:
        words = f"{given['type']} (population-based training) is not supported"
        problems.append(Problem(words, "early_terminate.type", NO_POPULATION))
        return None
    try:
        stop = EarlyStop.parse(given)
    except ValueError as error:
        problems.append(Problem(str(error), "early_terminate"))
        return None
    if len(metrics) != 1:
        problems.append(Problem("needs exactly one metric", "early_terminate"))
    return stop


def _budget(document: Mapping[str, Any], problems: list[Problem]) -> Budget:
    given = document.get("budget") or {}
    if not isinstance(given, Mapping) or given.keys() - {"trials", "hours", "usd"}:
        problems.append(Problem("has an unknown key; it takes trials, hours and usd", "budget"))
        return Budget()
    for key, value in given.items():
        most = {"trials": MOST_TRIALS, "hours": MOST_HOURS, "usd": MOST_USD}[key]
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= most:
            problems.append(Problem(f"is {shown(value)}, not a number above 0 and at most {most:,}", f"budget.{key}"))
    limits = [n for n in (document.get("run_cap"), given.get("trials")) if n is not None]
    for limit in limits:
        if type(limit) is not int or not 1 <= limit <= MOST_TRIALS:
            words = f"is {shown(limit)}, not a whole number from 1 to {MOST_TRIALS:,}"
            problems.append(Problem(words, "run_cap", "each trial is a run, drawn by the values of all before"))
            return Budget()
    return Budget(min(limits, default=None), given.get("hours"), given.get("usd"))


def _whole(document: Mapping[str, Any], key: str, default: int, least: int, most: int, problems: list[Problem]) -> int:
    value = document.get(key, default)
    if type(value) is not int or not least <= value <= most:
        problems.append(Problem(f"is {shown(value)}, not a whole number from {least} to {most:,}", key))
        return default
    return value


def _job(
    document: Mapping[str, Any], folder: Path, section_of: Mapping[str, Any] | None, problems: list[Problem]
) -> tuple[dict[str, Any], str]:
    """Return the keys of the job that a sweep runs, and how its script gets the parameters."""
    named = [key for key in ("job", "program", "command") if document.get(key) is not None]
    if section_of is not None:
        if named:
            problems.append(Problem("the sweep file itself is the job: remove the key job", named[0]))
        return dict(section_of), "arguments"
    if not named:
        problems.append(
            Problem(
                "is missing: a sweep needs the job file that its trials run",
                "job",
                "write job: job.yaml, or program: train.py",
            )
        )
        return {}, "arguments"
    if "job" in named and len(named) > 1:
        problems.append(Problem("and job cannot be combined", named[1]))
        return {}, "arguments"
    keys: dict[str, Any] = {}
    given = "arguments"
    if "job" in named:
        keys = _job_file(document["job"], folder, problems)
    else:
        from cloudtrain.sweeps.command import job_of

        try:
            keys, given = job_of(document.get("program"), document.get("command"))
        except ValueError as error:
            problems.append(Problem(str(error), "command" if "command" in named else "program"))
        keys["source"] = str(folder)
    if image := document.get("image_uri"):
        keys["image"] = image
    account = {f"WANDB_{key.upper()}": str(document[key]) for key in ("project", "entity") if document.get(key)}
    if account:
        keys["env"] = {**account, **(keys.get("env") or {})}
    return keys, given


def _job_file(given: Any, folder: Path, problems: list[Problem]) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return dict(given)
    from cloudtrain.job.job import read as read_job

    try:
        found, at = read_job(folder / str(given))
    except BadRequest as error:
        problems.append(Problem(error.message, "job", error.hint))
        return {}
    keys = dict(found.value)
    source = str(keys.get("source") or ".")
    if not source.startswith("git+"):
        keys["source"] = os.path.normpath(at / Path(source).expanduser())
    return keys
