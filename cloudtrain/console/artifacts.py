"""Files of a run on this machine: list and download its model, outputs and checkpoints.

A job chooses the names and may create links. A file is therefore opened component by component from the run's folder,
without following links or `..`: a path cannot leave the folder, even when a name changes meanwhile.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from cloudtrain.backends.api import FETCHABLE
from cloudtrain.errors import BadRequest
from cloudtrain.runs.run import Run

MAX_FILES = 2000  # listed
FETCHED = "fetched"  # folder below the home for results of other machines
_NO_LINK = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
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
    if record.attached is not None or record.backend != "local":
        return run.store.home / FETCHED / run.run_id
    output = str(record.job.get("output") or "").removeprefix("file://")
    if "://" in output:
        return run.store.home / FETCHED / run.run_id
    return (Path(output) if output else run.store.home / "runs") / run.run_id


def describe_missing_folder(run: Run) -> str:
    """Say that the folder of a run of this machine is gone, with its log and files; "" where it is there."""
    folder = run.store.home / "runs" / run.run_id
    if run.record.attached or run.record.backend != "local" or folder.is_dir() or run.attempts[-1].handle is None:
        return ""
    return f"The folder {folder} is missing: it was moved or deleted. Log, checkpoints and files of the run were in it."


def list_artifacts(run: Run) -> list[Artifact]:
    """List a run's files, the first 2,000 by name, without links."""
    root = results_folder(run)
    artifacts: list[Artifact] = []
    for name in FETCHABLE:
        if not (root / name).is_symlink():
            for artifact in _walk(root, name):
                artifacts.append(artifact)
                if len(artifacts) >= MAX_FILES:
                    return artifacts
    return artifacts


def _walk(root: Path, below: str) -> Iterator[Artifact]:
    try:
        with os.scandir(root / below) as entries:
            sorted_entries = sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return
    for entry in sorted_entries:
        path = f"{below}/{entry.name}"
        try:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(root, path)
            elif entry.is_file(follow_symlinks=False):
                yield Artifact(path, entry.stat(follow_symlinks=False).st_size)
        except OSError:
            continue  # deleted meanwhile


def open_artifact(run: Run, path: str) -> int:
    """Open one of a run's files and return the descriptor; raises BadRequest for anything else."""
    parts = path.split("/")
    if parts[0] not in FETCHABLE or not {"", ".", ".."}.isdisjoint(parts) or "\0" in path:
        raise BadRequest("the run has no file at this address")
    try:
        descriptor = os.open(results_folder(run), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for part in parts[:-1]:
            descriptor = _open_in(descriptor, part, _NO_LINK | os.O_DIRECTORY)
        descriptor = _open_in(descriptor, parts[-1], _NO_LINK | os.O_NONBLOCK)  # opening a pipe would block
    except OSError:
        raise BadRequest("the run has no file at this address") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadRequest("the run has no file at this address")
    return descriptor


def _open_in(folder_descriptor: int, name: str, flags: int) -> int:
    """Open a name in a folder, and close the folder."""
    try:
        return os.open(name, flags, dir_fd=folder_descriptor)
    finally:
        os.close(folder_descriptor)


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
