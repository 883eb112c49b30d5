"""Build the Kubernetes manifests of a job: an Indexed Job, a headless Service for several nodes, a ConfigMap for the code.

Pure data, no calls. The Job is created suspended, then the objects that it owns, then it is started: a submit that is
killed in between leaves nothing running and can be repeated. When one pod of several fails, the whole Job fails and the
next attempt is another Job. The cluster itself replaces a preempted pod of a single-node job, up to the job's attempts.

    ${job.uid}        the Job's uid, in the owner references of Service and ConfigMap: they are deleted with the Job
    ${bundle.bytes}   the source bundle, base64
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.kubernetes import init_container, rules
from cloudtrain.backends.manifest import Manifest
from cloudtrain.errors import BadRequest, Problem
from cloudtrain.job import units
from cloudtrain.nodes import paths
from cloudtrain.source import provenance

if TYPE_CHECKING:
    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle

RUN, ATTEMPT = "cloudtrain.dev/run", "cloudtrain.dev/attempt"  # labels
STARTED, CANCELLED = "cloudtrain.dev/started", "cloudtrain.dev/cancelled"  # annotations that submit and cancel set
OUTPUT = "cloudtrain.dev/output"  # annotation: path or URI of the run's output
QUEUE = "kueue.x-k8s.io/queue-name"
UID, BYTES = "${job.uid}", "${bundle.bytes}"
CONTAINER, UNPACK = "node", "source"  # the launcher's container, and the init container
PORT = 29380  # the launcher's, on node 0; the Service names one port because it must
MAX_INLINE_BYTES = 700 << 10  # largest bundle that goes into a ConfigMap, which holds 1 MiB of base64
SOURCE, WORK = "/cloudtrain/source", "/cloudtrain/work"
SHM = "/dev/shm"  # noqa: S108 - where ranks on one node share tensors
UPLOAD_S = 90  # added to limits.grace for the upload of results, before a pod is killed
SECRET = re.compile(r"k8s:([a-z0-9]([-a-z0-9.]*[a-z0-9])?)/([-._a-zA-Z0-9]+)")
# Fields that an overlay may not change: the number of pods, how the Job is found, how its pods start and end.
PROTECTED = (
    *("apiVersion", "kind", "metadata.name", "metadata.namespace", "spec.selector", "spec.manualSelector"),
    *("spec.completionMode", "spec.completions", "spec.parallelism", "spec.suspend", "spec.podFailurePolicy"),
    *("spec.backoffLimit", "spec.backoffLimitPerIndex", "spec.maxFailedIndexes", "spec.podReplacementPolicy"),
    *("spec.managedBy", "spec.successPolicy", "spec.template.spec.restartPolicy", "spec.template.spec.subdomain"),
    *("spec.template.spec.hostname", "spec.template.spec.setHostnameAsFQDN", "spec.template.spec.enableServiceLinks"),
)
PROTECTED_IN_CONTAINER = ("command", "args", "terminationMessagePolicy", "terminationMessagePath")


class Request:
    """The manifests of one attempt; `source` is the URI for a bundle that is too large for a ConfigMap, else None."""

    def __init__(self, job: Job, bundle: Bundle, run_id: str, attempt: int, options: Mapping[str, Any]) -> None:
        self._job, self._options = job, options
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        output = (job.output or "").rstrip("/") or None
        output_path, path_problems = paths.output_path(output)
        self.problems += [*path_problems, *paths.check_shared_output(job), *self._check_paths(output_path)]
        about = provenance.about("kubernetes", job, bundle) if output else None
        self.manifest = replace(Manifest.of(job, run_id, attempt, about), output=output)
        self.name = self.manifest.attempt_id
        self.namespace = str(options.get("namespace") or "default")
        self._output_path = output_path
        self.source = self._bundle_uri(bundle, output)
        labels = self._labels()
        base = self._add_queue_label(self._job_manifest(labels, bundle))
        self.job = merge_manifest(base, options.get("overlay") or {})
        self._check_overlay(base)
        owned = {"namespace": self.namespace, "labels": labels, "ownerReferences": [self._owner_reference()]}
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
            message = "no output is named: checkpoints, results and logs vanish with the pods"
            self.notes.append(f"{message} (output: gs://bucket/..., s3://bucket/... or a path on a claim)")
        if job.resources.gpus and not options.get("node_selector"):
            message = f"any GPU will do: nothing says which nodes have {job.resources.accelerator}"
            self.notes.append(f"{message} (options.kubernetes.node_selector)")

    def to_dict(self) -> dict[str, Any]:
        """Return the plan's request: the manifests in the order of creation, and the patch that starts the Job."""
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

    def _job_manifest(self, labels: dict[str, str], bundle: Bundle) -> dict[str, Any]:
        job, nodes = self._job, self.manifest.nodes
        per_start_s = job.limits.max_runtime_s + job.limits.grace_s + UPLOAD_S
        deadline_s = per_start_s * self.starts + self._seconds("wait", "24h")
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
                "activeDeadlineSeconds": deadline_s,
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
                        **self._pod_fields(),
                        "initContainers": [self._unpack_container(bundle)],
                        "containers": [self._launcher_container()],
                        "volumes": self._volumes(),
                    },
                },
            },
        }

    def _add_queue_label(self, job: dict[str, Any]) -> dict[str, Any]:
        if queue := self._options.get("queue"):
            job["metadata"]["labels"][QUEUE] = str(queue)
        return job

    def _pod_fields(self) -> dict[str, Any]:
        options, nodes = self._options, self.manifest.nodes
        pod: dict[str, Any] = {
            "restartPolicy": "Never",
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": self._job.limits.grace_s + UPLOAD_S,
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
                self._add_problem("options.kubernetes.spot_selector", "is needed for resources.use_spot", hint)
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
            affinity = merge_manifest(
                affinity, {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [near]}}
            )
        if affinity:
            pod["affinity"] = affinity
        return pod

    @property
    def starts(self) -> int:
        """How often the cluster itself may start the pod; more than once only for a single node, which has no peers."""
        retry = self._job.retry
        return retry.max_attempts if self.manifest.nodes == 1 and "preempted" in retry.on_events else 1

    def _unpack_container(self, bundle: Bundle) -> dict[str, Any]:
        """Return the init container that unpacks the source before the launcher starts. It gets no secrets."""
        env = {
            init_container.SOURCE: self.source or f"{SOURCE}/source.tar.gz",
            init_container.DIGEST: bundle.sha256,
            init_container.WORK: WORK,
        }
        mounts: list[dict[str, Any]] = [{"name": "work", "mountPath": WORK}]
        if self.source is None:
            mounts.insert(0, {"name": "source", "mountPath": SOURCE, "readOnly": True})
        # The same as the launcher's, which starts later: a quota may require limits for every container.
        resources = {
            kind: {name: value for name, value in values.items() if name in ("cpu", "memory", "ephemeral-storage")}
            for kind, values in self._resources().items()
        }
        return {
            "name": UNPACK,
            "image": self._image,
            "command": [self._python, "-c", init_container.COMMAND],
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

    def _launcher_container(self) -> dict[str, Any]:
        options = self._options
        if self._image == "none":
            self._add_problem(
                "image", "is not given, and pods run containers", "image: registry/name:tag, or the target's"
            )
        container: dict[str, Any] = {
            "name": CONTAINER,
            "image": self._image,
            "command": [self._python, f"{WORK}/{init_container.LAUNCHER}"],
            "env": self._env(),
            "resources": self._resources(),
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": self._mounts(),
        }
        if options.get("extended_resources"):
            container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}  # RDMA registers memory
        return container

    def _env(self) -> list[dict[str, Any]]:
        manifest = self.manifest
        try:
            chunks = manifest.encode()
        except BadRequest as error:
            self._add_problem("args", error.message, error.hint)
            chunks = []
        env = {f"CLOUDTRAIN_MANIFEST_{n}": chunk for n, chunk in enumerate(chunks)}
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
        variables: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in env.items()]
        if manifest.nodes > 1:
            variables.append(_pod_field_env("CLOUDTRAIN_POD_IP", "status.podIP"))
        variables.append(_pod_field_env("CLOUDTRAIN_START", "metadata.uid"))  # tells the logs of several starts apart
        return [*variables, *self._secrets()]

    def _secrets(self) -> Iterator[dict[str, Any]]:
        """Yield environment variables that refer to secrets; the kubelet fills in the values."""
        seen = set()
        for name, sources in self._job.secrets.items():
            for source in sources:
                match = SECRET.fullmatch(source)
                if source.startswith("k8s:") and match is None:
                    self._add_problem(f"secrets.{name}", f"names no key of a secret: {source}", "k8s:name/key")
                elif match is not None and source not in seen:
                    seen.add(source)
                    reference = {"name": match[1], "key": match[3], "optional": True}  # the launcher says what lacks
                    yield {"name": f"CLOUDTRAIN_SECRET_{match[1]}_{match[3]}", "valueFrom": {"secretKeyRef": reference}}

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
        extended = dict(options.get("extended_resources") or {})
        if wanted.gpus:
            extended[str(options.get("gpu_resource") or "nvidia.com/gpu")] = wanted.gpus
        for name, count in extended.items():
            requests[name] = limits[name] = str(count)
        return {kind: values for kind, values in (("requests", requests), ("limits", limits)) if values}

    def _mounts(self) -> list[dict[str, Any]]:
        mounts: list[dict[str, Any]] = [{"name": "work", "mountPath": WORK}, {"name": "shm", "mountPath": SHM}]
        for number, volume in enumerate(self._options.get("volumes") or ()):
            mount = {"name": f"claim-{number}", "mountPath": volume["path"]}
            mounts.append({**mount, "readOnly": True} if volume.get("read_only") else mount)
        return mounts

    def _volumes(self) -> list[dict[str, Any]]:
        shm: dict[str, Any] = {"medium": "Memory"}
        if size := self._options.get("shm"):
            try:
                shm["sizeLimit"] = str(units.size_bytes(str(size)))
            except ValueError as error:
                self._add_problem("options.kubernetes.shm", f"is no size: {size}", str(error))
        volumes: list[dict[str, Any]] = [{"name": "work", "emptyDir": {}}, {"name": "shm", "emptyDir": shm}]
        if self.source is None:
            volumes.insert(0, {"name": "source", "configMap": {"name": self.name}})
        for number, volume in enumerate(self._options.get("volumes") or ()):
            volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": volume["claim"]}})
        return volumes

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

    def _owner_reference(self) -> dict[str, Any]:
        return {"apiVersion": "batch/v1", "kind": "Job", "name": self.name, "uid": UID, "blockOwnerDeletion": False}

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
                "source", message, "output: gs://bucket/... or s3://bucket/... holds larger ones; or .cloudtrainignore"
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
            elif item.mode == "mount":
                yield Problem("no object store is mounted in a pod", f"inputs.{name}.mode", "write copy or stream")
        for path, text in local_paths.items():
            if not any(PurePosixPath(text).is_relative_to(folder) for folder in mount_paths):
                hint = "options.kubernetes.volumes: [{claim: NAME, path: /data}], or an object store"
                yield Problem(f"{text} lies on no claim that the pods mount", path, hint)

    def _check_overlay(self, base: Mapping[str, Any]) -> None:
        """Add a problem for every protected field that the overlay changes."""
        prefix = "options.kubernetes.overlay"
        protected = [*(path.split(".") for path in PROTECTED)]
        protected += [["metadata", "annotations", name] for name in (OUTPUT, STARTED, CANCELLED)]
        for name in (RUN, ATTEMPT):
            protected += [["metadata", "labels", name], ["spec", "template", "metadata", "labels", name]]
        for path in protected:
            if _get_path(self.job, path) != _get_path(base, path):
                self._add_problem(
                    f"{prefix}.{'.'.join(path)}", "may not be changed", "docs/kubernetes.md lists what may not"
                )
        pod = _get_path(self.job, ["spec", "template", "spec"])
        if not isinstance(pod, Mapping):
            self._add_problem(f"{prefix}.spec.template.spec", "is not a pod's")
            return
        for kind, name in (("initContainers", UNPACK), ("containers", CONTAINER)):
            self._check_overlay_container(f"{prefix}.spec.template.spec.{kind}.{name}", base, pod, kind, name)
        for volume in pod.get("volumes") or ():
            if "hostPath" in volume:
                hint = "a persistent volume claim: options.kubernetes.volumes"
                self._add_problem(f"{prefix}.spec.template.spec.volumes", "mounts a path of the host", hint)

    def _check_overlay_container(
        self, prefix: str, base: Mapping[str, Any], pod: Mapping[str, Any], kind: str, name: str
    ) -> None:
        original = base["spec"]["template"]["spec"][kind][0]
        changed: Mapping[str, Any] = next((item for item in pod.get(kind) or () if item.get("name") == name), {})
        for field in PROTECTED_IN_CONTAINER:
            if changed.get(field) != original.get(field):
                self._add_problem(f"{prefix}.{field}", "may not be changed")
        variables = {item["name"]: item for item in changed.get("env") or ()}
        for item in original["env"]:
            if variables.get(item["name"]) != item:
                self._add_problem(f"{prefix}.env.{item['name']}", "may not be changed")

    def _check(self) -> None:
        if self.problems:
            return  # the rules would only report the same problems again
        violations = [("options.kubernetes.overlay", violation) for violation in rules.check_job(self.job)]
        for manifest in self.others:
            check = rules.check_service if manifest["kind"] == "Service" else rules.check_config_map
            violations += [(manifest["kind"], violation) for violation in check(manifest)]
        for prefix, violation in violations:
            self._add_problem(f"{prefix}.{violation.path}", violation.message)

    def _seconds(self, name: str, default: str) -> int:
        text = str(self._options.get(name) or default)
        try:
            return units.duration_s(text)
        except ValueError as error:
            self._add_problem(f"options.kubernetes.{name}", f"is no duration: {text}", str(error))
            return 1

    def _add_problem(self, path: str, message: str, hint: str = "") -> None:
        self.problems.append(Problem(message, path, hint))


def merge_manifest(base: Any, overlay: Any) -> Any:
    """Merge a JSON value over another: objects by key, lists of named objects by name; anything else is replaced.

    null removes a field.
    """
    if isinstance(base, Mapping) and isinstance(overlay, Mapping):
        fields = {**base, **{key: merge_manifest(base.get(key), value) for key, value in overlay.items()}}
        return {key: value for key, value in fields.items() if value is not None}
    for key in ("name", "mountPath"):
        if _all_have_key(base, key) and _all_have_key(overlay, key):
            overlay_items = {item[key]: item for item in overlay}
            merged_items = [merge_manifest(item, overlay_items.pop(item[key], {})) for item in base]
            return [*merged_items, *overlay_items.values()]
    return overlay


def kubectl_manifests(request: Mapping[str, Any], bundle_bytes: bytes) -> list[dict[str, Any]]:
    """Return manifests for `kubectl apply`: with the bundle's bytes, without owner references, not suspended."""
    from base64 import b64encode

    manifests = []
    for manifest in request["manifests"]:
        applied = fill_placeholders(manifest, {BYTES: b64encode(bundle_bytes).decode()})
        applied["metadata"].pop("ownerReferences", None)
        if applied["kind"] == "Job":
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


def _pod_field_env(name: str, path: str) -> dict[str, Any]:
    """Return an environment variable that the kubelet fills from a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _all_have_key(value: Any, key: str) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and bool(value)
        and all(isinstance(item, Mapping) and key in item for item in value)
    )


def _get_path(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value
