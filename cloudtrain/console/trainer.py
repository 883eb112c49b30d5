"""The shared trainer's arguments as form fields, and the trainer's own validation of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, NamedTuple, get_type_hints

from cloudtrain.errors import Problem

_MODULE = "cloudtrain_trainer_arguments"
_KINDS: dict[Any, str] = {bool: "flag", int: "number", float: "number", str: "text", list[str]: "yaml"}
# Always shown; the other arguments are added one by one.
MAIN_ARGUMENTS = (
    "task", "dataset", "model", "model_type", "tokenizer", "block_size", "learning_rate", "max_steps", "num_train_epochs",
    "per_device_train_batch_size", "bf16",
)  # fmt: skip


class Argument(NamedTuple):
    """One argument of the shared trainer."""

    name: str
    kind: str  # flag, number, text or yaml (a list)
    default: str
    help: str
    choices: tuple[str, ...]


@cache
def arguments() -> dict[str, Argument]:
    """Return the arguments by name, in the trainer's order."""
    module = _arguments_module()
    hints = get_type_hints(module.Arguments)
    return {item.name: _argument(item, hints[item.name]) for item in fields(module.Arguments)}


def problems(argv: Sequence[str]) -> list[Problem]:
    """Return what the trainer would refuse at its start, as problems of hyperparameters."""
    module = _arguments_module()
    try:
        module.parse(list(argv))
    except module.Misuse as error:
        return [_problem(line) for line in str(error).splitlines()]
    return []


def _argument(item: Any, kind: Any) -> Argument:
    default = item.default if item.default is not MISSING else item.default_factory()
    default_text = (
        ("on" if default else "off") if isinstance(default, bool) else "" if default in ("", []) else str(default)
    )
    return Argument(item.name, _KINDS[kind], default_text, item.metadata["help"], tuple(item.metadata["choices"]))


def _problem(line: str) -> Problem:
    match = re.search(r"--([a-z]\w*)", line)
    return Problem(line, f"hyperparameters.{match[1]}" if match else "hyperparameters")


@cache
def _arguments_module() -> Any:
    """Load the trainer's module of arguments, which is part of every bundle and has light imports."""
    from importlib.util import module_from_spec, spec_from_file_location

    from cloudtrain.source.bundle import runtime_files

    path = dict(runtime_files())[".cloudtrain/trainer/arguments.py"]
    spec = spec_from_file_location(_MODULE, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[_MODULE] = module  # its dataclass needs this entry
    spec.loader.exec_module(module)
    return module
