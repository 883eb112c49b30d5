"""Restarts in place (retry.restarts): which ends of a rank may pass, and the node's part when its world starts again."""

from __future__ import annotations

import re
import signal

from . import processes
from .manifest import Manifest
from .ranks import Ranks

SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGKILL)
# What the last error of a rank says, of torch 2.13 with its NCCL and gloo, CUDA 13 and Python (2026-11-29).
ERRORS = {
    "NCCL": r"nccl(?:System|Remote|Internal)Error|NCCL communicator was aborted|unhandled (?:system|cuda) error",
    "gloo": r"gloo/(?:transport|rendezvous)/",
    "CUDA hardware": r"uncorrectable (?:ECC|NVLink) error|hardware stack error|fallen off the bus|busy or unavailable",
    "connection": r"Connection (?:reset|closed) by (?:peer|remote)|Connection was likely closed|Broken pipe|recvValue failed",
}
_PASSING = re.compile("|".join(ERRORS.values()))
_ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?[\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Iteration)\b", re.MULTILINE)


def may_pass(status: int, printed: str) -> bool:
    """Return whether the world may work when it is started again.

    Args:
        status: The rank's wait status.
        printed: What the rank printed last. Its last error counts, and earlier lines do not.
    """
    code = processes.exit_code(status)
    if code - 128 in SIGNALS:
        return True
    errors = [found.start() for found in _ERROR.finditer(printed)]
    return code != 0 and bool(errors) and _PASSING.search(printed, errors[-1]) is not None


class Restarts:
    """This node's part in a restart; node 0 decides (world/outcome.py)."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.under_way = False  # ranks are ended to be started again, and how they end says nothing

    def passes(self, manifest: Manifest, rank: int, status: int) -> bool:
        """Return whether the job wants its ranks to be started again after this end of one."""
        return manifest.restarts > 0 and (manifest.restart_on == "any" or may_pass(status, self._ranks.read(rank)))

    def end_world(self) -> None:
        """Kill what is left of the world on this node."""
        self.under_way = True
        self._ranks.reap(processes.end_descendants(self._ranks.groups))
        self._ranks.forget()
