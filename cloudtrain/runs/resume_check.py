"""Check whether a user's script shows any sign of resuming from a checkpoint; a retry is of no use otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle

SUFFIXES = (".py", ".sh", ".yaml", ".yml", ".toml", ".json", ".cfg")
LONGEST = 1 << 20  # bytes of a file that are looked at
MOST = 2000  # files
# Our own folder and functions, and what the Trainer, Accelerate, DeepSpeed, Lightning, fairseq and hand-written loops call
# it. Rather too many than too few: no warning about a script that does resume.
_SIGN = re.compile(
    rb"CHECKPOINT_DIR|cloudtrain_runtime|resum|restor|load_state|torch\.load|CheckpointManager|distributed\.checkpoint"
    rb"|(?:load|last|latest|newest|find|read)_?(?:checkpoint|ckpt|snapshot)|(?:checkpoint|ckpt|snapshot)_?(?:path|dir|file)",
    re.IGNORECASE,
)


def note(job: Job, bundle: Bundle) -> str:
    """Return what to tell a person whose job gives a script of their own several attempts, though it cannot resume, as far
    as can be seen; "" where there is nothing to tell.

    The source is read until the first sign, a megabyte of a file at most.
    """
    arguments = " ".join([*job.args, *job.hyperparameters, *job.env]).encode("utf-8", "replace")
    root = Path(bundle.source)
    if _SIGN.search(arguments) or any(_shows(root / name) for name in _first([file.path for file in bundle.files])):
        return ""
    return (
        f"{job.retry.max_attempts} attempts, but nothing in the source looks like resuming: each would begin anew; save below "
        "$CLOUDTRAIN_CHECKPOINT_DIR and load what is there, or set retry.max_attempts to 1"
    )


def _first(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.endswith(SUFFIXES)][:MOST]


def _shows(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return _SIGN.search(stream.read(LONGEST)) is not None
    except OSError:
        return True  # changed while it was looked at: nothing is known, and nothing said
