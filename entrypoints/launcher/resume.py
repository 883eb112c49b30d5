"""Find the checkpoint of a script that knows how to resume, and write its `resume_args`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from .manifest import Manifest

CHECKPOINT = "{checkpoint}"


def arguments(manifest: Manifest, folders: Iterable[str]) -> list[str]:
    """Return `resume_args` with the newest complete checkpoint's path in place of {checkpoint}.

    Empty on the first attempt, and where no folder holds a complete checkpoint. Reads the checkpoint's files.
    """
    if not manifest.resume_args or manifest.attempt == 1:
        return []
    path = newest_checkpoint(folders)
    return [argument.replace(CHECKPOINT, path) for argument in manifest.resume_args] if path else []


def newest_checkpoint(folders: Iterable[str]) -> str | None:
    """Return the complete checkpoint-N, step_N or epoch_N that was written last in any of the folders, None without."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if here not in sys.path:
        sys.path.insert(0, here)
    import runtime

    found = [path for folder in folders if (path := runtime.latest_checkpoint(folder))]
    return max(found, key=os.path.getmtime, default=None)
