"""Start jobs through the image's own sagemaker-training toolkit (`options.sagemaker.entry: toolkit`); pure data.

The image's command, `train`, stays the first process. It unpacks the source channel and runs the launcher, which reads its
manifest from the hyperparameters as always. The user's arguments never pass through the toolkit, so it cannot change them.
The toolkit treats some files in a source specially; such a source is refused. Checked in the code of sagemaker-training
5.1.4, and in a container of the image that images/build.sh builds with TOOLKIT=1.
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
    """Return what the toolkit needs where no estimator adds it: its program, and the archive's path in the container."""
    return {"sagemaker_program": json.dumps(PROGRAM), "sagemaker_submit_directory": json.dumps(archive)}


def find_problems(files: Iterable[str], path: str) -> list[Problem]:
    """Return a problem for each source file that the toolkit would treat specially; `path` is the option in the job file."""
    names = set(files)
    hint = "entry: launcher, or keep the file in a folder (environment.requirements names it there)"
    return [Problem(f"{name} in the source: {why}", path, hint) for name, why in REFUSED.items() if name in names]
