"""Print how far a long piece of work is: a bar, from time to time, by rank 0."""

from __future__ import annotations

from .. import collectives
from ..clock import SYSTEM, Clock

FIRST_S, EVERY_S, WIDTH = 5.0, 10.0, 20


class Progress:
    """A line with a bar after some seconds, and then every ten; nothing for what is done before.

    Args:
        what: what is done ("tokenizing").
        total: bytes of UTF-8 in all.
    """

    def __init__(self, what: str, total: int, clock: Clock = SYSTEM) -> None:
        self.what, self.total, self.done, self._clock = what, total, 0, clock
        self.begun = self._clock.monotonic()
        self.next = self.begun + FIRST_S
        self.printed = False

    def add(self, size: int) -> None:
        """Count so many bytes as done."""
        self.done += size
        if (now := self._clock.monotonic()) >= self.next:
            self.next = now + EVERY_S
            left = (self.total - self.done) * (now - self.begun) / max(self.done, 1)
            self._print(self.done, f", about {left:,.0f} s left")

    def end(self) -> None:
        """Print the full bar, where one was printed before."""
        if self.printed:
            self._print(self.total, f", {self._clock.monotonic() - self.begun:,.0f} s")

    def _print(self, done: int, more: str) -> None:
        self.printed = True
        if collectives.rank() == 0:
            share = min(done / max(self.total, 1), 1.0)
            bar = "#" * int(share * WIDTH)
            print(
                f"{self.what} [{bar:-<{WIDTH}}] {share:4.0%}, {done / 1e6:,.0f} of {self.total / 1e6:,.0f} MB{more}",
                flush=True,
            )
