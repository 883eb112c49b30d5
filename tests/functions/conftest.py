"""A module of the user's own in a folder of its own, as a project has it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest


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
