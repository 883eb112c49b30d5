"""A Python function as a job: `cloudtrain.function` makes an object that submits its calls."""

from __future__ import annotations

import base64
import copy
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from cloudtrain.errors import BadRequest
from cloudtrain.functions import packing
from cloudtrain.functions.refusal import plain
from cloudtrain.source.node_code import CALL

if TYPE_CHECKING:
    from cloudtrain.backends.api import Plan
    from cloudtrain.runs.run import Run
    from cloudtrain.runs.submit import Submitter
    from cloudtrain.source.bundle import Bundle
    from cloudtrain.sweeps.sweep import Sweep

P = ParamSpec("P")
R = TypeVar("R")
_OURS = (
    "entrypoint",
    "run",
    "trainer",
    "args",
    "hyperparameters",
    "arg_style",
)  # keys of the job that a call sets itself


class Function(Generic[P, R]):
    """A function whose calls can be submitted. Calling it runs it here, as before.

    Args:
        call: The function.
        target: A backend or a target of cloudtrain.toml; None for the default.
        home: Folder of the history; None for CLOUDTRAIN_HOME or ~/.local/share/cloudtrain.
        job: Keys of the job, such as num_nodes and resources.
    """

    def __init__(self, call: Callable[P, R], target: str | None = None, home: Path | None = None, **job: Any) -> None:
        if ours := sorted(job.keys() & set(_OURS)):
            raise BadRequest(
                f"{ours[0]} is not an argument of cloudtrain.function", "a function is the entrypoint itself"
            )
        if not callable(call):
            raise BadRequest(
                f"a {type(call).__name__} is not a function",
                "write @classmethod or @property above @cloudtrain.function",
            )
        functools.update_wrapper(self, call)  # copies attributes of the call too: it goes first
        self.target, self.home, self.job = target, home, job

    __wrapped__: Callable[P, R]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.__wrapped__(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Function {getattr(self, '__qualname__', '')}>"

    def __get__(self, owner: Any, kind: type | None = None) -> Function[..., R]:
        """Return the method of an object, whose calls can be submitted too."""
        if owner is None:
            return self
        return Function(self.__wrapped__.__get__(owner, kind), self.target, self.home, **self.job)

    def __reduce__(self) -> Any:
        return copy.copy, (self.__wrapped__,)  # a node has no cloudtrain; the copy of a function is itself

    def plan(self, *args: P.args, **kwargs: P.kwargs) -> Plan:
        """Return what `submit` would send; nothing is sent and no run is stored.

        Args:
            args: Positional arguments of the function.
            kwargs: Keyword arguments of the function.

        Returns:
            The plan.

        Raises:
            BadRequest: As of `submit`.
        """
        with tempfile.TemporaryDirectory(prefix="cloudtrain-") as folder:
            return self._planned(Path(folder), args, kwargs)[1]

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Run:
        """Submit a call and return its run; blocks until the platform has answered.

        Args:
            args: Positional arguments of the function.
            kwargs: Keyword arguments of the function.

        Returns:
            The run; `run.result()` blocks until the call has returned, and is its value.

        Raises:
            BadRequest: The function or an argument cannot be sent, or the job is wrong.
            BackendError: The platform refuses the job; the run is FAILED.
            TypeError: The function does not take these arguments.
        """
        with tempfile.TemporaryDirectory(prefix="cloudtrain-") as folder:
            submitter, plan, bundle = self._planned(Path(folder), args, kwargs)
            run = submitter.adopt_or_send(plan, bundle)
        run.acknowledge()
        return run

    def map(self, values: Iterable[Any], *, max_parallel: int = 4, key: str | None = None) -> Sweep:
        """Submit a call for each value, as one group; returns when the first call is planned.

        The watcher of this machine starts the calls, each exactly once; this process may end.

        Args:
            values: The argument of each call.
            max_parallel: Calls that run at a time.
            key: Idempotency key: the same key returns the same group.

        Returns:
            The group, a sweep: `results()` are the values in the order of the calls.

        Raises:
            BadRequest: The function or a value cannot be sent, or the job is wrong.
            TypeError: The function does not take these arguments.
        """
        return self.starmap(((value,) for value in values), max_parallel=max_parallel, key=key)

    def starmap(self, calls: Iterable[Sequence[Any]], *, max_parallel: int = 4, key: str | None = None) -> Sweep:
        """Submit a call for each list of arguments, as one group; `map` with several arguments.

        Args:
            calls: The positional arguments of each call.
            max_parallel: Calls that run at a time.
            key: Idempotency key: the same key returns the same group.

        Returns:
            The group, a sweep: `results()` are the values in the order of the calls.

        Raises:
            BadRequest: The function or an argument cannot be sent, or the job is wrong.
            TypeError: The function does not take these arguments.
        """
        from cloudtrain.sweeps.sweep import begin

        each: list[tuple[Any, Any]] = [(tuple(args), {}) for args in calls]
        if not each:
            raise BadRequest(f"{plain(self.__wrapped__).__name__} has no calls", "pass at least one value")
        with tempfile.TemporaryDirectory(prefix="cloudtrain-") as folder:
            job, packed, _ = self._packed(Path(folder), each, files=True)
            document = {
                "name": job["name"],
                "job": job,
                "method": "grid",
                "parameters": {"call": {"values": list(range(len(each)))}},
                "max_parallel": max_parallel,
                "seed": 0,
            }
            return begin(document, Path.cwd(), target=self.target, home=self.home, key=key, extra=packed.files)

    def _planned(self, folder: Path, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Submitter, Plan, Bundle]:
        """Return what submits a single call, its plan and its bundle."""
        from cloudtrain.functions import packages
        from cloudtrain.runs.submit import Submitter

        job, packed, [data] = self._packed(folder, [(tuple(args), dict(kwargs))])
        more = ["--arguments", base64.b64encode(data).decode()] if packing.is_short(data) else []
        submitter = Submitter(self.target, home=self.home)
        plan, bundle = submitter.plan_job({**job, "args": [*job["args"], *more]}, extra=packed.files)
        if missing := packages.note(self.__wrapped__, packed, plan, submitter.home):
            plan = replace(plan, notes=(missing, *plan.notes))
        return submitter, plan, bundle

    def _packed(
        self, folder: Path, calls: Sequence[tuple[Any, Any]], *, files: bool = False
    ) -> tuple[dict[str, Any], packing.Packed, list[bytes]]:
        """Return the keys of the job that all of the calls share, and what travels with it; `files` as of `pack`."""
        from cloudtrain.job.problems import fit_name
        from cloudtrain.job.targets import home

        call = self.__wrapped__
        given = self.job.get("source")
        source = packing.source_of(call, given)
        packed, pickles = packing.pack(call, calls, source, folder, files=files)
        place = source or given or packing.text_folder(call, (self.home or home()) / "functions")
        args = ["--digest", packed.digest]
        if packed.has_code:
            args += ["--python", f"{sys.version_info.major}.{sys.version_info.minor}"]
        job = {
            "name": fit_name(plain(call).__name__),
            **self.job,
            "source": os.fspath(place),
            "entrypoint": CALL,
            "args": args,
        }
        return job, packed, pickles


@overload
def function(call: Callable[P, R] | Function[P, R], **options: Any) -> Function[P, R]: ...
@overload
def function(call: None = None, **options: Any) -> Callable[[Callable[P, R]], Function[P, R]]: ...
def function(call: Any = None, *, target: str | None = None, home: Path | None = None, **job: Any) -> Any:
    """Make the calls of a function jobs, as a decorator or as a call.

    Args:
        call: The function, or one that was decorated before, whose options the others then change.
        target: A backend or a target of cloudtrain.toml; None for the default.
        home: Folder of the history; None for CLOUDTRAIN_HOME or ~/.local/share/cloudtrain.
        job: Keys of the job: num_nodes, resources, limits, env, secrets, `source` for a folder that is to travel too.

    Returns:
        The function with `submit`, `map` and `starmap`; without `call`, the decorator.

    Raises:
        BadRequest: An option is one that a function sets itself, such as entrypoint.
    """
    if call is None:
        return lambda decorated: function(decorated, target=target, home=home, **job)
    if isinstance(call, Function):
        target, home, job = target or call.target, home or call.home, {**call.job, **job}
        call = call.__wrapped__
    return Function(call, target, home, **job)
