"""Find a backend by name: the built-in table first, then the entry points `cloudtrain.backends` of installed packages.

It imports a backend's module only when that backend is used.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cloudtrain.backends.api import Backend, Plan, Traits
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BadRequest, MissingExtra, UnknownBackend
from cloudtrain.job.providers import BUILT_IN as BUILT_IN
from cloudtrain.job.providers import DEFAULT_TARGET

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from cloudtrain.backends.attached.backend import AttachedBackend

DEFAULT = DEFAULT_TARGET
GROUP = "cloudtrain.backends"
MOST = 64  # backends that are kept: the client of an SDK takes megabytes
RENEW_S = 60.0  # between two renewals of one
ATTACHED = "cloudtrain.backends.attached.backend:AttachedBackend"  # reads runs of others; no job names it


class Names(Collection[str]):
    """The names of all backends; a lookup of a built-in name does not look at installed packages."""

    def __contains__(self, name: object) -> bool:
        return name in BUILT_IN or name in _plugins()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*BUILT_IN, *_plugins()}))

    def __len__(self) -> int:
        return len({*BUILT_IN, *_plugins()})

    def __bool__(self) -> bool:
        return True


def names() -> list[str]:
    """Return the names of all backends, built-in and installed, without importing any."""
    return list(Names())


def backend_class(name: str) -> type[Backend]:
    """Return the class of a backend; raises UnknownBackend, or MissingExtra with the pip command."""
    target, extra = BUILT_IN.get(name, (None, None))
    if target is None:
        target = _plugins().get(name)
    if target is None:
        from difflib import get_close_matches

        near = get_close_matches(name, names(), n=1)
        raise UnknownBackend(
            f"there is no backend or target {name!r}" + (f"; did you mean {near[0]}?" if near else ""),
            f"known backends: {', '.join(names())}",
        )
    try:
        return cast("type[Backend]", _load(target))
    except ModuleNotFoundError as error:
        if extra is None or (error.name or "").partition(".")[0] == "cloudtrain":
            raise
        raise MissingExtra(f"the backend {name}", extra) from None


def traits(name: str) -> Traits:
    """Return what is always true of a backend; of one that is not installed here, what is true of most."""
    try:
        return backend_class(name).traits if name in Names() else Traits()
    except BadRequest:
        return Traits()


def priced_by(provider: str) -> type[Backend] | None:
    """Return the backend whose machines a price list's provider has, None for a provider that no backend describes."""
    for kind in loaded([provider] if provider in Names() else Names()):
        if provider and provider in (kind.name, kind.traits.rents) and kind.traits.prices:
            return kind
    return None


def loaded(several: Iterable[str] | None = None) -> Iterator[type[Backend]]:
    """Yield the classes of backends, of all by default; an installed package of others may not load."""
    for name in Names() if several is None else several:
        with suppress(BadRequest, ImportError):
            yield backend_class(name)


def create(name: str, options: Mapping[str, Any], home: Path, clock: Clock = SYSTEM) -> Backend:
    """Return a backend with validated options; its folder is `<home>/runs`."""
    return backend_class(name)(options, home / "runs", **_clock_of(clock))


def create_for(plan: Plan, home: Path, clock: Clock = SYSTEM) -> Backend:
    """Return the backend of a plan, over the options that the plan was made with."""
    return create(plan.backend, (plan.job.get("options") or {}).get(plan.backend) or {}, home, clock)


class Clients:
    """The backends that a watcher holds, by their options, for all threads; at most MOST."""

    def __init__(self, home: Path, clock: Clock = SYSTEM) -> None:
        self._home, self._clock = home, clock
        self._backends: dict[tuple[str, str], Backend] = {}
        self._renewed: dict[tuple[str, str], float] = {}  # monotonic

    def get(self, plan: Plan) -> Backend:
        """Return the backend of a plan."""
        key = _key(plan)
        backend = self._backends.get(key)
        if backend is None:
            backend = create_for(plan, self._home, self._clock)
            while len(self._backends) >= MOST:
                self._backends.pop(next(iter(self._backends)), None)
            backend = self._backends.setdefault(key, backend)
        return backend

    def renew(self, plan: Plan) -> Backend | None:
        """Make a new backend after a refusal, since credentials may have been renewed; None within RENEW_S."""
        key, moment = _key(plan), self._clock.monotonic()
        if moment - self._renewed.get(key, -RENEW_S) < RENEW_S:
            return None
        self._renewed[key] = moment
        self._backends.pop(key, None)
        return self.get(plan)


def _key(plan: Plan) -> tuple[str, str]:
    options = (plan.job.get("options") or {}).get(plan.backend) or {}
    return plan.backend, json.dumps(options, sort_keys=True, default=str)


def create_attached(home: Path, clock: Clock = SYSTEM) -> AttachedBackend:
    """Return the backend that reads runs which were submitted elsewhere."""
    return cast("type[AttachedBackend]", _load(ATTACHED))({}, home / "runs", **_clock_of(clock))


def _clock_of(clock: Clock) -> dict[str, Any]:
    """Return a constructor's argument; the system's clock is the default, and the class of a plugin may take none."""
    return {} if clock is SYSTEM else {"clock": clock}


def _load(target: str) -> object:
    """Import "module:class" and return the class."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def _plugins() -> dict[str, str]:
    return {point.name: point.value for point in installed(GROUP)}


def installed(group: str) -> list[EntryPoint]:
    """Return the entry points of a group by name; of two with one name, the one that is first on sys.path.

    Args:
        group: a group of cloudtrain's, such as "cloudtrain.backends".
    """
    points = [point for point in _entry_points(tuple(sys.path)) if point.group == group]
    return sorted({point.name: point for point in reversed(points)}.values(), key=lambda point: point.name)


@cache
def _entry_points(folders: tuple[str, ...]) -> list[EntryPoint]:
    """Return the entry points of packages that name a group of cloudtrain's, read once in a process.

    importlib.metadata reads the metadata of every package, some 20 ms a call.
    """
    found: list[EntryPoint] = []
    for folder in dict.fromkeys(folders):
        try:
            with os.scandir(folder or ".") as entries:
                packages = [each.path for each in entries if each.name.endswith((".dist-info", ".egg-info"))]
        except OSError:
            continue
        for package in packages:
            try:
                with open(f"{package}/entry_points.txt", "rb") as file:
                    named = b"[cloudtrain." in file.read()
            except OSError:
                continue
            if named:
                from importlib.metadata import Distribution

                found += Distribution.at(package).entry_points
    return found
