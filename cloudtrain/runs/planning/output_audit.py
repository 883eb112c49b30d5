"""A run's audit log in its output, with `audit: true`: one object for each line, which nothing overwrites.

    <output>/<run>/audit/<time>-<what>-<hex>.json    a line as cloudtrain.history.audit writes it, without the machine's others

It is written beside the machine's own log, in a thread: a store that does not answer delays nothing for longer than
WAIT_S. What could not be written there is a line `not copied` of the machine's own log.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import registry
from cloudtrain.errors import BackendError, CloudtrainError
from cloudtrain.events import is_shallow, short_reason
from cloudtrain.history import audit

if TYPE_CHECKING:
    from cloudtrain.backends.store.files import Files
    from cloudtrain.job.job import Job

WAIT_S = 15.0
FOLDER = "audit"
MOST_LINES, MOST_BYTES = 10_000, 4096
_NAME = re.compile(r"\d{8}T\d{6}\.\d+Z-\w+-[0-9a-f]{8}\.json")


def is_here(backend: str, job: Job) -> bool:
    """Return whether a backend's output folder is one of this machine: on a login node those of Slurm are."""
    return registry.backend_class(backend).output_is_here(job.options.get(backend) or {})


@contextmanager
def copied(home: Path, job: Mapping[str, Any], row: Mapping[str, Any]) -> Iterator[None]:
    """Write a line to the run's output while something is done; blocking afterwards, for WAIT_S at most."""
    if not job.get("audit") or not job.get("output"):
        yield
        return
    failures: list[str] = []

    def write() -> None:
        try:
            _add(job, row)
        except (CloudtrainError, OSError) as error:
            failures.append(str(error))

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(WAIT_S)
        if thread.is_alive():
            failures.append(f"no answer for {WAIT_S:g} s")
        if failures:
            detail = short_reason(f"{row['what']} to {job['output']}: {failures[0]}")
            audit.append(home, "not copied", str(row["run"]), detail=detail)


def read(uri: str) -> list[dict[str, str]]:
    """Return the lines of the run at a URI, <output>/<run>, the oldest first; blocking.

    Whoever can write there can have written them: they are bounded, and hold the known fields alone. Raises BackendError.
    """
    from cloudtrain.backends.store.files import NotRead, report
    from cloudtrain.backends.store.open import opened  # a plan does not need it

    files = opened(uri)
    names = sorted(name for name in files.sizes(FOLDER) if _NAME.fullmatch(name))
    if len(names) > MOST_LINES:
        raise BackendError(f"{uri} has more than {MOST_LINES:,} lines of an audit log")
    rows = []
    for name in names:
        try:
            row = json.loads(files.read(f"{FOLDER}/{name}", MOST_BYTES) or b"")
        except NotRead as refused:
            report(refused)
            continue
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and is_shallow(row):
            rows.append({field: short_reason(str(row[field])) for field in audit.FIELDS if field in row})
    return rows


def _add(job: Mapping[str, Any], row: Mapping[str, Any]) -> None:
    moment = re.sub(r"[-:]", "", str(row["at"]))
    name = f"{row['run']}/{FOLDER}/{moment}-{re.sub(r'[^a-z]', '_', str(row['what']))}-{os.urandom(4).hex()}.json"
    _output(job).add(name, (json.dumps(row) + "\n").encode())


def _output(job: Mapping[str, Any]) -> Files:
    from cloudtrain.backends.store.open import opened

    output = str(job["output"])
    of_its_backend = list((job.get("options") or {}).items())[:1]
    for backend, options in of_its_backend if "://" in output else ():
        if options and (files := registry.backend_class(backend).open_output(output, options)):
            return files
    return opened(output)
