"""Find the checkpoint of a script that knows how to resume, and write its `resume_args`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from .environment import Prepared
from .manifest import Manifest
from .output import script_files
from .output.script_files import checkpoint_of, is_saved_state
from .world.cluster import SAGEMAKER, SAGEMAKER_OURS

CHECKPOINT = "{checkpoint}"
OURS = "epochs"  # runtime.EPOCHS: which starts the run had, in the folder of checkpoints


def arguments(manifest: Manifest, prepared: Prepared) -> list[str]:
    """Return `resume_args` with their placeholders replaced, {checkpoint} by the newest complete checkpoint's path.

    Empty where there is nothing to resume from, as on the run's first start: no complete checkpoint or, where no argument
    asks for its path, no file of an earlier start. Reads the checkpoint's files.
    """
    if not manifest.resume_args:
        return []
    filled = [prepared.fill(argument) for argument in manifest.resume_args]
    if not any(CHECKPOINT in argument for argument in filled):  # the script knows where its checkpoints are
        names = ("checkpoints", "outputs") if manifest.keep else ("checkpoints",)
        left = has_files(*(prepared.folders[name] for name in names)) or prepared.keeper.has_restored
        return filled if left or any(map(has_checkpoint, prepared.folders.values())) else []
    folders = [*prepared.folders.values(), *checkpoint_folders(prepared.folders), *prepared.keeper.folders]
    path = newest_checkpoint(dict.fromkeys(folders))
    return [argument.replace(CHECKPOINT, path) for argument in filled] if path else []


def has_checkpoint(folder: str) -> bool:
    """Return whether a folder has a file that is named as a checkpoint, or lies in one."""
    return any(checkpoint_of(name) or is_saved_state(name) for name in script_files.files(folder, [""]))


def has_files(*folders: str) -> bool:
    """Return whether earlier starts left a file in any of the run's folders; SageMaker's copy of a history is none."""
    history = os.path.basename(SAGEMAKER_OURS)
    return any(
        files and os.path.basename(at) != OURS and os.path.relpath(at, folder).split(os.sep)[0] != history
        for folder in folders
        for at, _, files in os.walk(folder)
    )


def checkpoint_folders(folders: Mapping[str, str]) -> list[str]:
    """Return where a script's checkpoints may lie: in {checkpoint_dir}, on SageMaker also in /opt/ml/checkpoints itself.

    The last one holds all that is copied from and to the output.
    """
    folder = folders["checkpoints"]
    inner = SAGEMAKER["checkpoints"]
    return [folder, os.path.dirname(folder)] if folder.endswith(os.sep + inner) else [folder]


def newest_checkpoint(folders: Iterable[str]) -> str | None:
    """Return the complete checkpoint-N, step_N or epoch_N that was written last in any of the folders, None without."""
    import cloudtrain_runtime as runtime

    found = [path for folder in folders if (path := runtime.latest_checkpoint(folder))]
    return max(found, key=os.path.getmtime, default=None)
