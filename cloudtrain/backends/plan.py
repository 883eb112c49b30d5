"""The plan of an attempt: everything that is sent, as plain data, its notes, and the longest time that it may be billed."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from cloudtrain.errors import BadRequest
from cloudtrain.events import Status

if TYPE_CHECKING:
    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle

PLAN_VERSION = 1
ATTEMPT_ID = re.compile(r"[a-z][a-z0-9-]*-a[1-9][0-9]{0,3}")
ATTACHED = "attached:"  # prefix of the identity and handles of a run that was submitted elsewhere; no backend uses it
_ASIDE = ("labels", "source", "after")  # not part of what a job is: the source's digest is


@dataclass(frozen=True, repr=False)
class Plan:
    """Everything that will be sent for one attempt, as plain data: the dry run."""

    backend: str
    run_id: str
    attempt: int
    request: Mapping[str, Any]  # the platform's own request; ${...} stands for values that only the server knows
    bundle: Mapping[str, Any]  # sha256, source_sha256, size_bytes, files, commit, dirty
    manifest: Mapping[str, Any]  # see cloudtrain.backends.manifest.Manifest
    job: Mapping[str, Any]  # the resolved job, from which the same bundle can be built again
    target: str = ""
    retries: str = "client"  # who starts the next attempt: client or platform
    # {"usd_per_hour", "as_of", "source", ...}, as forecast/prices.py makes it; None where it is not known
    price: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    fit: Mapping[str, Any] | None = None  # whether its GPUs' memory is enough: cloudtrain.forecast.fit.Fit.to_dict
    time: Mapping[str, Any] | None = None  # how long it takes: cloudtrain.forecast.duration.forecast
    at_most: Mapping[str, Any] | None = None  # worst case of the whole run: cloudtrain.runs.planning.cap.worst_case
    candidates: tuple[
        Mapping[str, Any], ...
    ] = ()  # of several targets or accelerators: cloudtrain.runs.planning.candidates
    policies: tuple[Mapping[str, Any], ...] = ()  # that it was checked against: cloudtrain.policy.files.Policy.to_dict
    version: int = field(default=PLAN_VERSION, compare=False)

    @classmethod
    def of(
        cls,
        backend: str,
        job: Job,
        bundle: Bundle,
        manifest: Mapping[str, Any],
        request: Mapping[str, Any],
        notes: Iterable[str] = (),
        retries: str = "client",
        price: Mapping[str, Any] | None = None,
    ) -> Plan:
        """Return the plan of the attempt that a manifest names, as its `to_dict` returns it; pure."""
        return cls(
            backend, manifest["run_id"], manifest["attempt"], request, bundle.to_dict(), manifest, job.to_dict(),
            retries=retries, price=price, notes=tuple(notes),
        )  # fmt: skip

    def __repr__(self) -> str:
        nodes, notes = self.manifest.get("nodes") or 1, len(self.notes)
        of_nodes = f"{nodes} node{'s' * (nodes > 1)}"
        return (
            f"<Plan {self.attempt_id} on {self.target or self.backend}: {of_nodes}, {notes} note{'s' * (notes != 1)}>"
        )

    def __str__(self) -> str:
        return "\n".join([repr(self), *(f"note: {note}" for note in self.notes)])

    @property
    def attempt_id(self) -> str:
        return f"{self.run_id}-a{self.attempt}"

    @property
    def identity(self) -> str:
        """What makes two submits the same one: the job, the user's own files, the target.

        Not the whole bundle: it holds our launcher too, and the job is the same after an upgrade of this package.
        """
        own = [job_on(self.job, self.backend), self.bundle.get("source_sha256"), self.backend, self.target]
        return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()

    @cached_property
    def stored_job(self) -> Job:
        """The job as it was planned, with the defaults of fields that are new since; it is not to be changed."""
        from cloudtrain.job.job import Job

        return Job.from_dict(self.job)

    @property
    def requested_gpus(self) -> int | None:
        """The GPUs that the job names for all nodes, None where no role names any.

        On a machine of its own a main role that names none takes all beside them: `Backend.facts` says None then.
        """
        roles = self.manifest.get("roles") or [self.manifest]
        own = (self.job.get("resources") or {}).get("accelerators") is not None
        if not own and not any("gpus_per_node" in role for role in roles[1:]):
            return None
        each = int(self.manifest["gpus_per_node"])
        return sum(int(role.get("gpus_per_node", each)) * int(role["nodes"]) for role in roles)

    @property
    def node_roles(self) -> list[str]:
        """The role of each node, the main one's first; [] for a job without roles."""
        return [str(role["name"]) for role in self.manifest.get("roles", ()) for _ in range(int(role["nodes"]))]

    def nodes_of(self, role: str) -> list[int]:
        """Return the nodes of a role; raises BadRequest where the job has no such role."""
        names = self.node_roles
        if role not in names:
            known = ", ".join(dict.fromkeys(names))
            raise BadRequest(f"the run has no role {role}", f"choose from {known}" if known else "leave --role out")
        return [node for node, name in enumerate(names) if name == role]

    @property
    def main_nodes(self) -> int:
        """The nodes of the main role; of a job without roles, all."""
        return int(self.manifest["roles"][0]["nodes"] if self.manifest.get("roles") else self.manifest["nodes"])

    @property
    def machines(self) -> int:
        """The machines of all nodes: a role that runs on another's nodes has none of its own."""
        roles = self.manifest.get("roles") or [self.manifest]
        return sum(int(role["nodes"]) for role in roles if not role.get("colocate"))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields; what they hold is not copied."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def to_json(self, indent: int | None = 2) -> str:
        """Return the plan as JSON with a final newline, indented for people."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that `to_json` wrote; raises BadRequest when the text is something else."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise BadRequest(f"the plan is not JSON: {error}") from None
        if not isinstance(data, dict) or not {"backend", "run_id", "request", "manifest", "job"} <= data.keys():
            raise BadRequest("the file is not a plan", "cloudtrain plan job.yaml -o plan.json writes one")
        if data.get("version") != PLAN_VERSION:
            raise BadRequest(
                f"the plan has version {data.get('version')}, this cloudtrain reads version {PLAN_VERSION}",
                "run cloudtrain plan again with this version",
            )
        unknown = data.keys() - cls.__dataclass_fields__.keys()
        if unknown:
            raise BadRequest(
                f"the plan has keys that this version of cloudtrain does not know: {', '.join(sorted(unknown))}",
                "make the plan again: cloudtrain plan job.yaml -o plan.json",
            )
        return cls(**data | {name: tuple(data.get(name, ())) for name in ("notes", "candidates", "policies")})


def job_on(job: Mapping[str, Any], backend: str) -> dict[str, Any]:
    """Return what a job is on a backend; options of others, which count after a move alone, do not belong to it."""
    options = {name: value for name, value in (job.get("options") or {}).items() if name == backend}
    return {name: value for name, value in job.items() if name not in _ASIDE} | {"options": options}


@dataclass(frozen=True)
class Facts:
    """Where the request of a plan goes, and with what: what a policy is checked against.

    "" and an empty tuple mean that the plan does not say it, None that the platform has no such thing.
    """

    account: str | None = None  # of AWS, or Google's project
    region: str | None = None
    instance_types: tuple[str, ...] | None = None
    images: tuple[str, ...] | None = None
    isolated: bool | None = None  # whether the containers have no network
    gpus: int | None = None  # of all nodes together, by what is sent; None where that does not say it


class Requirement(NamedTuple):
    """One thing that a rule of a policy requires or sets, for the platform that is to enforce it."""

    rule: str
    why: str
    key: str  # as in policy.toml; "set KEY" for what a rule sets
    wanted: Any


@dataclass(frozen=True)
class AttachedAttempt:
    """An attempt of a run that was submitted elsewhere, as the run's output has it."""

    uri: str  # of the run's folder
    plan: Plan
    status: Status
    created_at: str
    provenance: Mapping[str, Any]  # commit, patch and the like, as cloudtrain.source.provenance has it

    @property
    def handle(self) -> str:
        return f"{ATTACHED}{self.plan.attempt_id}@{self.uri}"


@dataclass(frozen=True)
class FoundAttempt:
    """An attempt in the list of a platform; `record` holds `manifest` and `about` of its request, as far as they are there."""

    attempt_id: str
    handle: str
    record: Mapping[str, Any]
    created_at: str | None = None


@dataclass(frozen=True)
class TimeLimit:
    """The longest time that each node of an attempt may be billed, by the native limits in its request.

    Attributes:
        seconds: of one node, with restarts by the platform and the time between SIGTERM and SIGKILL; None without a bound.
        note: what is not in it, or why nothing bounds it; "" for neither.
        parts: what a backend adds to limits.max_runtime, and why; "" where it adds little.
        after_end_s: what a platform may bill of an attempt after the end that it reports.
        wait_s: of `seconds`, the wait for machines, which is not billed but has one limit with the run.
    """

    seconds: int | None
    note: str = ""
    parts: str = ""
    after_end_s: float = 30.0
    wait_s: int = 0

    @classmethod
    def of_launcher(cls, plan: Plan) -> TimeLimit:
        """Return the limit that the launcher on each node holds by its own clock."""
        seconds = math.ceil(plan.manifest["max_runtime_s"] + plan.manifest["grace_s"])
        return cls(
            seconds,
            "at its time limit the launcher ends the job and uploads results, but does not switch the machine off",
            after_end_s=0.0,
        )


class Fact(StrEnum):
    """What a note says, where cloudtrain shows, drops or replaces the note for it."""

    NO_GPUS = "the job requests no GPUs"
    WAIT_UNLIMITED = "the platform itself does not end a wait after limits.max_wait"
    WAIT_OVERRULED = "another setting ends the wait, not limits.max_wait"


class Note(str):
    """A text of `Plan.notes` with a fact; a plan that was read from JSON has the text alone."""

    fact: Fact | None

    def __new__(cls, text: str, fact: Fact | None = None) -> Note:
        note = super().__new__(cls, text)
        note.fact = fact
        return note


def say(notes: Iterable[str], *facts: Fact) -> bool:
    """Return whether any of the notes says one of the facts."""
    return any(getattr(note, "fact", None) in facts for note in notes)


def without(notes: Iterable[str], *facts: Fact) -> list[str]:
    """Return the notes that say none of the facts."""
    return [note for note in notes if not say([note], *facts)]
