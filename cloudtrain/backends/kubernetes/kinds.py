"""The objects that an attempt may be: a Job, a JobSet, or a TrainJob; and the Job that this package reads in each.

JobSet (jobset.x-k8s.io), of one Job or one for each role: the controller creates the Jobs <name>-n-0, <name>-n1-0 and so on
and the headless Service <name>, suspends and resumes the Jobs with the set, and copies their end
(pkg/controllers/jobset_controller.go of https://github.com/kubernetes-sigs/jobset, 2026-11-23). A set fails with its first
Job that fails, and is complete when all are.

TrainJob (trainer.kubeflow.org, Trainer 2.2 and newer): the controller makes a JobSet of that name from a
ClusterTrainingRuntime, whose container `node` gets the trainer's image, command and variables
(pkg/runtime/framework/plugins/jobset of https://github.com/kubeflow/trainer, 2026-11-29).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cloudtrain.backends.kubernetes.names import BESIDE, CONTAINER

Object = dict[str, Any]


class Kind(NamedTuple):
    """A kind of object that an attempt may be."""

    name: str
    api: str
    plural: str
    replicated: str = ""  # short in a JobSet: the names of pods hold it
    ends: Mapping[str, str] = {}  # its conditions -> those of its Job
    operator: str = ""  # where its operator is found

    @property
    def path(self) -> str:
        return f"/apis/{self.api}/namespaces/{{}}/{self.plural}"

    def job_name(self, name: str) -> str:
        """Return the name of the Job of an object."""
        return f"{name}-{self.replicated}-0" if self.replicated else name


SET_ENDS, TRAIN_ENDS = {"Completed": "Complete", "Failed": "Failed"}, {"Complete": "Complete", "Failed": "Failed"}
KINDS = {  # values of options.kubernetes.kind
    "job": Kind("Job", "batch/v1", "jobs"),
    "jobset": Kind("JobSet", "jobset.x-k8s.io/v1alpha2", "jobsets", "n", SET_ENDS, "https://jobset.sigs.k8s.io"),
    "trainjob": Kind("TrainJob", "trainer.kubeflow.org/v1alpha1", "trainjobs", CONTAINER, TRAIN_ENDS,
                     "https://www.kubeflow.org/docs/components/trainer"),
}  # fmt: skip
BY_NAME = {kind.name: kind for kind in KINDS.values()}
RUNTIMES = f"/apis/{KINDS['trainjob'].api}/clustertrainingruntimes"
MESSAGES = "FallbackToLogsOnError"
RUNTIME_IMAGE = "${runtime.image}"  # of a TrainJob without one
MANAGER = "cloudtrain.dev/submit"  # of our patch of a runtime
# What a TrainJob may set of its runtime's pods, and what its runtime is asked for at submit, or its JobSet sets itself.
_PATCHED = ("affinity", "imagePullSecrets", "nodeSelector", "securityContext", "serviceAccountName", "volumes",
            "terminationGracePeriodSeconds", "tolerations")  # fmt: skip
_OWN = {
    "activeDeadlineSeconds",
    "automountServiceAccountToken",
    "containers",
    "enableServiceLinks",
    "restartPolicy",
    "subdomain",
}
_TRAINER = ("image", "command", "env")
_CONTAINER = {"name", *_TRAINER, "resources", "volumeMounts", "securityContext", "terminationMessagePolicy"}


def wrap(jobs: Sequence[Mapping[str, Any]], kind: str, runtime: str = "", restarts: int = 0) -> Object:
    """Return the object of a kind for one or several Jobs' manifests; it has the first one's name, labels and annotations.

    Args:
        runtime: the ClusterTrainingRuntime of a TrainJob.
        restarts: how often a JobSet may start its Jobs again after a lost pod.
    """
    if kind == "job":
        return dict(jobs[0])
    head = {"apiVersion": KINDS[kind].api, "kind": KINDS[kind].name, "metadata": jobs[0]["metadata"]}
    return {**head, "spec": _set_spec(jobs, restarts) if kind == "jobset" else _train_spec(jobs[0], runtime)}


def _set_spec(jobs: Sequence[Mapping[str, Any]], restarts: int) -> Object:
    templates = []
    for job in jobs:
        spec = dict(job["spec"])
        suspend, ttl = spec.pop("suspend"), spec.pop("ttlSecondsAfterFinished", None)
        templates.append({"metadata": {"labels": spec["template"]["metadata"]["labels"]}, "spec": spec})
    several = sum(template["spec"]["completions"] for template in templates) > 1
    # Without restarts the next attempt is another set: its log and its limits begin anew.
    policy: Object = {"maxRestarts": restarts}
    if restarts:  # as Kubernetes words it (pkg/controller/job/pod_failure_policy.go, v1.36.2): all other ends are ends
        lost = {"name": "lost", "action": "RestartJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
        lost["onJobFailureMessagePatterns"] = ["has condition DisruptionTarget"]
        policy["rules"] = [lost, {"name": "ended", "action": "FailJobSet"}]
    return {
        "suspend": suspend,
        **({} if ttl is None else {"ttlSecondsAfterFinished": ttl}),
        "network": {"enableDNSHostnames": several, "publishNotReadyAddresses": True},
        "failurePolicy": policy,
        "replicatedJobs": [
            {"name": f"{KINDS['jobset'].replicated}{number or ''}", "replicas": 1, "template": template}
            for number, template in enumerate(templates)
        ],
    }


def _train_spec(job: Mapping[str, Any], runtime: str) -> Object:
    spec, template = job["spec"], job["spec"]["template"]
    pod, labels = template["spec"], template["metadata"]["labels"]
    node = _container(pod)
    trainer = {key: node[key] for key in _TRAINER if node.get(key) not in (None, RUNTIME_IMAGE)}
    if node.get("resources"):
        trainer["resourcesPerNode"] = node["resources"]
    patch = {key: pod[key] for key in _PATCHED if key in pod}
    patch["containers"] = [{key: node[key] for key in ("name", "volumeMounts", "securityContext") if key in node}]
    pods = {"metadata": {"labels": labels}, "spec": patch}
    replicated = {"name": CONTAINER, "template": {"metadata": {"labels": labels}, "spec": {"template": pods}}}
    return {
        "suspend": spec["suspend"],
        "activeDeadlineSeconds": spec["activeDeadlineSeconds"],
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": runtime},
        "trainer": {**trainer, "numNodes": spec["completions"]},
        "runtimePatches": [
            {"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}}}
        ],
    }


def left_out(job: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields of a Job that a TrainJob has no place for."""
    pod = job["spec"]["template"]["spec"]
    yield from (f"spec.template.spec.{key}" for key in pod if key not in (*_PATCHED, *_OWN))
    for number, container in enumerate(pod["containers"]):
        fields = container if container["name"] == CONTAINER else ["name"]
        known = _CONTAINER if container["name"] == CONTAINER else ()
        yield from (f"spec.template.spec.containers[{number}].{key}" for key in fields if key not in known)


def runtime_problems(runtime: Mapping[str, Any]) -> list[str]:
    """Return the lines that a ClusterTrainingRuntime lacks: with others a node would start again under a live world."""
    found = runtime["spec"].get("template", {}).get("spec", {})
    replicated = next((each for each in found.get("replicatedJobs") or () if each["name"] == CONTAINER), None)
    if replicated is None:
        return [f"a replicated job named {CONTAINER}"]
    job = replicated["template"].get("spec") or {}
    pod = (job.get("template") or {}).get("spec") or {}
    node: Object = next((each for each in pod.get("containers") or () if each["name"] == CONTAINER), {})
    policy = node.get("terminationMessagePolicy")
    wanted = {
        "backoffLimit: 0 in its Job": job.get("backoffLimit") == 0,
        "restartPolicy: Never in its pod": pod.get("restartPolicy") == "Never",
        f"terminationMessagePolicy: {MESSAGES} in its container {CONTAINER}": policy == MESSAGES,
        "failurePolicy.maxRestarts: 0": not (found.get("failurePolicy") or {}).get("maxRestarts"),
        "no network.subdomain": not (found.get("network") or {}).get("subdomain"),
    }
    return [line for line, there in wanted.items() if not there]


def templates_of(manifest: Mapping[str, Any]) -> list[Object]:
    """Return what holds the templates of an object's pods, the main role's first: what is changed there is sent."""
    spec = manifest["spec"]
    if "runtimeRef" in spec:
        patch = next(each for each in spec["runtimePatches"] if each["manager"] == MANAGER)
        spec = patch["trainingRuntimeSpec"]["template"]["spec"]
    return [each["template"]["spec"] for each in spec["replicatedJobs"]] if "replicatedJobs" in spec else [spec]


def specs_of(manifest: Mapping[str, Any]) -> list[Object]:
    """Return the specs of an object's Jobs, the main role's first."""
    return [as_job(manifest)["spec"]] if "runtimeRef" in manifest["spec"] else templates_of(manifest)


def child_names(manifest: Mapping[str, Any]) -> list[str]:
    """Return the names of the Jobs that the controller makes for an object; [] for a Job."""
    replicated = [CONTAINER] if "runtimeRef" in manifest["spec"] else []
    replicated += [each["name"] for each in manifest["spec"].get("replicatedJobs") or ()]
    return [f"{manifest['metadata']['name']}-{name}-0" for name in replicated]


def as_job(manifest: Mapping[str, Any], children: Sequence[Object] = ()) -> Object:
    """Return an object of any kind as one Job with the first one's template and the nodes of all; a Job as it is.

    Args:
        children: the Jobs that its controller made and that exist. Their conditions count, and of the object those that they
            lack. While a set may start its Jobs again, only the set's own end is one.
    """
    spec = manifest["spec"]
    kind = "trainjob" if "runtimeRef" in spec else "jobset" if "replicatedJobs" in spec else "job"
    if kind == "job":
        return dict(manifest)
    status = _joined_status(manifest, children, KINDS[kind].ends)
    if kind == "trainjob":
        job = _trained_job(spec, templates_of(manifest)[0]["template"], children)
    else:
        job = {**templates_of(manifest)[0]}
        job["completions"] = sum(int(each["completions"]) for each in templates_of(manifest))
    return {
        **manifest,
        "nodes": sum(count_nodes({"spec": each}) for each in specs_of(manifest)) if kind == "jobset" else 0,
        "spec": {**job, "suspend": spec.get("suspend", False)},
        "status": status,
        "children": list(children),
    }


def _joined_status(manifest: Mapping[str, Any], children: Sequence[Object], ends: Mapping[str, str]) -> Object:
    spec = manifest["spec"]
    own = [each for each in (manifest.get("status") or {}).get("conditions") or () if each["status"] == "True"]
    statuses = [child.get("status") or {} for child in children]
    status: Object = dict(statuses[0]) if statuses else {}
    for key in ("active", "ready", "terminating"):
        if counts := [int(each[key]) for each in statuses if each.get(key) is not None]:
            status[key] = sum(counts)
    conditions = [dict(each) for one in statuses for each in one.get("conditions") or ()]
    if len(spec.get("replicatedJobs") or ()) > 1:  # complete are all or none
        conditions = [each for each in conditions if each["type"] not in ("Complete", "SuccessCriteriaMet")]
        conditions.sort(key=lambda each: str(each.get("lastTransitionTime") or ""))
    if (spec.get("failurePolicy") or {}).get("maxRestarts") and not any(each["type"] in ends for each in own):
        conditions = [each for each in conditions if each["type"] not in ("FailureTarget", *ends.values())]
    if not any(each["type"] in ends.values() and each["status"] == "True" for each in conditions):
        kept = {**ends, **({} if children else {"Suspended": "Suspended"})}
        conditions += [{**each, "type": kept[each["type"]]} for each in own if each["type"] in kept]
    return {**status, "conditions": conditions}


def _trained_job(spec: Mapping[str, Any], template: Object, children: Sequence[Object]) -> Object:
    trainer, patch = spec["trainer"], template["spec"]
    image = trainer.get("image") or next(
        (_container(child["spec"]["template"]["spec"])["image"] for child in children), ""
    )
    node = {**_container(patch), **{key: trainer[key] for key in _TRAINER if key in trainer}, "image": image}
    node["resources"] = trainer.get("resourcesPerNode") or {}
    nodes = {"completions": trainer["numNodes"], "parallelism": trainer["numNodes"], "backoffLimit": 0}
    deadline = {"activeDeadlineSeconds": spec["activeDeadlineSeconds"]} if "activeDeadlineSeconds" in spec else {}
    return {**nodes, **deadline, "template": {**template, "spec": {**patch, "containers": [node]}}}


def beside(pod: Mapping[str, Any]) -> dict[str, int]:
    """Return the containers of a pod, or of a template of pods, that are nodes beside its first one: name -> first rank."""
    text = ((pod.get("metadata") or {}).get("annotations") or {}).get(BESIDE, "")
    return {name: int(first) for name, _, first in (each.partition("=") for each in text.split())}


def count_nodes(job: Mapping[str, Any]) -> int:
    """Return how many nodes the pods of a Job have: several, where roles share pods."""
    spec = job["spec"]
    return job.get("nodes") or int(spec["completions"]) * (1 + len(beside(spec.get("template") or {})))


def _container(pod: Mapping[str, Any]) -> Object:
    found: Object = next(each for each in pod["containers"] if each["name"] == CONTAINER)
    return found


def pods_owners(job: Mapping[str, Any]) -> list[Object]:
    """Return the objects that own a Job's pods and have their events: the Job, or those that were made for another kind."""
    return list(job.get("children") or ()) or [dict(job)]


def is_child(job: Mapping[str, Any], uid: str, name: str) -> bool:
    """Return whether a Job belongs to an object: to a JobSet by its uid, to a TrainJob by its JobSet's name."""
    owners = job["metadata"].get("ownerReferences") or ()
    return any(owner["uid"] == uid or (owner["kind"], owner["name"]) == ("JobSet", name) for owner in owners)
