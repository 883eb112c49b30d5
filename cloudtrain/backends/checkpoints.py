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
# Where a run's checkpoints are below its output: everywhere else, and on SageMaker.
FOLDERS = ("checkpoints", f"checkpoints/{CHECKPOINT_DIR}".rstrip("/"))
# Where a run's history can lie below its output: this way, or, before there was OURS, among the checkpoints.
HISTORIES = ("", f"checkpoints/{OURS}", "checkpoints/")


def name_here(name: str) -> str:
    """Return the name below checkpoints/ that `fetch` gives to a file of the copy, "" for one of ours."""
    return "" if name.startswith(OURS) else name.removeprefix(CHECKPOINT_DIR)


def lift(folder: Path) -> None:
    """Give the files of a folder that was copied as it is those names; blocking. Raises BackendError, DiskError."""
    import shutil

    from cloudtrain.source.folder_writer import folder_writer

    if (folder / CHECKPOINT_DIR).is_dir():
        with folder_writer(folder) as writer:
            for name, target in list(writer.names(CHECKPOINT_DIR.rstrip("/"))):
                if target:
                    writer.link(name_here(name), target)
                else:
                    writer.move(name, name_here(name))
    for name in (CHECKPOINT_DIR, OURS):
        shutil.rmtree(folder / name, ignore_errors=True)
