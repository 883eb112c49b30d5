"""What the shared trainer refuses by its arguments and layout alone: a plan says it before anything is uploaded.

It imports no torch. Each sentence comes from the function that the training itself calls.
"""

from __future__ import annotations

import ast
import glob
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from .arguments import FROM_SCRATCH, Misuse, parse
from .data import rows
from .data.documents import NO_DATASET, STDLIB, like_hub_name, located
from .errors import Unsupported, old_versions
from .in_memory_arguments import parse_in_memory
from .strategies import mesh
from .strategies.compatibility import check_arguments


def problems(
    argv: Sequence[str],
    parallelism: Mapping[str, Any],
    world: int,
    nodes: int,
    in_memory: bool = False,
    source: Path | None = None,
    inputs: Mapping[str, str] | None = None,
) -> list[str]:
    """Return a sentence for each reason why a training with these arguments, of this source, would not begin.

    `inputs` are the job's inputs and their paths on this machine, "" where it has none; None: its data is not checked.
    Without `source` no file of it is looked for.
    """
    try:
        arguments = parse_in_memory(argv) if in_memory else parse(argv)
    except Misuse as error:
        return str(error).splitlines()
    found = list(refusals(arguments, parallelism, world, nodes))
    if arguments.own_task and source is not None and (missing := missing_class(arguments.task, source)):
        found.append(missing)
    if inputs is not None and not arguments.own_task:
        found += list(missing_data(arguments, inputs, source)) or rows.problems(arguments, inputs, source)
    return found


def missing_data(arguments: Any, inputs: Collection[str], source: Path | None) -> Iterator[str]:
    """Yield a sentence for each data set that is not there: no name, no such input, no such file of the source."""
    if not arguments.dataset and "train" not in inputs:
        yield NO_DATASET
    for option, names in (("dataset", arguments.dataset), ("eval_dataset", arguments.eval_dataset)):
        for name in names:
            if name.startswith("input:"):
                try:
                    located(name, dict.fromkeys(inputs, ""))
                except Unsupported as error:
                    yield f"--{option} {name}: {error}"
            elif source is not None and not _may_exist(name, source):
                yield f"--{option} {name}: no such file or folder in the source, and not the name of a hub dataset"


def _may_exist(name: str, source: Path) -> bool:
    """Return whether a name can be found on a node: absolute paths and placeholders are only known there."""
    if name == STDLIB or "{" in name or os.path.isabs(name) or name.startswith("~"):
        return True
    if not glob.has_magic(name) and like_hub_name(name):
        return True
    return (source / name).exists() or any(glob.iglob(name, root_dir=source, recursive=True))


def version_problems(
    parallelism: Mapping[str, Any], world: int, nodes: int, versions: Mapping[str, str], where: str
) -> list[str]:
    """Return a sentence for each library, of those whose versions are known, that is too old."""
    try:
        splits_model = mesh.choose_plan(parallelism, world, nodes).splits_model
    except Unsupported:
        splits_model = ""
    return list(old_versions(versions, splits_model, where))


def missing_class(task: str, source: Path) -> str | None:
    """Return why a source has no such class (`module:Class`), None where it has one."""
    module, _, name = task.partition(":")
    path = module.replace(".", "/")
    files = [file for file in (source / f"{path}.py", source / path / "__init__.py") if file.is_file()]
    if not files:
        return f"--task {task}: there is no {path}.py in the source"
    try:
        top = ast.parse(files[0].read_text("utf-8")).body
    except (SyntaxError, UnicodeDecodeError) as error:
        return f"--task {task}: {files[0].relative_to(source)} is not Python: {error}"
    for node in top:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return None
        if not isinstance(
            node, ast.ClassDef | ast.FunctionDef
        ):  # an import, an assignment, a condition: it may be there
            names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            imported = [
                each for part in ast.walk(node) if isinstance(part, ast.Import | ast.ImportFrom) for each in part.names
            ]
            if name in names | {each.asname or each.name for each in imported} or any(
                each.name == "*" for each in imported
            ):
                return None
    return f"--task {task}: {files[0].relative_to(source)} has no class {name}"


def notes(argv: Sequence[str], parallelism: Mapping[str, Any], source: Path, has_setup: bool = False) -> list[str]:
    """Return what a plan says of arguments without effect, and of a task of the source: what it cannot know of it.

    With `has_setup` the job's own commands may make a folder that the source does not have.
    """
    try:
        arguments = parse(argv)
    except Misuse:
        return []
    if not arguments.own_task:
        found = (
            [unused_note(arguments), "" if has_setup else hub_note(arguments.model, source)] if arguments.model else []
        )
        return list(filter(None, found))
    unknown = (
        f"--task {arguments.task}: only the node loads this class. The plan does not check its data, the arguments "
        "that it takes and the names of its metrics, and knows neither its memory nor its duration"
    )
    return [unknown, *filter(None, [whole_model_note(arguments, parallelism, source)])]


def unused_note(arguments: Any) -> str:
    """Return a sentence for arguments that shape a model from scratch, which a pretrained one does not read; "" without."""
    defaults = {item.name: item.default for item in fields(arguments) if item.name in FROM_SCRATCH}
    given = [f"--{name}" for name in FROM_SCRATCH if getattr(arguments, name) != defaults[name]]
    return f"--model {arguments.model} has its own configuration; no effect: {', '.join(given)}" if given else ""


def hub_note(name: str, source: Path) -> str:
    """Return a sentence for a model that is no folder of the source, unless its name has an owner as on the hub; else ""."""
    owner, slash, _ = name.partition("/")
    only_there = "{" in name or os.path.isabs(name) or name.startswith(("~", "input:"))  # known on the node
    if only_there or (source / name).exists():
        return ""
    if slash and like_hub_name(name) and not (source / owner).exists():
        return ""
    meant = "it is taken as the name of a model on the Hugging Face Hub"
    return f"--model {name}: the source has no such folder" + (f"; {meant}" if like_hub_name(name) else "")


def whole_model_note(arguments: Any, parallelism: Mapping[str, Any], source: Path) -> str:
    """Return a sentence for a task of the source whose model each rank builds whole before it is sharded; "" for others."""
    if parallelism.get("strategy") not in ("fsdp", "hsdp", "zero3"):
        return ""
    path = arguments.task.partition(":")[0].replace(".", "/")
    for file in (source / f"{path}.py", source / path / "__init__.py"):
        if file.is_file() and not any(map(_has_model_without_values, ast.walk(ast.parse(file.read_text("utf-8"))))):
            return (
                f"--task {arguments.task}: each rank builds the whole model in host memory before it keeps its shard; "
                'build it below torch.device("meta") in model(), and each rank loads its shard alone'
            )
    return ""


def _has_model_without_values(node: ast.AST) -> bool:
    """Return whether this speaks for a model on the meta device: its name, or a built-in task to derive from."""
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").startswith("trainer.data")
    return isinstance(node, ast.Constant) and node.value == "meta"


def refusals(arguments: Any, parallelism: Mapping[str, Any], world: int, nodes: int) -> Iterator[str]:
    """Yield a sentence for each reason why a training with these parsed arguments would not begin."""
    if parallelism.get("accelerate_config"):
        return  # only Accelerate reads its file
    try:
        plan = mesh.choose_plan(parallelism, world, nodes)
        check_arguments(arguments, plan, None)
        if not arguments.model:  # from scratch: the sizes are the arguments'
            heads = arguments.num_attention_heads
            own = arguments.num_key_value_heads
            mesh.check_division(
                plan.tensor, {"attention heads": heads, "key and value heads": own if own > 0 else heads}
            )
            mesh.check_layers(arguments.num_hidden_layers, plan.stages)
    except Unsupported as refusal:
        yield str(refusal)
