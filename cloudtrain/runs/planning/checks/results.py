"""Checks of where the results of a script of the user's own end up."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from cloudtrain.backends import registry
from cloudtrain.backends.api import Paths
from cloudtrain.errors import Problem
from cloudtrain.job.units import format_size, size_bytes

if TYPE_CHECKING:
    from cloudtrain.job.job import Job
    from cloudtrain.runs.planning.checks.case import Case

# Options and variables that name a folder for results; a path of a model or of data may be absolute.
_RESULTS = (
    r"(?:output|out|save|results?|logging)[_-]?(?:dir|path|folder)|(?:checkpoint|ckpt)s?[_-]?(?:dir|folder)|output"
)
_RESULTS_NAME = re.compile(_RESULTS)
_ELSEWHERE = re.compile(r"/opt/ml/|/dev/null")  # what needs no note
_RESULTS_DEFAULT = re.compile(
    rf"""\b(?:{_RESULTS})["']?(?:,[^()\n]{{0,200}}default)?\s{{0,4}}=\s{{0,4}}["'](?:/|~)[^"'\n]{{0,200}}["']"""
)
_MODEL = re.compile(r"(?:pretrained_)?(?:base_)?model(?:_name)?(?:_or_path|_id)?")
_ADAPTERS = re.compile(r"\b(?:peft|LoraConfig)\b")  # of a model only they are saved
KEEP_LIMIT = "20GB"  # entrypoints/launcher/output/keep_choice.py
WEIGHT_BYTES, STATE_BYTES = 2, 12  # of a parameter: in 16 bits, and in 32 bits with the two moments of Adam


def outside(case: Case) -> Iterator[str | Problem]:
    """Refuse results that cannot come home: in folders outside of the script's own, but on this machine.

    On machines of the user's own, and below a path that the job's nodes mount, the folder may be on a shared disk; what a
    script has as a default may be unused. These are notes.
    """
    job, texts, traits = case.job, case.source, registry.traits(case.plan.backend)
    if job.trainer or job.form == "shell" or traits.in_place:
        return
    given = _given(job)
    own_disks = traits.own_machines and traits.paths is Paths.NODES
    shared = [
        str(path) for path in (job.output, *(each.uri for each in job.inputs.values()), *_mounts(case.plan.request))
    ]
    lost = "is outside of the script's folder: its files are not copied back, and the next attempt"
    for (name, value), key in given.items():
        option = name.lstrip("-").rpartition(".")[2]
        if not value.startswith(("/", "~")) or not _RESULTS_NAME.fullmatch(option) or _ELSEWHERE.search(value):
            continue
        if own_disks or any(path.startswith("/") and PurePosixPath(value).is_relative_to(path) for path in shared):
            yield f"{name} {value} {lost} finds them only on a disk that all nodes share; write {name} out"
        elif job.keep == "none" or option.startswith("log") or case.plan.attempt > 1:  # a resume changes no argument
            yield f"{name} {value} {lost} does not find them; write {name} out"
        else:
            hint = f"write {name} out, or set keep: none if nothing of it is needed"
            yield Problem(f"{name} {value} {lost} does not find them", key, hint)
    named = {name.lstrip("-").replace("-", "_") for name, _ in given}
    match = texts.find(_RESULTS_DEFAULT, (".py",))
    if match and (default := _RESULTS_NAME.match(match.text)) and default[0] not in named:
        folder = re.split(r"[\"']", match.text)[-2]
        again = "finds them only on a disk that all nodes share" if own_disks else "does not find them"
        if not _ELSEWHERE.search(folder):
            yield f"{match.place}: {default[0]} {folder} {lost} {again}; write a relative path, such as out"


def model_over_limit(case: Case) -> Iterator[str]:
    """Say where checkpoints of a model that the job names are larger than what `keep: auto` copies back."""
    job, texts = case.job, case.source
    if job.trainer or job.form == "shell" or job.keep != "auto":
        return
    from cloudtrain.forecast import models  # only here: most jobs name no model

    limit = size_bytes(job.keep_limit or KEEP_LIMIT)
    named = [value for (name, value), _ in _given(job).items() if _MODEL.fullmatch(name.lstrip("-").replace("-", "_"))]
    for name in dict.fromkeys([job.fit.model] if job.fit.model else named):
        if not name or isinstance(shape := models.find(name, texts.root), str):
            continue
        weights, state = shape.parameters * WEIGHT_BYTES, shape.parameters * STATE_BYTES
        if (weights if texts.find(_ADAPTERS, (".py",)) else state) > limit:
            yield (
                f"{name}: its weights are about {format_size(weights)} in 16 bits, a checkpoint with Adam's state about"
                f" {format_size(state)}, and at most {job.keep_limit or KEEP_LIMIT} of a node are copied back: set keep_limit"
            )


def _given(job: Job) -> dict[tuple[str, str], str]:
    """Return the options of a job's script with their values -> the key of the job that has them."""
    given = {(f"--{name}", str(value)): f"hyperparameters.{name}" for name, value in job.hyperparameters.items()}
    for word, following in pairwise([*job.argv()[1:], ""]):
        name, equals, value = word.partition("=")
        given.setdefault((name, value if equals else following), "args")
    return given


def _mounts(request: object) -> Iterator[str]:
    """Yield the paths at which a platform's request mounts volumes."""
    for name, value in request.items() if isinstance(request, Mapping) else ():
        if name in ("mountPath", "mount") and isinstance(value, str):
            yield value
    inner = request.values() if isinstance(request, Mapping) else request if isinstance(request, list) else ()
    for value in inner:
        yield from _mounts(value)
