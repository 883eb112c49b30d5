"""The clients of platforms that a watcher holds: one for all attempts with the same options."""

from __future__ import annotations

import json
from pathlib import Path

from cloudtrain.backends import registry
from cloudtrain.backends.api import Backend, Plan
from cloudtrain.clock import SYSTEM, Clock

MOST = 64  # clients that are kept: one of an SDK takes megabytes
RENEW_S = 60.0  # between two renewals of one


class Clients:
    """Backends by their options, for all threads; at most MOST."""

    def __init__(self, home: Path, clock: Clock = SYSTEM) -> None:
        self._home, self._clock = home, clock
        self._backends: dict[tuple[str, str], Backend] = {}
        self._renewed: dict[tuple[str, str], float] = {}  # monotonic

    def get(self, plan: Plan) -> Backend:
        """Return the backend of a plan."""
        key = _key(plan)
        backend = self._backends.get(key)
        if backend is None:
            backend = registry.create_for(plan, self._home, self._clock)
            while len(self._backends) >= MOST:
                self._backends.pop(next(iter(self._backends)), None)
            backend = self._backends.setdefault(key, backend)
        return backend

    def renew(self, plan: Plan) -> Backend | None:
        """Make a new backend after a refusal, since credentials may have been renewed; None within RENEW_S."""
        key, moment = _key(plan), self._clock.monotonic()
        if moment - self._renewed.get(key, -RENEW_S) < RENEW_S:
            return None
        self._renewed[key] = moment
        self._backends.pop(key, None)
        return self.get(plan)


def _key(plan: Plan) -> tuple[str, str]:
    options = (plan.job.get("options") or {}).get(plan.backend) or {}
    return plan.backend, json.dumps(options, sort_keys=True, default=str)
