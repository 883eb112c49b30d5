"""The interface of a backend: Feature and the Backend protocol, with Plan (plan.py). An author imports all from here.

A backend converts a Job into the exact request of its platform (`plan`, pure) and sends it (`submit`). Afterwards it
finds, watches, cancels and fetches the attempt by its handle, a string that another process can use as well. It never
touches the history, never prints, and never imports another backend. It must pass the suite `cloudtrain.testing.contract`.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from cloudtrain.backends.images import ImageRegistry as ImageRegistry
from cloudtrain.backends.plan import Facts as Facts
from cloudtrain.backends.plan import FoundAttempt as FoundAttempt
from cloudtrain.backends.plan import Plan as Plan
from cloudtrain.backends.plan import Requirement as Requirement
from cloudtrain.backends.plan import TimeLimit as TimeLimit
from cloudtrain.backends.shell import Shell as Shell
from cloudtrain.errors import Problem
from cloudtrain.events import LogLine, Status

if TYPE_CHECKING:
    from pydantic import BaseModel

    from cloudtrain.backends.plan import AttachedAttempt
    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle

FETCHABLE = ("model", "outputs", "checkpoints")
WORKDIR = "workdir"  # what a script left in its working directory, where the backend offers it


class Feature(StrEnum):
    """What a backend supports; a job that needs more is refused before anything is uploaded."""

    MULTI_NODE = "more than one node"
    MIN_NODES = "fewer nodes than asked for (min_nodes)"
    SPOT = "spot capacity (resources.use_spot)"
    ENV_SECRETS = "secrets from the client's environment (env:NAME)"
    KUBERNETES_SECRETS = "secrets of a Kubernetes cluster (k8s:SECRET/KEY)"
    FILE_SECRETS = "secrets from a file on the node (file:PATH)"
    LOCAL_PATHS = "inputs and output that are paths of this machine"
    OBJECT_STORES = "inputs and output in an object store (s3://, gs://)"
    IMAGES = "container images (image)"
    WORKDIR = "the working directory (fetch --what workdir)"
    MAX_WAIT = "a limit to the wait for machines (limits.max_wait)"
    INSTANCE_TYPES = "instance types (resources.instance_type)"


@runtime_checkable
class Backend(Protocol):
    """A platform that runs jobs. Constructors take validated options and the backend's own folder, and do no I/O."""

    name: str
    poll_s: float  # seconds between two calls of `status`
    features: frozenset[Feature]

    def __init__(self, options: Mapping[str, Any], workdir: Path) -> None: ...

    @classmethod
    def options(cls) -> type[BaseModel]:
        """Return the pydantic model of this backend's `options`; a method, so that other commands need not import pydantic."""
        ...

    def plan(self, job: Job, bundle: Bundle, run_id: str, attempt: int = 1) -> Plan:
        """Return everything that `submit` would send. Pure: no network, clock, randomness, SDK or credentials.

        Raises BadJob with every reason why this platform cannot run the job.
        """
        ...

    def submit(self, plan: Plan, bundle: Bundle) -> str:
        """Upload the bundle, create the job, and return its handle; blocks until the platform has accepted it.

        A second call with the same plan completes an interrupted one and returns the same handle.

        Raises:
            BackendError: the platform refuses the attempt (validation, permission): it is FAILED.
            NoCapacity: insufficient capacity, or a quota is used up: the event `capacity`.
            Unreachable: no answer, throttled, or an error on the platform's side: the attempt stays open, and nothing
                is sent again before `find` has answered.
        """
        ...

    def find(self, attempt_id: str) -> str | None:
        """Return the handle of an attempt that exists on the platform, None if the platform confirms that it has none.

        Blocking. Raises BackendError if the platform does not answer; it must not return None then.
        """
        ...

    def status(self, handle: str) -> Status:
        """Return the attempt's current status; LOST if the platform no longer has it."""
        ...

    def logs(self, handle: str, *, follow: bool = False, after: str | None = None) -> Iterator[LogLine]:
        """Yield the log lines of all nodes after the cursor `after`, in order on each node; with `follow` until the end."""
        ...

    def cancel(self, handle: str) -> None:
        """Request that the platform stops the attempt; idempotent, does not wait for the end."""
        ...

    def fetch(self, handle: str, into: Path, what: tuple[str, ...] = FETCHABLE) -> Path:
        """Copy `model`, `outputs` and `checkpoints` below `into` and return it; blocking, resumable.

        What others wrote is hostile: `copy_tree` and `folder_writer` of cloudtrain.source.folder_writer follow no links.
        """
        ...

    def check(self) -> list[Problem]:
        """Return the problems that would stop a submission from this machine (`cloudtrain doctor`)."""
        ...

    @classmethod
    def discover(cls) -> dict[str, Any]:
        """Return options that the account's settings show (`cloudtrain init`); raises MissingExtra alone."""
        ...


@runtime_checkable
class ReadsOutputs(Backend, Protocol):
    """The backend of runs that were submitted elsewhere: it reads them from their outputs. Every call blocks."""

    def run_names(self, uri: str) -> list[str]:
        """Return the names of the runs below an output."""
        ...

    def read_index(self, uri: str) -> dict[str, bytes]:
        """Return run id -> its newest record, of runs that had ended and are in the index of an output."""
        ...

    def indexed_attempt(self, uri: str, run_id: str, record: bytes) -> AttachedAttempt | None:
        """Return the newest attempt of a run, as a record of the index has it; None where it is no record of this run."""
        ...

    def newest_attempt(self, uri: str, run_id: str) -> AttachedAttempt | None:
        """Return the newest attempt of a run below an output, as its run.json has it; None where there is no such file."""
        ...

    def attempts(self, uri: str) -> list[AttachedAttempt]:
        """Return the attempts of the run at a URI, the oldest first; raises BadRequest where there is no history."""
        ...

    def output_sizes(self, uri: str) -> dict[str, int]:
        """Return name -> bytes of the files in a run's outputs."""
        ...

    def digest(self, uri: str, below: str) -> str:
        """Return a digest of what lies below a folder of a URI, "" where nothing does."""
        ...

    def read_output(self, uri: str, name: str, most: int) -> bytes | None:
        """Return a file of a run's outputs, None where it is gone; raises BackendError where it has more bytes."""
        ...

    def source(self, uri: str, digest: str) -> bytes | None:
        """Return the packed source of a run, None where it is not there."""
        ...


@runtime_checkable
class HasCapacity(Protocol):
    """A backend that can report the accelerators of its platform."""

    def capacity(self) -> str:
        """Return one sentence on the accelerators, for doctor; blocking. Raises BackendError."""
        ...


@runtime_checkable
class HasMachineChecks(Protocol):
    """A backend whose `check` looks at each machine of its target."""

    def checked_machines(self) -> Mapping[str, str]:
        """Return what the last `check` found on each machine, by its name, in one line for doctor; connects to nothing."""
        ...


@runtime_checkable
class HasImages(Protocol):
    """A backend that can report the container images of an attempt's nodes; called when it starts to run and at its end."""

    def images(self, handle: str) -> dict[int, str]:
        """Return node -> image as `cloudtrain.backends.images.pinned_image` returns it, for the nodes that are known.

        Blocking. Raises BackendError; the run continues without an answer.
        """
        ...


@runtime_checkable
class HasShell(Protocol):
    """A backend that can start a program on a node of an attempt that runs, or knows an address where a person can."""

    def shell(self, handle: str, node: int, words: Sequence[str], *, stdin: bool, terminal: bool) -> Shell:
        """Return how the node's Python is started with some arguments, in a terminal or not, with standard input or without.

        Its arguments are `-c`, a text, and words; they arrive as they are. It runs as the user of the ranks, and sees their
        processes in /proc. Blocking, seconds at most: it may ask the platform where the node is. It starts nothing itself.
        The exit code is that of the program. Raises BackendError where the attempt has no such node, or does not run.
        """
        ...


@runtime_checkable
class HasPorts(Protocol):
    """A backend whose platform connects to ports of a node by itself. Without it a program of `shell` copies the bytes."""

    def connect(self, handle: str, node: int, port: int) -> Shell:
        """Return a connection to a port of a node's loopback address: its input and output are the two directions.

        Blocking, seconds at most. Raises BackendError where the attempt has no such node, or does not run.
        """
        ...


@runtime_checkable
class PacksResults(Protocol):
    """A backend whose platform keeps results in a form of its own; asked where a job uses those of a run."""

    def packed(self, plan: Plan, what: str) -> str:
        """Return the URI of an attempt's `model` or `outputs`: a folder with a / at its end, or a .tar.gz; "" elsewhere. Pure."""
        ...

    def packed_digest(self, uri: str) -> str:
        """Return a digest of what is at such a URI, "" where nothing is; blocking. Raises BackendError."""
        ...


@runtime_checkable
class HasLabels(Protocol):
    """A backend that can read an attempt's labels back from its platform; called when a `--key` is reused."""

    def labels(self, handle: str) -> dict[str, str]:
        """Return the labels of `plan.job["labels"]` that the platform stored; blocking. Raises BackendError."""
        ...


@runtime_checkable
class ListsAttempts(Protocol):
    """A backend that can list its platform's attempts by a label; called for runs that the history has lost."""

    def labelled(self, name: str, value: str, known: Container[str]) -> Iterator[FoundAttempt]:
        """Yield the attempts that have a label of `plan.job["labels"]`, but those whose ids are known.

        Blocking. Raises BackendError.
        """
        ...


@runtime_checkable
class HasRemoteLog(Protocol):
    """A backend whose platform should be asked rarely: a watcher asks for all readers and keeps a copy of the log.

    Without it every reader calls `logs(follow=True)` itself.
    """

    follow_s: float  # seconds between two reads of a followed log; 0: it is a file on this machine, which is not copied


@runtime_checkable
class HasLogRate(Protocol):
    """A backend whose platform allows another rate of log reads than 5 nodes a second."""

    logs_per_s: float  # so many nodes' logs of a group (`HasStatuses`) are read a second where nobody follows them


@runtime_checkable
class HasManifests(Protocol):
    """A backend whose request can be sent with the platform's own tool; printed by `cloudtrain plan --manifests`."""

    def manifests(self, plan: Plan, packed: bytes) -> str:
        """Return what that tool reads, with the bytes of the bundle in it. Pure; raises BadRequest where they do not fit."""
        ...


@runtime_checkable
class HasEstimator(Protocol):
    """A backend whose platform's own library has an object for a job, with which people continue."""

    def estimator(self, plan: Plan) -> Any:
        """Return that object for an attempt that was submitted; blocking (imports). Raises MissingExtra."""
        ...


@runtime_checkable
class HasPreflight(Protocol):
    """A backend that can see from here, before anything is stored or sent, that an attempt cannot run.

    What needs a process, a file of this machine or a call stands here: `plan` is pure.
    """

    def preflight(self, plan: Plan) -> None:
        """Raise BadRequest with every reason why the attempt cannot run; blocking. It changes nothing."""
        ...


@runtime_checkable
class HasProbe(Protocol):
    """A backend whose platform says whether it would start a job, without taking it; for `doctor --job`."""

    def probe(self, plan: Plan) -> list[Problem]:
        """Return why the platform would not start the attempt of a plan; blocking. Raises BackendError."""
        ...


@runtime_checkable
class KeepsFiles(Protocol):
    """A backend on whose machines the files of a run stay, where its job has no output."""

    lost_after_s: float  # for so long a machine does not answer before its attempt is LOST

    def plan_after(self, plan: Plan, newest: int) -> Plan:
        """Return the plan of a later attempt, sent to the machine that has the files of attempt `newest`.

        With 0, where no attempt has left any, to any machine. Pure.
        """
        ...


@runtime_checkable
class HasPolicies(Protocol):
    """A backend whose platform needs policies for a job's role and for who submits; for `doctor --policy`."""

    def policy(self, kind: str, plan: Plan | None) -> Mapping[str, Any]:
        """Return "trust", "role" or "submit" for a plan, or for any plain job with these options. Pure; raises BadRequest."""
        ...


@runtime_checkable
class HasFacts(Protocol):
    """A backend whose plans say to which account, region and machines they go; policies are checked against it."""

    def facts(self, plan: Plan) -> Facts:
        """Return what the request of a plan says. Pure: it reads the plan alone."""
        ...


@runtime_checkable
class HasPermissions(Protocol):
    """A backend whose platform grants permissions; for `cloudtrain permissions`."""

    def permissions(self, plan: Plan | None, *, inside: bool = False) -> Mapping[str, Any]:
        """Return file name -> document (JSON, or a list of objects for YAML): the least that a plan's options need.

        Without a plan that is what any plain job with these options needs. With `inside` also what `exec`, `stack` and
        `forward` need, where that is granted apart. Pure; raises BadRequest.
        """
        ...

    def enforcement(self, rules: Sequence[Requirement]) -> tuple[Mapping[str, Any], list[str]]:
        """Return file name -> document by which the platform refuses what rules refuse, and what it cannot hold. Pure."""
        ...


@runtime_checkable
class HasImageRegistry(Protocol):
    """A backend whose platform has a registry of container images; for `cloudtrain image push`."""

    def image_registry(self, repository: str) -> ImageRegistry:
        """Return the registry and a login to it; creates the repository if it does not exist. Blocking. Raises BackendError."""
        ...


@runtime_checkable
class HasRemains(Protocol):
    """A backend whose submission has several steps: an interrupted one can leave parts that still run."""

    def discard(self, attempt_id: str) -> None:
        """Stop what is left of an abandoned attempt that `find` does not return; blocking, idempotent.

        Raises BackendError if that cannot be confirmed: the attempt stays open.
        """
        ...


@runtime_checkable
class KeepsCancelled(Protocol):
    """A backend whose platform keeps what was cancelled until somebody deletes it."""

    def delete_cancelled(self, handle: str) -> None:
        """Delete a cancelled attempt from the platform, whose log is stored here by now; blocking, idempotent.

        `fetch` still works afterwards. Raises BackendError.
        """
        ...


@runtime_checkable
class HasRemoval(Protocol):
    """A backend that can delete what an ended attempt has left; `cloudtrain rm`. What `output` names is never deleted."""

    def remains(self, handle: str) -> Mapping[str, int | None]:
        """Return place -> bytes of what is there, None where they are not known; blocking. Raises BackendError."""
        ...

    def remove(self, handle: str) -> None:
        """Delete it; blocking, idempotent. Raises BackendError."""
        ...


@runtime_checkable
class HasStatuses(Protocol):
    """A backend that can report many attempts in few calls of its platform.

    Attributes:
        group: attempts whose backends have the same group (account, region, project, cluster, namespace, host) may be asked
            in one call. It comes from the options alone, so who has several credentials keeps these apart as well.
        calls_per_s: what all clients of one home together may call of the platform, per group.
    """

    group: str
    calls_per_s: float

    def statuses(self, handles: Sequence[str]) -> Mapping[str, Status]:
        """Return handle -> what `status` would return; blocking.

        A handle that the platform's listing did not show is left out: the caller asks `status` for it. An object may keep
        what it needs to ask for changes only, so a caller that asks again keeps it.

        Raises:
            BackendError: as `status`. Nothing is known of any handle then.
        """
        ...


@runtime_checkable
class HasTimeLimit(Protocol):
    """A backend whose requests hold a limit that the platform enforces while no client lives.

    With `job.limits.capped` its plan must allow no restart by the platform whose clock starts anew.
    """

    def time_limit(self, plan: Plan) -> TimeLimit:
        """Return the longest time of an attempt. Pure: it reads the plan alone."""
        ...


@runtime_checkable
class HasMachine(Protocol):
    """A backend that rents machines by the hour, for which there are price lists."""

    def machine(self, plan: Plan) -> str:
        """Return each node's machine type as provider/region/name, "" where it is not known. Pure: it reads the plan."""
        ...


@runtime_checkable
class HasVariables(Protocol):
    """A backend that reads few variables of the environment; the class says which.

    Runs whose shells differ in others only are watched by one process. Without it that is every variable of credentials.
    """

    variables: tuple[str, ...]  # patterns of their names: AWS_*
