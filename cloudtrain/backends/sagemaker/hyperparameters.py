"""Build a training job's HyperParameters: the script's own, the launcher's manifest, and what estimator and toolkit add.

The launcher takes arguments from the manifest only. What SageMaker's console shows beside it are the hyperparameters as an
estimator writes them: each value as JSON.

With `options.sagemaker.entry: toolkit` the image's own sagemaker-training toolkit starts the job. The image's command,
`train`, stays the first process, unpacks the source channel and runs the launcher. The user's arguments never pass through
it, so it cannot change them. It treats some files in a source specially; such a source is refused. Checked in the code of
sagemaker-training 5.1.4, and in a container of the image that images/build.sh builds with TOOLKIT=1.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.manifest import Manifest
from cloudtrain.backends.sagemaker import limits
from cloudtrain.errors import BadRequest, Problem

if TYPE_CHECKING:
    from cloudtrain.job.job import Job

PROGRAM = ".cloudtrain/launch.py"
TOOLKIT_NOTES = (
    "the image's toolkit does not forward SIGTERM to the script: no checkpoint is saved when the job is stopped",
)
REFUSED = {
    "setup.py": "the toolkit would install the source as a package and run the launcher as its module",
    "requirements.txt": "the toolkit would install it over the image's own packages, torch included",
}
# What sagemaker 2.257.7's HuggingFace._huggingface_distribution_configuration sends for it (2026-11-23).
TORCHRUN = {"torch_distributed": {"enabled": True}}
ENABLED, INSTANCE_TYPE = "sagemaker_torch_distributed_enabled", "sagemaker_instance_type"
# What starts the ranks in the SageMaker SDK and not here, and what replaces it (sagemaker 2.257.7, fw_utils.py)
REPLACED = {
    "modelparallel": "write parallelism: {strategy: fsdp}, and use torch's FSDP in a script of your own",
    "dataparallel": 'the launcher starts a rank for each GPU: in the script, init_process_group("nccl") instead of "smddp"',
    "mpi": "the launcher starts a rank for each GPU: in the script, torch.distributed instead of MPI or Horovod",
}
PIECE = "ct_manifest_"
MANIFEST_FILE = "manifest"
MAX_OBJECT = 16 * 1024 * 1024
LOG_LEVEL = 20  # an estimator's default, logging.INFO
_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?"


def script_mode(archive: str, job_name: str, region: str) -> dict[str, str]:
    """Return what an estimator of sagemaker 2.257.7 with `entry_point` adds (Framework._script_mode_hyperparam_update)."""
    added = {
        "sagemaker_submit_directory": archive,
        "sagemaker_program": PROGRAM,
        "sagemaker_container_log_level": LOG_LEVEL,
        "sagemaker_job_name": job_name,
        "sagemaker_region": region,
    }
    return {name: json.dumps(value) for name, value in added.items()}


def build_hyperparameters(
    manifest: Manifest, pieces: Sequence[str], added: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Return the hyperparameters of an attempt, and a note on those of the script that the API's limits leave out."""
    own = {**added, **{f"{PIECE}{number}": json.dumps(piece) for number, piece in enumerate(pieces)}}
    shown: dict[str, str] = {}
    left_out = []
    for name, value in (manifest.hyperparameters or {}).items():
        text = json.dumps(_python_value(value))
        long = len(name) > limits.MAX_NAME or len(text) > limits.MAX_VALUE
        if long or name in own or name.startswith(PIECE) or len(shown) + len(own) >= limits.MAX_HYPERPARAMETERS:
            left_out.append(name[:40])
        else:
            shown[name] = text
    note = f"the script gets these hyperparameters, but the SageMaker console does not show them: {', '.join(left_out)}"
    return {**shown, **own}, [note] * bool(left_out)


def encode_manifest(manifest: Manifest, longest: int | None = None) -> tuple[list[str], str]:
    """Return a manifest's pieces for hyperparameters, or the content of an S3 object where it is longer than 64 KiB.

    `longest` is a smaller limit, in characters.
    """
    with suppress(BadRequest):
        pieces = manifest.encode()
        if longest is None or sum(map(len, pieces)) <= longest:
            return pieces, ""
    return [], manifest_object(manifest)


def manifest_object(manifest: Manifest) -> str:
    """Return the content of a manifest's object in S3."""
    return replace(manifest, about={}).pack(MAX_OBJECT)


def object_folder(root: str, content: str) -> str:
    """Return the S3 prefix of the object with such a content; `root` is s3://, the bucket and the folder in it."""
    return f"{root}/manifests/{hashlib.sha256(content.encode()).hexdigest()}/"


def _python_value(value: Any) -> Any:
    """Return a job's hyperparameter as a notebook would hold it: texts of numbers are numbers, where nothing is lost."""
    if isinstance(value, list):
        return [_python_value(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _python_value(item) for name, item in value.items()}
    if isinstance(value, str) and len(value) <= 40 and re.fullmatch(_NUMBER, value):
        number = json.loads(value)
        if math.isfinite(number) and Decimal(repr(number)) == Decimal(value):
            return number
    return value


def toolkit_hyperparameters(options: Mapping[str, Any], archive: str) -> dict[str, str]:
    """Return what `entry: toolkit` needs where no estimator adds it: its program, and the archive in its channel."""
    if options.get("entry") != "toolkit":
        return {}
    path = f"/opt/ml/input/data/{archive}"
    return {"sagemaker_program": json.dumps(PROGRAM), "sagemaker_submit_directory": json.dumps(path)}


def distribution_hyperparameters(options: Mapping[str, Any], instance_type: str) -> dict[str, str]:
    """Return what tells the image's toolkit to start the ranks with torchrun, {} without `distribution`."""
    return {ENABLED: "true", INSTANCE_TYPE: json.dumps(instance_type)} if options.get("distribution") else {}


def replacement(distribution: Mapping[str, Any]) -> tuple[str, str]:
    """Return the first part of an estimator's `distribution` that cloudtrain cannot use, and what replaces it; else ""."""
    named = {**distribution, **(distribution.get("smdistributed") or {})}
    return next(((name, hint) for name, hint in REPLACED.items() if name in named), ("", ""))


def distribution_problems(job: Job, options: Mapping[str, Any], backend: str) -> list[Problem]:
    """Return what does not go with `distribution`: the toolkit's torchrun starts a launcher for each rank."""
    path = f"options.{backend}.distribution"
    distribution = options.get("distribution")
    if not distribution:
        return []
    name, instead = replacement(distribution)
    if name:
        return [Problem(f"the framework {name} cannot start cloudtrain's launcher", path, f"remove it; {instead}")]
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


def source_problems(files: Iterable[str], path: str) -> list[Problem]:
    """Return a problem for each source file that the toolkit would treat specially; `path` is the option in the job file."""
    names = set(files)
    hint = "entry: launcher, or keep the file in a folder (environment.requirements: PATH)"
    return [Problem(f"{name} in the source: {why}", path, hint) for name, why in REFUSED.items() if name in names]
