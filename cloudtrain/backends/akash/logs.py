"""Read an attempt's log from the run's output; the log of a provider has neither times nor a cursor."""

from __future__ import annotations

from collections.abc import Iterator

from cloudtrain.backends.akash.jobs import Attempts, parse_handle
from cloudtrain.backends.output_log import log_lines
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.events import LogLine


def read(
    attempts: Attempts, handle: str, *, follow: bool, after: str | None, pause_s: float, clock: Clock = SYSTEM
) -> Iterator[LogLine]:
    """Yield the log lines of all nodes behind a cursor; with `follow` until the attempt has ended. Raises BackendError."""
    attempt_id, _ = parse_handle(handle)
    lease = attempts.lease(handle)
    if lease is None:
        return
    files = attempts.files(lease)
    while True:
        final = (
            not follow or attempts.status(handle).state.final
        )  # before the log: what was written until then is read below
        for line in log_lines(files, f"logs/{attempt_id}", after):
            after = line.cursor
            yield line
        if final:
            return
        clock.sleep(pause_s)
