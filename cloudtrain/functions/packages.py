"""Which packages a function imports, as far as its code shows, and which of them its nodes may lack."""

from __future__ import annotations

import dis
import functools
import re
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import registry
from cloudtrain.backends.images import library_versions
from cloudtrain.functions.modules import is_own
from cloudtrain.functions.refusal import inside, plain
from cloudtrain.job.job import Job
from cloudtrain.runs.planning.attempts import backend_of

if TYPE_CHECKING:
    from cloudtrain.backends.api import Plan
    from cloudtrain.functions.packing import Packed

_MOST = 10_000  # objects that are looked at
_OURS = (
    "__main__",
    "cloudtrain",
    "cloudtrain_runtime",
    "cloudtrain_media",
    "cloudtrain_sampler",
    "cloudtrain_trainer",
    "cloudpickle",
)
_REQUIREMENT = re.compile(r"(?m)^[ \t]*([A-Za-z0-9][\w.-]*)")
_OTHER_FILES = re.compile(r"(?m)^[ \t]*(?:-r|-e|--requirement|--editable|\.|/)")  # may name more packages


def note(function: Callable[..., Any], packed: Packed, plan: Plan, home: Path) -> str:
    """Return which packages of a function its nodes may lack, "" for none.

    Args:
        function: the function of a call.
        packed: what of it travels.
        plan: the plan of the call.
        home: the folder of the history.
    """
    job, name = plan.job, plain(function).__name__
    if job.get("setup") or str(job["source"]).startswith("git+"):  # either may bring packages
        return ""
    names = imported(function, whole_module=packed.named)
    python = (job["options"].get(plan.backend) or {}).get("python") or sys.executable
    if registry.traits(plan.backend).in_place and python == sys.executable:
        missing = sorted(each for each in names - sys.modules.keys() if find_spec(each) is None)
        return f"{name} imports {', '.join(missing)}, which {sys.executable} does not have" if missing else ""
    file = Job.from_dict(dict(job)).environment.requirements
    text = Path(job["source"], file).read_text("utf-8", "replace") if file else ""
    if not names or _OTHER_FILES.search(text):
        return ""
    required = {_normal(each) for each in _REQUIREMENT.findall(text)}
    if any(library_versions(image) for image in backend_of(plan, home).facts(plan).images or ()):
        required |= {"numpy", "torch", "transformers"}
    known = packages_distributions()
    missing = sorted(each for each in names if required.isdisjoint(map(_normal, (each, *known.get(each, ())))))
    where = f"which {file} does not name" if file else "and the job has no requirements file"
    return f"{name} imports {', '.join(missing)}, {where}: its nodes must have them" if missing else ""


def imported(function: Callable[..., Any], *, whole_module: bool) -> set[str]:
    """Return the top names of the packages that a function imports and that are neither Python's nor the user's own.

    Args:
        function: the function.
        whole_module: whether a node imports its module, and does not have the code of the function alone.
    """
    todo: list[Any] = [function, *([sys.modules[function.__module__]] if whole_module else [])]
    seen: set[int] = set()
    names: set[str] = set()
    while todo and len(seen) < _MOST:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        is_module = isinstance(each, ModuleType)
        named = each if isinstance(each, type | FunctionType | BuiltinFunctionType) else type(each)
        name = str(each.__name__ if is_module else named.__module__ or "builtins")
        if name == "__main__" or is_own(name, sys.modules.get(name)):
            is_space = is_module or isinstance(each, type)
            todo += vars(each).values() if is_space else [type(each), *inside(each).values()]
            names |= set(_imports(each.__code__)) if isinstance(each, FunctionType) else set()
        elif isinstance(each, MethodType | functools.partial):
            todo += inside(each).values()
        else:
            names.add(name)
    tops = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - set(_OURS)
    return {top for top in tops if not is_own(top, sys.modules.get(top))}


def _imports(code: CodeType) -> Iterator[str]:
    """Yield the names of modules that code imports by absolute names, inner functions too."""
    instructions = [*dis.get_instructions(code)]
    for level, _, each in zip(instructions, instructions[1:], instructions[2:], strict=False):
        if each.opname == "IMPORT_NAME" and level.argval == 0:
            yield str(each.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _imports(inner)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
