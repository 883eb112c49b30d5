"""Read a call of azure-ai-ml's `command(...)` in a script or notebook as the YAML of a command job. The code is never run.

Arguments: azure-ai-ml 1.35.2, entities/_builders/command_func.py and entities/_builders/command.py (2026-11-30).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from cloudtrain.errors import BadRequest
from cloudtrain.source.literals import name_of

CALLS = ("command", "CommandJob")
PACKAGE = "azure.ai.ml"
PLACES = {  # arguments that the YAML has in a section
    **dict.fromkeys(("instance_count", "instance_type", "shm_size", "docker_args", "locations"), "resources"),
    "timeout": "limits",
    **dict.fromkeys(("job_tier", "priority"), "queue_settings"),
}
SETTERS = ("set_limits", "set_resources", "set_queue_settings")  # of a job that is there
TYPES = {  # objects that the YAML tells apart by their type
    "PyTorchDistribution": "pytorch",
    "MpiDistribution": "mpi",
    "TensorFlowDistribution": "tensorflow",
    "RayDistribution": "ray",
    "ManagedIdentityConfiguration": "managed",
    "UserIdentityConfiguration": "user_identity",
    "AmlTokenConfiguration": "aml_token",
}


class _Computed(Exception):
    """A value that the text does not say."""


def read(code: str, path: object) -> tuple[dict[str, Any], list[str]] | None:
    """Return the keys of the YAML, and notes on values that the code computes; None for a code without such a call.

    Raises BadRequest for code that is none, and for several calls.
    """
    if PACKAGE not in code:
        return None
    try:
        tree = ast.parse(code)
    except SyntaxError as error:
        raise BadRequest(
            f"{path} is not valid Python in line {error.lineno}: {error.msg}", "correct the line"
        ) from None
    nodes = list(ast.walk(tree))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    jobs = [
        call for call in calls if name_of(call.func) in CALLS and any(word.arg == "command" for word in call.keywords)
    ]
    if not jobs:
        return None
    if len(jobs) > 1:
        lines = ", ".join(str(call.lineno) for call in jobs)
        raise BadRequest(
            f"{path} has several calls of command(...), in lines {lines}", "write each one to its own file"
        )
    assigned = {
        node.targets[0].id: node.value
        for node in nodes
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
    }
    given: dict[str, Any] = {}
    notes: list[str] = []
    later = [call for call in calls if name_of(call.func) in SETTERS]
    for word in (word for call in (*jobs, *later) for word in call.keywords):
        name = word.arg or "**"
        try:
            value = _value(word.value, assigned)
        except _Computed:
            notes.append(
                f"{name}: write this value yourself, because the script computes it: {ast.unparse(word.value)[:200]}"
            )
            continue
        section = given.setdefault(PLACES[name], {}) if name in PLACES else given
        section[name] = value
    return given, notes


def _value(node: ast.expr, assigned: Mapping[str, ast.expr], depth: int = 0) -> Any:
    """Return what an expression stands for, an object as the YAML writes it. Raises _Computed."""

    def inner(each: ast.expr) -> Any:
        return _value(each, assigned, depth + 1)

    if depth > 20:
        raise _Computed
    if isinstance(node, ast.Name) and node.id in assigned:
        return inner(assigned[node.id])
    if isinstance(node, ast.Attribute) and name_of(node.value) in ("AssetTypes", "InputOutputModes"):
        return node.attr.lower()
    if isinstance(node, ast.Dict) and all(node.keys):
        return {inner(key): inner(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    if isinstance(node, ast.List | ast.Tuple):
        return [inner(each) for each in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = inner(node.left), inner(node.right)
        if isinstance(left, str) and isinstance(right, str):
            return left + right
    if isinstance(node, ast.Call) and not node.args and all(word.arg for word in node.keywords):
        kind = TYPES.get(name_of(node.func))
        if kind or name_of(node.func)[:1].isupper():  # a class: Input, Output, Environment, a service
            return {**({"type": kind} if kind else {}), **{str(word.arg): inner(word.value) for word in node.keywords}}
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        raise _Computed from None
