"""The launcher's manifest: the command, inputs, limits and settings of one attempt, sent beside the source bundle.

It is JSON, compressed, base64url, in pieces of at most 2,400 characters, so that it fits environment variables,
hyperparameters and labels of every platform. It is not part of the bundle: a changed learning rate uploads nothing.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.plan import Fact, Note
from cloudtrain.errors import BadJob, BadRequest, Problem
from cloudtrain.job import placeholders, roles

if TYPE_CHECKING:
    from cloudtrain.backends.api import Plan
    from cloudtrain.job.job import Job
    from cloudtrain.job.model import JobModel

MAX_PIECE = 2400  # characters; SageMaker allows 2,500 in a hyperparameter's value
MAX_BYTES = 64 * 1024  # encoded
VARIABLE = "CLOUDTRAIN_MANIFEST_"  # and the number of the piece
VERSION = 1
EXTENDED = 2  # of a job that launchers of version 0.1 would not run as it is meant: they refuse it
ROLES = 4  # it has roles
MOVED = 3  # checkpoint.folder is set: a launcher that did not know it would begin anew


@dataclass(frozen=True)
class Manifest:
    """What the launcher needs to run one attempt; plain data, equal on every node."""

    run_id: str
    attempt: int
    argv: tuple[str, ...]  # the rank's arguments after the interpreter: ("train.py", "--lr", "3.0e-4")
    nodes: int
    processes_per_node: int
    min_nodes: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    gpus_per_node: int = 0
    parallelism: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # name -> uri, mode
    output: str | None = None
    secrets: Mapping[str, Sequence[str]] = field(default_factory=dict)  # name -> sources, never values
    requirements: str | None = None  # path below the source, or None
    checkpoint: Mapping[str, Any] = field(default_factory=dict)  # every_s or every_steps, keep
    max_runtime_s: int = 24 * 3600
    grace_s: int = 30
    stall_s: int | None = None  # no limit; left out of the JSON then
    idle_s: int | None = None
    silence_s: int | None = None
    join_s: int | None = None  # how long nodes wait for each other; the launcher's own limit; left out likewise
    form: str = "script"  # what argv is: "script", "command" or "shell"; as the next ones left out where default
    setup: str = ""
    resume_args: tuple[str, ...] = ()
    compat: str = ""
    keep: tuple[str, ...] | None = None  # None: all results of the working directory
    keep_limit: int | None = None  # bytes; the launcher's own limit
    framework: str = ""  # "tensorflow", "jax" or "keras", whose variables ranks get too; left out as the others
    restarts: int = 0  # how often ranks are started again on the same nodes
    restart_on: str = "transient"
    rank_env: bool = True  # False: one process that gets no RANK, WORLD_SIZE or MASTER_ADDR
    hyperparameters: Mapping[str, Any] | None = None  # of a job whose script gets SageMaker's variables; else None
    aip_env: bool = False  # whether the script gets Vertex AI's AIP_MODEL_DIR and the like
    health: str = ""  # "off" or "strict"; "": auto
    roles: Sequence[Mapping[str, Any]] = ()  # the main one first: cloudtrain.job.roles.to_manifest
    about: Mapping[str, Any] = field(
        default_factory=dict
    )  # for `attach` (provenance.about); only in the encoded pieces
    version: int = VERSION

    @property
    def attempt_id(self) -> str:
        return f"{self.run_id}-a{self.attempt}"

    @property
    def world_size(self) -> int:
        return (int(self.roles[0]["nodes"]) if self.roles else self.nodes) * self.processes_per_node

    @classmethod
    def of(cls, job: Job, run_id: str, attempt: int, about: Mapping[str, Any] | None = None) -> Manifest:
        """Return the manifest for an attempt of a validated job."""
        form, argv = job.node_program()
        framework = "" if job.distributed_env in ("auto", "always") else job.distributed_env
        texts = [*(job.argv()[1:] if job.form != "shell" else ()), *job.env.values()]
        extended = (
            job.form != "script" or job.setup or job.resume_args or job.kept or any(map(placeholders.used, texts))
        ) or framework
        return cls(
            form=form,
            setup=job.setup or "",
            resume_args=tuple(job.resume_args),
            compat=job.compat or "",
            keep=job.kept,
            keep_limit=job.keep_limit_bytes,
            framework=framework,
            restarts=job.retry.restarts,
            restart_on=job.retry.restart_on,
            rank_env=job.has_rank_env,
            hyperparameters=dict(job.hyperparameters) if job.sm_env else None,
            aip_env=bool(job.aip_env),
            health="" if job.health == "auto" else job.health,
            roles=tuple(roles.to_manifest(job)) if job.roles else (),
            version=ROLES if job.roles else MOVED if job.checkpoint.folder else EXTENDED if extended else VERSION,
            run_id=run_id,
            attempt=attempt,
            argv=tuple(argv),
            nodes=job.num_nodes,
            min_nodes=job.min_nodes,
            processes_per_node=job.processes,
            env=dict(job.env),
            gpus_per_node=job.resources.gpus,
            parallelism=job.parallelism.model_dump(mode="json", exclude_none=True),
            inputs={name: item.model_dump(mode="json") for name, item in job.inputs.items()},
            output=job.output,
            secrets={name: list(sources) for name, sources in job.secrets.items()},
            requirements=job.environment.requirements,
            checkpoint={
                "every_s": job.checkpoint.every_s,
                "every_steps": job.checkpoint.every_steps,
                "keep": job.checkpoint.keep,
                **({"required": True} if job.checkpoint.required else {}),
                **({"engine": "cloudtrain"} if job.checkpoint.engine == "cloudtrain" else {}),
                **({"folder": job.checkpoint.folder} if job.checkpoint.folder else {}),
            },
            max_runtime_s=job.limits.max_runtime_s,
            grace_s=job.limits.grace_s,
            stall_s=job.limits.stall_s,
            idle_s=job.limits.idle_s,
            silence_s=job.limits.silence_s,
            join_s=job.limits.max_wait_s if job.num_nodes > 1 else None,
            about=about or {},
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest as JSON-ready data, as a plan shows it; without `about`."""
        data = asdict(self)
        del data["about"]  # a plan has the same data elsewhere
        data |= {name: list(getattr(self, name)) for name in ("argv", "resume_args", "roles")}
        data["keep"] = None if self.keep is None else list(self.keep)
        for name in (
            "stall_s",
            "idle_s",
            "silence_s",
            "join_s",
            "form",
            "setup",
            "resume_args",
            "compat",
            "health",
            "keep_limit",
            "framework",
            "roles",
        ):
            if data[name] in (None, "", [], "script"):
                del data[name]
        if data["keep"] is None:
            del data["keep"]
        defaults = {
            "rank_env": True,
            "restarts": 0,
            "restart_on": "transient",
            "hyperparameters": None,
            "aip_env": False,
        }
        for name, default in defaults.items():
            if data[name] == default:
                del data[name]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Manifest:
        """Return the manifest of a plan; raises BadRequest for another version."""
        if data.get("version") not in (VERSION, EXTENDED, MOVED, ROLES):
            raise BadRequest(
                f"the plan's manifest has version {data.get('version')}, this cloudtrain reads up to {ROLES}",
                "run cloudtrain plan again with this version",
            )
        lists = {name: tuple(data.get(name, ())) for name in ("argv", "resume_args", "roles")}
        lists |= {"keep": tuple(data["keep"])} if "keep" in data else {}
        return cls(**{**data, **lists})

    def encode(self) -> list[str]:
        """Return the encoded pieces; raises BadRequest if they exceed 64 KiB together."""
        packed = self.pack()
        return [packed[at : at + MAX_PIECE] for at in range(0, len(packed), MAX_PIECE)]

    def pack(self, limit: int = MAX_BYTES) -> str:
        """Return the encoded manifest; raises BadRequest if it has more bytes than `limit`.

        If it would, the data for `attach` is left out: first the patch, then all of `about`.
        """
        no_patch = {name: value for name, value in self.about.items() if name != "patch"}
        for about in (self.about, no_patch, {}):
            text = json.dumps(
                {**self.to_dict(), **({"about": about} if about else {})}, separators=(",", ":"), sort_keys=True
            )
            packed = base64.urlsafe_b64encode(zlib.compress(text.encode(), 9)).decode()
            if len(packed) <= limit:
                break
        if len(packed) > limit:
            parts = {"args": "".join(self.argv), "setup": self.setup, **{f"env.{n}": v for n, v in self.env.items()}}
            largest = max(parts, key=lambda name: len(parts[name]))
            raise BadRequest(
                f"arguments and environment take {len(packed):,} bytes packed, {limit:,} are allowed; {largest} has the most",
                "move long values into a file in the source folder",
            )
        return packed

    def environment(self) -> dict[str, str]:
        """Return the variables by which a launcher gets the manifest; raises BadRequest as `encode` does."""
        pieces = {f"{VARIABLE}{number}": piece for number, piece in enumerate(self.encode())}
        return {**pieces, "CLOUDTRAIN_ATTEMPT_ID": self.attempt_id}

    def notes(self) -> list[str]:
        """Return the notes of a plan on a platform that gives a job no accelerators but those that it asks for."""
        text = "the job does not request GPUs (resources.accelerators): the ranks run on CPU"
        return [] if self.gpus_per_node else [Note(text, Fact.NO_GPUS)]

    @classmethod
    def decode(cls, pieces: Sequence[str]) -> Manifest:
        """Return the manifest that `encode` packed; raises BadRequest when a piece is missing or damaged."""
        try:
            data = json.loads(zlib.decompress(base64.urlsafe_b64decode("".join(pieces))))
        except (binascii.Error, zlib.error, ValueError) as error:
            raise BadRequest(f"the manifest is damaged: {error}") from None
        return cls.from_dict(data)


def sent_record(values: Mapping[str, str], prefix: str = VARIABLE) -> dict[str, Any]:
    """Return the `manifest` that an attempt was sent in such variables, and its `about`; {} where they hold none."""
    pieces: list[str] = []
    while (piece := values.get(f"{prefix}{len(pieces)}")) is not None:
        pieces.append(piece)
    try:
        manifest = Manifest.decode(pieces)
    except BadRequest:
        return {}
    return {"manifest": manifest.to_dict(), "about": dict(manifest.about)}


# -- GPUs of machines that no scheduler shares out: this one, and those behind SSH ----------------------------------------------


def gpus_of_nodes(job: JobModel) -> list[int | None]:
    """Return the GPUs that each node asks for, by its rank; None where it takes those that are there."""
    own = job.resources.gpus if job.resources.accelerators is not None else None
    gpus: list[int | None] = [own] * job.main_nodes
    for role in (job.roles[name] for name in (roles.services(job) if job.roles else ())):
        gpus += [role.resources.gpus if role.resources else own] * role.num_nodes
    return gpus


def chosen_gpus(asked: int | None, before: Iterable[int | None] = ()) -> str:
    """Return CLOUDTRAIN_GPUS of a node on this machine: numbers, "" for none, "all" for those that are there.

    `asked` is of gpus_of_nodes; `before`: what the nodes before it on this machine ask for.
    """
    first = sum(count or 0 for count in before)
    return "all" if asked is None else ",".join(str(first + number) for number in range(asked))


def gpu_notes(job: Job, where: str) -> list[str]:
    """Return the notes of a plan on which GPUs the ranks see of a job that asks for none."""
    if job.resources.accelerators == "0":
        return ["accelerators: 0 hides all GPUs from the ranks: they run on CPU (resources.accelerators)"]
    if job.resources.accelerators:
        return []
    seen = f"each rank gets one GPU of {where}; with fewer GPUs than ranks, all ranks run on CPU"
    return [Note(f"the job does not request GPUs: {seen} (accelerators: 0 hides them)", Fact.NO_GPUS)]


def check_gpus(plan: Plan) -> None:
    """Raise BadJob where a plan asks for more GPUs than this machine shows; blocking (nvidia-smi)."""
    count = plan.requested_gpus
    if not count:
        return
    from cloudtrain.source.node_code import module

    if (present := len(module("launcher.prepare.gpus").visible())) < count:
        shown = f"{present} GPU{'s' * (present != 1)}" if present else "no GPU"
        named = plan.job["resources"]["accelerators"]
        message = (
            f"is {named or 0}, {count} GPU{'s' * (count != 1)} in all, and this machine shows {shown} (nvidia-smi)"
        )
        hint = "remove it: the ranks then use all GPUs of this machine"
        raise BadJob([Problem(message, "resources.accelerators", hint)])


# -- resources and secrets -------------------------------------------------------------------------------------------------------


def unset_secrets(plan: Plan) -> str:
    """Return a sentence on the secrets that this process cannot give, "" for none."""
    secrets = plan.manifest.get("secrets") or {}
    return "; ".join(f"secret {name}: {' or '.join(secrets[name])} is not set" for name in missing_secrets(plan))


def missing_secrets(plan: Plan) -> list[str]:
    """Return the secrets that have no source but environment variables that this process does not have."""
    secrets: Mapping[str, list[str]] = plan.manifest.get("secrets") or {}
    return [
        name
        for name, sources in sorted(secrets.items())
        if all(source.startswith("env:") and source[4:] not in os.environ for source in sources)
    ]


def secret_sources(plan: Plan) -> set[str]:
    """Return the variables of the submitting process from which secrets of a job come."""
    secrets: Mapping[str, list[str]] = plan.manifest.get("secrets") or {}
    return {source[4:] for secret in secrets.values() for source in secret if source.startswith("env:")}


def env_secrets(plan: Plan) -> dict[str, str]:
    """Return the values of a job's `env:` secret sources that are set in this process, by source."""
    return {f"env:{name}": os.environ[name] for name in sorted(secret_sources(plan)) if name in os.environ}


def secret_names(plan: Plan) -> set[str]:
    """Return the variables that hold, or are to hold, secrets of a job."""
    return secret_sources(plan) | set(plan.manifest.get("secrets") or {})
