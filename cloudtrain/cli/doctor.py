"""cloudtrain doctor: what would stand in the way, here and at a target."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

from cloudtrain.cli.view import options, runs, terminal
from cloudtrain.errors import CloudtrainError

FREE_BYTES = 1 << 30


class Finding(NamedTuple):
    """One thing that was looked at."""

    what: str
    ok: bool | None  # None: neither good nor bad
    said: str
    hint: str = ""


@options.command()
@click.argument("target", required=False, shell_complete=options.complete_targets)
@options.json_option
def command(target: str | None, as_json: bool) -> int:
    """Check this machine and a target for what would stand in the way.

    TARGET is a backend or a target of cloudtrain.toml; left out, it is local. Nothing is submitted. Exits with 1 when
    something stands in the way.
    """
    found = list(findings(target or "local"))
    bad = [finding for finding in found if finding.ok is False]
    if as_json:
        terminal.print_json([finding._asdict() for finding in found], indent=2)
    else:
        marks = {True: "ok", False: "PROBLEM", None: "-"}
        rows = [(marks[f.ok], f.what, f.said + (f" ({f.hint})" if f.hint else "")) for f in found]
        terminal.table(("", "what", "found"), rows, styles={"ok": "green", "PROBLEM": "bold red"})
        terminal.say(
            "", f"{len(bad)} problem{'s' * (len(bad) != 1)}" if bad else "everything that was looked at is fine"
        )
    return 1 if bad else 0


def findings(target: str, options: Mapping[str, Any] | None = None) -> Iterator[Finding]:
    """Yield what is found on this machine and at a target, one after the other; blocking, on the network too.

    `options` are laid over the target's own. Raises UnknownBackend, MissingExtra, BadRequest.
    """
    yield from _machine()
    yield from _target(target, options or {})


def _machine() -> Iterator[Finding]:
    from cloudtrain import __version__
    from cloudtrain.job import targets

    yield Finding("cloudtrain", True, f"{__version__}, in {Path(__file__).parents[1]}")
    fits = sys.version_info >= (3, 11)
    yield Finding(
        "python", fits, f"{sys.version.split()[0]}, {sys.executable}", "" if fits else "3.11 or newer is needed"
    )
    yield _git()
    home = targets.home()
    yield _disk(home)
    yield _history(home)
    for package, extra in (("torch", "train"), ("accelerate", "train"), ("transformers", "train")):
        yield _installed(package, extra)
    gpus = sorted(path.name for path in Path("/proc/driver/nvidia/gpus").glob("*")) if sys.platform == "linux" else []
    yield Finding("accelerators", None, f"{len(gpus)} NVIDIA" if gpus else f"none; {os.cpu_count()} CPUs")


def _git() -> Finding:
    import subprocess

    found = shutil.which("git")
    if found is None:
        return Finding("git", False, "not found", "install git: it decides which files are packaged")
    shown = subprocess.run([found, "--version"], capture_output=True, text=True, check=False, timeout=60)
    return Finding("git", shown.returncode == 0, shown.stdout.strip() or shown.stderr.strip())


def _disk(home: Path) -> Finding:
    parent = next((folder for folder in (home, *home.parents) if folder.exists()), Path("/"))
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        return Finding("home", False, f"{home} cannot be written", "set CLOUDTRAIN_HOME")
    free = shutil.disk_usage(parent).free
    hint = "" if free >= FREE_BYTES else "less than 1 GiB: free some space or set CLOUDTRAIN_HOME"
    return Finding("home", free >= FREE_BYTES, f"{home}, {runs.size(free)} free", hint)


def _history(home: Path) -> Finding:
    if not (home / "history.sqlite3").exists():
        return Finding("history", None, "none yet")
    from cloudtrain.history.store import Store

    store = Store(home)
    try:
        count = len(store.names())
    except CloudtrainError as error:
        return Finding("history", False, error.message, error.hint)
    told = store.warnings
    return Finding("history", not told, "; ".join([f"{count} run{'s' * (count != 1)}", *told]))


def _installed(package: str, extra: str) -> Finding:
    """Look a package's version up without importing it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return Finding(package, True, version(package))
    except PackageNotFoundError:
        return Finding(
            package, None, "not installed", f"pip install 'cloudtrain[{extra}]' for the shared trainer on local"
        )


def _target(name: str, options: Mapping[str, Any]) -> Iterator[Finding]:
    from cloudtrain.backends import registry
    from cloudtrain.backends.api import HasCapacity
    from cloudtrain.job import targets

    known = targets.named_targets()
    place = known.get(name)
    backend = place.backend if place else name
    made = registry.create(backend, {**(place.options.value if place else {}), **options}, targets.home())
    problems = made.check()
    what = f"target {name}" if place else f"backend {name}"
    for problem in problems:
        path = f"{problem.path}: " if problem.path else ""
        yield Finding(what, False, path + problem.message, problem.hint)
    if not problems:
        yield Finding(what, True, "ready" + (f", backend {backend}" if place else ""))
        if isinstance(made, HasCapacity):
            yield Finding("GPUs there", None, made.capacity())
