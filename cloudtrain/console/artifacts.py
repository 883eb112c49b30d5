"""Files of a run on this machine: list and download its model, outputs and checkpoints.

A job chooses the names and may create links: source/untrusted.py opens the files.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from cloudtrain.backends import registry
from cloudtrain.backends.api import FETCHABLE
from cloudtrain.errors import BadRequest
from cloudtrain.runs.run import Run
from cloudtrain.source import untrusted

MAX_FILES = 2000  # listed
MAX_ENTRIES = 100_000  # looked at, of each folder
FETCHED = "fetched"  # folder below the home for results of other machines
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Artifact:
    """A file of a run: its path below the run's folder."""

    path: str
    size_bytes: int


def results_folder(run: Run) -> Path:
    """Return the local folder of a run's results; for a remote run the folder that a fetch fills."""
    record = run.record
    if record.attached is not None and "://" not in record.attached:
        return Path(record.attached)
    if record.attached is not None or not registry.traits(record.backend).in_place:
        return run.store.home / FETCHED / run.run_id
    output = str(record.job.get("output") or "").removeprefix("file://")
    if "://" in output:
        return run.store.home / FETCHED / run.run_id
    return (Path(output) if output else run.store.home / "runs") / run.run_id


def describe_missing_folder(run: Run) -> str:
    """Say that the folder of a run of this machine is gone, with its log and files; "" where it is there."""
    folder = run.store.home / "runs" / run.run_id
    in_place = registry.traits(run.record.backend).in_place
    if run.record.attached or not in_place or folder.is_dir() or run.attempts[-1].handle is None:
        return ""
    return f"The folder {folder} is missing: it was moved or deleted. Log, checkpoints and files of the run were in it."


def list_artifacts(run: Run) -> list[Artifact]:
    """List a run's files, the first 2,000 by name of those that are found soon, without links."""
    root, artifacts = results_folder(run), list[Artifact]()
    for name in FETCHABLE:
        found = []
        with suppress(OSError):  # there is none, or more than is looked at
            for path, about in untrusted.walk(root, name, MAX_ENTRIES):
                if stat.S_ISREG(about.st_mode):
                    found.append(Artifact(f"{name}/{path}", about.st_size))
        artifacts += sorted(found, key=lambda artifact: artifact.path.split("/"))
    return artifacts[:MAX_FILES]


def open_artifact(run: Run, path: str) -> int:
    """Open one of a run's files and return the descriptor; raises BadRequest for anything else."""
    try:
        if path.partition("/")[0] not in FETCHABLE:
            raise OSError
        return untrusted.open_file(results_folder(run), path)
    except (OSError, UnicodeEncodeError):
        raise BadRequest("the run has no file at this address") from None


def read_pieces(descriptor: int, size_bytes: int) -> Iterator[bytes]:
    """Yield the first `size_bytes` of a file, which may still grow, and close it."""
    try:
        while size_bytes > 0 and (chunk := os.read(descriptor, min(CHUNK_BYTES, size_bytes))):
            size_bytes -= len(chunk)
            yield chunk
    finally:
        os.close(descriptor)


def download_url(run_id: str, path: str) -> str:
    """Return the path of the download; "" for a name that is not valid Unicode."""
    try:
        return f"/runs/{quote(run_id, safe='')}/files/{quote(path)}"
    except UnicodeEncodeError:
        return ""


def add_route() -> None:
    """Add the download route for files."""
    from fastapi import HTTPException
    from nicegui import app
    from starlette.responses import StreamingResponse

    from cloudtrain.console import history

    @app.get("/runs/{run_id}/files/{path:path}")
    async def download(run_id: str, path: str) -> StreamingResponse:
        try:
            descriptor = await history.current().query_run(run_id, lambda run: open_artifact(run, path))
        except Exception:
            raise HTTPException(404, "the run has no file at this address") from None
        name, size_bytes = quote(path.rpartition("/")[2], safe=""), os.fstat(descriptor).st_size
        headers = {
            "content-disposition": f"attachment; filename*=UTF-8''{name}",  # never rendered as a page
            "content-length": str(size_bytes),
            "content-security-policy": "sandbox; default-src 'none'",
        }
        return StreamingResponse(
            read_pieces(descriptor, size_bytes), media_type="application/octet-stream", headers=headers
        )
