"""Import light modules of the code that runs on a node: what a plan says and what a node says comes from one function.

The files of every bundle are imported from this installation, as the package `cloudtrain_node`.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from cloudtrain.errors import StoreError, reinstall_command

PACKAGE = "cloudtrain_node"
IN_MEMORY = ".cloudtrain/trainer/pickled.py"  # the script of DistributedTraining
CALL = ".cloudtrain/call/call.py"  # the script of cloudtrain.function


@cache
def module(name: str) -> ModuleType:
    """Return a module of the node's code, such as trainer.arguments."""
    if PACKAGE not in sys.modules:
        package = ModuleType(PACKAGE)
        package.__path__ = [str(folder())]
        sys.modules[PACKAGE] = package
    return import_module(f"{PACKAGE}.{name}")


def folder() -> Path:
    """Return the folder of this installation with the node's code. Raises StoreError."""
    package = Path(__file__).parents[1]
    found = next((at for at in (package / "_entrypoints", package.parent / "entrypoints") if at.is_dir()), None)
    if found is None:
        raise StoreError(
            "the installation of cloudtrain is incomplete: the files that run a job on a node are missing",
            reinstall_command(),
        )
    return found
