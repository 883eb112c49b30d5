"""Build the request of an attempt on Akash: the SDL with placeholders for what only a submission knows; pure data.

<store>/src/<sha256>.tar.gz     source bundles, by digest
<store>/<run>/                  checkpoints, outputs, model, log and history of the run, unless the job names `output`
<store>/akash/<attempt id>/     what cloudtrain keeps of the attempt (control.py)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import fetch_program
from cloudtrain.backends.akash import container, sdl
from cloudtrain.backends.images import is_image
from cloudtrain.backends.manifest import Manifest
from cloudtrain.backends.traits import HONOURED
from cloudtrain.errors import BadRequest, Problem
from cloudtrain.job import roles, rules, units
from cloudtrain.source import provenance

if TYPE_CHECKING:
    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle

START_S = 1800  # for image pulls before a start and uploads after an end, until the watcher closes a lease by itself
URLS = "${urls of node %d}"  # in the plan; presigned URLs are made by `submit`


KEYS = {
    "num_nodes": "services",
    "image": "image",
    "resources.accelerators": "gpu",
    "resources.disk_gb": "storage",
    "resources.cpus": "cpu",
    "resources.memory": "memory",
    "roles.resources": "compute",
    "secrets.env": HONOURED,
    "limits.max_wait": HONOURED,
}


class Request:
    """The request of one attempt, with problems and notes."""

    def __init__(self, job: Job, bundle: Bundle, run_id: str, attempt: int, options: Mapping[str, Any]) -> None:
        self._job, self._options = job, options
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        store = str(options.get("store") or "").rstrip("/")
        if not store:
            self._add_problem("options.akash.store", "is needed", "s3://bucket/prefix of an S3-compatible store")
        output = (job.output or store or "s3://none").rstrip("/")
        if not re.match(r"s3://[^/]+", output):
            self._add_problem("output", f"is {output}, and results of Akash go to S3", "s3://bucket/prefix")
        keys = options.get("node_keys")
        node_keys = {"AWS_ACCESS_KEY_ID": "env:AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY": "env:AWS_SECRET_ACCESS_KEY"}
        node_keys = node_keys if keys is None else dict(keys)
        place = {"AWS_DEFAULT_REGION": str(options.get("store_region") or "us-east-1")}
        if options.get("store_endpoint"):
            place["AWS_ENDPOINT_URL_S3"] = str(options["store_endpoint"])
        about = provenance.about("akash", job, bundle)
        manifest = Manifest.of(job, run_id, attempt, about)
        secrets = {**{name: [source] for name, source in node_keys.items()}, **manifest.secrets}
        self.manifest = replace(
            manifest, output=output, secrets=secrets, env={**place, **manifest.env}, inputs=self._inputs()
        )
        self.source = {"uri": f"{store}/src/{bundle.sha256}.tar.gz", "sha256": bundle.sha256}
        self.ceiling_usd = float(job.resources.usd_per_hour or options.get("max_usd_per_hour") or 0)
        if not self.ceiling_usd:
            hint = "max_usd_per_hour of the target, or resources.usd_per_hour"
            self._add_problem("options.akash.max_usd_per_hour", "is not set: cloudtrain accepts no bid above it", hint)
        elif not sdl.price_amount(self.ceiling_usd):
            self._add_problem("options.akash.max_usd_per_hour", f"is too small: {self.ceiling_usd}", "0.10, say")
        image = job.image or options.get("image")
        if not image:
            hint = "image: registry/name:tag, or the target's; `images/` builds one"
            self._add_problem("image", "is not given, and Akash runs containers", hint)
        elif not is_image(str(image)):
            self._add_problem(
                "image", f"is not the name of an image: {str(image)[:80]}", "registry/name:tag, in small letters"
            )
        self.image = str(image or "")
        if job.resources.use_spot or job.resources.instance_type:
            key = "use_spot" if job.resources.use_spot else "instance_type"
            self._add_problem(f"resources.{key}", "does not exist on Akash", "remove it")
        self.sdl = sdl.build_sdl(
            image=self.image,
            python=str(options.get("python") or "python3"),
            environments=self._environments(bundle),
            resources=self._profiles(),
            options=options,
            ceiling_usd=self.ceiling_usd,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the request as the plan shows it."""
        limits = self._job.limits
        own = [job.resources for job, *_ in roles.on_own_machines(self._job)]
        models = {each.accelerator: sdl.gpu_model(each.accelerator) for each in own if each.accelerator}
        return {
            "sdl": self.sdl,
            "source": self.source,
            "output": f"{self.manifest.output}/{self.manifest.run_id}",
            "ceiling_usd_per_hour": round(self.ceiling_usd * self.manifest.nodes, 6),
            "gpu": next(iter(models.values()), None),
            **({"gpus": list(models.values())} if len(models) > 1 else {}),  # of roles that have other ones
            "deadline_s": limits.max_runtime_s + limits.grace_s + (limits.max_wait_s or 0) + START_S,
        }

    def _environments(self, bundle: Bundle) -> list[dict[str, str]]:
        try:
            shared = self.manifest.environment()
        except BadRequest as error:
            self._add_problem("args", error.message, error.hint)
            shared = {"CLOUDTRAIN_ATTEMPT_ID": self.manifest.attempt_id}
        shared |= {
            "CLOUDTRAIN_NUM_NODES": str(self.manifest.nodes),
            "CLOUDTRAIN_KEEP_LOG": "1",  # the platform's own log has no cursor: it is read from the output
            fetch_program.DIGEST: bundle.sha256,
        }
        return [
            {**shared, "CLOUDTRAIN_NODE_RANK": str(node), container.URLS: URLS % node}
            for node in range(self.manifest.nodes)
        ]

    def _profiles(self) -> dict[str, tuple[int, dict[str, Any]]]:
        """Return nodes and resources by the name of their profile: one for all, or of each role."""
        if "roles.resources" not in rules.keys_in_use(self._job):
            return {sdl.PROFILE: (self.manifest.nodes, self._resources(self._job))}
        names = [self._job.main_role, *roles.services(self._job)]
        parts = zip(names, roles.on_own_machines(self._job), strict=True)
        return {name: (nodes, self._resources(job)) for name, (job, nodes, _) in parts}

    def _resources(self, job: Job) -> dict[str, Any]:
        resources, options = job.resources, self._options
        memory = str(options.get("memory") or "16Gi")
        if resources.memory_bytes:
            memory = f"{-(-resources.memory_bytes // (1 << 20))}Mi"
        return {
            "cpus": resources.cpus or int(options.get("cpus") or 4),
            "memory": memory,
            "disk_gb": resources.disk_gb or int(options.get("disk_gb") or 50),
            "gpus": resources.gpus,
            "accelerator": resources.accelerator,
        }

    def _inputs(self) -> dict[str, dict[str, str]]:
        inputs = {}
        for name, item in self._job.inputs.items():
            if item.mode == "mount":
                self._add_problem(
                    f"inputs.{name}.mode", "cannot be mount: nothing is mounted on Akash", "copy or stream"
                )
            elif item.mode == "copy" and not re.match(r"(gs|s3)://[^/]+", item.uri):
                self._add_problem(f"inputs.{name}.uri", f"names no bucket: {item.uri}", "s3:// or gs://")
            inputs[name] = {"uri": item.uri, "mode": item.mode}
        for name in ("lost_after", "bid_wait"):
            try:
                units.duration_s(str(self._options.get(name) or "1m"))
            except ValueError as error:
                self._add_problem(f"options.akash.{name}", f"is not a duration: {self._options[name]}", str(error))
        return inputs

    def _add_problem(self, path: str, message: str, hint: str = "") -> None:
        self.problems.append(Problem(message, path, hint))


def fill(planned: Mapping[str, Any], values: Mapping[int, Mapping[str, str]]) -> dict[str, Any]:
    """Return a plan's SDL with variables of each node set; those with the value "" are left out."""
    services = {}
    for node, (name, service) in enumerate(planned["services"].items()):
        env = {**dict(item.split("=", 1) for item in service["env"]), **values[node]}
        services[name] = {**service, "env": [f"{key}={value}" for key, value in env.items() if value]}
    return {**planned, "services": services}
