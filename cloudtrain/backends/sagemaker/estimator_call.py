"""Convert a call of the SageMaker SDK, in a script or notebook, into a job. The code is read, never run.

The call is one of an estimator (SDK 2) or of ModelTrainer (SDK 3), whose arguments are objects such as Compute(...).
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cloudtrain.backends.sagemaker import hyperparameters
from cloudtrain.backends.sagemaker.estimator_channels import convert_channels
from cloudtrain.errors import BadRequest, page
from cloudtrain.job import launchers
from cloudtrain.source.literals import read_code

CLASSES = ("HuggingFace", "PyTorch", "TensorFlow", "SKLearn", "XGBoost", "Estimator", "ModelTrainer")
# Arguments of ModelTrainer that are objects: sagemaker-train 1.27.0, model_trainer.py and configs.py (2026-11-23).
OBJECTS = {
    "source_code": "SourceCode",
    "compute": "Compute",
    "networking": "Networking",
    "stopping_condition": "StoppingCondition",
    "output_data_config": "OutputDataConfig",
    "checkpoint_config": "CheckpointConfig",
}
INPUTS = {"fit": "inputs", "train": "input_data_config"}  # method -> its argument
READ = {
    *OBJECTS.values(),
    "InputData",
    "Channel",
    "DataSource",
    "S3DataSource",
    "FileSystemDataSource",
    "FileSystemInput",
}
FIRST = {"TrainingInput": "s3_data", "ShuffleConfig": "seed"}  # further objects -> their first argument
MODES = {"input_mode": "inputs.NAME.mode", "training_input_mode": "inputs.NAME.mode"}  # of channels that name none
# Arguments of sagemaker 2.257.7's estimators -> key of a job; a value is taken as it is.
KEYS = {
    "entry_point": "entrypoint",
    "source_dir": "source",
    "hyperparameters": "hyperparameters",
    "model_dir": "hyperparameters.model_dir",  # of TensorFlow's estimator
    "environment": "env",
    "image_uri": "image",
    "base_job_name": "name",
    "instance_type": "resources.instance_type",
    "instance_count": "num_nodes",
    "volume_size": "resources.disk_gb",
    "use_spot_instances": "resources.use_spot",
    "output_path": "output",
    "role": "options.sagemaker.role",
    "subnets": "options.sagemaker.subnets",
    "security_group_ids": "options.sagemaker.security_groups",
    "output_kms_key": "options.sagemaker.kms_key",
    "volume_kms_key": "options.sagemaker.volume_kms_key",
    "enable_network_isolation": "options.sagemaker.isolate",
    "encrypt_inter_container_traffic": "options.sagemaker.encrypt_traffic",
    "keep_alive_period_in_seconds": "options.sagemaker.keep_alive_s",
    "training_plan": "options.sagemaker.training_plan",
    "enable_infra_check": "options.sagemaker.infra_check",
    "enable_remote_debug": "options.sagemaker.remote_debug",
    "enable_session_tag_chaining": "options.sagemaker.session_chaining",
    "training_repository_credentials_provider_arn": "options.sagemaker.registry_credentials",
    "training_image": "image",
    "source_code.entry_script": "entrypoint",
    "source_code.source_dir": "source",
    "source_code.requirements": "environment.requirements",
    "source_code.command": "run",
    "compute.instance_type": "resources.instance_type",
    "compute.instance_count": "num_nodes",
    "compute.volume_size_in_gb": "resources.disk_gb",
    "compute.enable_managed_spot_training": "resources.use_spot",
    "compute.volume_kms_key_id": "options.sagemaker.volume_kms_key",
    "compute.keep_alive_period_in_seconds": "options.sagemaker.keep_alive_s",
    "compute.training_plan_arn": "options.sagemaker.training_plan",
    "networking.subnets": "options.sagemaker.subnets",
    "networking.security_group_ids": "options.sagemaker.security_groups",
    "networking.enable_network_isolation": "options.sagemaker.isolate",
    "networking.enable_inter_container_traffic_encryption": "options.sagemaker.encrypt_traffic",
    "output_data_config.s3_output_path": "output",
    "output_data_config.kms_key_id": "options.sagemaker.kms_key",
}


def _seconds(value: int) -> str:
    return f"{value}s"


CHANGED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "max_run": ("limits.max_runtime", _seconds),
    "max_wait": ("options.sagemaker.max_wait", _seconds),
    "stopping_condition.max_runtime_in_seconds": ("limits.max_runtime", _seconds),
    "stopping_condition.max_wait_time_in_seconds": ("options.sagemaker.max_wait", _seconds),
    "stopping_condition.max_pending_time_in_seconds": ("options.sagemaker.max_pending", _seconds),
    "source_code.args": ("args", lambda value: list(map(str, value))),
    "output_data_config.compression_type": ("options.sagemaker.compress", lambda value: value != "NONE"),
    "max_retry_attempts": ("retry.max_attempts", lambda value: value + 1),
    "disable_output_compression": ("options.sagemaker.compress", lambda value: not value),
    "training_repository_access_mode": ("options.sagemaker.private_registry", lambda value: value == "Vpc"),
    "metric_definitions": ("metrics", lambda value: {metric["Name"]: metric["Regex"] for metric in value}),
    "tags": (
        "labels",
        lambda value: dict(value) if isinstance(value, dict) else {tag["Key"]: tag["Value"] for tag in value},
    ),
}
CHECKPOINTS_NOTE = (
    "cloudtrain stores checkpoints below output and finds them again. To start from those that are there, write "
    "options.sagemaker.raw: {CheckpointConfig: {S3Uri: ...}}"
)
WITHOUT = {  # what needs no key, and why
    "distribution": "cloudtrain's launcher starts a rank for each GPU",
    "checkpoint_s3_uri": CHECKPOINTS_NOTE,
    "checkpoint_local_path": "/opt/ml/checkpoints is always uploaded",
    "sagemaker_session": "options.sagemaker has profile, region and bucket",
    "code_location": "options.sagemaker.bucket and prefix",
    "distributed": "cloudtrain's launcher starts a rank for each GPU",
    "checkpoint_config.s3_uri": CHECKPOINTS_NOTE,
    "checkpoint_config.local_path": "/opt/ml/checkpoints is always uploaded",
    "training_mode": "-t sagemaker-local runs the job in containers here",
}
METHODS = {  # of ModelTrainer, which add to a trainer; what they are given is written by hand
    "with_retry_strategy": "retry.max_attempts",
    "with_metric_definitions": "metrics",
    "with_infra_check_config": "options.sagemaker.infra_check",
    "with_remote_debug_config": "options.sagemaker.remote_debug",
    "with_session_chaining_config": "options.sagemaker.session_chaining",
    "with_checkpoint_config": "options.sagemaker.raw: {CheckpointConfig: ...}",
    "with_tensorboard_output_config": "options.sagemaker.raw: {TensorBoardOutputConfig: ...}",
}
NOTHING = (
    "input_data_config",
    "py_version",
    "debugger_hook_config",
    "disable_profiler",
    "enable_sagemaker_metrics",
)  # neither key nor note
VERSIONS = ("transformers_version", "pytorch_version", "tensorflow_version", "framework_version")
CHECKPOINTS = "/opt/ml/checkpoints"  # on SageMaker only
COMPUTED_NOTE = "{}: write this value yourself, because the script computes it: {}"


def convert_file(path: Path, *, asks: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the job and the notes of `convert` for a script or notebook; blocking. Raises BadRequest.

    `asks`: AWS is asked for the ARN of a role that is given by its name.
    """
    from cloudtrain.backends.sagemaker import doctor

    job, notes = convert(read_code(path))
    options = job.get("options", {}).get("sagemaker", {})
    role = options.get("role", "")
    if role and ":" not in role:  # a name, as the SDK takes it: `plan` makes no call
        if asks and (arn := doctor.find_role(os.environ.get("AWS_PROFILE"), role)):
            options["role"] = arn
        else:
            hint = f"write the ARN of {role}; init --from FILE -t sagemaker looks it up"
            notes.append(f"options.sagemaker.role: {hint}")
    return job, notes


def convert(code: str) -> tuple[dict[str, Any], list[str]]:
    """Return the job of the last call of CLASSES in a code, and notes on what it lacks; raises BadRequest without one.

    Values are literals, or names that the code gives literals. What is computed becomes a note.
    """
    try:
        tree = ast.parse(code)
    except SyntaxError as error:
        raise BadRequest(
            f"the code is not valid Python in line {error.lineno}: {error.msg}",
            "correct the line; the file must be a Python script or a notebook",
        ) from None
    every_call = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls = [call for call in every_call if _called(call) in CLASSES]
    if not calls:
        hint = "give the script or notebook that contains the call"
        if any(_called(call) == "from_recipe" for call in every_call):
            hint = "from_recipe names a recipe of AWS: write the recipe's script as the entrypoint of a job file"
        raise BadRequest(f"the file has no call of {', '.join(CLASSES)}", hint)
    names = dict(_literals(tree))
    job: dict[str, Any] = {}
    notes: list[str] = []
    versions = []
    mode = None
    call = max(calls, key=lambda call: call.lineno)
    for name, value, node in _arguments(call, names):
        key, change = (KEYS[name], None) if name in KEYS else CHANGED.get(name, (MODES.get(name, ""), None))
        if name in MODES and value is not _COMPUTED:
            mode = value
        elif name in VERSIONS:
            versions.append(f"{name} {value}")
        elif name in ("distribution", "distributed") and (replaced := _replaced(value, node)):
            notes.append(f"{name}: {replaced}")
        elif not key and name not in NOTHING:
            notes.append(f"{name}: {WITHOUT.get(name) or 'not a key of a job file; see ' + page('sagemaker-options')}")
        elif key and value is _COMPUTED:
            notes.append(COMPUTED_NOTE.format(key, ast.unparse(node)))
        elif key and value is not None:
            _put(job, key, change(value) if change else value)
    if versions and "image" not in job:
        notes.append(
            f"image: not set, so the job runs in Hugging Face's newest image; for {', '.join(versions)} set it to the URI "
            "of such an image"
        )
    for method in every_call:
        if set_by := METHODS.get(_called(method)):
            notes.append(COMPUTED_NOTE.format(set_by, ast.unparse(method.args[0] if method.args else method)))
    if mismatch := launchers.nodes_note(str(job.get("run", "")), job.get("num_nodes", 1), is_text=True):
        notes.append(f"run: {mismatch}")
    _add_inputs(job, [call, *(each for each in every_call if _called(each) in INPUTS)], names, notes, mode)
    for name, value in job.get("hyperparameters", {}).items():
        if value == CHECKPOINTS:
            job["hyperparameters"][name] = "{checkpoint_dir}"
            notes.append(
                f"hyperparameters.{name}: {{checkpoint_dir}} instead of {CHECKPOINTS}; a node puts the run's checkpoint "
                "folder there on every target"
            )
    if any(isinstance(value, bool | list | dict) for value in job.get("hyperparameters", {}).values()):
        job["arg_style"] = "hf"  # as SageMaker gives them: --fp16 True, and JSON
    return job, notes


_COMPUTED = object()


def _replaced(value: Any, node: ast.expr) -> str:
    """Return which way of starting the ranks cloudtrain does not have, and what replaces it; else ""."""
    called = {_called(each) for each in ast.walk(node) if isinstance(each, ast.Call)}
    objects = {name: True for kind, name in (("MPI", "mpi"), ("SMP", "modelparallel")) if kind in called}
    return ": ".join(filter(None, hyperparameters.replacement(value if isinstance(value, dict) else objects)))


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _arguments(call: ast.Call, names: Mapping[str, Any]) -> Iterator[tuple[str, Any, ast.expr]]:
    """Yield name, value and expression of a call's arguments; those of an object in it as compute.instance_type."""
    for keyword in call.keywords:
        value = _value(keyword.value, names)
        if keyword.arg in OBJECTS and isinstance(value, dict):
            yield from ((f"{keyword.arg}.{field}", each, keyword.value) for field, each in value.items())
        else:
            yield str(keyword.arg), value, keyword.value


def _literals(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Yield the names that a code gives a literal, in order."""
    known: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            value = known[node.targets[0].id] = _value(node.value, known)
            yield node.targets[0].id, value


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression of literals and known names, else _COMPUTED; of an object in READ its arguments."""
    if isinstance(node, ast.Call) and _called(node) in READ:
        return {str(keyword.arg): _value(keyword.value, names) for keyword in node.keywords}
    if isinstance(node, ast.Call) and _called(node) in FIRST:
        first = {FIRST[_called(node)]: _value(argument, names) for argument in node.args[:1]}
        return first | {str(keyword.arg): _value(keyword.value, names) for keyword in node.keywords}
    if isinstance(node, ast.Name):
        return names.get(node.id, _COMPUTED)
    if isinstance(node, ast.JoinedStr):
        parts = [_value(part.value if isinstance(part, ast.FormattedValue) else part, names) for part in node.values]
        return _COMPUTED if _COMPUTED in parts else "".join(map(str, parts))
    if isinstance(node, ast.Dict):
        items = [(_value(key, names) if key else _COMPUTED, _value(value, names)) for key, value in
                 zip(node.keys, node.values, strict=True)]  # fmt: skip
        return _COMPUTED if any(_COMPUTED in item for item in items) else dict(items)
    if isinstance(node, ast.List | ast.Tuple):
        found = [_value(item, names) for item in node.elts]
        return _COMPUTED if any(item is _COMPUTED for item in found) else found
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return _product(node, names)


def _product(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the value of 24 * 60 * 60, else _COMPUTED."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        sides = [_value(side, names) for side in (node.left, node.right)]
        if all(isinstance(side, int | float) for side in sides):
            return sides[0] * sides[1]
    return _COMPUTED


def _put(job: dict[str, Any], path: str, value: Any) -> None:
    *folders, name = path.split(".")
    for folder in folders:
        job = job.setdefault(folder, {})
    job[name] = {**job.get(name, {}), **value} if isinstance(value, dict) else value


def _add_inputs(
    job: dict[str, Any], calls: list[ast.Call], names: Mapping[str, Any], notes: list[str], mode: Any
) -> None:
    """Add the inputs that the last of some calls gives: a `fit`, a `train`, or the constructor of a ModelTrainer."""
    given = []
    for call in calls:
        first = call.args[:1] if _called(call) == "fit" else []
        wanted = INPUTS.get(_called(call), "input_data_config")
        given += [*first, *(word.value for word in call.keywords if word.arg == wanted)]
    for expression in given[-1:]:
        value = _value(expression, names)
        if value is None:
            continue
        if (converted := convert_channels(value, mode)) is None:
            notes.append(COMPUTED_NOTE.format("inputs", ast.unparse(expression)))
            continue
        job["inputs"], options, found = converted
        notes += found
        if options:
            _put(job, "options.sagemaker", options)
