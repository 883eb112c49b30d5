"""What Azure Machine Learning receives: an environment for an image, and a command job. Pure.

Fields: `CommandJob` and `JobResourceConfiguration` of azure-rest-api-specs (machinelearningservices, 2024-10-01); the
rendering equals that of azure-ai-ml 1.35.2, `command(...)._to_job()._to_rest_object()` (tests/golden/azureml, 2026-11-30).
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from cloudtrain.backends import fetch_program
from cloudtrain.backends.machines import Machine, choose, find_machine, load, with_gpus
from cloudtrain.backends.manifest import Manifest
from cloudtrain.backends.plan import Plan
from cloudtrain.errors import BadJob, Problem
from cloudtrain.job.job import Job
from cloudtrain.source.bundle import Bundle

NAME = "azureml"
RUN_TAG, ATTEMPT_TAG = "cloudtrain_run", "cloudtrain_attempt"
EXPERIMENT = "cloudtrain"
ENVIRONMENT = "cloudtrain"  # the environment whose versions are images
PRIORITIES = {"low": 1, "medium": 2, "high": 3}  # azure-ai-ml, entities/_job/queue_settings.py
SETUP_S = 900  # of the platform, before our command starts: image, inputs
RESULTS = "results"  # the output of a job that is in a datastore
DATASTORE = re.compile(r"azureml://datastores/([a-zA-Z0-9_-]+)/paths/([^?#]*[^?#/])/?")
MODES = {"copy": "Download", "mount": "ReadOnlyMount", "stream": "Direct"}
TAG_CHARS = 256  # of a tag's value: Azure Resource Manager's limit of tags


def build(job: Job, bundle: Bundle, run_id: str, attempt: int, options: Mapping[str, Any]) -> Plan:
    """Return the plan of an attempt. Raises BadJob with every reason why Azure Machine Learning cannot run it."""
    if options.get("image") and not job.image and not options.get("environment"):
        job = job.replace(image=options["image"])
    problems = list(_problems(job, options))
    chosen: Machine | Problem | None = None
    if job.resources.instance_type:
        chosen = find_machine(load(NAME), job.resources.instance_type)
    elif not options.get("compute"):
        chosen = choose(load(NAME), job.resources, job.num_nodes)
    if isinstance(chosen, Problem):
        problems.append(chosen)
    if problems:
        raise BadJob(problems)
    notes: list[str] = []
    if isinstance(chosen, Machine):
        job, notes = with_gpus(job, chosen)
    instance_type = job.resources.instance_type or (chosen.name if isinstance(chosen, Machine) else "")
    manifest = Manifest.of(job, run_id, attempt)
    # What is in a datastore is brought by Azure: the launcher finds folders.
    output = None if is_datastore(job.output) else job.output or f"{options['store'].rstrip('/')}/runs"
    inputs = {name: {**item, **_given(name, item["uri"])} for name, item in manifest.inputs.items()}
    manifest = replace(manifest, output=output, inputs=inputs)
    source = f"{bundles(options)}/{bundle_name(bundle)}"
    request = {
        "source": source,
        "environment": _environment(job.image) if job.image and not options.get("environment") else None,
        "job": {"properties": _properties(job, manifest, bundle, options, instance_type, source)},
    }
    if options.get("compute") and (job.resources.accelerators or job.resources.cpus or job.resources.memory):
        notes.append(
            f"the machines are those of the cluster {options['compute']}: what resources asks for is not compared"
        )
    if job.resources.use_spot and attempt == 1:
        notes.append(
            "Azure may start a job again whose spot machines were taken; it then continues from its checkpoints"
        )
    notes += manifest.notes()
    return Plan.of(NAME, job, bundle, manifest.to_dict(), request, notes)


_PATH = "azureml://datastores/NAME/paths/PATH"


def is_datastore(uri: str | None) -> bool:
    """Return whether a place is a path in a datastore of the workspace."""
    return DATASTORE.fullmatch(uri or "") is not None


def _given(name: str, uri: str) -> dict[str, str]:
    """Return what the launcher needs of an input that Azure brings."""
    return {"mode": "given", "variable": f"CLOUDTRAIN_AZUREML_{_input(name).upper()}"} if is_datastore(uri) else {}


def _input(name: str) -> str:
    """Return the name that an input has in the request: Azure takes no dash, and `source` is ours."""
    return f"input_{name.lower().replace('-', '_')}"


def _problems(job: Job, options: Mapping[str, Any]) -> Iterator[Problem]:
    if job.image and options.get("environment"):
        yield Problem("cannot be combined with options.azureml.environment", "image", "remove one of the two")
    elif not job.image and not options.get("environment"):
        hint = "an image with Python, such as pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime, or options.azureml.environment"
        yield Problem("is missing", "image", hint)
    if job.resources.use_spot and options.get("compute"):
        message = "is of serverless compute: a cluster has dedicated or low-priority nodes by itself"
        yield Problem(message, "resources.use_spot", "remove it, or options.azureml.compute")
    for name, item in job.inputs.items():
        if item.uri.startswith("azureml://") and not is_datastore(item.uri):
            yield Problem(f"{item.uri!r} is no path in a datastore", f"inputs.{name}.uri", _PATH)
        elif is_datastore(item.uri):
            continue
        elif item.mode == "mount":
            yield Problem("nothing mounts an input for this backend", f"inputs.{name}.mode", "write copy or stream")
        elif "://" not in item.uri or item.uri.startswith("file://"):
            hint = f"write az://CONTAINER@ACCOUNT/PATH, or {_PATH}"
            yield Problem(f"{item.uri!r} is not in a store that nodes can read", f"inputs.{name}.uri", hint)
    if job.output and not is_datastore(job.output) and not job.output.startswith(("az://", "s3://", "gs://")):
        hint = f"write az://CONTAINER@ACCOUNT/PATH, or {_PATH}"
        yield Problem(f"{job.output!r} is not in a store that nodes can write to", "output", hint)
    if job.audit and is_datastore(job.output):
        yield Problem(
            "is written from this machine, which reads no datastore",
            "audit",
            "write output: az://CONTAINER@ACCOUNT/PATH",
        )
    for name, value in job.labels.items():
        if len(value) > TAG_CHARS:
            yield Problem(f"has {len(value)} characters; a tag has at most {TAG_CHARS}", f"labels.{name}", "shorten it")
        if name in (RUN_TAG, ATTEMPT_TAG):
            yield Problem("is a tag that cloudtrain sets itself", f"labels.{name}", "choose another name")


def _properties(
    job: Job, manifest: Manifest, bundle: Bundle, options: Mapping[str, Any], instance_type: str, source: str
) -> dict[str, Any]:
    nodes = manifest.nodes
    environment = {**manifest.environment(), fetch_program.DIGEST: bundle.sha256}
    if nodes == 1:
        environment["CLOUDTRAIN_NODE_RANK"] = "0"
    resources: dict[str, Any] = {"instanceCount": nodes, "properties": {}}
    if instance_type:
        resources["instanceType"] = instance_type
    if options.get("shm_gb"):
        resources["shmSize"] = f"{options['shm_gb']}g"
    properties: dict[str, Any] = {
        "jobType": "Command",
        "displayName": manifest.attempt_id,
        "experimentName": options.get("experiment") or EXPERIMENT,
        "command": command(nodes, options.get("python") or "python", _bindings(job, manifest)),
        "environmentId": options.get("environment") or environment_id(options, _environment(str(job.image))["version"]),
        "environmentVariables": environment,
        "inputs": {"source": {"jobInputType": "uri_file", "uri": https(source), "mode": "Download"}, **_inputs(job)},
        "outputs": _outputs(job, manifest.run_id),
        "resources": resources,
        "limits": {"jobLimitsType": "Command", "timeout": iso(time_limit_s(manifest.max_runtime_s, manifest.grace_s))},
        "tags": {**job.labels, RUN_TAG: manifest.run_id, ATTEMPT_TAG: manifest.attempt_id},
        "properties": {},
        "isArchived": False,
    }
    if options.get("compute"):
        properties["computeId"] = f"{workspace_id(options)}/computes/{options['compute']}"
    if nodes > 1:
        properties["distribution"] = {"distributionType": "PyTorch", "processCountPerInstance": 1}
    if options.get("identity") == "managed":
        client = {"clientId": options["client_id"]} if options.get("client_id") else {}
        properties["identity"] = {"identityType": "Managed", **client}
    elif options.get("identity") == "user":
        properties["identity"] = {"identityType": "UserIdentity"}
    if options.get("ssh_public_key"):
        key = {"sshPublicKeys": options["ssh_public_key"]}
        properties["services"] = {
            "ssh": {"jobServiceType": "SSH", "nodes": {"nodesValueType": "All"}, "properties": key}
        }
    queue: dict[str, Any] = {"jobTier": "Spot"} if job.resources.use_spot else {}
    if options.get("priority"):
        queue = {"jobTier": queue.get("jobTier", "Standard"), "priority": PRIORITIES[options["priority"]]}
    if queue:
        properties["queueSettings"] = queue
    return properties


def _inputs(job: Job) -> dict[str, Any]:
    """Return the inputs that are in datastores. One whose last part has an ending is a file."""
    return {
        _input(name): {
            "jobInputType": "uri_file" if re.search(r"/[^/]+\.\w+$", item.uri) else "uri_folder",
            "uri": item.uri,
            "mode": MODES[item.mode],
        }
        for name, item in job.inputs.items()
        if is_datastore(item.uri)
    }


def _outputs(job: Job, run_id: str) -> dict[str, Any]:
    if not is_datastore(job.output):
        return {}
    uri = f"{str(job.output).rstrip('/')}/{run_id}"
    return {RESULTS: {"jobOutputType": "uri_folder", "uri": uri, "mode": "ReadWriteMount"}}


def _bindings(job: Job, manifest: Manifest) -> dict[str, str]:
    """Return the variables of a node that say where Azure has brought what is in datastores."""
    given = {name: item for name, item in manifest.inputs.items() if item["mode"] == "given"}
    found = {item["variable"]: f"${{{{inputs.{_input(name)}}}}}" for name, item in given.items()}
    return found | ({"CLOUDTRAIN_RUN_DIR": f"${{{{outputs.{RESULTS}}}}}"} if is_datastore(job.output) else {})


def command(nodes: int, python: str, bindings: Mapping[str, str]) -> str:
    """Return the command of every node: it fetches the bundle and becomes the launcher.

    With `distribution: PyTorch` and one process on a node, RANK and WORLD_SIZE count nodes. Azure sets LOCAL_RANK too,
    beside which they would be taken for those of ranks.
    """
    alone = "env -u LOCAL_RANK " if nodes > 1 else "env "
    variables = {fetch_program.SOURCE: "${{inputs.source}}", **bindings}
    given = " ".join(f"{name}={value}" for name, value in variables.items())
    return f"exec {alone}{given} {shlex.quote(python)} -c {shlex.quote(fetch_program.LAUNCH)}"


def workspace_id(options: Mapping[str, Any]) -> str:
    """Return the resource id of the workspace."""
    group = f"/subscriptions/{options['subscription']}/resourceGroups/{options['resource_group']}"
    return f"{group}/providers/Microsoft.MachineLearningServices/workspaces/{options['workspace']}"


def environment_id(options: Mapping[str, Any], version: str) -> str:
    """Return the resource id of a version of our environment."""
    return f"{workspace_id(options)}/environments/{ENVIRONMENT}/versions/{version}"


def _environment(image: str) -> dict[str, Any]:
    """Return the version of our environment that is an image: its name follows from the image, so it is made once."""
    version = hashlib.sha256(image.encode()).hexdigest()[:32]
    return {"version": version, "body": {"properties": {"image": image, "osType": "Linux", "isAnonymous": False}}}


def bundles(options: Mapping[str, Any]) -> str:
    """Return the address below which the bundles are."""
    return f"{options['store'].rstrip('/')}/bundles"


def bundle_name(bundle: Bundle) -> str:
    return f"{bundle.sha256}.tar.gz"


def https(uri: str) -> str:
    """Return the address of az://CONTAINER@ACCOUNT/NAME, as a job's input names it."""
    place, _, name = uri.removeprefix("az://").partition("/")
    container, _, account = place.partition("@")
    return f"https://{account}.blob.core.windows.net/{container}/{name}"


def time_limit_s(max_runtime_s: int, grace_s: int) -> int:
    """Return the seconds of the job's own limit: the launcher ends the attempt earlier, by its own clock."""
    return max_runtime_s + grace_s + SETUP_S


def iso(seconds: int) -> str:
    """Return a duration as ISO 8601 writes it and azure-ai-ml renders it: P1DT2H3M4S."""
    days, rest = divmod(seconds, 86400)
    parts = ((rest // 3600, "H"), (rest % 3600 // 60, "M"), (rest % 60, "S"))
    clock = "".join(f"{count}{unit}" for count, unit in parts if count)
    return "P" + (f"{days}D" if days else "") + (f"T{clock}" if clock else "") if seconds else "PT0S"
