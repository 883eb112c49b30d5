"""Law 3, submissions: a driver of drawn sequences of lost answers and user actions, for any backend.

A test module gives a `Platform` (a simulator that can fail) and calls `drive` once for each seed. The driver submits a
job, loses the answer, lets more calls fail, does what users do meanwhile, and checks the promises after every step.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest

from cloudtrain.backends import registry
from cloudtrain.cli.view import runs as shown
from cloudtrain.cli.view.follow import cancel as cancel_as_cli
from cloudtrain.errors import BackendError, CloudtrainError, Unreachable
from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.runs.run import Run
from cloudtrain.runs.sending import retry
from cloudtrain.runs.submit import Submitter
from cloudtrain.runs.watching.watch import Watcher
from tests.conftest import wait_for

NORMAL, LONG = 10, 400  # sequences
MOST = 5  # further failures


class Platform(Protocol):
    """A simulated platform. Its jobs never end by themselves, and end soon after they are cancelled."""

    backend: str  # its name
    options: Mapping[str, Any]  # for Submitter

    def lose(self, choose: random.Random) -> None:
        """Let the answer to the next create be lost, before or after the job was made."""

    def fail(self, choose: random.Random) -> None:
        """Let one more call fail: any call, in any way that leaves open what happened."""

    def heal(self) -> None:
        """Let every call work again."""

    def jobs(self) -> list[str]:
        """Return the attempt ids of all jobs that were ever made, one entry for each job."""

    def live(self) -> list[str]:
        """Return the attempt ids of the jobs that have not ended."""

    def check(self) -> None:
        """Assert what only this platform's record of calls can tell."""


class Calls:
    """Records `submit` and `find` of a backend, and asserts that nothing is sent twice without an answer in between."""

    def __init__(self, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open: set[str] = set()  # attempts whose submit was not answered, and which were not found since
        kind = registry.backend_class(backend)
        submit, find = kind.submit, kind.find

        def submits(its: Any, plan: Any, bundle: Any) -> str:
            assert plan.attempt_id not in self.open, "sent again before find has answered"
            try:
                return submit(its, plan, bundle)
            except Unreachable:
                self.open.add(plan.attempt_id)
                raise

        def finds(its: Any, attempt_id: str) -> str | None:
            found = find(its, attempt_id)
            self.open.discard(attempt_id)
            return found

        monkeypatch.setattr(kind, "submit", submits)
        monkeypatch.setattr(kind, "find", finds)


@contextlib.contextmanager
def recorded(backend: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Record a backend's calls while sequences are driven, and let outages be over at once."""
    with monkeypatch.context() as patch:
        patch.setattr(retry, "OUTAGE_S", 0.0)
        Calls(backend, patch)
        yield


def drive(platform: Platform, folder: Path, seed: int, **changes: Any) -> Counter[str]:
    """Drive one sequence and return how often each action was done; `changes` are fields of the job."""
    try:
        return _Sequence(platform, folder, seed, changes).go()
    except AssertionError as error:
        raise AssertionError(f"sequence {seed}: {error}") from error


class _Sequence:
    def __init__(self, platform: Platform, folder: Path, seed: int, changes: Mapping[str, Any]) -> None:
        self.platform, self.choose = platform, random.Random(seed)
        source = folder / "source"
        source.mkdir(parents=True)
        (source / "train.py").write_text("import time\ntime.sleep(600)\n")
        job = {"name": f"sequence-{seed}", "source": str(source), "entrypoint": "train.py"}
        self.job = {**job, "environment": {"requirements": "none"}, **changes}
        self.key = f"key-{seed}" if self.choose.random() < 0.25 else None
        self.home, self.elsewhere = folder / "home", folder / "elsewhere"
        self.submitter = self._submitter(self.home)
        self.wanted = 0  # jobs that the user has asked for
        self.over = True  # the next submit asks for another one
        self.cancelled = False  # after the last submit
        self.closed: Counter[str] = Counter()  # jobs of a submission that was cancelled before it was accepted
        self.done: Counter[str] = Counter()
        self.log: list[str] = []

    def go(self) -> Counter[str]:
        self.platform.lose(self.choose)
        self._do("submit")
        for _ in range(self.choose.randint(1, MOST)):
            self.platform.fail(self.choose)
            for _ in range(self.choose.randint(1, 2)):
                self._do(self._action())
        self.platform.heal()
        for _ in range(3):
            self._do("watch")
        for run in self._runs():
            newest = run.attempts[-1]
            assert newest.handle or newest.status.state.final, f"{run.run_id} is still open: {self.log}"
            assert not newest.unanswered_since or newest.status.state.final, self.log
        if not self.cancelled:
            assert self.platform.live(), f"the job was lost: {self.log}"
        for run in self._runs():
            if not run.record.status.state.final:
                run.cancel()
        for run in self._runs():
            self._end(run)
        assert self.platform.live() == [], f"it cannot be cancelled: {self.log}"
        self.platform.check()
        return self.done

    # -- what users do --------------------------------------------------------------------------------------------------

    def _action(self) -> str:
        weights = {"submit": 4, "again": 4, "show": 3, "watch": 5, "cancel": 1, "new": 0 if self.key else 1}
        weights["elsewhere"] = 2 if self.key else 0
        return self.choose.choices(list(weights), list(weights.values()))[0]

    def _do(self, action: str) -> None:
        self.done[action] += 1
        self.log.append(action)
        try:
            getattr(self, f"_{action}")()
        except CloudtrainError as error:
            self.log[-1] += f" ({type(error).__name__}: {error})"
            assert isinstance(error, BackendError), self.log
            assert isinstance(error, Unreachable), f"an outage is no refusal: {self.log}"
        self._check()

    def _submit(self) -> None:
        self._send(self.submitter)

    def _again(self) -> None:
        self._send(self._submitter(self.home))

    def _elsewhere(self) -> None:
        self._send(self._submitter(self.elsewhere))

    def _new(self) -> None:
        self.wanted, self.over, self.cancelled = self.wanted + 1, False, False
        self._acknowledge(self.submitter.submit(self.job, new=True))

    def _send(self, submitter: Submitter) -> None:
        if self.over and not (self.wanted and self.key):
            self.wanted, self.cancelled = self.wanted + 1, False
        self.over = False
        made = len(self.platform.jobs())
        run = submitter.submit(self.job, key=self.key)
        if len(self.platform.jobs()) > made:
            self.cancelled = False  # its key was free: what was cancelled had never begun
        self._acknowledge(run)

    def _acknowledge(self, run: Run) -> None:
        """Do what the command line does where it has said that a job was accepted: an equal submit is another one."""
        if run.attempts[-1].handle is not None:
            run.acknowledge()
            self.over = True

    def _show(self) -> None:
        for run in self._runs():
            run.refresh(complain=lambda _: None)

    def _watch(self) -> None:
        for run in self._runs():
            with self._freed_key(run):
                Watcher(run.store, run.run_id, complain=lambda _: None).refresh()

    def _cancel(self) -> None:
        for run in self._runs()[:1]:
            self.over = self.cancelled = True
            with self._freed_key(run):
                cancel_as_cli(run, 0.0)

    @contextlib.contextmanager
    def _freed_key(self, run: Run) -> Iterator[None]:
        """A cancel, also one that a watcher carries out later, frees the key of a run that was not accepted.

        The next submission of the key, from any history, gets the same id: the jobs closed until then do not count.
        """
        ended = run.record.status.state.final
        yield
        if self.key and not ended and run.record.status.state is State.CANCELLED and run.attempts[-1].handle is None:
            self.closed = Counter(self.platform.jobs()) - Counter(self.platform.live())

    def _submitter(self, home: Path) -> Submitter:
        return Submitter(self.platform.backend, home=home, watch=False, **self.platform.options)

    def _runs(self) -> list[Run]:
        stores = [Store(home) for home in (self.home, self.elsewhere) if home.exists()]
        return [Run(record.run_id, store, watch=False) for store in stores for record in store.runs()]

    # -- what holds at any time -----------------------------------------------------------------------------------------

    def _check(self) -> None:
        made, live = Counter(self.platform.jobs()) - self.closed, set(self.platform.live())
        assert max(made.values(), default=0) <= 1, f"an attempt has two jobs, {made}: {self.log}"
        assert made.total() <= self.wanted, f"{made.total()} jobs for {self.wanted} submissions: {self.log}"
        runs = self._runs()
        for run in runs:
            status, newest = run.record.status, run.attempts[-1]
            if live & {attempt.attempt_id for attempt in run.attempts}:
                # Another history may have submitted the key again after it was cancelled in this one.
                over = status.failed if self.done["elsewhere"] else status.state.final
                assert not over, f"{status} while its job runs: {self.log}"
            if newest.handle is None and not status.state.final:
                data = shown.shown_json(run)
                assert data["attempts"][-1]["tries"] >= 1 and data["attempts"][-1]["unanswered_since"], data
                unsent = data["reason"].startswith(("not sent yet", "its submission was interrupted, and"))
                # Another history may have sent what this one has not.
                others = [each for other in runs for each in other.attempts if each.attempt_id == newest.attempt_id]
                sent = not all(each.status.reason.startswith("not sent yet") for each in others)
                missing = newest.attempt_id not in made
                assert "unknown since" in data["reason"] or (unsent and (missing or sent)), (data["reason"], self.log)

    def _end(self, run: Run) -> None:
        def ended() -> bool:
            if not run.record.status.state.final:
                Watcher(run.store, run.run_id, complain=lambda _: None).refresh()
            return run.record.status.state.final

        wait_for(ended, f"the end of {run.run_id} ({self.log})")
        if run.attempts[-1].handle is not None:
            status = run.record.status
            # A cancelled Job is deleted when its logs are collected: another history may come too late to see it.
            deleted = (
                status.state is State.LOST and status.reason.endswith("no longer exists") and self.done["elsewhere"]
            )
            assert deleted or status.state is State.CANCELLED, (status, self.log)
