"""Name what cannot travel to another machine: the variable, argument, attribute or item that holds it."""

from __future__ import annotations

import functools
import inspect
import io
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from types import CodeType, FunctionType, GeneratorType, MethodType
from typing import Any

from cloudtrain.errors import BadRequest
from cloudtrain.source.node_code import module

_MOST_ITEMS = 1000  # of a list or mapping, where a refusal looks for what cannot travel
_DEPTH = 4  # of objects in objects, where a refusal looks for the name of what cannot travel
_HINTS: Mapping[tuple[type, ...], tuple[str, str]] = {  # what has no meaning on another machine -> what to do instead
    (io.IOBase,): ("an open file", "open it on the node, inside the function that uses it"),
    (socket.socket,): ("a socket", "connect on the node, inside the function that uses it"),
    (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Semaphore, threading.Event): (
        "a lock",
        "create it on the node, inside the function that uses it",
    ),
    (GeneratorType,): ("a generator", "pass a list, or create it inside the function that uses it"),
}


def refusal(parts: Mapping[str, Any], error: Exception, fails: Callable[[Any], bool], where: str = "") -> BadRequest:
    """Return the error for parts that cannot be pickled, with the name of the variable or attribute that cannot.

    Args:
        parts: what was pickled, by name.
        error: what the pickler raised.
        fails: whether an object cannot be pickled.
        where: what follows the name.
    """
    name, value = culprit(parts, fails)
    reason, hint = _reason(value, error)
    return BadRequest(f"{name or 'what is sent'}{where} cannot be sent: {reason}", hint)


def named_arguments(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names of the parameters; by position where those are not known."""
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    with suppress(ValueError):  # a function of C may have no signature
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    return {f"the argument {name}": value for name, value in given.items()}


def culprit(parts: Mapping[str, Any], fails: Callable[[Any], bool], depth: int = _DEPTH) -> tuple[str, Any]:
    """Return the name of the part that cannot be pickled, down to the variable or attribute that holds it, and its value."""
    for name, part in parts.items():
        if not fails(part):
            continue
        found, value = culprit(inside(part), fails, depth - 1) if depth else ("", None)
        return (f"{found} of {name}", value) if found else (name, part)
    return "", None


def inside(part: Any) -> dict[str, Any]:
    """Return what an object consists of, by name: what a function captures, attributes, items."""
    if isinstance(part, MethodType):
        return {"the object": part.__self__}
    if isinstance(part, functools.partial):
        return {"the function": part.func, "the arguments": part.args, "the arguments by name": part.keywords}
    function = getattr(part, "__wrapped__", part)
    if isinstance(function, FunctionType):
        return {f"the variable {name}": value for name, value in _captured(function) if value is not part}
    if isinstance(part, Mapping):
        return {f"the item {key!r}": value for key, value in islice(part.items(), _MOST_ITEMS)}
    if isinstance(part, list | tuple):
        return {f"the item {at}": value for at, value in enumerate(part[:_MOST_ITEMS])}
    return {f"the attribute {name}": value for name, value in getattr(part, "__dict__", {}).items()}


def _captured(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables outside of a function that its code names, and its defaults."""
    for name in _names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it has no value yet
            yield name, cell.cell_contents
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is not parameter.empty:
            yield name, parameter.default


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _reason(value: Any, error: Exception) -> tuple[str, str]:
    for kinds, (what, hint) in _HINTS.items():
        if isinstance(value, kinds):
            return f"it is {what}", hint
    if module("trainer.pickles.pickler").is_on_gpu(value):
        return f"it is a tensor on {value.device}, and the node may have no such device", "pass tensor.cpu()"
    return f"{type(error).__name__}: {error}", "create it on the node, inside the function that uses it"


def plain(function: Callable[..., Any]) -> Any:
    """Return what has the name and the text of a callable: the function of a partial, the class of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if hasattr(function, "__name__") else type(function)
