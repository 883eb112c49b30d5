"""The shared trainer's arguments as form fields."""

from __future__ import annotations

from dataclasses import MISSING, fields
from functools import cache
from typing import Any, NamedTuple, get_type_hints

from cloudtrain.source import node_code

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
    module = node_code.module("trainer.arguments")
    hints = get_type_hints(module.Arguments)
    return {item.name: _argument(item, hints[item.name]) for item in fields(module.Arguments)}


def _argument(item: Any, kind: Any) -> Argument:
    default = item.default if item.default is not MISSING else item.default_factory()
    default_text = (
        ("on" if default else "off") if isinstance(default, bool) else "" if default in ("", []) else str(default)
    )
    return Argument(item.name, _KINDS[kind], default_text, item.metadata["help"], tuple(item.metadata["choices"]))
