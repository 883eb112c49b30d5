"""A node's log as it outlives the node: what goes to standard output is also brought to the output, in pieces.

    <output>/<run id>/logs/<attempt id>/node-<rank>/<number>      one piece; in the order of the numbers they are the log

For platforms that lose a log with its container, and say so (CLOUDTRAIN_KEEP_LOG).
"""

from __future__ import annotations

import os
import tempfile
import threading

from . import store
from .orders import Orders, Refused
from .output import Log

EVERY_S = 30.0  # the first pieces come sooner, at twice the pause each time
FIRST_S = 1.0
TRIES = 3


class KeptLog(Log):
    """Appends to a descriptor and to a file without a name, from which pieces are brought to the output."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self._copy = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - as long as this process lives
        self._brought = 0  # bytes
        self._pieces = 0
        self._place: store.Store | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, orders: Orders, node_rank: int) -> None:
        """Bring what was said, and will be, to the output from now on; raises Refused."""
        where = f"{str(orders.output).rstrip('/')}/{orders.run_id}/logs/{orders.attempt_id}/node-{node_rank}"
        self._place = store.Store(where, "the output")
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def bring(self) -> None:
        """Bring the rest after `close`; blocking. A store that does not take it is not waited for long."""
        if self._thread is None:
            return
        self._over.set()
        self._thread.join()
        for _ in range(TRIES):
            if self._piece():
                return

    def _run(self) -> None:
        pause = FIRST_S
        while not self._over.wait(pause):
            self._piece()
            pause = min(2 * pause, EVERY_S)

    def _piece(self) -> bool:
        """Bring what is new as one piece; False where it could not be done."""
        size = os.fstat(self._copy.fileno()).st_size
        if size == self._brought or self._place is None:
            return True
        data = os.pread(self._copy.fileno(), size - self._brought, self._brought)
        try:
            self._place.write(f"{self._pieces:08d}", data)
        except (store.Failed, Refused, OSError):
            return False  # the same bytes, and what has come by then, go again
        self._brought += len(data)
        self._pieces += 1
        return True

    def _write(self, data: bytes) -> None:
        try:
            self._copy.write(data)
        except OSError:
            pass  # a full disk: standard output has it
        super()._write(data)
