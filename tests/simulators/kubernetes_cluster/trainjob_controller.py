"""TrainJob controller of the simulated cluster: a JobSet from a ClusterTrainingRuntime, as Trainer's plugin `jobset` builds it.

pkg/runtime/framework/plugins/jobset of https://github.com/kubeflow/trainer (2026-11-29). Only the job `node` is patched, and
only by fields that its API has.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from cloudtrain.backends.kubernetes import rules
from cloudtrain.backends.kubernetes.overlay import merge_manifest
from tests.simulators.kubernetes_cluster.job_controller import find_condition, set_condition
from tests.simulators.kubernetes_cluster.objects import Objects

NODE, ANCESTOR = "node", "trainer.kubeflow.org/trainjob-ancestor-step"
Object = dict[str, Any]


def check_trainjob(trainjob: Object, objects: Objects) -> Iterator[rules.Violation]:
    """Yield what the webhook refuses: a runtime or containers that are not there, variables in a patch of `node`."""
    runtime = objects.get("clustertrainingruntimes", "", trainjob["spec"]["runtimeRef"]["name"])
    if runtime is None:
        yield rules.Violation("spec.runtimeRef", "clusterTrainingRuntime not found")
        return
    there = {each["name"]: each for each in runtime["spec"]["template"]["spec"]["replicatedJobs"]}
    for patch in trainjob["spec"].get("runtimePatches") or ():
        for job in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
            if job["name"] not in there:
                yield rules.Violation("spec.runtimePatches", "must not have a job that the runtime has not")
                continue
            pod = there[job["name"]]["template"]["spec"]["template"]["spec"]
            patched = job["template"]["spec"]["template"]["spec"]
            for kind in ("initContainers", "containers"):
                names = {each["name"] for each in pod.get(kind) or ()}
                for container in patched.get(kind) or ():
                    if container["name"] not in names:
                        yield rules.Violation("spec.runtimePatches", f"must not have {kind} that the runtime has not")
                    if container["name"] == NODE and "env" in container:
                        yield rules.Violation("spec.runtimePatches", "must not have envs for the node container")


def reconcile_trainjob(objects: Objects, trainjob: Object) -> None:
    """Create the JobSet of a TrainJob, pass on `suspend`, and copy its end."""
    metadata, spec, before = trainjob["metadata"], trainjob["spec"], repr(trainjob["status"])
    jobset = objects.get("jobsets", metadata["namespace"], metadata["name"])
    if find_condition(trainjob, "Complete") or find_condition(trainjob, "Failed"):
        return
    if jobset is None:
        jobset = objects.add("jobsets", metadata["namespace"], _jobset(objects, trainjob))
    suspended = spec.get("suspend", False)
    if jobset["spec"]["suspend"] != suspended:
        jobset["spec"]["suspend"] = suspended
        objects.touch("jobsets", jobset)
    for theirs, ours in (("Completed", "Complete"), ("Failed", "Failed")):
        if found := find_condition(jobset, theirs):
            set_condition(trainjob, ours, found["reason"], found["message"])
    if suspended and not find_condition(trainjob, "Suspended"):
        set_condition(trainjob, "Suspended", "Suspended", "TrainJob is suspended")
    elif not suspended and find_condition(trainjob, "Suspended"):
        set_condition(trainjob, "Suspended", "Resumed", "TrainJob is resumed", "False")
    if repr(trainjob["status"]) != before:
        objects.touch("trainjobs", trainjob)


def _jobset(objects: Objects, trainjob: Object) -> Object:
    spec, metadata = trainjob["spec"], trainjob["metadata"]
    runtime = objects.get("clustertrainingruntimes", "", spec["runtimeRef"]["name"])
    assert runtime is not None
    made = copy.deepcopy(runtime["spec"]["template"]["spec"])
    for patch in spec.get("runtimePatches") or ():
        made = merge_manifest(made, patch["trainingRuntimeSpec"]["template"]["spec"])
    for replicated in made["replicatedJobs"]:
        if (replicated["template"].get("metadata") or {}).get("labels", {}).get(ANCESTOR) != "trainer":
            continue
        job, trainer = replicated["template"]["spec"], spec.get("trainer") or {}
        job["completions"] = job["parallelism"] = trainer.get("numNodes", 1)
        job["completionMode"] = "Indexed"
        job["template"]["spec"].setdefault("restartPolicy", "OnFailure")
        node = next(each for each in job["template"]["spec"]["containers"] if each["name"] == NODE)
        node |= {key: trainer[key] for key in ("image", "command", "args") if key in trainer}
        node["env"] = merge_manifest(node.get("env") or [], trainer.get("env") or [])
        node["resources"] = trainer.get("resourcesPerNode") or node.get("resources") or {}
    owner = {"apiVersion": trainjob["apiVersion"], "kind": "TrainJob", "name": metadata["name"], "uid": metadata["uid"],
             "controller": True}  # fmt: skip
    head = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "status": {}}
    return {
        **head,
        "metadata": {"name": metadata["name"], "labels": metadata.get("labels") or {}, "ownerReferences": [owner]},
        "spec": {**made, "suspend": spec.get("suspend", False)},
    }
