"""Start jobs through the image's own sagemaker-training toolkit (`options.sagemaker.entry: toolkit`); pure data.

The image's command, `train`, stays the first process. It unpacks the source channel and runs the launcher, which reads its
manifest from the hyperparameters as always. The user's arguments never pass through the toolkit, so it cannot change them.
The toolkit treats some files in a source specially; such a source is refused. Checked in the code of sagemaker-training
5.1.4, and in a container of the image that images/build.sh builds with TOOLKIT=1.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import Problem
from cloudtrain.job import launchers

if TYPE_CHECKING:
    from cloudtrain.job.job import Job

PROGRAM = ".cloudtrain/launch.py"
NOTES = ("the image's toolkit does not forward SIGTERM to the script: no checkpoint is saved when the job is stopped",)
REFUSED = {
    "setup.py": "the toolkit would install the source as a package and run the launcher as its module",
    "requirements.txt": "the toolkit would install it over the image's own packages, torch included",
}


def hyperparameters(archive: str) -> dict[str, str]:
    """Return what the toolkit needs where no estimator adds it: its program, and the archive's path in the container."""
    return {"sagemaker_program": json.dumps(PROGRAM), "sagemaker_submit_directory": json.dumps(archive)}


# What sagemaker 2.257.7's HuggingFace._huggingface_distribution_configuration sends for it (2026-11-23).
TORCHRUN = {"torch_distributed": {"enabled": True}}
ENABLED, INSTANCE_TYPE = "sagemaker_torch_distributed_enabled", "sagemaker_instance_type"


def distribution_hyperparameters(options: Mapping[str, Any], instance_type: str) -> dict[str, str]:
    """Return what tells the image's toolkit to start the ranks with torchrun, {} without `distribution`."""
    return {ENABLED: "true", INSTANCE_TYPE: json.dumps(instance_type)} if options.get("distribution") else {}


def distribution_problems(job: Job, options: Mapping[str, Any], backend: str) -> list[Problem]:
    """Return what does not go with `distribution`: the toolkit's torchrun starts a launcher for each rank."""
    path = f"options.{backend}.distribution"
    distribution = options.get("distribution")
    if not distribution:
        return []
    name, instead = launchers.replacement(distribution)
    if name:
        return [Problem(f"{name}: cloudtrain's launcher cannot be started by it", path, f"remove it; {instead}")]
    if options.get("entry") != "toolkit":
        hint = "remove it: cloudtrain's launcher starts a rank for each GPU; or entry: toolkit"
        return [Problem("works only with options.sagemaker.entry: toolkit", path, hint)]
    if distribution != TORCHRUN:
        message = f"{', '.join(distribution)}: the launcher cannot be started by it, only by torch_distributed: {{enabled: true}}"
        return [Problem(message, path, "remove it: cloudtrain's launcher starts a rank for each GPU")]
    once = {
        "entrypoint": job.form != "script",
        "setup": job.setup,
        "keep": job.kept,
        "min_nodes": job.min_nodes,
        "roles": job.roles,
        "processes_per_node": job.processes != (job.resources.gpus or 1),
        f"options.{backend}.instance_groups": options.get("instance_groups"),
    }
    message = f"cannot be combined with {path}: torchrun starts one process for each GPU, for scripts, on machines of one type"
    return [Problem(message, key, "remove one of the two") for key, given in once.items() if given]


def find_problems(files: Iterable[str], path: str) -> list[Problem]:
    """Return a problem for each source file that the toolkit would treat specially; `path` is the option in the job file."""
    names = set(files)
    hint = "entry: launcher, or keep the file in a folder (environment.requirements: PATH)"
    return [Problem(f"{name} in the source: {why}", path, hint) for name, why in REFUSED.items() if name in names]
