"""Ask the code that runs on a node whether it would refuse a job, so that a plan says it with the same sentence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import Problem
from cloudtrain.source.node_code import IN_MEMORY, module

if TYPE_CHECKING:
    from cloudtrain.job.job import Job


def find_refusals(
    job: Job, parallelism: Mapping[str, Any], world: int, nodes: int, source: Path | None = None
) -> list[Problem]:
    """Return why a node would refuse a job of `world` processes.

    Args:
        job: the job.
        parallelism: its section, as the launcher's manifest has it.
        world: processes of all nodes.
        nodes: number of nodes.
        source: the source's folder, from which a script or a task of your own is read; None where there is none yet.
    """
    in_memory = job.entrypoint == IN_MEMORY
    if job.trainer or in_memory:
        parallelism = {} if parallelism.get("strategy") == "auto" else parallelism
        found = module("trainer.preview").problems(job.argv()[1:], parallelism, world, nodes, in_memory, source)
        return [Problem(sentence, _path(sentence)) for sentence in found]
    if job.form == "script" and source is not None:
        try:
            module("launcher.prepare.declared").check(job.argv(), parallelism, str(source))
        except module("launcher.errors").Refused as refusal:
            return [Problem(str(refusal), _path(str(refusal)))]
    return []


def _path(sentence: str) -> str:
    """Return the key of the job file that a sentence is about."""
    from cloudtrain.job.sections import Parallelism

    if option := re.search(r"--([a-z]\w*)", sentence):
        return f"hyperparameters.{option[1]}"
    named = (word for word in re.findall(r"\w+", sentence) if word in Parallelism.model_fields and word != "strategy")
    return f"parallelism.{next(named, 'strategy')}"
