"""The folder of the history, the runs and the packaged sources: where it is, its ignore file, its id.

Its files appear whole or not at all, whatever happens to the process that writes them.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from cloudtrain.errors import StoreError

HOME_FILE, HOME_ID = "home.id", "[0-9a-f]{12}"
PLACE_FILE = "home.place"
IGNORE_ALL = "*\n"  # in a home's .gitignore
_BEFORE_HISTORY = {HOME_FILE, PLACE_FILE, "bundles"}  # what plans of earlier versions left in a home


def home() -> Path:
    """Return the folder of the history and the runs: $CLOUDTRAIN_HOME, or the platform's user data folder."""
    if chosen := os.environ.get("CLOUDTRAIN_HOME"):
        return Path(chosen).expanduser().absolute()
    from platformdirs import user_data_path

    return user_data_path("cloudtrain")


def make_home(folder: Path) -> None:
    """Make a home, and before anything else its ignore file: in a source folder it belongs neither to git nor to a bundle.

    A folder that holds something else already stays as it is. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if {path.name for path in folder.iterdir()} <= _BEFORE_HISTORY:
        (folder / ".gitignore").write_text(IGNORE_ALL)


def home_id(folder: Path) -> str:
    """Return the id of a home, which labels its runs on their platforms; made on first use, "" where it cannot be written.

    It has a file of its own, beside the history: with it a history that was lost is made again. A copy of a home gets
    another id.
    """
    path, origins = folder / HOME_FILE, _origins(folder)
    for _ in range(2):
        with suppress(OSError):
            text = path.read_text("ascii", "replace")
            if re.fullmatch(HOME_ID, text) and text not in origins:
                _note_place(folder, origins)
                return text
            path.unlink()  # a power cut has emptied it, or it is another home's
        with suppress(OSError, StoreError), temporary(folder, HOME_FILE) as (stream, name):
            stream.write(os.urandom(6).hex().encode())
            stream.flush()
            os.link(name, path)  # of two processes one makes it
    return ""


def original_of(folder: Path, home_label: str) -> str:
    """Return where the home is that submitted a run, as `host:folder`; "" where that is not a home that this one copies.

    Args:
        folder: the home that has the run.
        home_label: the run's label with the id of its home.
    """
    return _origins(folder).get(home_label, "")


def _origins(folder: Path) -> dict[str, str]:
    """Return id -> place of the homes that one is a copy of; a home that was moved is no copy."""
    try:
        place = json.loads((folder / PLACE_FILE).read_text("utf-8"))
        origins, here = dict(place["origins"]), folder.resolve()
        same = place["inode"] == here.stat().st_ino and place.get("changed", _changed(here)) == _changed(here)
        stays = place["path"] == str(here) or same
        moved = place["host"] == os.uname().nodename and not Path(place["path"]).exists()
        if not (stays or moved) and (known := _read_id(folder)):
            origins.setdefault(known, f"{place['host']}:{place['path']}")
        return origins
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _read_id(folder: Path) -> str:
    with suppress(OSError):
        return (folder / HOME_FILE).read_text("ascii", "replace")
    return ""


def _changed(folder: Path) -> int:
    """Return the nanosecond in which a home's id file was made, which no copy shares: roots of volumes share their inode."""
    with suppress(OSError):
        return (folder / HOME_FILE).stat().st_ctime_ns
    return 0


def _note_place(folder: Path, origins: dict[str, str]) -> None:
    """Write where a home is, which tells it from a copy of it."""
    here = folder.resolve()
    place = {"host": os.uname().nodename, "path": str(here), "inode": here.stat().st_ino, "changed": _changed(here)}
    place["origins"] = origins
    data, path = json.dumps(place).encode(), folder / PLACE_FILE
    with suppress(OSError, StoreError):
        if not path.is_file() or path.read_bytes() != data:
            with new_file(path) as file:
                file.write(data)


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that appears under its name when the block ends well, and leaves nothing behind otherwise.

    Its folder is made; only the owner may read it. Raises StoreError when it cannot be written.
    """
    with temporary(path.parent, path.name) as (stream, name):
        yield stream
        with explained(path.parent):
            stream.close()
            name.replace(path)


@contextmanager
def temporary(folder: Path, name: str) -> Iterator[tuple[IO[bytes], Path]]:
    """Open a file under a unique temporary name; it is deleted when the block ends unless it was renamed."""
    path = folder / f".{name}.{os.getpid()}-{time.perf_counter_ns():x}.tmp"
    try:
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with open(path, "xb", opener=_private) as stream:
                yield stream, path
    finally:
        with suppress(OSError):
            path.unlink()


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn the file system's complaints into one sentence."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{folder} cannot be written: {error.strerror}", "make room, or set CLOUDTRAIN_HOME") from None


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
