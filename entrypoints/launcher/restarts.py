"""Which ends of a rank may pass, so that its world is started again on the same nodes (retry.restarts)."""

from __future__ import annotations

import re
import signal

from . import processes

SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGKILL)
# What the last error of a rank says, of torch 2.13 with its NCCL and gloo, CUDA 13 and Python (2026-11-29).
ERRORS = {
    "NCCL": r"nccl(?:System|Remote|Internal)Error|NCCL communicator was aborted|unhandled (?:system|cuda) error",
    "gloo": r"gloo/(?:transport|rendezvous)/",
    "CUDA hardware": r"uncorrectable (?:ECC|NVLink) error|hardware stack error|fallen off the bus|devices? .*busy or unavailable",
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
