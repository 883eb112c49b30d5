"""An append-only log of who submitted, cancelled and deleted which run, and when: beside the history, and in a run's output.

    <home>/audit.jsonl                              one line of JSON for each action; only the owner may read it
    <output>/<run>/audit/<time>-<what>-<hex>.json   with `audit: true`, one object for each line, of the run alone

Nothing here changes a line. It names runs and machines, and holds no argument, variable or file of a job. The output is
written beside the machine's own log, in a thread: a store that does not answer delays nothing for longer than WAIT_S.
What could not be written there is a line `not copied` of the machine's own log.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import registry
from cloudtrain.errors import BackendError, CloudtrainError, DiskError
from cloudtrain.events import is_shallow, short_reason
from cloudtrain.job.units import now

if TYPE_CHECKING:
    from cloudtrain.backends.store.files import Files
    from cloudtrain.job.job import Job

FILE = "audit.jsonl"
FIELDS = ("at", "who", "what", "run", "attempt", "target", "detail")
WAIT_S = 15.0
FOLDER = "audit"
MOST_LINES, MOST_BYTES = 10_000, 4096
_NAME = re.compile(r"\d{8}T\d{6}\.\d+Z-\w+-[0-9a-f]{8}\.json")


def append(
    home: Path, what: str, run_id: str, *, attempt: int | None = None, target: str = "", detail: str = ""
) -> dict[str, object]:
    """Add an action before it is done, and return its row; raises DiskError where it cannot be written."""
    given = {
        "at": now(),
        "who": f"{_user()}@{socket.gethostname()}",
        "what": what,
        "run": run_id,
        "attempt": attempt,
        "target": target,
        "detail": detail,
    }
    row: dict[str, object] = {name: value for name, value in given.items() if value not in (None, "")}
    line = json.dumps(row) + "\n"
    path = home / FILE
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line.encode())  # one write: lines of several processes do not mix
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DiskError(path, error) from None
    return row


def read(home: Path, run_id: str = "") -> Iterator[dict[str, object]]:
    """Yield the actions of runs whose ids begin with `run_id`, the oldest first; lines that are none are left out."""
    try:
        with open(home / FILE, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    row = json.loads(line)
                except ValueError:
                    continue  # a power cut has torn it
                if isinstance(row, dict) and str(row.get("run", "")).startswith(run_id):
                    yield {name: row[name] for name in FIELDS if name in row}
    except FileNotFoundError:
        return


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def output_is_here(backend: str, job: Job) -> bool:
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
            _add_to_output(job, row)
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
            append(home, "not copied", str(row["run"]), detail=detail)


def read_output(uri: str) -> list[dict[str, str]]:
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
            rows.append({field: short_reason(str(row[field])) for field in FIELDS if field in row})
    return rows


def _add_to_output(job: Mapping[str, Any], row: Mapping[str, Any]) -> None:
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
