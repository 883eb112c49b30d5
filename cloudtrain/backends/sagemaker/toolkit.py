"""Training jobs under the image's own sagemaker-training toolkit (`options.sagemaker.entry: toolkit`); pure data.

The image's own command, `train`, stays the first process. It unpacks our channel and runs the launcher, which finds its
orders where it always does: an argument of the user's never passes through the toolkit, so none can be changed by it.
What it would do besides, to a source that holds certain files, is refused. Read in sagemaker-training 5.1.4, and seen in
a container of the image that images/build.sh makes with TOOLKIT=1.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from cloudtrain.errors import Problem

PROGRAM = ".cloudtrain/launch.py"
NOTES = (
    "the image's toolkit is the first process: it passes no SIGTERM on, so that nothing is saved when the job is stopped",
)
REFUSED = {
    "setup.py": "the toolkit would install the source as a package and run the launcher as its module",
    "requirements.txt": "the toolkit would install it over the image's own packages, torch included",
}


def hyperparameters(archive: str) -> dict[str, str]:
    """Return what the toolkit reads: the launcher as the program, and where the source's archive lies in the container."""
    return {"sagemaker_program": json.dumps(PROGRAM), "sagemaker_submit_directory": json.dumps(archive)}


def problems(files: Iterable[str], path: str) -> list[Problem]:
    """Return what the toolkit would do with a source of these files; `path` is the option's in the job file."""
    found = set(files)
    hint = "entry: launcher, or keep the file in a folder (environment.requirements names it there)"
    return [Problem(f"{name} in the source: {why}", path, hint) for name, why in REFUSED.items() if name in found]
