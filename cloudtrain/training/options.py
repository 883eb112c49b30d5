"""The keyword arguments of `train_distributed` beyond its own: arguments of the trainer and keys of the job."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from cloudtrain.errors import BadRequest
from cloudtrain.source.node_code import module


def divide(options: Mapping[str, Any], own: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of the trainer and the keys of the job.

    Args:
        options: the keyword arguments.
        own: the parameters that `train_distributed` has itself, which a misspelt one may mean.

    Raises:
        BadRequest: an argument is about texts only, or unknown.
    """
    from cloudtrain.job.job import Job
    from cloudtrain.job.problems import nearest

    taken: frozenset[str] = module("trainer.in_memory_arguments").TAKEN
    known = {item.name for item in fields(module("trainer.arguments").Arguments)}
    if strange := sorted(options.keys() & known - taken):
        raise BadRequest(
            f"{strange[0]} is an argument of the shared trainer only; train_distributed takes the model and data as objects",
            "write a job with trainer: true, or remove the argument",
        )
    keys = {item.alias or name for name, item in Job.model_fields.items()}
    if unknown := sorted(options.keys() - taken - keys):
        near = nearest(unknown[0], {*own, *taken, *keys})
        raise BadRequest(
            f"{unknown[0]} is not an argument of train_distributed, of the shared trainer or a key of the job",
            f"did you mean {near}?" if near else "remove it",
        )
    sets = {name: value for name, value in options.items() if name in taken}
    return sets, {name: value for name, value in options.items() if name not in taken}
