"""The GPUs of a node on a host that several jobs share: the preparing thread waits for them, the supervisor reports it.

Where several nodes of an attempt are on one host, the first that asks for GPUs takes those of all: two that each waited for
their own could wait for those of another attempt for ever.
"""

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
from .status import Status, read, stamp
from .world.cluster import Cluster
from .world.coordinator import Coordinator
from .world.worker import Worker

LOOK_S = 2.0  # between two looks at the queue
SHARE_S = 0.2  # between two looks for what another node of the attempt has taken
SMI_S = 10.0  # between two calls of nvidia-smi, where other programs fill GPUs: it may cost a second
LINE_S = 60.0  # between two lines of the log on the wait


class SharedGpus:
    """What a node takes of its host's GPUs. `turn` is set where the nodes of the attempt before this one have theirs."""

    def __init__(self, manifest: Manifest, environ: Mapping[str, str], log: Log) -> None:
        self._manifest, self._environ, self._log = manifest, environ, log
        wait_s = environ.get("CLOUDTRAIN_GPU_WAIT_S")
        self._wait_s = float(wait_s) if wait_s else None
        self._asked, self._began = manifest.gpus_per_node, log.clock.monotonic()
        node, here = int(environ["CLOUDTRAIN_NODE_RANK"]), environ["CLOUDTRAIN_NODE_DIR"]
        self._before, together, first = manifest.shared_gpus(node)
        self._first = os.path.join(os.path.dirname(here), f"node-{first}")  # whose launcher takes GPUs of this machine
        self._wanted = (0 if self._before else together) if self._asked else 0
        self.turn, self._reported = threading.Event(), threading.Event()
        self._reason, self._taken, self._over = "", False, False
        self._all: list[str] = []  # those of this machine that this node has taken for others, too
        self._busy: dict[str, str] = {}
        self._busy_until = 0.0

    def queue(self, peers: Coordinator | Worker) -> None:
        """Ask for this node's turn; a job that names no GPUs waits for none and so has no turn.

        The order in which attempts take GPUs of several hosts goes by what names a host to all users.
        """
        if self._wanted:
            peers.queue(f"{boot_id() or ''} {socket.gethostname()}")
        else:
            self.turn.set()

    def report(self, status: Status, peers: Coordinator | Worker) -> None:
        """Report what the wait has come to; called by the supervisor's loop."""
        if self._over:
            self._over = False
            peers.stop("TIMED_OUT")
        elif self._taken and not self._reported.is_set():
            more = {"gpus": self._all} if self._all else {}
            status.set(state="STARTING", reason="", started_at=stamp(self._log.clock.now()), **more)
            if self._wanted:
                peers.taken()
            self._reported.set()
        elif self._reason != status.fields["reason"] and not self._taken:
            status.set(state="QUEUED", reason=self._reason)

    def take(self, cluster: Cluster) -> Cluster:
        """Return the node's place with the GPUs that its ranks may use; blocking. Raises Refused."""
        uuids = gpus.visible()
        usable = _usable(uuids, self._environ)
        if self._wanted > len(usable):
            shows = f"has {len(usable)}" if usable else "shows none"
            raise Refused(f"{self._wanted} GPUs per node were requested, this machine {shows} (nvidia-smi)")
        self.turn.wait()
        try:
            queue = GpuQueue(clock=self._log.clock)
            if self._wanted:
                mine = self._wait(queue, usable)
                self._all, mine = mine[self._asked :] and mine, mine[: self._asked]
            else:
                mine = self._take_part(queue) if self._asked else self._take_rest(queue, usable)
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

    def _take_part(self, queue: GpuQueue) -> list[str]:
        """Take this node's GPUs from those that another node of this attempt has taken on this machine."""
        self._reason = f"waits for the GPUs of {os.path.basename(self._first)}, whose machine it shares"
        while not (taken := (read(self._first) or {}).get("gpus")):
            self._log.clock.sleep(SHARE_S)
        return queue.join_in(list(taken)[self._before : self._before + self._asked])  # type: ignore[call-overload]

    def _wait(self, queue: GpuQueue, usable: list[str]) -> list[str]:
        line_at = 0.0
        shared = self._wanted > self._asked
        while (mine := queue.advance(self._wanted, usable, self._filled, shared)) is None:
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
        wanted = f"{self._wanted} of {len(usable)} GPUs of {socket.gethostname()}"
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
