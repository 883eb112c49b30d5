"""Check cloudtrain.toml offline: its tables, the backend of each target, and the options that this backend knows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.backends import registry
from cloudtrain.errors import BadJob, BadRequest, MissingExtra, Problem
from cloudtrain.job import configfile, targets
from cloudtrain.job.problems import nearest
from cloudtrain.runs.planning.plan import find_invalid

if TYPE_CHECKING:
    from cloudtrain.job.configfile import Target


def find_problems(folder: Path) -> dict[str, list[Problem]]:
    """Return what is wrong in the configuration files that count for a folder, by target; reads them, opens no connection.

    Under "" stands what makes the files unusable. An option may be missing, because a job file can hold it. Options of a
    backend that is not installed are not checked.
    """
    unusable: list[Problem] = []
    documents = []
    for path in targets.config_files(folder):
        try:
            documents.append(configfile.read(path))
        except BadJob as error:
            unusable += error.problems
        except BadRequest as error:
            unusable.append(Problem(error.message, hint=error.hint))
    named: dict[str, Target] = {}
    try:
        named = configfile.targets(documents)
    except BadJob as error:
        unusable += error.problems
    found = {"": unusable, **{name: list(_of_target(target)) for name, target in named.items()}}
    return {name: problems for name, problems in found.items() if problems}


def _of_target(target: Target) -> Iterator[Problem]:
    path, mark = f"targets.{target.name}", target.options.mark(())
    try:
        kind = registry.backend_class(target.backend)
    except MissingExtra:
        return
    except BadRequest:
        near = nearest(target.backend, registry.names())
        hint = f"did you mean {near}?" if near else f"choose from {', '.join(registry.names())}"
        yield Problem(f"there is no backend {target.backend!r}", f"{path}.backend", hint, mark.file, mark.line)
        return
    options = targets.options_of(target)
    prefix = f"options.{target.backend}"
    for problem in find_invalid(options, kind, target.backend, target.name) if options else ():
        key = problem.path.removeprefix(prefix).lstrip(".")
        if not key or problem.message == "is missing":  # pydantic's word; the options of a job are laid over these
            continue
        mark = target.options.mark((key.partition(".")[0].partition("[")[0],))
        yield replace(problem, path=f"{path}.{key}", file=mark.file, line=mark.line)
