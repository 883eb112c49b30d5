"""The backend of attached runs, which were submitted elsewhere: it reads their outputs and submits nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from cloudtrain.backends.api import FETCHABLE, Backend
from cloudtrain.backends.attached.run import AttachedRun, attempt_of, newest_attempt, run_names
from cloudtrain.backends.plan import ATTACHED, AttachedAttempt, Plan
from cloudtrain.backends.store.files import Files
from cloudtrain.backends.store.open import opened
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError
from cloudtrain.events import LogLine, State, Status

if TYPE_CHECKING:
    from pydantic import BaseModel

    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle


class AttachedBackend(Backend):
    """Reads runs from their outputs. A handle is `attached:<attempt id>@<URI of the run's folder>`."""

    name = "attached"
    poll_s = 5.0

    def __init__(self, options: Mapping[str, Any], workdir: Path, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._runs: dict[str, AttachedRun] = {}
        self._outputs: dict[str, Files] = {}  # of teams: one client for all their runs

    @classmethod
    def options(cls) -> type[BaseModel]:
        from pydantic import create_model

        return create_model("AttachedOptions")

    def attempts(self, uri: str) -> list[AttachedAttempt]:
        """Return the attempts of the run at a URI, the oldest first; raises BadRequest where there is no history."""
        return self._run(uri).attempts()

    def run_names(self, uri: str) -> list[str]:
        """Return the names of the runs below an output."""
        return run_names(self._output(uri))

    def read_index(self, uri: str) -> dict[str, bytes]:
        """Return run id -> its newest record, of runs that had ended and are in the index of an output."""
        from cloudtrain.backends.attached.index import read_index

        return read_index(self._output(uri))

    def indexed_attempt(self, uri: str, run_id: str, record: bytes) -> AttachedAttempt | None:
        """Return the newest attempt of a run, as a record of the index has it; None where it is no record of this run."""
        return attempt_of(self._output(uri), run_id, record)

    def newest_attempt(self, uri: str, run_id: str) -> AttachedAttempt | None:
        """Return the newest attempt of a run below an output, as its run.json has it; None where there is no such file."""
        return newest_attempt(self._output(uri), run_id)

    def output_sizes(self, uri: str) -> dict[str, int]:
        """Return name -> bytes of the files in a run's outputs."""
        return self._run(uri).output_sizes()

    def digest(self, uri: str, below: str) -> str:
        """Return a digest of what lies below a folder of a URI, "" where nothing does."""
        return opened(uri).digest(below)

    def read_output(self, uri: str, name: str, most: int) -> bytes | None:
        """Return a file of a run's outputs, None where it is gone; raises BackendError where it has more bytes."""
        return self._run(uri).read_output(name, most)

    def source(self, uri: str, digest: str) -> bytes | None:
        """Return the packed source of a run, None where it is not there."""
        return self._run(uri).source(digest)

    def find(self, attempt_id: str) -> str | None:
        return None  # an attempt id alone names no output

    def status(self, handle: str) -> Status:
        attempt_id, uri = _parse(handle)
        for attempt in self.attempts(uri):
            if attempt.plan.attempt_id == attempt_id:
                return attempt.status
        return Status(State.LOST, None, f"the files of {attempt_id} no longer exist at {self._run(uri).uri}")

    def logs(self, handle: str, *, follow: bool = False, after: str | None = None) -> Iterator[LogLine]:
        attempt_id, uri = _parse(handle)
        while True:
            final = self.status(handle).state.final  # before the log: what was written until then is read below
            for line in self._run(uri).lines(attempt_id, after):
                after = line.cursor
                yield line
            if final or not follow:
                return
            self._clock.sleep(self.poll_s)

    def fetch(self, handle: str, into: Path, what: tuple[str, ...] = FETCHABLE) -> Path:
        attempt_id, uri = _parse(handle)
        self.status(handle)
        self._run(uri).bring(attempt_id, into, what)
        return into

    def plan(self, job: Job, bundle: Bundle, run_id: str, attempt: int = 1) -> Plan:
        self._refuse()

    def submit(self, plan: Plan, bundle: Bundle) -> str:
        self._refuse()

    def cancel(self, handle: str) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise BackendError(
            "this machine can only read this run, because it was submitted from another machine",
            "run this command on the machine that submitted the run",
        )

    def _output(self, uri: str) -> Files:
        if uri not in self._outputs:
            self._outputs[uri] = opened(uri)
        return self._outputs[uri]

    def _run(self, uri: str) -> AttachedRun:
        if uri not in self._runs:
            self._runs[uri] = AttachedRun(uri)
        return self._runs[uri]


def _parse(handle: str) -> tuple[str, str]:
    """Return the attempt id and the URI of a handle."""
    attempt_id, _, uri = handle.removeprefix(ATTACHED).partition("@")
    return attempt_id, uri
