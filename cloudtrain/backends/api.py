"""The base class of a backend, Backend, and most of the names that an author uses with it.

A backend converts a Job into the exact request of its platform (`plan`, pure) and sends it (`submit`). Afterwards it
finds, watches, cancels and fetches the attempt by its handle, a string that another process can use as well. It never
touches the history, never prints, and never imports another backend. It must pass the suite `cloudtrain.testing.contract`.

Seven calls are abstract. Every other one has a default, which says what it means that a platform does not have it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.images import ImageRegistry as ImageRegistry
from cloudtrain.backends.plan import Facts as Facts
from cloudtrain.backends.plan import FoundAttempt as FoundAttempt
from cloudtrain.backends.plan import Plan as Plan
from cloudtrain.backends.plan import Requirement as Requirement
from cloudtrain.backends.plan import TimeLimit as TimeLimit
from cloudtrain.backends.shell import Shell as Shell
from cloudtrain.backends.traits import HONOURED as HONOURED
from cloudtrain.backends.traits import NO_EFFECT as NO_EFFECT
from cloudtrain.backends.traits import Paths as Paths
from cloudtrain.backends.traits import Traits as Traits
from cloudtrain.errors import BackendError as BackendError
from cloudtrain.errors import BadJob as BadJob
from cloudtrain.errors import NoCapacity as NoCapacity
from cloudtrain.errors import NotReached as NotReached
from cloudtrain.errors import Problem as Problem
from cloudtrain.errors import Unreachable as Unreachable
from cloudtrain.errors import Unsupported as Unsupported
from cloudtrain.events import LogLine as LogLine
from cloudtrain.events import State as State
from cloudtrain.events import Status as Status

if TYPE_CHECKING:
    from pydantic import BaseModel

    from cloudtrain.backends.price_lists import Downloads, Offer
    from cloudtrain.backends.store.files import Files
    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle

FETCHABLE = ("model", "outputs", "checkpoints")
WORKDIR = "workdir"  # what a script left in its working directory, where the backend offers it


class Backend(ABC):
    """A platform that runs jobs. Constructors take validated options and the backend's own folder, and do no I/O.

    Every call may block, except where it is pure, and raises BackendError where its platform does not answer.

    Attributes:
        name: as a job file has it.
        poll_s: seconds between two calls of `status`.
        follow_s: seconds between two reads of a followed log. The watcher then reads for all and keeps a copy. With 0 the
            log is a file on this machine, which is not copied. With None every reader calls `logs(follow=True)` itself.
        logs_per_s: so many nodes' logs of a group are read a second while no reader follows them.
        group: attempts whose backends have the same group (account, region, project, cluster, namespace, host) may be asked
            in one call of `statuses`. It comes from the options alone, so who has several credentials keeps these apart as
            well. "": each is asked by `status`.
        calls_per_s: what all clients of one home together may call of the platform, per group.
        has_marks: `marks` answers: the watcher asks for the state of attempts whose mark has changed.
        lost_after_s: for so long a machine that keeps the files of a run does not answer before its attempt is LOST. None
            where no machine keeps any.
        variables: patterns of the environment variables that its calls read: AWS_*. Runs whose shells differ in others only
            are watched by one process. None: every variable of credentials.
    """

    name: str
    poll_s: float
    follow_s: float | None = None
    logs_per_s: float = 5.0
    group: str = ""
    calls_per_s: float = 50.0
    has_marks: bool = False
    lost_after_s: float | None = None
    variables: tuple[str, ...] | None = None
    traits: Traits = Traits()

    @abstractmethod
    def __init__(self, options: Mapping[str, Any], workdir: Path) -> None: ...

    @classmethod
    @abstractmethod
    def options(cls) -> type[BaseModel]:
        """Return the pydantic model of this backend's `options`; a method, so that other commands need not import pydantic."""

    # -- what every platform answers -----------------------------------------------------------------------------------

    @abstractmethod
    def plan(self, job: Job, bundle: Bundle, run_id: str, attempt: int = 1) -> Plan:
        """Return everything that `submit` would send. Pure: no network, clock, randomness, SDK or credentials.

        Raises BadJob with every reason why this platform cannot run the job.
        """

    @abstractmethod
    def submit(self, plan: Plan, bundle: Bundle) -> str:
        """Upload the bundle, create the job, and return its handle; blocks until the platform has accepted it.

        A second call with the same plan completes an interrupted one and returns the same handle.

        Raises:
            BackendError: the platform refuses the attempt (validation, permission): it is FAILED.
            NoCapacity: insufficient capacity, or a quota is used up: the event `capacity`.
            Unreachable: no answer, throttled, or an error on the platform's side: the attempt stays open, and nothing
                is sent again before `find` has answered.
        """

    @abstractmethod
    def find(self, attempt_id: str) -> str | None:
        """Return the handle of an attempt that exists on the platform, None if the platform confirms that it has none.

        Raises BackendError if the platform does not answer; it must not return None then.
        """

    @abstractmethod
    def status(self, handle: str) -> Status:
        """Return the attempt's current status; LOST if the platform no longer has it."""

    @abstractmethod
    def logs(self, handle: str, *, follow: bool = False, after: str | None = None) -> Iterator[LogLine]:
        """Yield the log lines of all nodes after the cursor `after`, in order on each node; with `follow` until the end."""

    @abstractmethod
    def cancel(self, handle: str) -> None:
        """Request that the platform stops the attempt; idempotent, does not wait for the end."""

    @abstractmethod
    def fetch(self, handle: str, into: Path, what: tuple[str, ...] = FETCHABLE) -> Path:
        """Copy `model`, `outputs` and `checkpoints`, or a folder in one of them, below `into` and return it; resumable.

        What others wrote is hostile: `copy_tree` and `folder_writer` of cloudtrain.source.folder_writer follow no links.
        """

    # -- what is known of its options ----------------------------------------------------------------------------------

    @classmethod
    def output_is_here(cls, options: Mapping[str, Any]) -> bool:
        """Return whether a path in `output` is one of this machine."""
        return cls.traits.writes_here

    @classmethod
    def open_output(cls, uri: str, options: Mapping[str, Any]) -> Files | None:
        """Return an output in a store with the credentials that options name, None where they name none."""
        return None

    # -- before a submission -------------------------------------------------------------------------------------------

    def check(self) -> list[Problem]:
        """Return the problems that would stop a submission from this machine (`cloudtrain doctor`)."""
        return []

    def checked_machines(self) -> Mapping[str, str]:
        """Return what the last `check` found on each machine, by its name, in one line for doctor; connects to nothing."""
        return {}

    def capacity(self) -> str:
        """Return one sentence on the accelerators of the platform, for doctor; "" where it cannot tell."""
        return ""

    @classmethod
    def discover(cls) -> dict[str, Any]:
        """Return options that the account's settings show (`cloudtrain init`); raises MissingExtra alone."""
        return {}

    @classmethod
    def convert(cls, path: Path, backend: str) -> tuple[dict[str, Any], list[str]] | None:
        """Return the job of a file that people wrote for the platform's own tools, and notes (`cloudtrain init --from`).

        Args:
            path: the file.
            backend: on which the job is to run; "" where none was chosen.

        None for a file of others. Raises BadRequest and BadJob. Blocking where a backend is chosen: it may ask the platform.
        """
        return None

    @classmethod
    def ci_values(cls, options: Mapping[str, Any]) -> Mapping[str, str]:
        """Return what the lines of `traits.ci` name between two @; by default the texts among a target's options."""
        return {name: value for name, value in options.items() if isinstance(value, str) and value}

    def preflight(self, plan: Plan) -> None:
        """Raise BadRequest with every reason why an attempt cannot run that can be seen from here. It changes nothing.

        Raises BackendError without credentials, MissingExtra without the platform's SDK.

        It is called before anything is stored. What needs a process, a file of this machine or a call stands here:
        `plan` is pure.
        """
        return

    def most_together(self, plan: Plan) -> int:
        """Return how many attempts like that of a plan one request can send, if `expect` is called with them. Pure."""
        return 1

    def expect(self, plans: Sequence[Plan], at_once: int) -> None:
        """Take note of attempts of one job and bundle that are submitted next: the first `submit` may send all of them.

        Pure. `submit` of each of the others then returns what `find` finds; `discard` stops one that is not submitted.

        Args:
            plans: the attempts, `most_together` at most.
            at_once: how many of them may run at a time.
        """
        return

    def probe(self, plan: Plan) -> list[Problem] | None:
        """Return why the platform would not start the attempt of a plan, for `doctor --job`; None where it cannot tell."""
        return None

    def manifests(self, plan: Plan, packed: bytes) -> str:
        """Return what the platform's own tool reads, with the bytes of the bundle in it. Pure.

        Raises BadRequest where they do not fit, Unsupported where there is no such tool.
        """
        raise Unsupported(f"the backend {self.name} has no manifests", "use -t with a target on another backend")

    def time_limit(self, plan: Plan) -> TimeLimit:
        """Return the longest time of an attempt that the platform enforces while no client lives. Pure.

        With `job.limits.capped` the plan must allow no restart by the platform whose clock starts anew.
        """
        return TimeLimit(None, "this backend cannot guarantee the end of a job when no cloudtrain process runs")

    def machine(self, plan: Plan) -> str:
        """Return each node's machine type as provider/region/name, "" where it is not known. Pure."""
        return ""

    @classmethod
    def read_prices(cls, provider: str, region: str, key: str, downloads: Downloads) -> Offer:
        """Read the prices of machines in a region (`cloudtrain prices refresh`); blocking.

        Args:
            provider: of the list: this backend, or `traits.rents`.
            region: of the machines.
            key: of an API for prices, "" without.
            downloads: reads addresses, with bounds.

        Raises:
            BackendError: the answer is not such a list, or too large.
            Unreachable: no answer, or too slow.
        """
        from cloudtrain.backends.price_lists import read_catalogue

        return read_catalogue(downloads, provider, region).offer()

    def facts(self, plan: Plan) -> Facts:
        """Return to which account, region and machines a plan goes; policies are checked against it. Pure."""
        if not self.traits.own_machines:
            return Facts("", "", (), (), None)
        return Facts(gpus=None if plan.job["resources"]["accelerators"] is None else plan.requested_gpus)

    def plan_after(self, plan: Plan, newest: int) -> Plan:
        """Return the plan of a later attempt, sent to the machine that has the files of attempt `newest`. Pure.

        With 0, where no attempt has left any, to any machine.
        """
        return plan

    def avoid(self, plan: Plan, names: Sequence[str]) -> Plan:
        """Return the plan of an attempt that uses other nodes than these, by their platform's names. Pure.

        The plan as it is where the platform gives no choice.
        """
        return plan

    # -- while an attempt runs -----------------------------------------------------------------------------------------

    def statuses(self, handles: Sequence[str]) -> Mapping[str, Status]:
        """Return handle -> what `status` would return, from few calls of the platform; called where `group` is set.

        A handle that the platform's listing did not show is left out: the caller asks `status` for it. An object may keep
        what it needs to ask for changes only, so a caller that asks again keeps it.
        """
        return {}

    def marks(self, handles: Sequence[str]) -> Mapping[str, Any]:
        """Return what changes when an attempt's state does, read from files here, without a call of the platform."""
        return {}

    def ended(self, handles: Sequence[str]) -> Mapping[str, Status]:
        """Return the final statuses that files here have, of attempts whose mark has changed; no call of the platform."""
        return {}

    def images(self, handle: str) -> dict[int, str]:
        """Return node -> container image as `cloudtrain.backends.images.pinned_image` returns it, for the nodes that are
        known; called when an attempt starts to run and at its end."""
        return {}

    def shell(self, handle: str, node: int, words: Sequence[str], *, stdin: bool, terminal: bool) -> Shell:
        """Return how the node's Python is started with some arguments, in a terminal or not, with standard input or without.

        Its arguments are `-c`, a text, and words; they arrive as they are. It runs as the user of the ranks, and sees their
        processes in /proc. Seconds at most: it may ask the platform where the node is. It starts nothing itself.
        The exit code is that of the program. `traits.shell` says whether a platform has this.

        Raises BackendError where the attempt has no such node, or does not run.
        """
        raise Unsupported(f"{self.name} cannot start a program beside a rank")

    def connect(self, handle: str, node: int, port: int) -> Shell | None:
        """Return a connection to a port of a node's loopback address: its input and output are the two directions.

        Seconds at most. None where the platform has no such thing: a program of `shell` copies the bytes. Raises
        BackendError where the attempt has no such node, or does not run.
        """
        return None

    # -- finding attempts again ----------------------------------------------------------------------------------------

    def labels(self, handle: str) -> dict[str, str] | None:
        """Return the labels of `plan.job["labels"]` that the platform stored, None where it stores none.

        They are compared when a `--key` is reused.
        """
        return None

    def labelled(self, name: str, value: str, known: Container[str]) -> Iterator[FoundAttempt]:
        """Yield the attempts that have a label, but those whose ids are known; for runs that the history has lost."""
        return iter(())

    def discard(self, attempt_id: str) -> None:
        """Stop what an interrupted submission of several steps has left, which `find` does not return; idempotent.

        Raises BackendError if that cannot be confirmed: the attempt stays open.
        """
        return

    # -- after its end -------------------------------------------------------------------------------------------------

    def delete_cancelled(self, handle: str) -> None:
        """Delete a cancelled attempt that the platform would keep, whose log is stored here by now; idempotent.

        `fetch` still works afterwards.
        """
        return

    def remains(self, handle: str) -> Mapping[str, int | None]:
        """Return place -> bytes of what an ended attempt has left, None where they are not known; `cloudtrain rm`.

        What `output` names is not part of it.
        """
        return {}

    def remove(self, handle: str) -> None:
        """Delete what `remains` names; idempotent."""
        return

    def packed(self, plan: Plan, what: str) -> str:
        """Return where the platform keeps an attempt's `model` or `outputs` in a form of its own. Pure.

        The URI of a folder with a / at its end, or of a .tar.gz; "" elsewhere. It is asked where a job uses those of a run.
        """
        return ""

    def packed_digest(self, uri: str) -> str:
        """Return a digest of what is at such a URI, "" where nothing is."""
        return ""

    def estimator(self, plan: Plan) -> Any:
        """Return the object of the platform's own library for an attempt that was submitted, with which people continue.

        Raises MissingExtra, and Unsupported where there is no such library.
        """
        raise Unsupported(f"the backend {self.name} has no library with an estimator of a run")

    # -- permissions and images ----------------------------------------------------------------------------------------

    def policy(self, kind: str, plan: Plan | None) -> Mapping[str, Any]:
        """Return "trust", "role" or "submit" for a plan, or for any plain job with these options. Pure.

        Raises BadRequest, and Unsupported where there are no such policies.
        """
        raise Unsupported(
            f"the backend {self.name} has no IAM policies to print",
            "cloudtrain permissions -t TARGET prints what other platforms grant",
        )

    def permissions(self, plan: Plan | None, *, inside: bool = False) -> Mapping[str, Any]:
        """Return file name -> document (JSON, or a list of objects for YAML): the least that a plan's options need. Pure.

        Without a plan that is what any plain job with these options needs. With `inside` also what `exec`, `stack` and
        `forward` need, where that is granted apart. Raises BadRequest, and Unsupported where nothing grants permissions.
        """
        raise Unsupported(
            f"the backend {self.name} needs no permissions of a platform", "-t names a target of another backend"
        )

    def enforcement(self, rules: Sequence[Requirement]) -> tuple[Mapping[str, Any], list[str]]:
        """Return file name -> document by which the platform refuses what rules refuse, and what it cannot hold. Pure."""
        return {}, [f"nothing on {self.name} enforces rules: only cloudtrain plan enforces them"]

    def image_registry(self, repository: str) -> ImageRegistry:
        """Return the platform's registry of images and a login to it; creates the repository if it does not exist.

        Raises Unsupported where the platform has none.
        """
        raise Unsupported(f"the backend {self.name} has no registry of its own", "add --to REGISTRY/NAME:TAG")
