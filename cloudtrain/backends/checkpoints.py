"""SageMaker's copy of /opt/ml/checkpoints: where the script's checkpoints and a run's history lie in it.

    checkpoint_dir/    what the script finds in $CLOUDTRAIN_CHECKPOINT_DIR
    .cloudtrain/       the run's history and logs, and the files that `keep` names
    anything else      of a script that writes to /opt/ml/checkpoints itself, or of a run from before the two others

entrypoints/launcher/world/cluster.py has the same names.
"""

from __future__ import annotations

from pathlib import Path

CHECKPOINT_DIR = "checkpoint_dir/"
OURS = ".cloudtrain/"
# Where a run's history can lie below its output: this way, or, before there was OURS, among the checkpoints.
HISTORIES = ("", f"checkpoints/{OURS}", "checkpoints/")


def name_here(name: str) -> str:
    """Return the name below checkpoints/ that `fetch` gives to a file of the copy, "" for one of ours."""
    return "" if name.startswith(OURS) else name.removeprefix(CHECKPOINT_DIR)


def copy(source: Path, into: Path) -> None:
    """Copy a folder that was /opt/ml/checkpoints, under those names; blocking. Raises DiskError."""
    from cloudtrain.backends.download import copy_tree

    inner = CHECKPOINT_DIR.rstrip("/")
    copy_tree(source, into, leave_out=(inner, OURS.rstrip("/")))
    if (source / inner).is_dir():
        copy_tree(source / inner, into)
