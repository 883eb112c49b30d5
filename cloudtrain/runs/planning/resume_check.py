"""Check whether a user's script shows any sign of resuming from a checkpoint; a retry is of no use otherwise."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloudtrain.job.job import Job
    from cloudtrain.source.texts import Texts

# Our own folder and functions, and what the Trainer, Accelerate, DeepSpeed, Lightning, fairseq and hand-written loops call
# it. Rather too many than too few: no warning about a script that does resume.
_SIGN = re.compile(
    r"CHECKPOINT_DIR|cloudtrain_runtime|resum|restor|load_state|torch\.load|CheckpointManager|distributed\.checkpoint"
    r"|(?:load|last|latest|newest|find|read)_?(?:checkpoint|ckpt|snapshot)|(?:checkpoint|ckpt|snapshot)_?(?:path|dir|file)",
    re.IGNORECASE,
)


def note(job: Job, texts: Texts) -> str:
    """Return what to tell a person whose job gives a script of their own several attempts, though it cannot resume, as far
    as can be seen; "" where there is nothing to tell, or not all of the source was read.
    """
    words = [*job.args, *job.hyperparameters, *job.env]
    if any(_SIGN.search(text) for text in (" ".join(words), *texts.files.values())) or not texts.complete:
        return ""
    return (
        f"{job.retry.max_attempts} attempts, but no code in the source seems to load a checkpoint, "
        "so each would start from the beginning; "
        "save in $CLOUDTRAIN_CHECKPOINT_DIR and load from it, or set retry.max_attempts to 1"
    )
