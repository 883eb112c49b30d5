"""A module of the user's own in a folder of its own, as a project has it, and calls that have ended."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import cloudtrain
from cloudtrain.backends import registry
from cloudtrain.events import State, Status
from cloudtrain.runs.run import Run
from cloudtrain.testing.memory import MemoryBackend


def scaled(x, factor=2):
    return x * factor


scaled.__module__ = "__main__"  # as in a script: it travels by value


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], ModuleType]]:
    """Return a function that writes a module and imports it."""
    folder = tmp_path / "project"
    made: list[str] = []

    def make(name: str, text: str) -> ModuleType:
        path = folder.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        for package in path.parents:
            if package == folder:
                break
            (package / "__init__.py").touch()
        path.write_text(text)
        importlib.invalidate_caches()
        made.append(name.partition(".")[0])
        return importlib.import_module(name)

    monkeypatch.syspath_prepend(folder)
    yield make
    for name in list(sys.modules):
        if name.partition(".")[0] in made:
            del sys.modules[name]


@pytest.fixture
def ended(home: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that ends a call in memory, which has left these files."""
    monkeypatch.setattr(registry, "BUILT_IN", dict(registry.BUILT_IN))
    MemoryBackend.install()

    def end(files: dict[str, bytes], state: State | None = State.SUCCEEDED, **job: object) -> Run:
        def fetch(self, handle, into, what=()):
            folder = into / "outputs" / "returned"
            folder.mkdir(parents=True)
            for name, data in files.items():
                (folder / name).write_bytes(data)
            return into

        monkeypatch.setattr(MemoryBackend, "fetch", fetch)
        from cloudtrain.runs.submit import Submitter

        made = cloudtrain.function(scaled, output="/shared/runs", **job)
        monkeypatch.setattr("cloudtrain.runs.submit.Submitter", lambda target, **more: Submitter("memory", watch=False))
        run = made.submit(1)
        if state is not None:
            run.store.set_status(run.run_id, Status(state, 0 if state is State.SUCCEEDED else 1))
        return run

    return end
