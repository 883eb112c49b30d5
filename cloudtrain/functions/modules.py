"""The user's own modules: which travel by value, and which a node finds by their name."""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from cloudtrain.source.node_code import PACKAGE

_REGISTRY = threading.RLock()  # cloudpickle's list of modules is one for all threads


@contextmanager
def by_value(source: Path | None = None) -> Iterator[None]:
    """Let the user's own modules be pickled whole, but for those of the packaged source: nodes have what is installed."""
    import cloudpickle

    with _REGISTRY:
        before = cloudpickle.list_registry_pickle_by_value()
        mine = [
            found
            for name, found in list(sys.modules.items())
            if name not in before and is_own(name, found) and not is_in(found, source)
        ]
        for each in mine:
            cloudpickle.register_pickle_by_value(each)
        try:
            yield
        finally:
            for each in mine:
                cloudpickle.unregister_pickle_by_value(each)


def is_own(name: str, module: Any) -> bool:
    """Return whether a module is a file of the user's, neither installed nor ours; a script is pickled by value anyhow."""
    return (
        isinstance(module, ModuleType)
        and bool(getattr(module, "__file__", None))
        and module.__name__ == name
        and name != "__main__"
        and name.partition(".")[0]
        not in ("cloudtrain", "cloudpickle", PACKAGE)  # cloudpickle travels beside the pickle
        and not _is_installed(str(module.__file__))
    )


def is_in(module: Any, source: Path | None) -> bool:
    """Return whether a node that starts in the packaged source finds a module there by its name."""
    if source is None or not getattr(module, "__file__", None):
        return False
    file = Path(os.path.realpath(module.__file__))
    place = Path(source.resolve(), *module.__name__.split("."))
    return file.with_name(file.name.partition(".")[0]) in (place, place / "__init__")


@functools.cache
def _is_installed(file: str) -> bool:
    return os.path.realpath(file).startswith(_installed())


@functools.cache
def _installed() -> tuple[str, ...]:
    """Return the folders of what is installed, and of Python itself."""
    paths = {path for name, path in sysconfig.get_paths().items() if name.endswith("lib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages()}
    return tuple(os.path.realpath(path) + os.sep for path in paths)
