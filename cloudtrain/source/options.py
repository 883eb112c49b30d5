"""How a script declares its options, as far as its text shows: which want a value, and which take none."""

from __future__ import annotations

import ast
from typing import NamedTuple

from cloudtrain.source.texts import Texts

_BARE = ("store_true", "store_false", "store_const", "count")


class Option(NamedTuple):
    """One add_argument of the script."""

    place: str  # file and line
    takes_value: bool
    is_boolean: bool = False  # type=bool, str2bool and the like


class Options(NamedTuple):
    """The options of a script: those that take a value or none; one that takes both is not here."""

    by_name: dict[str, Option]
    hf_parser: str  # where HfArgumentParser is called, or ""
    hydra: str = ""  # where hydra.main decorates a function, or ""

    @property
    def wants_boolean_values(self) -> bool:
        """Whether true and false are given as values: what arg_style hf writes."""
        return bool(self.hf_parser) or any(option.is_boolean for option in self.by_name.values())


def declared(texts: Texts) -> Options:
    """Return what the entry declares; nothing where it is no Python, or declares its options elsewhere."""
    found = Options({}, "")
    text = texts.files.get(texts.entry, "")
    if not texts.entry.endswith(".py") or not any(
        word in text for word in ("add_argument", "HfArgumentParser", "hydra")
    ):
        return found
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return found
    hydra = {"hydra.main"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "hydra":
            hydra |= {name.asname or name.name for name in node.names if name.name == "main"}
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        place = f"{texts.entry}:{node.lineno}"
        if ast.unparse(node.func) in hydra:
            found = found._replace(hydra=found.hydra or place)
        elif called == "HfArgumentParser":
            found = found._replace(hf_parser=found.hf_parser or place)
        elif called == "add_argument" and (option := _option(node, place)):
            names = [word.value for word in node.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
            found.by_name.update({name.lstrip("-"): option for name in names if name.startswith("--")})
    return found


def _option(node: ast.Call, place: str) -> Option | None:
    given = {word.arg: word.value for word in node.keywords}
    action = given.get("action")
    if isinstance(action, ast.Constant) and action.value in _BARE:
        return Option(place, False)
    if None in given or (
        action is not None and not (isinstance(action, ast.Constant) and action.value in ("store", "append"))
    ):
        return None  # BooleanOptionalAction, one of its own, or **more: not known
    nargs = given.get("nargs")
    if isinstance(nargs, ast.Constant) and nargs.value in ("?", "*", 0):
        return None
    kind = ast.unparse(given["type"]).lower() if "type" in given else ""
    return Option(place, True, "bool" in kind or "true" in kind)
