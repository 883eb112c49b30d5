"""The page docs/python.md: what a program imports, from the signatures and docstrings of the public API."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

HEAD = """\
# Python

`import cloudtrain` costs almost nothing: what is named here is loaded at its first use. Types are checked by editors and by
`mypy --strict`: a misspelt key of `Job(...)` is an error there. `help(cloudtrain.Job)` lists the keys, and [spec.md](spec.md)
those of its sections. Every error is a `CloudtrainError` with a sentence, and a `hint` where there is something to do.

```python
from cloudtrain import Job, submit

run = submit(Job(source=".", entrypoint="train.py", hyperparameters={"lr": 3e-4}), target="lab")
run.result()  # blocks; raises RunFailed unless the run succeeded
print(run.metrics("loss")[-1].value)
run.fetch("results")
```
"""
RUNTIME_HEAD = """\
## Inside a script

`import cloudtrain_runtime as runtime` in the script that is trained. It needs the standard library only, and works outside of cloudtrain too:
then there is one process, and its folders are below `runs/local`.
"""
ONLY = {"Submitter": ("plan", "submit", "submit_plan")}  # its other methods are steps of these
SECTION = re.compile(r"(Args|Returns|Raises):")


def page(written: str) -> str:
    """Return the text of the page; `written` is the line that says who wrote it."""
    import cloudtrain
    from cloudtrain.runs import listing

    sys.path.insert(0, str(Path(__file__).parents[1] / "entrypoints"))
    import runtime

    parts = [HEAD.rstrip(), "", written]
    for name in ("submit", "Submitter", "Run", "runs", "attach", "DistributedTraining"):
        entry = listing.runs if name == "runs" else getattr(cloudtrain, name)
        parts += ["", f"## {name}", "", *(_class(entry) if inspect.isclass(entry) else _function(name, entry))]
    parts += ["", RUNTIME_HEAD.rstrip(), *_runtime(runtime)]
    return "\n".join(parts) + "\n"


def _class(entry: type) -> Iterator[str]:
    yield from (f"`{entry.__name__}{_signature(entry.__init__)}`", "")
    yield from _text(entry)
    for name, member in _members(entry):
        yield from ("", f"### {entry.__name__}.{name}", "")
        if isinstance(member, property):
            yield from _text(member.fget)
        else:
            yield from _function(name, member)


def _members(entry: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that have a docstring, those of cloudtrain's base classes behind its own."""
    seen: set[str] = set()
    for base in entry.__mro__:
        for name, member in vars(base).items() if base.__module__.startswith("cloudtrain") else ():
            found = member.__func__ if isinstance(member, classmethod) else member
            if (
                name.startswith("_")
                or name in seen
                or name not in ONLY.get(entry.__name__, (name,))
                or not inspect.getdoc(found)
            ):
                continue
            seen.add(name)
            if isinstance(found, property) or inspect.isfunction(found):
                yield name, found


def _runtime(module: ModuleType) -> Iterator[str]:
    for name, entry in vars(module).items():
        if not name.startswith("_") and getattr(entry, "__module__", "") == module.__name__:
            yield from ("", f"### runtime.{name}", "")
            if inspect.isclass(entry):
                yield from _text(entry)
                yield from ("", f"Fields: {', '.join(f'`{field}`' for field in inspect.signature(entry).parameters)}.")
            else:
                yield from _function(name, entry)


def _function(name: str, entry: Any) -> Iterator[str]:
    yield from (f"`{name}{_signature(entry)}`", "")
    yield from _text(entry)


def _signature(entry: Any) -> str:
    signature = inspect.signature(entry)
    parts, starred = [], False
    for name, parameter in signature.parameters.items():
        if name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
        starred = starred or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        parts.append(f"{stars}{name}: {parameter.annotation}{default}")
    returned = "" if signature.return_annotation in ("None", signature.empty) else f" -> {signature.return_annotation}"
    return f"({', '.join(parts)}){returned}"


def _text(entry: Any) -> Iterator[str]:
    """Yield a docstring; arguments and errors become lists, `    code` becomes a block."""
    in_list = in_code = False
    for line in (inspect.getdoc(entry) or "").splitlines():
        if SECTION.fullmatch(line):
            in_list = True
            yield f"{line}\n"
        elif in_list and (entry_line := re.match(r"    ([\w*]+): (.*)", line)):
            yield f"- `{entry_line[1]}`: {entry_line[2]}"
        elif in_list and line.startswith("    "):
            yield f"  {line.strip()}"
        else:
            in_list = in_list and not line
            if line.startswith("    ") != in_code and line:
                in_code = not in_code
                yield "```python" if in_code else "```"
            yield line[4:] if in_code else line
    if in_code:
        yield "```"
