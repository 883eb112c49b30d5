"""Three platforms in memory that refuse, let wait, take away and lose jobs, by a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from cloudtrain import events
from cloudtrain.backends import registry
from cloudtrain.backends.api import Plan
from cloudtrain.errors import CloudtrainError, NoCapacity, NotReached, Unreachable
from cloudtrain.events import LogLine, State, Status
from cloudtrain.history.store import Store
from cloudtrain.job import units
from cloudtrain.runs.run import Run
from cloudtrain.runs.sending import retry
from cloudtrain.runs.submit import Submitter
from cloudtrain.runs.watching.watch import Watcher
from cloudtrain.testing.clock import VirtualClock
from cloudtrain.testing.memory import MemoryBackend, SubmittedAttempt

NAMES = ("east", "west", "lab")
WRITES = ("intend", "next_attempt", "accept", "record", "set_status")
FOREVER = float("inf")


class Killed(BaseException):
    """The client's process ends here, without another word."""


@dataclass
class Life:
    """What becomes of an accepted attempt: when it gets machines, how it ends, and how long after a cancel."""

    starts_at: float
    ends_at: float
    state: State = State.SUCCEEDED
    event: str = ""
    stops_s: float = 0.0
    cancelled: bool = False
    saves: bool = False
    lost_at: float = FOREVER  # from then on the platform calls it lost, and it lives on until somebody cancels it


class Fleet:
    """The platforms, the clock, and what is drawn of both.

    Args:
        draw: None for platforms that accept everything and do what the test says.
    """

    def __init__(self, patch: pytest.MonkeyPatch, draw: random.Random | None = None) -> None:
        self.clock, self.draw = VirtualClock(), draw
        self.lives: dict[str, Life] = {}  # of accepted attempts, by attempt id
        self.sent: list[tuple[str, str]] = []  # platform and attempt of each that was accepted
        self.refuses: set[str] = set()  # platforms without machines
        self.not_reached: set[str] = set()  # platforms to which nothing is sent
        self.unreachable: set[str] = set()
        self.kill_after = FOREVER  # writes to the history, until the client dies
        patch.setattr(retry, "OUTAGE_S", 0.0)
        patch.setattr(registry, "BUILT_IN", dict(registry.BUILT_IN))
        self.kinds = {
            name: type(name.title(), (Site,), {"name": name, "fleet": self, "attempts": {}}) for name in NAMES
        }
        for kind in self.kinds.values():
            kind.install()
            patch.setitem(registry.BUILT_IN, kind.name, ("tests.runs.fleet:Site", None))
        known = registry.backend_class
        patch.setattr(registry, "backend_class", lambda name: self.kinds.get(name) or known(name))
        for name in WRITES:
            patch.setattr(Store, name, self._mortal(getattr(Store, name)))

    @property
    def now(self) -> float:
        return self.clock.now()

    def _mortal(self, write, after: bool = True):
        def mortal(*arguments, **named):
            self.reach_point()
            written = write(*arguments, **named)
            if after:  # not where it has only begun a transaction
                self.reach_point()
            return written

        return mortal

    def reach_point(self) -> None:
        """The client gets to one of the points between which it may die."""
        self.kill_after -= 1
        if self.kill_after == 0:
            raise Killed

    def lines(self, name: str) -> list[LogLine] | None:
        """Return what an attempt has printed; None where the test says it to its platform."""
        return None

    def chance(self, share: float) -> bool:
        return self.draw is not None and self.draw.random() < share

    def live(self) -> list[str]:
        """Return the attempts that a platform has and that have not ended, pending ones too."""
        return [name for name, life in self.lives.items() if self.now < life.ends_at]

    def live_beside(self, run_id: str) -> list[str]:
        """Return the attempts of a run that have not ended on their platform."""
        return [name for name in self.live() if name.rpartition("-a")[0] == run_id]

    def admit(self, name: str) -> None:
        """Assert that a platform may take an attempt: no other one of its run is there."""
        beside = self.live_beside(name.rpartition("-a")[0])
        assert beside == [], f"{name} beside {beside}"

    def begin(self, name: str) -> Life:
        if not self.draw:
            return Life(self.now, FOREVER)
        draw, starts = self.draw, self.now + self.draw.choice([0.0, 300.0, 7200.0, FOREVER])
        kinds = [(State.SUCCEEDED, ""), (State.PREEMPTED, ""), (State.LOST, ""), (State.FAILED, "capacity")]
        state, event = draw.choices(kinds, [1, 3, 2, 2])[0]
        ends = self.now + draw.uniform(60, 3000) if event else starts + draw.uniform(60, 20_000)
        starts = FOREVER if event else starts
        life = Life(starts, ends, state, event, draw.choice([0.0, 60.0, 2000.0]), saves=draw.random() < 0.3)
        if state is State.LOST:
            life.lost_at, life.ends_at, life.stops_s = life.ends_at, FOREVER, 0.0
        return life

    def status(self, name: str) -> Status:
        life = self.lives[name]
        started = units.format_time(life.starts_at) if life.starts_at <= min(self.now, life.ends_at) else None
        if self.now >= life.ends_at:
            code = 0 if life.state is State.SUCCEEDED else None
            ended = units.format_time(life.ends_at)
            return Status(life.state, code, f"ended {life.state}", started, ended, event=life.event)
        if self.now >= life.lost_at:
            return Status(State.LOST, None, "it does not answer", started, units.format_time(life.lost_at))
        if life.cancelled:
            return Status(State.STOPPING, started_at=started)
        return Status(State.RUNNING if started else State.QUEUED, None, "", started)

    def cancel(self, name: str) -> None:
        life = self.lives[name]
        if not life.cancelled and self.now < life.ends_at:
            life.cancelled = True
            if self.now + life.stops_s < life.ends_at:
                life.ends_at, life.event = self.now + life.stops_s, ""
                life.state = State.LOST if self.now >= life.lost_at else State.CANCELLED

    def look(self, run: Run) -> None:
        """A watcher looks until nothing moves any more, or dies on the way."""
        try:
            Watcher(run.store, run.run_id, complain=lambda _: None).refresh()
        except (Killed, CloudtrainError):
            pass


class Site(MemoryBackend):
    """One of the platforms."""

    fleet: Fleet
    variables: tuple[str, ...] = ()

    @classmethod
    def install(cls) -> None:
        cls.attempts.clear()

    @contextmanager
    def _asked(self, lost: float = 0.06) -> Iterator[None]:
        """A call may get no answer, or kill who makes it, before and after it is carried out."""
        if self.name in self.fleet.unreachable or self.fleet.chance(lost):
            raise Unreachable("nobody answers")
        yield
        if self.fleet.chance(lost / 2):
            raise Unreachable("it was carried out, and the answer is lost")
        if self.fleet.chance(lost / 2):
            raise Killed

    def submit(self, plan: Plan, bundle) -> str:
        with self._asked():
            if plan.attempt_id in self.attempts:
                return plan.attempt_id
            if self.name in self.fleet.not_reached:
                raise NotReached(f"{self.name} refuses the connection")
            if self.name in self.fleet.refuses or self.fleet.chance(0.35):
                raise NoCapacity(f"{self.name} has no such machines")
            self.fleet.admit(plan.attempt_id)
            self.attempts[plan.attempt_id] = SubmittedAttempt(plan)
            self.fleet.lives[plan.attempt_id] = self.fleet.begin(plan.attempt_id)
            self.fleet.sent.append((self.name, plan.attempt_id))
        return plan.attempt_id

    def logs(self, handle: str, *, follow: bool = False, after: str | None = None) -> Iterator[LogLine]:
        if (lines := self.fleet.lines(handle)) is None:
            yield from super().logs(handle, follow=follow, after=after)
            return
        with self._asked():
            yield from lines[int(after or 0) :]

    def statuses(self, handles: Sequence[str]) -> dict[str, Status]:
        with self._asked():
            return {handle: self.fleet.status(handle) for handle in handles if not self.fleet.chance(0.1)}

    def find(self, attempt_id: str) -> str | None:
        with self._asked():
            return super().find(attempt_id)

    def status(self, handle: str) -> Status:
        with self._asked():
            life = self.fleet.lives[handle]
            if life.saves and life.starts_at + 60 <= self.fleet.now and not self.attempts[handle].lines:
                self.say(handle, events.format("checkpoint", {"written": "step-5.pt", "step": 5}))
            return self.fleet.status(handle)

    def cancel(self, handle: str) -> None:
        with self._asked(0.2):
            self.fleet.cancel(handle)

    def images(self, handle: str) -> dict[int, str]:
        return {}


def submit(fleet: Fleet, job: dict, home: Path) -> Run:
    """Submit as a person would, who tries again after a crash."""
    submitter = Submitter(home=home, watch=False, clock=fleet.clock)
    while True:
        try:
            return submitter.submit(job, adopt=True)
        except Killed:
            fleet.kill_after = FOREVER
            begun = submitter.store.names()
            if (
                begun and submitter.store.attempts(begun[0])[-1].handle
            ):  # this very process, by its id, has submitted it
                return Run(submitter.store.names()[0], submitter.store)
        except CloudtrainError:  # refused by all
            return Run(submitter.store.names()[0], submitter.store)
