"""Fixtures of the contract suite: a backend, a job prepared for it, attempts that are cancelled at the end, bounded waits."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from cloudtrain.backends.api import Backend, Plan
from cloudtrain.clock import SYSTEM
from cloudtrain.events import MARK, LogLine, Status
from cloudtrain.job import rules
from cloudtrain.job.job import Job
from cloudtrain.source.bundle import Bundle
from cloudtrain.testing import machine
from cloudtrain.testing.elsewhere import Elsewhere

# Timeout of each single wait in seconds; generous, because machines are slow and busy.
WAIT_S = float(os.environ.get("CLOUDTRAIN_CONTRACT_WAIT_S", "180"))
ASK_S = 2.0  # between two questions whether an attempt whose lines are awaited has ended
LAST_LINES_S = 30.0  # in which the last lines of an ended attempt come


class ContractFixtures:
    """What a subclass of BackendContract overrides, and what its tests use."""

    submitted: ClassVar[dict[str, str]] = {}  # handle -> attempt id, of what `start` has submitted

    # -- overridden by the subclass ----------------------------------------------------------------------------------------

    @pytest.fixture
    def connect(self) -> Callable[[], Backend]:
        raise AssertionError(
            "a contract test gives the fixture `connect`: a function that returns a new backend object"
        )

    def leftovers(self, handle: str) -> list[str]:
        """Describe what an ended attempt left behind on any node, one line each; override it for other machines.

        By default the processes of this machine that have the attempt's id in their environment or command line.
        """
        mark = self.submitted.get(handle, handle).encode()
        return [str(seen) for seen in machine.processes() if mark in seen.environ or mark in seen.argv]

    def folders(self) -> list[Path]:
        """Return folders in which no secret may be found, beside the test's own and the ranks'; override it."""
        return []

    def calls(self) -> int | None:
        """Return how many calls the platform has received so far, None where they are not counted; override it."""
        return None

    def job_changes(self) -> dict[str, Any]:
        """Return job-file keys that every job needs on this backend, such as an image; override it."""
        return {}

    # -- tools --------------------------------------------------------------------------------------------------------

    @pytest.fixture
    def backend(self, connect: Callable[[], Backend]) -> Backend:
        return connect()

    @pytest.fixture
    def elsewhere(
        self, connect: Callable[[], Backend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Elsewhere]:
        """A backend as `connect` makes it, in another process."""
        kind: Any = type(connect())
        given: list[Any] = []
        construct = kind.__init__

        def record(self: Any, options: Any, workdir: Path, *clock: Any, **named: Any) -> None:
            given[:] = options, workdir
            construct(self, options, workdir, *clock, **named)

        with monkeypatch.context() as patch:
            patch.setattr(kind, "__init__", record)
            connect()
        options, workdir = given
        other = Elsewhere(kind, options, workdir, tmp_path / "elsewhere", WAIT_S)
        yield other
        other.close()

    @pytest.fixture
    def prepare(self, backend: Backend, tmp_path: Path) -> Callable[..., tuple[Plan, Bundle]]:
        """Return a function that makes plan and bundle from a script's text and changes to the job."""
        count = iter(range(1000))

        def prepare(script: str, *, attempt: int = 1, run_id: str = "", **changes: Any) -> tuple[Plan, Bundle]:
            number = next(count)
            source = tmp_path / f"source-{number}"
            source.mkdir()
            (source / "script.py").write_text(script, encoding="utf-8")
            data = {
                "name": "contract",
                "source": str(source),
                "entrypoint": "script.py",
                "environment": {"requirements": "none"},
            }
            job = Job.from_dict({**data, **self.job_changes(), **changes})
            bundle = Bundle.make(source, tmp_path / "bundles")
            return backend.plan(
                job, bundle, run_id or f"contract-{number}-{random.getrandbits(32):08x}", attempt
            ), bundle

        return prepare

    @pytest.fixture
    def start(self, backend: Backend, prepare: Callable[..., tuple[Plan, Bundle]]) -> Any:
        """Return a function that submits a script and returns its handle; the fixture cancels all handles at the end."""
        handles: list[str] = []

        def start(script: str, **changes: Any) -> str:
            plan, bundle = prepare(script, **changes)
            handle = backend.submit(plan, bundle)
            handles.append(handle)
            self.submitted[handle] = plan.attempt_id
            return handle

        yield start
        for handle in handles:
            backend.cancel(handle)

    def require(self, backend: Backend, key: str) -> None:
        """Skip the test where the backend does not take a key of the job."""
        if key not in backend.traits.keys:
            pytest.skip(f"it does not offer {rules.describe_key(key)}")

    def until_final(self, backend: Backend, handle: str) -> Status:
        deadline = SYSTEM.monotonic() + WAIT_S
        while not (status := backend.status(handle)).state.final:
            assert SYSTEM.monotonic() < deadline, f"still {status} after {WAIT_S} s:\n" + self.text(backend, handle)
            SYSTEM.sleep(min(backend.poll_s, 1.0) / 5)
        return status

    def until_line(self, backend: Backend, handle: str, text: str, times: int = 1) -> None:
        """Wait for a line of a rank."""
        self._until(
            lambda: sum(text in line.text for line in self.script_lines(backend, handle)) >= times,
            backend,
            handle,
            text,
        )

    def until_text(self, backend: Backend, handle: str, text: str) -> None:
        """Wait for a line of the launcher or of a rank."""
        self._until(lambda: text in self.text(backend, handle), backend, handle, text)

    def _until(self, seen: Callable[[], bool], backend: Backend, handle: str, text: str) -> None:
        """Wait for a text; of an attempt that has ended, the last lines may come a while later."""
        ended: Status | None = None
        ask_at = SYSTEM.monotonic() + ASK_S
        deadline = SYSTEM.monotonic() + WAIT_S
        while not seen():
            now = SYSTEM.monotonic()
            if ended is None and now > ask_at:
                ask_at = now + ASK_S
                status = backend.status(handle)
                if status.state.final:
                    ended, deadline = status, min(deadline, now + LAST_LINES_S)
            reason = f"the attempt ended: {ended}\n{self.text(backend, handle)}" if ended else f"waited {WAIT_S} s"
            assert now < deadline, f"the log has no {text!r}; {reason}"
            SYSTEM.sleep(0.05)

    def script_lines(self, backend: Backend, handle: str) -> list[LogLine]:
        """Return the lines that the ranks printed, without events and the launcher's own lines."""
        return [line for line in backend.logs(handle) if line.rank >= 0 and not line.text.startswith(MARK)]

    said = script_lines  # the former name; existing suites may call it

    def text(self, backend: Backend, handle: str) -> str:
        return "\n".join(f"[{line.node}:{line.rank}] {line.text}" for line in backend.logs(handle))

    def assert_no_leftovers(self, handle: str) -> None:
        """Wait until an attempt has left nothing behind."""
        deadline = SYSTEM.monotonic() + WAIT_S
        while left := self.leftovers(handle):
            assert SYSTEM.monotonic() < deadline, f"left behind: {left}"
            SYSTEM.sleep(0.1)

    gone = assert_no_leftovers  # the former name; existing suites may call it
