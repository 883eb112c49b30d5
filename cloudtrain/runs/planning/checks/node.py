"""Checks that ask the code that runs on a node whether it would refuse a job, so that a plan says the same sentence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.api import Paths
from cloudtrain.backends.images import library_versions, parse_reference, python_version
from cloudtrain.errors import Problem
from cloudtrain.source.node_code import CALL, IN_MEMORY, module

if TYPE_CHECKING:
    from cloudtrain.job.job import Job
    from cloudtrain.job.sections import Input
    from cloudtrain.runs.planning.checks.job import Case


def refusals(case: Case) -> Iterator[Problem]:
    """Refuse what a node would refuse."""
    made = case.plan.manifest  # the platform's machine may have given the number of ranks
    nodes = case.plan.main_nodes
    world = nodes * made["processes_per_node"]
    images = case.backend.facts(case.plan).images or ()
    here = case.backend.traits.paths is Paths.HERE
    yield from find_refusals(case.job, made["parallelism"], world, nodes, case.source.root, images, here)


def lost_values(case: Case) -> Iterator[Problem]:
    """Refuse the call of a function whose value nothing would keep."""
    traits = case.backend.traits
    kept = traits.own_machines or traits.packs or case.plan.manifest.get("output")
    if case.job.entrypoint == CALL and not kept:
        yield Problem("is needed: the value of a function is kept there", "output", "name a bucket or a mounted path")


def notes(case: Case) -> Iterator[str]:
    """Say what a node would do that a user may not expect."""
    job = case.job
    if job.trainer:
        layout = case.plan.manifest["parallelism"]
        yield from module("trainer.preview").notes(job.argv()[1:], layout, case.source.root, bool(job.setup))


def find_refusals(
    job: Job,
    parallelism: Mapping[str, Any],
    world: int,
    nodes: int,
    source: Path | None = None,
    images: Iterable[str] = (),
    local: bool = False,
) -> list[Problem]:
    """Return why a node would refuse a job of `world` processes.

    Args:
        job: the job.
        parallelism: its section, as the launcher's manifest has it.
        world: processes of all nodes.
        nodes: number of nodes.
        source: the source's folder, from which a script or a task of your own is read; None where there is none yet.
        images: container images of the nodes, as far as they are known.
        local: whether the nodes are this machine, so that paths of inputs are its own.
    """
    in_memory = job.entrypoint == IN_MEMORY
    if job.trainer or in_memory:
        parallelism = {} if parallelism.get("strategy") == "auto" else parallelism
        # In memory the script has the data, and set-up commands may download what is not in the source.
        inputs = None if in_memory or job.setup else {name: _here(value, local) for name, value in job.inputs.items()}
        found = module("trainer.preview").problems(job.argv()[1:], parallelism, world, nodes, in_memory, source, inputs)
        problems = [Problem(sentence, _path(sentence)) for sentence in found]
        if in_memory and local:
            problems += _missing_folders(job)
        return problems + _version_problems(parallelism, world, nodes, images)
    if job.entrypoint == CALL:
        return _python_problems(job, images)
    if job.form == "script" and source is not None:
        try:
            module("launcher.prepare.declared").check(job.argv(), parallelism, str(source))
        except module("launcher.errors").Refused as refusal:
            return [Problem(str(refusal), _path(str(refusal)))]
    return []


def _python_problems(job: Job, images: Iterable[str]) -> list[Problem]:
    """Return which images have another Python than the one that pickled the code of a function."""
    written = job.args[job.args.index("--python") + 1] if "--python" in job.args[:-1] else ""
    others = {image: version for image in images if (version := python_version(image)) not in ("", written)}
    hint = "choose an image of this Python, or move the function into a module, which travels as source"
    return [
        Problem(f"{image} has Python {version}, and the function is pickled with Python {written}", "image", hint)
        for image, version in others.items()
        if written
    ]


def _missing_folders(job: Job) -> list[Problem]:
    """Return which folders of data in memory this machine, which is the node, does not have."""
    paths = {name: Path(_here(value, True)) for name, value in job.inputs.items() if _here(value, True)}
    hint = "write it with save_to_disk of datasets"
    found = [(name, path) for name, path in paths.items() if not (path / "state.json").is_file()]
    return [Problem(f"{path} is not a folder that save_to_disk wrote", f"inputs.{name}", hint) for name, path in found]


def _here(value: Input, local: bool) -> str:
    """Return an input's path on this machine, "" where only its nodes have it."""
    return value.uri if local and "://" not in value.uri and value.run is None else ""


def _version_problems(parallelism: Mapping[str, Any], world: int, nodes: int, images: Iterable[str]) -> list[Problem]:
    """Return what images lack whose names say the versions of their libraries."""
    problems = []
    for image in images:
        versions, where = library_versions(image), f"in {parse_reference(image).name.rpartition('/')[2]}"
        for sentence in module("trainer.preview").version_problems(parallelism, world, nodes, versions, where):
            path = "image" if sentence.startswith("the shared trainer") else _path(sentence)
            problems.append(Problem(sentence, path, "make image-gpu builds one with newer versions"))
    return problems


def _path(sentence: str) -> str:
    """Return the key of the job file that a sentence is about."""
    from cloudtrain.job.sections import Parallelism

    if option := re.search(r"--([a-z]\w*)", sentence):
        return f"hyperparameters.{option[1]}"
    named = (word for word in re.findall(r"\w+", sentence) if word in Parallelism.model_fields and word != "strategy")
    return f"parallelism.{next(named, 'strategy')}"
