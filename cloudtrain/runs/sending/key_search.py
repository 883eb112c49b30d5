"""Ask the platforms of a job for the run of its `--key`, which another machine or CI may have submitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from cloudtrain.backends import registry
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.runs.planning import candidates, keys

if TYPE_CHECKING:
    from pathlib import Path

    from cloudtrain.backends.api import Backend, Plan


class Found(NamedTuple):
    """An attempt that a platform has: which candidate's platform, and its handle there."""

    candidate: int
    handle: str


class KeySearch(NamedTuple):
    """What all platforms of a job answered: `attempts[0]` is the first attempt, None one that no platform has."""

    bases: Sequence[Plan]
    clients: Sequence[Backend]
    attempts: Sequence[Found | None]

    @property
    def newest(self) -> int:
        """The number of the newest attempt that a platform has; 0 where there is none."""
        return max((number for number, found in enumerate(self.attempts, 1) if found), default=0)

    def check_labels(self, key: str) -> None:
        """Raise BadRequest where the newest attempt was made of another job or source."""
        found = self.attempts[self.newest - 1]
        assert found is not None
        backend = self.clients[found.candidate]
        if (labels := backend.labels(found.handle)) is not None:
            keys.check_labels(key, self.bases[found.candidate], labels)


def search(plan: Plan, home: Path, clock: Clock = SYSTEM) -> KeySearch:
    """Look for all attempts of a plan's run on the platforms of all its candidates; blocking. Raises BackendError.

    An attempt that was refused for lack of machines left nothing there: the later ones are looked for as well.
    """
    bases = candidates.bases(plan)
    clients = [registry.create_for(base, home, clock) for base in bases]
    attempts: list[Found | None] = []
    expected = len(bases) * int((plan.job.get("retry") or {}).get("max_attempts") or 1)
    while len(attempts) < expected or attempts[-1] is not None:
        name = f"{plan.run_id}-a{len(attempts) + 1}"
        asked = ((at, client.find(name)) for at, client in enumerate(clients))
        attempts.append(next((Found(at, handle) for at, handle in asked if handle is not None), None))
    return KeySearch(bases, clients, attempts)
