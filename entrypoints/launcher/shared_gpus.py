"""The GPUs of a node on a host that several jobs share: the preparing thread waits for them, the supervisor reports it."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Mapping

from .errors import Refused
from .log import Log
from .manifest import Manifest
from .prepare import gpus
from .prepare.gpu_queue import GpuQueue
from .processes import boot_id
from .status import Status, stamp
from .world.cluster import Cluster
from .world.coordinator import Coordinator
from .world.worker import Worker

LOOK_S = 2.0  # between two looks at the queue
SMI_S = 10.0  # between two calls of nvidia-smi, where other programs fill GPUs: it may cost a second
LINE_S = 60.0  # between two lines of the log on the wait


class SharedGpus:
    """What a node takes of its host's GPUs. `turn` is set where the nodes of the attempt before this one have theirs."""

    def __init__(self, manifest: Manifest, environ: Mapping[str, str], log: Log) -> None:
        self._manifest, self._environ, self._log = manifest, environ, log
        wait_s = environ.get("CLOUDTRAIN_GPU_WAIT_S")
        self._wait_s = float(wait_s) if wait_s else None
        self._asked, self._began = manifest.gpus_per_node, log.clock.monotonic()
        self.turn, self._reported = threading.Event(), threading.Event()
        self._reason, self._taken, self._over = "", False, False
        self._busy: dict[str, str] = {}
        self._busy_until = 0.0

    def queue(self, peers: Coordinator | Worker) -> None:
        """Ask for this node's turn; a job that names no GPUs waits for none and so has no turn.

        The order in which attempts take GPUs of several hosts goes by what names a host to all users.
        """
        if self._asked:
            peers.queue(f"{boot_id() or ''} {socket.gethostname()}")
        else:
            self.turn.set()

    def report(self, status: Status, peers: Coordinator | Worker) -> None:
        """Report what the wait has come to; called by the supervisor's loop."""
        if self._over:
            self._over = False
            peers.stop("TIMED_OUT")
        elif self._taken and not self._reported.is_set():
            status.set(state="STARTING", reason="", started_at=stamp(self._log.clock.now()))
            if self._asked:
                peers.taken()
            self._reported.set()
        elif self._reason != status.fields["reason"] and not self._taken:
            status.set(state="QUEUED", reason=self._reason)

    def take(self, cluster: Cluster) -> Cluster:
        """Return the node's place with the GPUs that its ranks may use; blocking. Raises Refused."""
        uuids = gpus.visible()
        usable = _usable(uuids, self._environ)
        if self._asked > len(usable):
            shows = f"has {len(usable)}" if usable else "shows none"
            raise Refused(f"{self._asked} GPUs per node were requested, this machine {shows} (nvidia-smi)")
        self.turn.wait()
        try:
            queue = GpuQueue(clock=self._log.clock)
            mine = self._wait(queue, usable) if self._asked else self._take_rest(queue, usable)
        except OSError as error:
            raise Refused(f"GPUs cannot be locked: {error.filename or ''} {error.strerror}") from None
        for lock in queue.locks:
            os.set_inheritable(lock, True)  # by the ranks: a GPU is free when the last of them has ended
        self._taken = True
        os.kill(os.getpid(), signal.SIGCHLD)  # wakes the supervisor's loop
        self._reported.wait()
        return cluster._replace(gpus=",".join(str(uuids.index(gpu)) for gpu in sorted(mine, key=uuids.index)))

    def _take_rest(self, queue: GpuQueue, usable: list[str]) -> list[str]:
        """Take what no other job holds, for a job that names no GPUs; it does not wait."""
        least = self._manifest.processes_per_node
        mine = queue.take_rest(least, usable)
        if usable and not mine:
            self._log.say(
                f"{least} processes, and {len(usable)} GPUs that other jobs use or wait for: the ranks run on CPU."
                " Set resources.accelerators to wait for free GPUs"
            )
        self._manifest.gpus_per_node = len(mine)
        return mine

    def _wait(self, queue: GpuQueue, usable: list[str]) -> list[str]:
        line_at = 0.0
        while (mine := queue.advance(self._asked, usable, self._filled)) is None:
            self._reason = self._why(queue, usable)
            now = self._log.clock.monotonic()
            if now >= line_at:
                line_at = now + LINE_S
                self._log.say(f"waits: {self._reason}")
            if self._wait_s is not None and now - self._began >= self._wait_s:
                queue.leave()
                self._over = True
                raise Refused(f"{self._reason} (limits.max_wait)")
            self._log.clock.sleep(LOOK_S)
        return mine

    def _filled(self) -> Mapping[str, str]:
        if self._log.clock.monotonic() >= self._busy_until:
            self._busy = gpus.filled()
            self._busy_until = self._log.clock.monotonic() + (SMI_S if self._busy else 0.0)
        return self._busy

    def _why(self, queue: GpuQueue, usable: list[str]) -> str:
        wanted = f"{self._asked} of {len(usable)} GPUs of {socket.gethostname()}"
        if queue.place > 1:
            return f"number {queue.place} in the queue for {wanted}"
        others = "".join(f"; GPU {number}: {self._busy[gpu]}" for number, gpu in enumerate(usable) if gpu in self._busy)
        return f"first in the queue for {wanted}, {len(queue.free)} free{others}"


def _usable(uuids: list[str], environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that the host leaves to this user: those of CUDA_VISIBLE_DEVICES, where it sets that."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return uuids
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    return [
        uuid
        for number, uuid in enumerate(uuids)
        if any(n == str(number) or (n[:1] == "G" and uuid.startswith(n)) for n in names)
    ]
