"""Checks of the source: can Accelerate carry out the strategy of a user's own script, and what its file replaces.

Accelerate does not report a strategy that it cannot carry out: without GPUs, or in a script that does not use it, ranks
train plain data parallel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import Problem
from cloudtrain.job import launchers
from cloudtrain.source.node_code import IN_MEMORY, module

if TYPE_CHECKING:
    from cloudtrain.job.job import Job
    from cloudtrain.runs.planning.checks.case import Case
    from cloudtrain.source.texts import Texts

LIBRARIES = re.compile(r"\b(?:accelerate|transformers|trl|deepspeed)\b")


def strategy(case: Case) -> Iterator[str | Problem]:
    """Refuse a strategy that the ranks would not run, and say which keys of an Accelerate file count for nothing."""
    job, texts = case.job, case.source
    file = job.parallelism.accelerate_config
    if not file and job.parallelism.strategy not in module("launcher.prepare.declared").SHARDED:
        return
    config: dict[str, Any] = {}
    if file:
        try:
            config = _read_config(texts, file)
        except (OSError, ValueError) as error:
            message = f"{file} is not a valid Accelerate configuration: {error}"
            yield Problem(message, "parallelism.accelerate_config")
            return
    yield from _find_problems(job, texts, case.gpus, config)
    if replaced := _find_replaced(job, config):
        yield replaced


def separate_trainings(case: Case) -> Iterator[str]:
    """Say where accelerate launch in a command would start separate trainings on CPU."""

    def read(name: str) -> dict[str, Any]:
        try:
            return _read_config(case.source, name)
        except (OSError, ValueError):
            return {}

    if case.job.form != "script" and not case.gpus and "ACCELERATE_USE_CPU" not in case.job.env:
        note = launchers.cpu_note(case.command, read)
        yield from [note] * bool(note)


def _find_problems(job: Job, texts: Texts, gpus: int, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield why a job's strategy would not be what its ranks run.

    Args:
        job: any job; those of the shared trainer have no such problems.
        texts: what the source's files hold.
        gpus: GPUs of a node, as the backend gives them.
        config: what the Accelerate file holds; empty without one.
    """
    strategy: str = job.parallelism.strategy
    path, name = "parallelism.strategy", strategy
    if config:
        path, name = "parallelism.accelerate_config", f"of type {config.get('distributed_type')}"
    sharded = (
        config.get("distributed_type") in ("FSDP", "DEEPSPEED")
        if config
        else strategy in module("launcher.prepare.declared").SHARDED
    )
    if job.trainer or job.entrypoint == IN_MEMORY or not sharded or strategy in _declared(texts):
        return
    if not gpus:
        yield Problem(
            f"is {name}, but the job requests no GPU: without GPUs Accelerate silently uses plain data parallel",
            path,
            "set resources.accelerators, or, to try it on CPU, write parallelism: {strategy: ddp}"
            + (" in place of accelerate_config" if config else ""),
        )
    if not _uses_accelerate(job, texts):
        yield Problem(
            f"is {name}, which needs Accelerate, but no file and no requirement mentions accelerate, transformers, "
            "trl or deepspeed",
            path,
            f"remove it, or, if the script shards the model itself, say so in a comment: # cloudtrain: {strategy}",
        )


def _find_replaced(job: Job, config: Mapping[str, Any]) -> str:
    """Return which keys of an Accelerate file count for nothing, because the job says otherwise; "" for none."""
    ours = {"num_processes": job.world_size, "num_machines": job.num_nodes}
    nested = config.get("deepspeed_config")
    values = {**config, **(nested if isinstance(nested, dict) else {})}
    replaced = []
    for key, usual in module("launcher.prepare.accelerate_keys").WORLD.items():
        value = values.get(key)
        if value not in (None, "", usual, ours.get(key)):
            replaced.append(f"{key} {value}" + (f" (the job's is {ours[key]})" if key in ours else ""))
    if not replaced:
        return ""
    return f"{job.parallelism.accelerate_config}: cloudtrain's own settings replace {', '.join(replaced)}"


def _read_config(texts: Texts, name: str) -> dict[str, Any]:
    """Return what an Accelerate file of the source holds; raises OSError, and ValueError for one that is not a mapping."""
    import yaml

    try:
        config = yaml.safe_load((texts.root / name).read_text("utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(str(error).replace("\n", " ")) from None
    if not isinstance(config, dict) or not config:
        raise ValueError("it has no keys")
    return config


def _uses_accelerate(job: Job, texts: Texts) -> bool:
    """Return whether a file or the job's requirements mention Accelerate or what stands on it; True where not all is read."""
    found = list(texts.files.values())
    if job.environment.requirements:
        found.append((texts.root / job.environment.requirements).read_text("utf-8", "replace"))
    return any(LIBRARIES.search(text) for text in found) or not texts.complete


def _declared(texts: Texts) -> set[str]:
    """Return what the script declares that it does itself."""
    return set(
        re.findall(r"\w+", " ".join(module("launcher.prepare.declared").LINE.findall(texts.files.get(texts.entry, ""))))
    )
