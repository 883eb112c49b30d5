"""Check this machine for `cloudtrain doctor`: Python, git, disk, history, packages, and cloudtrain.toml, offline."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cloudtrain.backends import registry
from cloudtrain.errors import BadJob, BadRequest, CloudtrainError, MissingExtra, Problem, install_command
from cloudtrain.job import configfile, targets
from cloudtrain.job.problems import nearest
from cloudtrain.job.units import format_size
from cloudtrain.runs.planning.plan import find_invalid

if TYPE_CHECKING:
    from cloudtrain.job.configfile import Target

FREE_BYTES = 1 << 30


class Finding(NamedTuple):
    """The outcome of one check."""

    what: str
    ok: bool | None  # None: information, neither good nor bad
    message: str
    hint: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as `doctor --json` prints it."""
        return {"what": self.what, "ok": self.ok, "said": self.message, "hint": self.hint}


def check_machine() -> Iterator[Finding]:
    from cloudtrain.__about__ import __version__

    yield Finding("cloudtrain", True, f"{__version__}, in {Path(__file__).parents[2]}")
    fits = sys.version_info >= (3, 11)
    yield Finding(
        "python",
        fits,
        f"{sys.version.split()[0]}, {sys.executable}",
        "" if fits else "cloudtrain needs Python 3.11 or newer",
    )
    yield _check_git()
    home = targets.home()
    yield _check_disk(home)
    yield _check_history(home)
    for package, extra in (("torch", "train"), ("accelerate", "train"), ("transformers", "train")):
        yield _check_package(package, extra)
    gpus = sorted(path.name for path in Path("/proc/driver/nvidia/gpus").glob("*")) if sys.platform == "linux" else []
    yield Finding("accelerators", None, f"{len(gpus)} NVIDIA" if gpus else f"none; {os.cpu_count()} CPUs")


def _check_git() -> Finding:
    import subprocess

    git = shutil.which("git")
    if git is None:
        return Finding("git", False, "not found", "install git: cloudtrain uses it to decide which files to package")
    completed = subprocess.run([git, "--version"], capture_output=True, text=True, check=False, timeout=60)
    return Finding("git", completed.returncode == 0, completed.stdout.strip() or completed.stderr.strip())


def _check_disk(home: Path) -> Finding:
    parent = next((folder for folder in (home, *home.parents) if folder.exists()), Path("/"))
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        return Finding("home", False, f"{home} cannot be written", "set CLOUDTRAIN_HOME")
    free = shutil.disk_usage(parent).free
    hint = "" if free >= FREE_BYTES else "less than 1 GiB: free some space or set CLOUDTRAIN_HOME"
    return Finding("home", free >= FREE_BYTES, f"{home}, {format_size(free)} free", hint)


def _check_history(home: Path) -> Finding:
    if not (home / "history.sqlite3").exists():
        return Finding("history", None, "none yet")
    from cloudtrain.history.store import Store

    store = Store(home)
    try:
        store.check()
        count = len(store.names())
    except CloudtrainError as error:
        return Finding("history", False, error.message, error.hint)
    warnings = store.warnings
    return Finding("history", not warnings, "; ".join([f"{count} run{'s' * (count != 1)}", *warnings]))


def _check_package(package: str, extra: str) -> Finding:
    """Check the version of a package without importing it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return Finding(package, True, version(package))
    except PackageNotFoundError:
        return Finding(
            package, None, "not installed", f"{install_command(f'cloudtrain[{extra}]')} for the shared trainer on local"
        )


def find_config_problems(folder: Path) -> dict[str, list[Problem]]:
    """Return what is wrong in the configuration files that count for a folder, by target; reads them, opens no connection.

    Under "" stands what makes the files unusable. An option may be missing, because a job file can hold it. Options of a
    backend that is not installed are not checked.
    """
    unusable: list[Problem] = []
    documents = []
    for path in targets.config_files(folder):
        try:
            documents.append(configfile.read(path))
        except BadJob as error:
            unusable += error.problems
        except BadRequest as error:
            unusable.append(Problem(error.message, hint=error.hint))
    named: dict[str, Target] = {}
    try:
        named = configfile.targets(documents)
    except BadJob as error:
        unusable += error.problems
    found = {"": unusable, **{name: list(_of_target(target)) for name, target in named.items()}}
    return {name: problems for name, problems in found.items() if problems}


def _of_target(target: Target) -> Iterator[Problem]:
    path, mark = f"targets.{target.name}", target.options.mark(())
    try:
        kind = registry.backend_class(target.backend)
    except MissingExtra:
        return
    except BadRequest:
        near = nearest(target.backend, registry.names())
        hint = f"did you mean {near}?" if near else f"choose from {', '.join(registry.names())}"
        yield Problem(f"there is no backend {target.backend!r}", f"{path}.backend", hint, mark.file, mark.line)
        return
    options = targets.options_of(target)
    prefix = f"options.{target.backend}"
    for problem in find_invalid(options, kind, target.backend, target.name) if options else ():
        key = problem.path.removeprefix(prefix).lstrip(".")
        if not key or problem.message == "is missing":  # pydantic's word; the options of a job are laid over these
            continue
        mark = target.options.mark((key.partition(".")[0].partition("[")[0],))
        yield replace(problem, path=f"{path}.{key}", file=mark.file, line=mark.line)
