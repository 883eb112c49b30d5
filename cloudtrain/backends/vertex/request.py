"""Build the complete Vertex AI CustomJob request of a job, in the JSON of Google's API; pure data.

    gs://<bucket>/<prefix>/src/<sha256>.tar.gz   source bundles, by digest
    gs://<bucket>/<prefix>/<run>/                checkpoints, outputs and model of the run

One worker pool has the primary replica, a second one all others, as the API requires. Every replica runs the same
command, which fetches the bundle and execs the launcher (fetch_program.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from cloudtrain.backends import fetch_program, machines
from cloudtrain.backends.machines import Machine
from cloudtrain.backends.manifest import Manifest
from cloudtrain.backends.plan import Fact, Note
from cloudtrain.backends.vertex.raw import merge_raw
from cloudtrain.errors import BadRequest, Problem
from cloudtrain.job import roles
from cloudtrain.nodes import paths
from cloudtrain.source import provenance

if TYPE_CHECKING:
    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle

ATTEMPT, RUN = "cloudtrain_attempt", "cloudtrain_run"  # labels; `find` searches by the first one
MARGIN_S = 1800  # added to max_runtime for the platform's timeout: image pulls before, uploads after
MAX_TIMEOUT_S = 30 * 86400
FLEX_START_S = 7 * 86400  # the longest run of FLEX_START
DISK_GB = (100, 64000)
MAX_ENV, MAX_LABELS = 100, 64
_LABEL = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_LABEL_VALUE = re.compile(r"[a-z0-9_-]{0,63}")
# option -> pattern and example of the resource names that Google's API takes
_NAMES = {
    "network": (r"projects/\d+/global/networks/[\w-]+", "projects/123456789/global/networks/default, by number"),
    "network_attachment": (r"(projects/[^/]+/regions/[^/]+/networkAttachments/)?[\w-]+", "the attachment's name"),
    "kms_key": (
        r"projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+",
        "projects/P/locations/R/keyRings/K/cryptoKeys/NAME",
    ),
    "tensorboard": (r"projects/[^/]+/locations/[^/]+/tensorboards/[^/]+", "projects/P/locations/R/tensorboards/ID"),
    "service_account": (r"[^@\s]+@[^@\s]+", "name@project.iam.gserviceaccount.com"),
    "persistent_resource": (r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "its id, without the project"),
}
# https://cloud.google.com/vertex-ai/docs/training/use-reservations (2026-11-23)
_TPU = re.compile(r"ct\d|tpu", re.IGNORECASE)  # ct5lp-hightpu-4t, ct6e-standard-8t, tpu7x-standard-4t
_GPU_FAMILIES = re.compile(r"[ag]\d")  # Compute Engine's machine families: a2, a3, a4x, g2, g4 (2026-11-29)
_RESERVATION = re.compile(r"projects/[^/]+/zones/[^/]+/reservations/[^/]+")


KEYS = {
    "num_nodes": "replicaCount",
    "image": "imageUri",
    "resources.accelerators": "acceleratorType",
    "resources.use_spot": "strategy",
    "resources.disk_gb": "bootDiskSizeGb",
    "resources.cpus": "machineType",
    "resources.memory": "machineType",
    "resources.instance_type": "machineType",
    "roles.resources": "workerPoolSpecs",
    "roles.image": "imageUri",
    "limits.max_runtime": "timeout",
    "limits.max_wait": "maxWaitDuration",
    "retry.max_attempts": "disableRetries",
}


class Request:
    """The request of one attempt: `parent`, `custom_job`, `source` and `manifest`, with problems and notes."""

    def __init__(
        self, job: Job, bundle: Bundle, run_id: str, attempt: int, options: Mapping[str, Any], backend: str
    ) -> None:
        self._job, self._options, self._backend = job, options, backend
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        bucket = str(options["bucket"]).removeprefix("gs://").strip("/")
        prefix = str(options.get("prefix") or "cloudtrain").strip("/")
        output = (job.output or f"gs://{bucket}/{prefix}").rstrip("/")
        # Replicas of vertex-local are processes of this machine.
        folder = paths.output_path(output)[0] if backend == "vertex-local" else None
        self._run_folder = f"{folder.rstrip('/')}/{run_id}" if folder else ""
        if not folder and not re.match(r"gs://[^/]+", output):
            self._add_problem(
                "output", f"is {output}, but Vertex AI writes results to Cloud Storage only", "gs://bucket/prefix"
            )
        self.machine = self._choose_machine()
        self._services = self._of_services(bundle, run_id, attempt)
        job, found_notes = machines.with_gpus(self._job, self.machine)
        self._job = job
        self.notes += found_notes
        changes: dict[str, Any] = {"output": output, "inputs": self._inputs()}
        self.manifest = replace(Manifest.of(job, run_id, attempt, provenance.about(backend, job, bundle)), **changes)
        self.parent = f"projects/{options['project']}/locations/{options['region']}"
        self.source = {"bucket": bucket, "object": f"{prefix}/src/{bundle.sha256}.tar.gz"}
        base = f"gs://{bucket}/{prefix}/{run_id}/" if folder else f"{output}/{run_id}/"
        self.custom_job, problems = merge_raw(
            self._custom_job(base, bundle), options.get("raw") or {}, f"options.{backend}.raw"
        )
        self.problems += problems

    @property
    def price(self) -> dict[str, Any] | None:
        """The on-demand price of all nodes together, which spot machines stay below; None if unknown."""
        price, others = (one.machine.price if one.machine else None for one in (self, self._services or self))
        if not price or not others:
            return None
        usd = price["usd_per_hour"] + others["usd_per_hour"] * (self._job.num_nodes - 1)
        return {**price, "usd_per_hour": round(usd, 6)}

    def to_dict(self) -> dict[str, Any]:
        """Return the request as the plan shows it."""
        return {"parent": self.parent, "customJob": self.custom_job, "source": self.source}

    # -- the parts -----------------------------------------------------------------------------------------------------

    def _custom_job(self, base: str, bundle: Bundle) -> dict[str, Any]:
        options, manifest = self._options, self.manifest
        spec: dict[str, Any] = {"workerPoolSpecs": self._worker_pools(bundle), "scheduling": self._scheduling()}
        fields = {
            "serviceAccount": "service_account",
            "network": "network",
            "tensorboard": "tensorboard",
            "persistentResourceId": "persistent_resource",
        }
        for name, (pattern, example) in _NAMES.items():
            if options.get(name) and not re.fullmatch(pattern, str(options[name])):
                self._add_option_problem(name, f"is not a valid name: {options[name]}", example)
        if options.get("tensorboard") and not options.get("service_account"):
            self._add_option_problem(
                "service_account", "is required with options.vertex.tensorboard", "name@project.iam..."
            )
        parts = str(options.get("tensorboard") or "").split("/")
        if len(parts) == 6 and (region := options.get("region") or "us-central1") != parts[3]:
            message = f"is in {parts[3]}, and the job runs in {region}"
            self._add_option_problem("tensorboard", message, "a TensorBoard of the job's region")
        if options.get("network") and options.get("network_attachment"):
            self._add_option_problem("network_attachment", "excludes network", "remove one of the two")
        spec |= {field: options[name] for field, name in fields.items() if options.get(name)}
        if options.get("network_attachment"):
            spec["pscInterfaceConfig"] = {"networkAttachment": options["network_attachment"]}
        spec["baseOutputDirectory"] = {"outputUriPrefix": base}
        if options.get("web_access"):
            spec["enableWebAccess"] = True
        custom_job: dict[str, Any] = {
            "displayName": manifest.attempt_id,
            "jobSpec": spec,
            "labels": self._labels(),
        }
        if options.get("kms_key"):
            custom_job["encryptionSpec"] = {"kmsKeyName": options["kms_key"]}
        return custom_job

    def _worker_pools(self, bundle: Bundle) -> list[dict[str, Any]]:
        """Return the worker pools: the primary replica, and a second pool of the same kind for the other nodes."""
        options, count = self._options, self.manifest.nodes
        pool: dict[str, Any] = {"machineSpec": self._machine_spec(), "replicaCount": 1}
        disk = {"bootDiskType": options.get("disk_type"), "bootDiskSizeGb": self._job.resources.disk_gb}
        if any(disk.values()):
            pool["diskSpec"] = {name: value for name, value in disk.items() if value}
        size = self._job.resources.disk_gb
        if size and not DISK_GB[0] <= size <= DISK_GB[1]:
            self._add_problem("resources.disk_gb", f"is {size}; boot disks here have {DISK_GB[0]} to {DISK_GB[1]} GB")
        image = self._job.image or options.get("image")
        if not image:
            self._add_problem(
                "image",
                "is missing: Vertex AI needs a container image",
                "set image: registry/name:tag in the job or the target",
            )
        pool["containerSpec"] = {
            "imageUri": image,
            "command": [options.get("python") or "python3", "-c", fetch_program.LAUNCH],
            "env": [{"name": name, "value": value} for name, value in self._environment(bundle).items()],
        }
        others = {**pool, "replicaCount": count - 1}
        if self._services:
            own = self._services.custom_job["jobSpec"]["workerPoolSpecs"][0]
            others.pop("diskSpec", None)
            others |= {name: own[name] for name in ("machineSpec", "diskSpec") if name in own}
            others["containerSpec"] = {**pool["containerSpec"], "imageUri": own["containerSpec"]["imageUri"]}
        return [pool, others] if count > 1 else [pool]

    def _of_services(self, bundle: Bundle, run_id: str, attempt: int) -> Request | None:
        """Return the request of a service by itself, where services have other machines or images than the main role."""
        job, names = self._job, roles.services(self._job)
        own = [roles.on_own_machine(job, name) for name in names]
        wanted = [(each.resources, each.image) for each in own]
        if all(each == (job.resources, job.image) for each in wanted):
            return None
        path = f"roles.{names[0]}."
        if job.main_nodes > 1 or any(each != wanted[0] for each in wanted):
            message = (
                "is possible beside a main role of one node, and the same for all services: there are two worker pools"
            )
            key = "image" if all(resources == job.resources for resources, _ in wanted) else "resources"
            self._add_problem(f"{path}{key}", message, "give all roles the same")
            return None
        resources, image = wanted[0]
        one = cast("Job", roles.program(job, names[0])).replace(resources=resources, image=image)
        made = Request(one, bundle, run_id, attempt, self._options, self._backend)
        self.problems += [replace(p, path=path + p.path) for p in made.problems if p.path.startswith("resources.")]
        self.notes += [note for note in made.notes if note not in self.notes]
        for name in names:
            self._job = machines.with_gpus_of(self._job, name, made.machine)
        return made

    def _environment(self, bundle: Bundle) -> dict[str, str]:
        try:
            env = self.manifest.environment()
        except BadRequest as error:
            self._add_problem("args", error.message, error.hint)
            env = {}
        env |= {
            fetch_program.SOURCE: f"gs://{self.source['bucket']}/{self.source['object']}",
            fetch_program.DIGEST: bundle.sha256,
        }
        if self._run_folder:
            env |= {"CLOUDTRAIN_RUN_DIR": self._run_folder, "CLOUDTRAIN_RUN_DIR_SHARED": "1"}
        assert len(env) <= MAX_ENV, "64 KiB of manifest are at most 28 pieces"
        return env

    def _choose_machine(self) -> Machine | None:
        """Return the machine type of every node, None for one that is not in machines.csv."""
        resources = self._job.resources
        table = machines.load("vertex")
        if _TPU.match(resources.instance_type or resources.accelerator or ""):
            path = "resources.instance_type" if resources.instance_type else "resources.accelerators"
            message = "TPUs need torch_xla or JAX, its images and its launcher, which cloudtrain does not support"
            self._add_problem(path, message, "choose GPUs: L4, A100-80GB, H100")
            return None
        if resources.instance_type:
            same_name = [machine for machine in table if machine.name == resources.instance_type]
            if not same_name:
                self.notes.append(
                    f"cloudtrain does not know the machine type {resources.instance_type}: Vertex AI decides whether it exists"
                )
                if _GPU_FAMILIES.match(resources.instance_type) and not resources.accelerators:
                    message = f"is missing, and cloudtrain does not know what GPUs {resources.instance_type} has"
                    self._add_problem("resources.accelerators", message, "write them, as in B200:8")
                return None
            if not resources.accelerators:  # the machine's own; GPUs are attached to an N1 machine only on request
                return self._check_capacity(min(same_name, key=lambda machine: machine.accelerators))
            fitting = [machine for machine in same_name if machine.accelerators == resources.gpus]
            fitting = [
                m
                for m in fitting
                if not resources.accelerator or machines.matches(resources.accelerator, m.accelerator)
            ]
            if not fitting:
                offered = " or ".join(sorted({_describe_gpus(machine) for machine in same_name}))
                self._add_problem(
                    "resources.accelerators", f"does not fit {resources.instance_type}, which has {offered}"
                )
            return self._check_capacity(fitting[0]) if fitting else same_name[0]
        allowed = [machine for machine in table if machine.more["capacity"] in self._capacity]
        choice = machines.choose(allowed, resources)
        if isinstance(choice, Problem):
            choice = machines.choose(table, resources)
        if isinstance(choice, Problem):
            self.problems.append(choice)
            return None
        return self._check_capacity(choice)

    def _check_capacity(self, machine: Machine) -> Machine:
        """Return a machine, with a problem where it is not offered on demand and the job asks for nothing else."""
        if machine.more["capacity"] not in self._capacity:
            message = f"is not offered on demand: {machine.accelerator}:{machine.accelerators} ({machine.name})"
            spot = "resources.use_spot, options.vertex.strategy: FLEX_START, or "
            hint = f"set {spot if machine.more['capacity'] == 'spot' else ''}options.vertex.reservations"
            named = "instance_type" if self._job.resources.instance_type else "accelerators"
            self._add_problem(f"resources.{named}", message, hint)
        return machine

    @property
    def _capacity(self) -> list[str]:
        """The kinds of capacity that the job may use, as in the table of machines; "" is on demand."""
        if self._options.get("reservations") or self._options.get("persistent_resource"):
            return ["", "spot", "reservation"]
        return ["", "spot"] if self._strategy in ("SPOT", "FLEX_START") else [""]

    def _machine_spec(self) -> dict[str, Any]:
        resources, options, machine = self._job.resources, self._options, self.machine
        spec: dict[str, Any] = {"machineType": machine.name if machine else resources.instance_type}
        if machine and machine.accelerators:
            spec |= {"acceleratorType": machine.more["accelerator_type"], "acceleratorCount": machine.accelerators}
        elif not machine and resources.gpus:
            if options.get("accelerator_type"):
                spec |= {"acceleratorType": options["accelerator_type"], "acceleratorCount": resources.gpus}
            elif resources.instance_type:
                message = f"is needed for {resources.instance_type}, which cloudtrain's table of machines lacks"
                self._add_option_problem("accelerator_type", message, "use the API's name, such as NVIDIA_H100_80GB")
        for name in options.get("reservations") or ():
            if not _RESERVATION.fullmatch(name):
                message = f"is not a full name: {name}"
                self._add_option_problem("reservations", message, "projects/P/zones/Z/reservations/NAME")
        if options.get("reservations"):
            if self._strategy in ("SPOT", "FLEX_START"):
                self._add_option_problem("reservations", f"excludes {self._strategy}", "remove one of the two")
            spec["reservationAffinity"] = {
                "reservationAffinityType": "SPECIFIC_RESERVATION",
                "key": "compute.googleapis.com/reservation-name",
                "values": list(options["reservations"]),
            }
        return spec

    @property
    def _strategy(self) -> str | None:
        return self._options.get("strategy") or ("SPOT" if self._job.resources.use_spot else None)

    def _scheduling(self) -> dict[str, Any]:
        job, options, strategy = self._job, self._options, self._strategy
        longest_s = FLEX_START_S if strategy == "FLEX_START" else MAX_TIMEOUT_S
        timeout_s = job.limits.max_runtime_s + job.limits.grace_s + MARGIN_S
        if job.limits.max_runtime_s > longest_s:
            message = f"is {job.limits.max_runtime}; Vertex AI allows at most {longest_s // 86400} days"
            self._add_problem("limits.max_runtime", message)
        elif timeout_s > longest_s:
            timeout_s = longest_s
            self.notes.append(
                f"Vertex AI runs such a job for {longest_s // 86400} days at most: less time is added for image pulls "
                "and the last checkpoint"
            )
        if job.resources.use_spot and strategy != "SPOT":
            self._add_option_problem("strategy", f"is {strategy}, but resources.use_spot asks for SPOT")
        scheduling: dict[str, Any] = {"timeout": f"{timeout_s}s"}
        if job.retry.max_attempts == 1 or job.limits.capped:  # a restart by Vertex AI may reset the timeout
            scheduling["disableRetries"] = True
        else:
            # Ranks cannot join a running process group: when one replica restarts, all must.
            scheduling["restartJobOnWorkerRestart"] = True
        if options.get("persistent_resource") and job.limits.capped:
            message = (
                "cannot be combined with limits.max_cost or max_total_runtime: its machines are billed after the job"
            )
            self._add_option_problem("persistent_resource", message, "remove one of the two")
        if strategy:
            scheduling["strategy"] = strategy
        if job.limits.max_wait and strategy == "FLEX_START":
            scheduling["maxWaitDuration"] = f"{job.limits.max_wait_s}s"
            if not job.limits.max_wait_s:  # which means no limit to Vertex AI
                self._add_problem("limits.max_wait", "is 0, and FLEX_START waits for machines", "write 10m")
        elif job.limits.max_wait:
            text = "limits.max_wait has no effect: Vertex AI supports it only with options.vertex.strategy: FLEX_START"
            self.notes.append(Note(text, Fact.WAIT_UNLIMITED))
        return scheduling

    def _labels(self) -> dict[str, str]:
        for name, value in self._job.labels.items():
            if not _LABEL.fullmatch(name):
                hint = "use small letters, digits, _ and -, starting with a letter"
                self._add_problem(f"labels.{name}", "is not a valid label here", hint)
            elif not _LABEL_VALUE.fullmatch(value):
                message = f"has a value that is not valid for a label here: {value[:80]}"
                self._add_problem(f"labels.{name}", message, "small letters, digits, _ and -, at most 63")
        labels = {**self._job.labels, RUN: self.manifest.run_id, ATTEMPT: self.manifest.attempt_id}
        if len(labels) > MAX_LABELS:
            self._add_problem(
                "labels",
                f"holds {len(self._job.labels)}; at most {MAX_LABELS - 2} are allowed besides the two that cloudtrain sets",
            )
        return labels

    def _inputs(self) -> dict[str, dict[str, str]]:
        """Return the inputs as the launcher's manifest describes them: a mounted one is a path below /gcs."""
        inputs = {}
        for name, item in self._job.inputs.items():
            uri = item.uri
            mount = item.mode == "mount"
            if mount and uri.startswith("gs://"):
                uri = f"/gcs/{uri[5:]}"
            elif mount:
                self._add_problem(
                    f"inputs.{name}.mode", f"mount is not possible for {uri}", "only gs:// is mounted; copy or stream"
                )
            elif item.mode == "copy" and not re.match(r"(gs|s3)://[^/]+", uri):
                self._add_problem(
                    f"inputs.{name}.uri", f"is not a bucket that cloudtrain can copy from: {uri}", "gs:// or s3://"
                )
            inputs[name] = {"uri": uri, "mode": "copy" if mount else item.mode}
        return inputs

    def _add_option_problem(self, name: str, message: str, hint: str = "") -> None:
        self._add_problem(f"options.{self._backend}.{name}", message, hint)

    def _add_problem(self, path: str, message: str, hint: str = "") -> None:
        self.problems.append(Problem(message, path, hint))


def _describe_gpus(machine: Machine) -> str:
    return f"{machine.accelerators} x {machine.accelerator}" if machine.accelerators else "no accelerator"
