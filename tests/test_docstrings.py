"""The docstrings of the public API: Google style, with every parameter, what is returned and what is raised."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import cloudtrain
from entrypoints.path import cloudtrain_runtime as runtime

SECTION = re.compile(r"^(Args|Returns|Raises|Attributes|Yields):$", re.MULTILINE)
# Methods that the classes have from other modules are steps of a submit, or pydantic's, and no part of the API.
PUBLIC_MODULES = {getattr(cloudtrain, name).__module__ for name in cloudtrain.__all__ if name != "__version__"}
PUBLIC_MODULES |= {base.__module__ for base in cloudtrain.Run.__mro__}
RUNTIME = [name for name, value in vars(runtime).items() if inspect.isfunction(value) and not name.startswith("_")]


def _public() -> Iterator[tuple[str, Any]]:
    """Yield name and object of the functions, classes and methods that users call."""
    for name in cloudtrain.__all__:
        value = getattr(cloudtrain, name)
        if inspect.isclass(value):
            yield name, value  # its parameters are its constructor's
            for method, each in inspect.getmembers(value):
                own = inspect.unwrap(getattr(each, "__func__", each))
                if not method.startswith("_") and inspect.isfunction(own) and own.__module__ in PUBLIC_MODULES:
                    yield f"{name}.{method}", each
        elif inspect.isfunction(value):
            yield name, value
    yield "Submitter.plan", cloudtrain.Submitter.plan
    yield from (
        (f"runtime.{name}", getattr(runtime, name))
        for name in RUNTIME
        if vars(runtime)[name].__module__ == runtime.__name__
    )


def _problems(value: Callable[..., Any]) -> list[str]:
    text = inspect.getdoc(value) or ""
    if not text:
        return ["has no docstring"]
    sections = {match[1]: part for match, part in zip(SECTION.finditer(text), SECTION.split(text)[2::2], strict=True)}
    try:
        signature = inspect.signature(value)
    except ValueError:  # an enumeration
        return []
    names = [name for name in signature.parameters if name not in ("self", "cls")]
    documented = re.findall(r"^\s+\*{0,2}(\w+): ", sections.get("Args", ""), re.MULTILINE)
    kept = re.findall(r"^\s+(\w+): ", sections.get("Attributes", ""), re.MULTILINE)  # a class may keep what it is given
    found = [f"Args lacks {name}" for name in names if name not in documented + kept]
    found += [f"Args has {name}, which is not a parameter" for name in documented if name not in names]
    returned = signature.return_annotation
    if names and not inspect.isclass(value) and returned not in (None, "None", "NoReturn", inspect.Signature.empty):
        found += [] if "Returns" in sections or "Yields" in sections else ["has no Returns"]
    if "Raises" not in sections and re.search(r"\b[Rr]aises [A-Z]\w+", text):
        found.append("names what it raises outside of a section Raises")
    return found


PUBLIC = {
    name: value
    for name, value in _public()
    if not name.startswith(("State.", "Status.", "Runs.")) and name not in ("State", "Status")
}


def test_every_public_docstring_is_complete():
    assert {name: found for name, value in PUBLIC.items() if (found := _problems(value))} == {}


def test_the_public_api_is_found():
    assert {
        "Job",
        "Job.load",
        "Submitter.submit",
        "Run.wait",
        "Run.fetch",
        "attach",
        "submit",
        "Sweep.stop",
    } <= PUBLIC.keys()
    assert {"runtime.install", "runtime.latest_checkpoint", "runtime.exit_resumable"} <= PUBLIC.keys()


def test_the_check_finds_what_is_missing():
    def bad(first: int, second: int) -> int:
        """Return a sum; raises ValueError.

        Args:
            first: A number.
            third: A number.
        """
        return first + second

    assert _problems(bad) == [
        "Args lacks second",
        "Args has third, which is not a parameter",
        "has no Returns",
        "names what it raises outside of a section Raises",
    ]
