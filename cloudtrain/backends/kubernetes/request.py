"""A job as objects of Kubernetes, pure data: an Indexed Job, a headless Service for several nodes, a ConfigMap for the code.

The Job is created suspended, what it owns behind it, and then it is started: whoever is killed in between leaves nothing
that runs, and may do it all again. When one pod of several fails the Job fails as a whole: the next attempt is another Job.
A pod that is alone and is taken away is replaced by the cluster itself, as often as the job has attempts.

    ${job.uid}        the Job's, in the owner references of the other two, so that its deletion cleans up
    ${bundle.bytes}   the packed source, base64
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.kubernetes import pod, rules
from cloudtrain.backends.manifest import Manifest
from cloudtrain.errors import BadRequest, Problem
from cloudtrain.job import units
from cloudtrain.nodes import paths
from cloudtrain.source import provenance

if TYPE_CHECKING:
    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle

RUN, ATTEMPT = "cloudtrain.dev/run", "cloudtrain.dev/attempt"  # labels
STARTED, CANCELLED = "cloudtrain.dev/started", "cloudtrain.dev/cancelled"  # annotations: how far a Job is
OUTPUT = "cloudtrain.dev/output"  # annotation: where the run's folders lie
QUEUE = "kueue.x-k8s.io/queue-name"
UID, BYTES = "${job.uid}", "${bundle.bytes}"
CONTAINER, UNPACK = "node", "source"  # the launcher's container, and the one before it
PORT = 29380  # the launcher's, on node 0; the Service names one port because it must
SMALL = 700 << 10  # bytes of a packed source that goes into a ConfigMap, which holds 1 MiB in base64
SOURCE, WORK = "/cloudtrain/source", "/cloudtrain/work"
SHM = "/dev/shm"  # noqa: S108 - where ranks on one node share tensors
LEAVE_S = 90  # beyond limits.grace, for the upload of results, before a pod is killed
SECRET = re.compile(r"k8s:([a-z0-9]([-a-z0-9.]*[a-z0-9])?)/([-._a-zA-Z0-9]+)")
# What an overlay may not change: the gang, how it is found again, and how its pods start and end.
FIXED = (
    *("apiVersion", "kind", "metadata.name", "metadata.namespace", "spec.selector", "spec.manualSelector"),
    *("spec.completionMode", "spec.completions", "spec.parallelism", "spec.suspend", "spec.podFailurePolicy"),
    *("spec.backoffLimit", "spec.backoffLimitPerIndex", "spec.maxFailedIndexes", "spec.podReplacementPolicy"),
    *("spec.managedBy", "spec.successPolicy", "spec.template.spec.restartPolicy", "spec.template.spec.subdomain"),
    *("spec.template.spec.hostname", "spec.template.spec.setHostnameAsFQDN", "spec.template.spec.enableServiceLinks"),
)
FIXED_IN_CONTAINER = ("command", "args", "terminationMessagePolicy", "terminationMessagePath")


class Request:
    """One attempt as manifests; `source` says where a bundle goes that is too large for a ConfigMap, else None."""

    def __init__(self, job: Job, bundle: Bundle, run_id: str, attempt: int, options: Mapping[str, Any]) -> None:
        self._job, self._options = job, options
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        output = (job.output or "").rstrip("/") or None
        path, found = paths.output_path(output)
        self.problems += [*found, *paths.unshared(job), *self._paths(path)]
        about = provenance.about("kubernetes", job, bundle) if output else None
        self.manifest = replace(Manifest.of(job, run_id, attempt, about), output=output)
        self.name = self.manifest.attempt_id
        self.namespace = str(options.get("namespace") or "default")
        self._output_path = path
        self.source = self._place(bundle, output)
        labels = self._labels()
        base = self._kueue(self._base(labels, bundle))
        self.job = merged(base, options.get("overlay") or {})
        self._unbroken(base)
        owned = {"namespace": self.namespace, "labels": labels, "ownerReferences": [self._owner()]}
        self.others: list[dict[str, Any]] = []
        if self.manifest.nodes > 1:
            self.others.append(self._service(owned))
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
            said = "no output is named: checkpoints, results and logs vanish with the pods"
            self.notes.append(f"{said} (output: gs://bucket/..., s3://bucket/... or a path on a claim)")
        if job.resources.gpus and not options.get("node_selector"):
            said = f"any GPU will do: nothing says which nodes have {job.resources.accelerator}"
            self.notes.append(f"{said} (options.kubernetes.node_selector)")

    def to_dict(self) -> dict[str, Any]:
        """Return what the plan prints: the manifests in the order in which they are sent, and the patch that starts."""
        start: dict[str, Any] = {"metadata": {"annotations": {STARTED: "yes"}}}
        if not self._options.get("queue"):  # Kueue starts it itself
            start["spec"] = {"suspend": False}
        return {
            "namespace": self.namespace,
            "manifests": [self.job, *self.others],
            "start": start,
            "source": self.source,
        }

    # -- the parts -----------------------------------------------------------------------------------------------------

    def _base(self, labels: dict[str, str], bundle: Bundle) -> dict[str, Any]:
        job, nodes = self._job, self.manifest.nodes
        one = job.limits.max_runtime_s + job.limits.grace_s + LEAVE_S
        longest = one * self.starts + self._seconds("wait", "24h")
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
                "backoffLimit": self.starts - 1,
                "activeDeadlineSeconds": longest,
                "ttlSecondsAfterFinished": self._seconds("ttl", "7d"),
                "podReplacementPolicy": "Failed",
                "podFailurePolicy": {
                    "rules": [
                        {
                            "action": "FailJob" if self.starts == 1 else "Count",
                            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                        },
                        *(
                            {
                                "action": "FailJob",
                                "onExitCodes": {"containerName": name, "operator": "NotIn", "values": [0]},
                            }
                            for name in (CONTAINER, UNPACK)
                        ),
                    ]
                },
                "suspend": True,
                "template": {
                    "metadata": {"labels": dict(labels)},
                    "spec": {
                        **self._pod(),
                        "initContainers": [self._unpacking(bundle)],
                        "containers": [self._container()],
                        "volumes": self._volumes(),
                    },
                },
            },
        }

    def _kueue(self, job: dict[str, Any]) -> dict[str, Any]:
        if queue := self._options.get("queue"):
            job["metadata"]["labels"][QUEUE] = str(queue)
        return job

    def _pod(self) -> dict[str, Any]:
        options, nodes = self._options, self.manifest.nodes
        pod: dict[str, Any] = {
            "restartPolicy": "Never",
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": self._job.limits.grace_s + LEAVE_S,
        }
        if nodes > 1:
            pod["subdomain"] = self.name
        if options.get("service_account"):
            pod["serviceAccountName"] = options["service_account"]
        if options.get("pull_secrets"):
            pod["imagePullSecrets"] = [{"name": name} for name in options["pull_secrets"]]
        if options.get("priority_class"):
            pod["priorityClassName"] = options["priority_class"]
        selector = dict(options.get("node_selector") or {})
        tolerations = [dict(item) for item in options.get("tolerations") or ()]
        resources = self._job.resources
        if resources.instance_type:
            selector["node.kubernetes.io/instance-type"] = resources.instance_type
        if resources.use_spot:
            spot = dict(options.get("spot_selector") or {})
            if not spot:
                hint = "by cluster: cloud.google.com/gke-spot: 'true', eks.amazonaws.com/capacityType: SPOT"
                self._wrong("options.kubernetes.spot_selector", "is needed for resources.use_spot", hint)
            selector |= spot
            tolerations += [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in sorted(spot)]
        if resources.gpus:
            key = str(options.get("gpu_resource") or "nvidia.com/gpu")
            tolerations.append({"key": key, "operator": "Exists", "effect": "NoSchedule"})
        if selector:
            pod["nodeSelector"] = selector
        if tolerations:
            pod["tolerations"] = tolerations
        affinity = dict(options.get("affinity") or {})
        if options.get("topology"):
            near = {
                "topologyKey": options["topology"],
                "labelSelector": {"matchLabels": {ATTEMPT: self.name}},
            }
            affinity = merged(affinity, {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [near]}})
        if affinity:
            pod["affinity"] = affinity
        return pod

    @property
    def starts(self) -> int:
        """How often the cluster itself may start the pod: one that is alone does not break a world when it is replaced."""
        retry = self._job.retry
        return retry.max_attempts if self.manifest.nodes == 1 and "preempted" in retry.on_events else 1

    def _unpacking(self, bundle: Bundle) -> dict[str, Any]:
        """Return the container that brings the source, and ends before the launcher begins. It sees no secret."""
        env = {
            pod.SOURCE: self.source or f"{SOURCE}/source.tar.gz",
            pod.DIGEST: bundle.sha256,
            pod.WORK: WORK,
        }
        mounts: list[dict[str, Any]] = [{"name": "work", "mountPath": WORK}]
        if self.source is None:
            mounts.insert(0, {"name": "source", "mountPath": SOURCE, "readOnly": True})
        # As much as the launcher's, which is not there yet: a quota may want limits of every container.
        resources = {
            kind: {name: value for name, value in values.items() if name in ("cpu", "memory", "ephemeral-storage")}
            for kind, values in self._resources().items()
        }
        return {
            "name": UNPACK,
            "image": self._image,
            "command": [self._python, "-c", pod.COMMAND],
            "env": [{"name": name, "value": value} for name, value in env.items()],
            "resources": {kind: values for kind, values in resources.items() if values},
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": mounts,
        }

    @property
    def _image(self) -> str:
        return str(self._job.image or self._options.get("image") or "none")

    @property
    def _python(self) -> str:
        return str(self._options.get("python") or "python3")

    def _container(self) -> dict[str, Any]:
        options = self._options
        if self._image == "none":
            self._wrong("image", "is not given, and pods run containers", "image: registry/name:tag, or the target's")
        found: dict[str, Any] = {
            "name": CONTAINER,
            "image": self._image,
            "command": [self._python, f"{WORK}/{pod.LAUNCHER}"],
            "env": self._env(),
            "resources": self._resources(),
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": self._mounts(),
        }
        if options.get("extended_resources"):
            found["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}  # RDMA registers memory
        return found

    def _env(self) -> list[dict[str, Any]]:
        manifest = self.manifest
        try:
            pieces = manifest.encode()
        except BadRequest as error:
            self._wrong("args", error.message, error.hint)
            pieces = []
        env = {f"CLOUDTRAIN_MANIFEST_{n}": piece for n, piece in enumerate(pieces)}
        env |= {
            "CLOUDTRAIN_ATTEMPT_ID": manifest.attempt_id,
            "CLOUDTRAIN_NUM_NODES": str(manifest.nodes),
            "MASTER_ADDR": f"{self.name}-0.{self.name}" if manifest.nodes > 1 else "127.0.0.1",
        }
        if self._output_path is not None:
            env["CLOUDTRAIN_RUN_DIR"] = f"{self._output_path.rstrip('/')}/{manifest.run_id}"
            env["CLOUDTRAIN_RUN_DIR_SHARED"] = "1"
        elif manifest.output is not None:
            env["CLOUDTRAIN_KEEP_LOG"] = "1"  # in the output: a pod that is deleted takes its log along
        found: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in env.items()]
        if manifest.nodes > 1:
            found.append(_own("CLOUDTRAIN_POD_IP", "status.podIP"))
        found.append(_own("CLOUDTRAIN_START", "metadata.uid"))  # tells the logs of several starts apart
        return [*found, *self._secrets()]

    def _secrets(self) -> Iterator[dict[str, Any]]:
        """Yield references: the kubelet reads the values, the launcher takes them from its environment."""
        seen = set()
        for name, sources in self._job.secrets.items():
            for source in sources:
                found = SECRET.fullmatch(source)
                if source.startswith("k8s:") and found is None:
                    self._wrong(f"secrets.{name}", f"names no key of a secret: {source}", "k8s:name/key")
                elif found is not None and source not in seen:
                    seen.add(source)
                    reference = {"name": found[1], "key": found[3], "optional": True}  # the launcher says what lacks
                    yield {"name": f"CLOUDTRAIN_SECRET_{found[1]}_{found[3]}", "valueFrom": {"secretKeyRef": reference}}

    def _resources(self) -> dict[str, Any]:
        wanted, options = self._job.resources, self._options
        requests: dict[str, Any] = {}
        limits: dict[str, Any] = {}
        if wanted.cpus:
            requests["cpu"] = str(wanted.cpus)
        if wanted.memory_bytes:
            requests["memory"] = limits["memory"] = str(wanted.memory_bytes)
        if wanted.disk_gb:
            requests["ephemeral-storage"] = limits["ephemeral-storage"] = f"{wanted.disk_gb}G"
        counted = dict(options.get("extended_resources") or {})
        if wanted.gpus:
            counted[str(options.get("gpu_resource") or "nvidia.com/gpu")] = wanted.gpus
        for name, count in counted.items():
            requests[name] = limits[name] = str(count)
        return {kind: values for kind, values in (("requests", requests), ("limits", limits)) if values}

    def _mounts(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [{"name": "work", "mountPath": WORK}, {"name": "shm", "mountPath": SHM}]
        for number, volume in enumerate(self._options.get("volumes") or ()):
            mount = {"name": f"claim-{number}", "mountPath": volume["path"]}
            found.append({**mount, "readOnly": True} if volume.get("read_only") else mount)
        return found

    def _volumes(self) -> list[dict[str, Any]]:
        shm: dict[str, Any] = {"medium": "Memory"}
        if size := self._options.get("shm"):
            try:
                shm["sizeLimit"] = str(units.size_bytes(str(size)))
            except ValueError as error:
                self._wrong("options.kubernetes.shm", f"is no size: {size}", str(error))
        found: list[dict[str, Any]] = [{"name": "work", "emptyDir": {}}, {"name": "shm", "emptyDir": shm}]
        if self.source is None:
            found.insert(0, {"name": "source", "configMap": {"name": self.name}})
        for number, volume in enumerate(self._options.get("volumes") or ()):
            found.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": volume["claim"]}})
        return found

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

    def _owner(self) -> dict[str, Any]:
        return {"apiVersion": "batch/v1", "kind": "Job", "name": self.name, "uid": UID, "blockOwnerDeletion": False}

    def _labels(self) -> dict[str, str]:
        found = {**self._job.labels, RUN: self.manifest.run_id, ATTEMPT: self.name}
        for name, value in self._job.labels.items():
            if rule := rules.is_label(name, value):
                self._wrong(f"labels.{name}", rule.said)
        return {name: value for name, value in found.items() if rules.is_label(name, value) is None}

    def _place(self, bundle: Bundle, output: str | None) -> str | None:
        """Return where a large bundle goes; None where a ConfigMap holds it."""
        if bundle.size_bytes <= SMALL:
            return None
        if output is None or not paths.STORED.match(output):
            said = f"takes {bundle.size_bytes:,} bytes packed; {SMALL:,} fit into a ConfigMap"
            self._wrong(
                "source", said, "output: gs://bucket/... or s3://bucket/... holds larger ones; or .cloudtrainignore"
            )
            return None
        return f"{output}/src/{bundle.sha256}.tar.gz"

    # -- what is wrong -------------------------------------------------------------------------------------------------

    def _paths(self, output: str | None) -> Iterator[Problem]:
        """Yield what is a path and lies on no claim that the pods mount."""
        mounted = [PurePosixPath(volume["path"]) for volume in self._options.get("volumes") or ()]
        local = {"output": output} if output else {}
        for name, item in self._job.inputs.items():
            if "://" not in item.uri or item.uri.startswith("file://"):
                local[f"inputs.{name}.uri"] = item.uri.removeprefix("file://")
            elif item.mode == "mount":
                yield Problem("no object store is mounted in a pod", f"inputs.{name}.mode", "write copy or stream")
        for path, text in local.items():
            if not any(PurePosixPath(text).is_relative_to(folder) for folder in mounted):
                hint = "options.kubernetes.volumes: [{claim: NAME, path: /data}], or an object store"
                yield Problem(f"{text} lies on no claim that the pods mount", path, hint)

    def _unbroken(self, base: Mapping[str, Any]) -> None:
        """Note what the overlay has changed although everything else builds on it."""
        at = "options.kubernetes.overlay"
        fixed = [*(path.split(".") for path in FIXED)]
        fixed += [["metadata", "annotations", name] for name in (OUTPUT, STARTED, CANCELLED)]
        for name in (RUN, ATTEMPT):
            fixed += [["metadata", "labels", name], ["spec", "template", "metadata", "labels", name]]
        for path in fixed:
            if _get(self.job, path) != _get(base, path):
                self._wrong(f"{at}.{'.'.join(path)}", "may not be changed", "docs/kubernetes.md lists what may not")
        pod = _get(self.job, ["spec", "template", "spec"])
        if not isinstance(pod, Mapping):
            self._wrong(f"{at}.spec.template.spec", "is not a pod's")
            return
        for kind, name in (("initContainers", UNPACK), ("containers", CONTAINER)):
            self._unbroken_container(f"{at}.spec.template.spec.{kind}.{name}", base, pod, kind, name)
        for volume in pod.get("volumes") or ():
            if "hostPath" in volume:
                hint = "a persistent volume claim: options.kubernetes.volumes"
                self._wrong(f"{at}.spec.template.spec.volumes", "mounts a path of the host", hint)

    def _unbroken_container(
        self, at: str, base: Mapping[str, Any], pod: Mapping[str, Any], kind: str, name: str
    ) -> None:
        ours = base["spec"]["template"]["spec"][kind][0]
        now: Mapping[str, Any] = next((item for item in pod.get(kind) or () if item.get("name") == name), {})
        for field in FIXED_IN_CONTAINER:
            if now.get(field) != ours.get(field):
                self._wrong(f"{at}.{field}", "may not be changed")
        known = {item["name"]: item for item in now.get("env") or ()}
        for item in ours["env"]:
            if known.get(item["name"]) != item:
                self._wrong(f"{at}.env.{item['name']}", "may not be changed")

    def _check(self) -> None:
        if self.problems:
            return  # what is wrong already would only be said twice
        found = [("options.kubernetes.overlay", rule) for rule in rules.of_job(self.job)]
        for other in self.others:
            check = rules.of_service if other["kind"] == "Service" else rules.of_config_map
            found += [(other["kind"], rule) for rule in check(other)]
        for place, rule in found:
            self._wrong(f"{place}.{rule.path}", rule.said)

    def _seconds(self, name: str, usual: str) -> int:
        text = str(self._options.get(name) or usual)
        try:
            return units.duration_s(text)
        except ValueError as error:
            self._wrong(f"options.kubernetes.{name}", f"is no duration: {text}", str(error))
            return 1

    def _wrong(self, path: str, said: str, hint: str = "") -> None:
        self.problems.append(Problem(said, path, hint))


def merged(one: Any, other: Any) -> Any:
    """Lay one JSON value over another: objects by key, lists of named objects by their names, anything else is replaced.

    null removes what stood there.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        found = {**one, **{key: merged(one.get(key), value) for key, value in other.items()}}
        return {key: value for key, value in found.items() if value is not None}
    for key in ("name", "mountPath"):
        if _keyed(one, key) and _keyed(other, key):
            overs = {item[key]: item for item in other}
            kept = [merged(item, overs.pop(item[key], {})) for item in one]
            return [*kept, *overs.values()]
    return other


def applicable(request: Mapping[str, Any], packed: bytes) -> list[dict[str, Any]]:
    """Return the manifests as `kubectl apply` takes them: the bytes in, no owner references, not suspended."""
    from base64 import b64encode

    found = []
    for manifest in request["manifests"]:
        shown = filled(manifest, {BYTES: b64encode(packed).decode()})
        shown["metadata"].pop("ownerReferences", None)
        if shown["kind"] == "Job":
            shown = merged(shown, request["start"])
        found.append(shown)
    return found


def filled(value: Any, known: Mapping[str, str]) -> Any:
    """Return a manifest with the values in it that only the server, or the bundle, knows."""
    if isinstance(value, Mapping):
        return {key: filled(item, known) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [filled(item, known) for item in value]
    return known.get(value, value) if isinstance(value, str) else value


def _own(name: str, path: str) -> dict[str, Any]:
    """Return a variable that the kubelet fills with a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _keyed(value: Any, key: str) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and bool(value)
        and all(isinstance(item, Mapping) and key in item for item in value)
    )


def _get(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value
