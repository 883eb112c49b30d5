"""Checks that read the job and its plan, and those of where a script's results end up."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from cloudtrain.backends import machines, registry
from cloudtrain.backends.api import Paths
from cloudtrain.backends.plan import Fact, Note, say
from cloudtrain.backends.traits import NO_EFFECT
from cloudtrain.errors import Problem
from cloudtrain.job import launchers, placeholders, platform_keys, sbatch, targets
from cloudtrain.job.units import format_size, size_bytes
from cloudtrain.runs.planning import output_audit, upstream

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


def audit_elsewhere(case: Case) -> Iterator[Problem]:
    """Refuse an audit log in a folder that this machine cannot write."""
    job, plan = case.job, case.plan
    if job.audit and "://" not in str(job.output) and not output_audit.is_here(plan.backend, job):
        message = f"is written from this machine, and {job.output} is on the machines of {job.target}"
        yield Problem(message, "audit", "use an output in s3:// or gs://, or leave audit out")


def launcher_nodes(case: Case) -> Iterator[str]:
    """Say where a launcher in a command expects other nodes than the job has."""
    if case.job.form != "script":
        note = launchers.nodes_note(case.command, case.job.num_nodes, is_text=bool(case.job.run))
        yield from [note] * bool(note)


def idle_gpus(case: Case) -> Iterator[str]:
    """Say where a node has more GPUs than processes."""
    if case.job.form != "script":
        note = launchers.gpus_note(case.command, case.gpus, case.job.num_nodes)
        yield from [note] * bool(note)
        return
    ranks, gpus = int(case.plan.manifest["processes_per_node"]), case.gpus
    if ranks < gpus:
        condition = "" if case.job.trainer else ", unless a process itself uses several"
        yield (
            f"{ranks} process{'es' * (ranks != 1)} on the {gpus} GPUs of a node: {gpus - ranks} of them"
            f" {'is' if gpus - ranks == 1 else 'are'} idle{condition}; remove processes_per_node to start one for each GPU"
        )


def unlimited_wait(case: Case) -> Iterator[str]:
    """Say where the platform does not end a wait for machines."""
    job, name = case.job, case.plan.backend
    if not job.limits.max_wait or "limits.max_wait" in registry.traits(name).keys:
        return
    if say(case.plan.notes, Fact.WAIT_UNLIMITED):
        return
    text = f"{name} itself does not end a wait for machines: limits.max_wait needs several targets or GPUs"
    if job.num_nodes > 1:
        between = "limits.max_wait bounds only how long nodes wait for each other"
        text = f"{name} does not end a wait for machines: {between}"
    yield Note(text, Fact.WAIT_UNLIMITED)


def without_effect(case: Case) -> Iterator[str]:
    """Name the resources that the backend reserves nowhere."""
    keys = registry.traits(case.plan.backend).keys
    used = platform_keys.in_use(case.job)
    if named := [key for key, becomes in keys.items() if becomes == NO_EFFECT and key in used]:
        yield f"{', '.join(named)}: without effect on {case.plan.backend}, which does not reserve resources"


def unknown_gpu(case: Case) -> Iterator[str]:
    """Name the GPU that an unknown one is probably a mistyped form of."""
    if (gpu := case.job.resources.accelerator) and (meant := machines.similar_accelerator(gpu)):
        yield f"{gpu} is not a GPU that cloudtrain knows; did you mean {meant}? (resources.accelerators)"


def set_by_policies(case: Case) -> Iterator[str]:
    """Say what policies have set."""
    yield from case.policies


def unused_keep_limit(case: Case) -> Iterator[str]:
    """Say where keep_limit limits nothing."""
    if case.job.keep_limit and case.job.keep != "auto":
        yield "keep_limit has no effect: it limits keep: auto only"


def placeholders_in_shell(case: Case) -> Iterator[str]:
    """Name a placeholder in a shell text, where none is replaced."""
    for key, text in (("run", case.job.run), ("setup", case.job.setup)):
        if text and (name := next(placeholders.names(text), "")):
            yield f"{key} is never changed: {{{name}}} arrives as it is; write {placeholders.variable(name)}"


def another_user(case: Case) -> Iterator[str]:
    """Say whom costs and lists name, where the job names another user."""
    labels = case.job.labels
    if me := labels.get(targets.SUBMITTER_LABEL):
        yield f"labels.user is {labels['user']}, but you are {me}: costs and lists name you (submitted_by)"


def source_in_output(case: Case) -> Iterator[str]:
    """Say who can read the source in an output."""
    if case.job.output and not case.job.allow_secrets:
        yield (
            f"the source goes to {case.job.output} too: everyone who can read it can attach to the run and resume it"
        )


def found_while_planning(case: Case) -> Iterator[str | Problem]:
    """Pass on what the planner has set for the job, and whether it fits on its GPUs."""
    yield from case.found


def inputs_of_runs(case: Case) -> Iterator[str]:
    """Say where the inputs are that name a run."""
    for name, item in case.job.inputs.items():
        if item.run:
            yield f"input {name} is the {upstream.describe_input(item.model_dump())}"


def other_tools(case: Case) -> Iterator[str]:
    """Say what `compat` does to a shell text."""
    if case.job.compat == "skypilot":
        yield "compat: skypilot: run and setup continue after a command that fails, as in SkyPilot"
    elif case.job.compat == "dstack":
        yield "compat: dstack: a pipeline in run or setup fails only where its last command does, as in dstack"
    elif case.job.compat == "sbatch":
        yield f"compat: sbatch: run is executed on the first node, and srun starts steps on all {case.job.num_nodes}"
        yield from sbatch.notes(case.command)


def renamed(case: Case) -> Iterator[str]:
    """Say how a name was changed for platforms."""
    job = case.job
    if job.renamed:
        yield (
            f"the job name {job.renamed} is changed to {job.name}, because platforms allow only small letters, digits and -"
        )


def one_process(case: Case) -> Iterator[str]:
    """Say where a script has no variables of ranks."""
    if case.plan.manifest.get("rank_env") is False:
        yield (
            "one process: RANK, WORLD_SIZE and MASTER_ADDR are not set, as with plain python (distributed_env: always sets them)"
        )


def once_per_node(case: Case) -> Iterator[str]:
    """Say that a command starts its own processes."""
    if case.job.form != "script" and case.job.compat != "sbatch":
        yield "it runs once per node and may start its own processes, so only the number of nodes is checked"


def results_outside(case: Case) -> Iterator[str | Problem]:
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
    limit = size_bytes(job.keep_limit or KEEP_LIMIT)
    named = [value for (name, value), _ in _given(job).items() if _MODEL.fullmatch(name.lstrip("-").replace("-", "_"))]
    names = list(filter(None, dict.fromkeys([job.fit.model] if job.fit.model else named)))
    if not names:
        return
    from cloudtrain.forecast import models  # only here: most jobs name no model

    for name in names:
        if isinstance(shape := models.find(name, texts.root), str):
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
