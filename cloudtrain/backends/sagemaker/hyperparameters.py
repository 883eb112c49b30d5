"""Build a training job's HyperParameters: the script's own, the launcher's manifest, and what the SDK's estimator adds.

The launcher takes arguments from the manifest only. What SageMaker's console shows beside it are the hyperparameters as an
estimator writes them: each value as JSON.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from typing import Any

from cloudtrain.backends.manifest import Manifest
from cloudtrain.backends.sagemaker import limits
from cloudtrain.backends.sagemaker.toolkit import PROGRAM
from cloudtrain.errors import BadRequest

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
