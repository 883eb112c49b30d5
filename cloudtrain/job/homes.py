"""The folder of the history, the runs and the packaged sources: where it is, its ignore file, its id."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from cloudtrain.errors import StoreError
from cloudtrain.source.atomic import temporary

HOME_FILE, HOME_ID = "home.id", "[0-9a-f]{12}"
IGNORE_ALL = "*\n"  # in a home's .gitignore
_BEFORE_HISTORY = {HOME_FILE, "bundles"}  # what plans of earlier versions left in a home


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

    It has a file of its own, beside the history: with it a history that was lost is made again.
    """
    path = folder / HOME_FILE
    for _ in range(2):
        with suppress(OSError):
            if re.fullmatch(HOME_ID, text := path.read_text("ascii", "replace")):
                return text
            path.unlink()  # a power cut has emptied it
        with suppress(OSError, StoreError), temporary(folder, HOME_FILE) as (stream, name):
            stream.write(os.urandom(6).hex().encode())
            stream.flush()
            os.link(name, path)  # of two processes one makes it
    return ""
