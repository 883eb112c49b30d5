"""A clock that a test advances, and containers that live by it: no process runs, no time passes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cloudtrain import clock

EPOCH = 1_600_000_000.0  # in the past, so that no client takes an end for a late one


@dataclass
class Life:
    """How the launcher in a container behaves: when it ends by itself, and how long after SIGTERM."""

    clock: Clock
    ends_at: float
    code: int
    stops_s: float  # infinite where it does not hear SIGTERM
    asked: bool = False

    def terminate(self) -> None:
        if not self.asked:
            self.asked = True
            if self.clock.at + self.stops_s < self.ends_at:
                self.ends_at, self.code = self.clock.at + self.stops_s, 75

    def kill(self) -> None:
        if not self.over:
            self.ends_at, self.code = self.clock.at, 137

    @property
    def over(self) -> bool:
        return self.clock.at >= self.ends_at


@dataclass
class Clock(clock.Clock):
    """The clock of simulators whose steps a test goes through."""

    draw: random.Random
    at: float = EPOCH
    lives: list[Life] = field(default_factory=list)
    steppers: list[Callable[[], float]] = field(default_factory=list)  # each returns when it has something to do
    limits: tuple[float, float] = (3600.0, 30.0)  # max_runtime and grace of the newest attempt
    hostile: bool = False  # every launcher hangs and hears no SIGTERM, every upload takes as long as it may

    def now(self) -> float:
        return self.at

    monotonic = now

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def begin(self, steps: Iterator[float]) -> None:
        """Go through a simulator's steps from now on."""
        self.steppers.append(lambda: next(steps, float("inf")))

    def launcher(self, *, begins_s: float | None = None) -> Life:
        """Draw how a launcher behaves: most end at max_runtime at the latest, some hang; some are slow to stop."""
        max_runtime_s, grace_s = self.limits
        begins_s = self.draw.uniform(0, 900) if begins_s is None else begins_s
        if self.hostile:
            return self.live(float("inf"), 1)
        stops_s = self.draw.choice([0.0, self.draw.uniform(0, grace_s), float("inf")])
        works_s = self.draw.choice([self.draw.uniform(0, 2 * max_runtime_s), float("inf")])
        ends_s, code = begins_s + works_s, self.draw.choice([0, 1, 75])
        if works_s > max_runtime_s and self.draw.random() < 0.7:  # it does not hang: it ends by its own clock
            ends_s, code = begins_s + max_runtime_s + self.draw.uniform(0, grace_s), 75
        return self.live(ends_s, code, stops_s)

    def live(self, seconds: float, code: int, stops_s: float = float("inf")) -> Life:
        life = Life(self, self.at + seconds, code, stops_s)
        self.lives.append(life)
        return life

    def settle(self) -> float:
        """Let the platform do all that is due; return when it has something to do next."""
        for _ in range(20):
            due = min([step() for step in self.steppers], default=float("inf"))
        self.lives = [life for life in self.lives if not life.over]
        return min([due, *(life.ends_at for life in self.lives)])

    def advance(self, seconds: float) -> None:
        """Let time pass, from one thing that happens to the next."""
        until = self.at + seconds
        while (due := self.settle()) <= until:
            self.at = max(due, self.at)
        self.at = until
        self.settle()
