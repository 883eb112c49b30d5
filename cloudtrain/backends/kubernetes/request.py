"""Build the Kubernetes manifests of a job: an Indexed Job or what makes one, a headless Service, a ConfigMap for the code.

Pure data, no calls. The Job is created suspended, then the objects that it owns, then it is started: a submit that is
killed in between leaves nothing running and can be repeated. When one pod of several fails, the whole Job fails and the
next attempt is another Job. The cluster itself replaces a preempted pod of a single-node job, up to the job's attempts.

    ${job.uid}        the Job's uid, in the owner references of Service and ConfigMap: they are deleted with the Job
    ${bundle.bytes}   the source bundle, base64
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import machines
from cloudtrain.backends.api import Plan, TimeLimit
from cloudtrain.backends.kubernetes import rules, security
from cloudtrain.backends.kubernetes.kinds import BY_NAME, as_job, left_out, wrap
from cloudtrain.backends.kubernetes.names import (
    ATTEMPT,
    BESIDE,
    FIRST_NODE,
    MAX_EXEC,
    OUTPUT,
    QUEUE,
    RUN,
    STARTED,
)
from cloudtrain.backends.kubernetes.overlay import check_overlay, merge_manifest
from cloudtrain.backends.kubernetes.pod import Pod, container_name
from cloudtrain.backends.manifest import Manifest
from cloudtrain.errors import Problem
from cloudtrain.job import roles, units
from cloudtrain.job.rules import keys_in_use
from cloudtrain.nodes import paths
from cloudtrain.source import provenance

if TYPE_CHECKING:
    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle

UID, BYTES = "${job.uid}", "${bundle.bytes}"
WAIT_S = 24 * 3600  # for machines, without limits.max_wait
PORT = 29380  # the launcher's, on node 0; the Service names one port because it must
LOST = 69  # the launcher leaves with it where nothing happened: its pod is started again
MAX_INLINE_BYTES = 700 << 10  # largest bundle that goes into a ConfigMap, which holds 1 MiB of base64


class Request:
    """The manifests of one attempt; `source` is the URI for a bundle that is too large for a ConfigMap, else None."""

    def __init__(self, job: Job, bundle: Bundle, run_id: str, attempt: int, options: Mapping[str, Any]) -> None:
        self.problems: list[Problem] = []
        self.notes: list[str]
        job, self.notes = _with_gpus(job)
        self._job, self._options = job, options
        output = (job.output or "").rstrip("/") or None
        output_path, path_problems = paths.output_path(output)
        self.problems += [*path_problems, *paths.check_shared_output(job), *self._check_paths(output_path)]
        about = provenance.about("kubernetes", job, bundle) if output else None
        self.manifest = replace(Manifest.of(job, run_id, attempt, about), output=output)
        self.name = self.manifest.attempt_id
        self.namespace = str(options.get("namespace") or "default")
        self.source = self._bundle_uri(bundle, output)
        labels = self._labels()
        self.jobs: list[dict[str, Any]] = []  # of several, one for each role
        parts = list(self._parts())
        pods = sum(nodes for _, nodes, *_ in parts)
        for part, nodes, first, beside in parts:
            pod = Pod(
                part,
                options,
                self.manifest,
                output_path,
                self.source,
                bundle.sha256,
                self.problems,
                first,
                pods,
                beside,
            )
            base = self._add_queue_label(self._job_manifest(labels, pod.spec(), nodes, first))
            if beside:
                ranks = " ".join(f"{container_name(role)}={rank}" for role, _, rank in beside)
                base["spec"]["template"]["metadata"]["annotations"] = {BESIDE: ranks}
            self.jobs.append(merge_manifest(base, options.get("overlay") or {}))
            self.problems += check_overlay(base, self.jobs[-1], options.get("allow_host_paths") or ())
        self.job = self.jobs[0]
        kind = "job" if self.problems else str(options.get("kind") or "job")
        if kind == "trainjob":
            self._check_runtime()
        # what is created first
        self.main = wrap(self.jobs, kind, str(options.get("runtime") or ""), self.starts - 1 if self._all_again else 0)
        owned = {"namespace": self.namespace, "labels": labels, "ownerReferences": [self._owner_reference()]}
        self.others: list[dict[str, Any]] = []
        if pods > 1 and kind == "job":  # a JobSet has its own
            self.others.append(self._service(owned))
        if options.get("network_policy"):
            self.others.append(self._network_policy(owned))
        if self.source is None:
            self.others.append(
                {
                    "apiVersion": "v1",
                    "kind": "ConfigMap",
                    "metadata": {"name": self.name, **owned},
                    "immutable": True,
                    "binaryData": {"source.tar.gz": BYTES},
                }
            )
        self._check()
        if output is None:
            message = "`output` is not set: checkpoints, results and logs are lost when the pods are deleted"
            self.notes.append(
                f"{message} (output: gs://bucket/..., s3://bucket/... or a path on a persistent volume claim)"
            )
        if job.retry.by == "cluster" and self.starts == 1 < job.retry.max_attempts:
            message = "needs a job without a cap on one node, or kind: jobset, and preempted among retry.on_events"
            self._add_problem(
                "retry.by", message, "retry: {by: client}: the watcher on your machine starts the next attempt"
            )
        if job.resources.gpus and not options.get("node_selector"):
            message = f"pods may run on any GPU: no node_selector says which nodes have {job.resources.accelerator}"
            self.notes.append(f"{message} (options.kubernetes.node_selector)")
        self.problems = list(dict.fromkeys(self.problems))  # the containers of several roles have the same

    def to_dict(self) -> dict[str, Any]:
        """Return the plan's request: the manifests in the order of creation, and the patch that starts the Job."""
        start: dict[str, Any] = {"metadata": {"annotations": {STARTED: "yes"}}}
        if not self._options.get("queue"):  # Kueue starts it itself
            start["spec"] = {"suspend": False}
        return {
            "namespace": self.namespace,
            "manifests": [self.main, *self.others],
            "start": start,
            "source": self.source,
        }

    # -- the parts -----------------------------------------------------------------------------------------------------

    def _parts(self) -> Iterator[tuple[Job, int, int, list[tuple[str, Job, int]]]]:
        """Yield a job for each Job of the attempt, its pods and the first one's rank; several where roles differ.

        And for each role that shares these pods its name, job and first rank.
        """
        job, at, kind = self._job, 0, self._options.get("kind") or "job"
        own = {"roles.resources", "roles.image", "roles.colocate"}.intersection(keys_in_use(job))
        hosts = roles.hosts(job) if own else []
        if not own:
            yield job, job.num_nodes, 0, []
        elif "roles.colocate" in own and kind == "trainjob":
            sharing = next(name for name, role in job.roles.items() if role.colocate)
            message = "needs a second container in a pod, and a TrainJob sets one"
            self._add_problem(f"roles.{sharing}.colocate", message, "set options.kubernetes.kind to job or jobset")
        elif len(hosts) > 1 and kind != "jobset":
            message = (
                "have different resources or images, or share nodes; that needs a JobSet with one Job for each role"
            )
            self._add_problem("roles", message, "set options.kubernetes.kind: jobset, or give all roles the same")
        for host in hosts:
            nodes, beside = job.roles[host].num_nodes, []
            main = job if host == job.main_role else roles.on_own_machine(job, host)
            for number, name in enumerate(roles.sharing(job, host)[1:], 1):
                beside.append((name, roles.on_own_machine(job, name), at + number * nodes))
            yield main, nodes, at, beside
            at += nodes * (1 + len(beside))

    def _job_manifest(self, labels: dict[str, str], pod: dict[str, Any], nodes: int, first: int) -> dict[str, Any]:
        # Not 75: a pod leaves with it at the end of its own deadline too, and no condition tells that from a request.
        in_job = 1 if self._all_again else self.starts
        restarts = [LOST] if in_job > 1 and "lost" in self._job.retry.on_events else []
        wait_s = self._job.limits.max_wait_s
        deadline_s = pod["activeDeadlineSeconds"] * in_job + (WAIT_S if wait_s is None else wait_s)
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {
                "name": self.name,
                "namespace": self.namespace,
                "labels": dict(labels),
                "annotations": {
                    OUTPUT: f"{self.manifest.output}/{self.manifest.run_id}" if self.manifest.output else ""
                },
            },
            "spec": {
                "completionMode": "Indexed",
                "completions": nodes,
                "parallelism": nodes,
                "backoffLimit": in_job - 1,
                "activeDeadlineSeconds": deadline_s,
                "ttlSecondsAfterFinished": self._seconds("ttl", "7d"),
                "podReplacementPolicy": "Failed",
                "podFailurePolicy": {
                    "rules": [
                        {
                            "action": "FailJob" if in_job == 1 else "Count",
                            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                        },
                        *(
                            {
                                "action": "FailJob",
                                "onExitCodes": {"containerName": name, "operator": "NotIn", "values": [0, *codes]},
                            }
                            for name, codes in (
                                *((each["name"], restarts) for each in pod["containers"]),
                                *((each["name"], []) for each in pod.get("initContainers", ())),
                            )
                        ),
                    ]
                },
                "suspend": True,
                "template": {
                    "metadata": {"labels": {**labels, **({FIRST_NODE: str(first)} if first else {})}},
                    "spec": pod,
                },
            },
        }

    def _add_queue_label(self, job: dict[str, Any]) -> dict[str, Any]:
        if queue := self._options.get("queue"):
            job["metadata"]["labels"][QUEUE] = str(queue)
            if self._job.limits.capped:
                job["metadata"]["labels"][MAX_EXEC] = str(_pod_seconds(job["spec"]["template"]["spec"]))
        return job

    @property
    def starts(self) -> int:
        """How often the cluster itself may start the pods: a single node, which has no peers, or all nodes of a JobSet."""
        retry, kind = self._job.retry, self._options.get("kind") or "job"
        alone = self.manifest.nodes == 1 and kind != "trainjob"
        begun_again = (alone or self._all_again) and "preempted" in retry.on_events
        return (
            retry.max_attempts if begun_again and not self._job.limits.capped else 1
        )  # each start begins a deadline anew

    @property
    def _all_again(self) -> bool:
        """Whether a JobSet begins its Job again: new pods of all nodes, once the old ones are gone."""
        return self._options.get("kind") == "jobset" and self._job.retry.by == "cluster"

    def _service(self, owned: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": self.name, **owned},
            "spec": {
                "clusterIP": "None",
                "selector": {ATTEMPT: self.name},
                "publishNotReadyAddresses": True,  # ranks look for each other before anything is ready
                "ports": [{"name": "launcher", "port": PORT}],
            },
        }

    def _network_policy(self, owned: Mapping[str, Any]) -> dict[str, Any]:
        own_pods = {"matchLabels": {ATTEMPT: self.name}}
        return {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": self.name, **owned},
            "spec": {
                "podSelector": own_pods,
                "policyTypes": ["Ingress"],
                "ingress": [{"from": [{"podSelector": own_pods}]}],  # no ports: all of them
            },
        }

    def _owner_reference(self) -> dict[str, Any]:
        about = {field: self.main[field] for field in ("apiVersion", "kind")}
        return {**about, "name": self.name, "uid": UID, "blockOwnerDeletion": False}

    def _labels(self) -> dict[str, str]:
        labels = {**self._job.labels, RUN: self.manifest.run_id, ATTEMPT: self.name}
        for name, value in self._job.labels.items():
            if violation := rules.check_label(name, value):
                self._add_problem(f"labels.{name}", violation.message)
        return {name: value for name, value in labels.items() if rules.check_label(name, value) is None}

    def _bundle_uri(self, bundle: Bundle, output: str | None) -> str | None:
        """Return the URI to upload a large bundle to; None if a ConfigMap holds it."""
        if bundle.size_bytes <= MAX_INLINE_BYTES:
            return None
        if output is None or not paths.OBJECT_STORE.match(output):
            message = f"takes {bundle.size_bytes:,} bytes packed; {MAX_INLINE_BYTES:,} fit into a ConfigMap"
            self._add_problem(
                "source",
                message,
                "output: gs://bucket/... or s3://bucket/... allows larger sources; or exclude files in .cloudtrainignore",
            )
            return None
        return f"{output}/src/{bundle.sha256}.tar.gz"

    # -- what is wrong -------------------------------------------------------------------------------------------------

    def _check_paths(self, output: str | None) -> Iterator[Problem]:
        """Yield a problem for every local path that is on no mounted volume."""
        mount_paths = [PurePosixPath(volume["path"]) for volume in self._options.get("volumes") or ()]
        local_paths = {"output": output} if output else {}
        for name, item in self._job.inputs.items():
            if "://" not in item.uri or item.uri.startswith("file://"):
                local_paths[f"inputs.{name}.uri"] = item.uri.removeprefix("file://")
        yield from paths.check_inputs(self._job, "a pod")
        for path, text in local_paths.items():
            if not any(PurePosixPath(text).is_relative_to(folder) for folder in mount_paths):
                hint = "options.kubernetes.volumes: [{claim: NAME, path: /data}], or an object store"
                yield Problem(f"{text} is not on a persistent volume claim that the pods mount", path, hint)

    def _check(self) -> None:
        if self.problems:
            return  # the rules would only report the same problems again
        prefix = "options.kubernetes.overlay"
        violations = [(prefix, violation) for job in self.jobs for violation in rules.check_job(job)]
        if violation := rules.check_set_name(self.main):
            self._add_problem("name", f"{self._job.name} {violation.message}", "choose a shorter name, or kind: job")
        if self._options.get("security"):
            pods = [job["spec"]["template"]["spec"] for job in self.jobs]
            broken = [found for pod in pods for found in security.check_restricted(pod, "spec.template.spec")]
            violations += [(prefix, violation) for violation in broken]
        for manifest in (other for other in self.others if other["kind"] != "NetworkPolicy"):
            check = rules.check_service if manifest["kind"] == "Service" else rules.check_config_map
            violations += [(manifest["kind"], violation) for violation in check(manifest)]
        for prefix, violation in violations:
            self._add_problem(f"{prefix}.{violation.path}", violation.message)

    def _check_runtime(self) -> None:
        if not self._options.get("runtime"):
            hint = "options: {kubernetes: {runtime: torch-distributed}}; kubectl get clustertrainingruntimes lists them"
            self._add_problem("options.kubernetes.runtime", "is needed for kind: trainjob", hint)
        for field in left_out(self.job):
            key = "priority_class" if field.endswith(".priorityClassName") else f"overlay.{field}"
            hint = "set it in the ClusterTrainingRuntime, or use kind: jobset"
            self._add_problem(f"options.kubernetes.{key}", "has no place in a TrainJob", hint)

    def _seconds(self, name: str, default: str) -> int:
        text = str(self._options.get(name) or default)
        try:
            return units.duration_s(text)
        except ValueError as error:
            self._add_problem(f"options.kubernetes.{name}", f"is not a duration: {text}", str(error))
            return 1

    def _add_problem(self, path: str, message: str, hint: str = "") -> None:
        self.problems.append(Problem(message, path, hint))


def _with_gpus(job: Job) -> tuple[Job, list[str]]:
    """Return a job that names the GPUs of the machine types that it and its services name, and notes on it."""
    job, notes = machines.with_gpus(job, machines.find_node(job.resources.instance_type or ""))
    for name in roles.services(job):
        own = job.roles[name].resources or job.resources
        job = machines.with_gpus_of(job, name, machines.find_node(own.instance_type or ""))
    return job, notes


def time_limit(plan: Plan) -> TimeLimit:
    """Return the longest time of an attempt: the deadline and the grace period of each pod that may be started."""
    job = as_job(plan.request["manifests"][0])
    spec, labels = job["spec"], job["metadata"]["labels"]
    if QUEUE in labels and MAX_EXEC not in labels:
        return TimeLimit(None, "a queue may suspend the Job: its deadlines start again when it resumes")
    once_s = _pod_seconds(spec["template"]["spec"])
    if "runtimeRef" in plan.request["manifests"][0]["spec"]:
        return TimeLimit(spec["activeDeadlineSeconds"], "of a TrainJob, the wait for machines included")
    if once_s is None:
        return TimeLimit(None, "options.kubernetes.overlay removes the pods' activeDeadlineSeconds")
    note = (
        f"the queue's Kueue configuration must include the label {MAX_EXEC} (Kueue 0.10); " if QUEUE in labels else ""
    )
    restarts = (plan.request["manifests"][0]["spec"].get("failurePolicy") or {}).get("maxRestarts", 0)
    seconds = once_s * (spec["backoffLimit"] + 1 + restarts)
    return TimeLimit(seconds, f"{note}counted from a pod's start; the cloud may bill nodes earlier")


def _pod_seconds(pod: Mapping[str, Any]) -> int | None:
    """Return how long a pod may be on its node, None without a limit."""
    deadline_s = pod.get("activeDeadlineSeconds")
    return int(deadline_s) + int(pod.get("terminationGracePeriodSeconds", 30)) if deadline_s else None


def kubectl_manifests(request: Mapping[str, Any], bundle_bytes: bytes) -> list[dict[str, Any]]:
    """Return manifests for `kubectl apply --server-side`: with the bundle's bytes, without owner references, not suspended.

    Without --server-side kubectl copies each object into an annotation, which holds at most 262,144 bytes: less than many
    a source takes (https://kubernetes.io/docs/reference/using-api/server-side-apply/, read 2026-11-25).
    """
    from base64 import b64encode

    manifests = []
    for manifest in request["manifests"]:
        applied = fill_placeholders(manifest, {BYTES: b64encode(bundle_bytes).decode()})
        applied["metadata"].pop("ownerReferences", None)
        if applied["kind"] in BY_NAME:
            applied = merge_manifest(applied, request["start"])
        manifests.append(applied)
    return manifests


def fill_placeholders(value: Any, values: Mapping[str, str]) -> Any:
    """Return a manifest with its ${...} placeholders replaced."""
    if isinstance(value, Mapping):
        return {key: fill_placeholders(item, values) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [fill_placeholders(item, values) for item in value]
    return values.get(value, value) if isinstance(value, str) else value
