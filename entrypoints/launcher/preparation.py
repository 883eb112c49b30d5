"""The preparation of a node, in a thread of its own: it may take minutes, and the supervisor's loop answers meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping

from .environment import Prepared
from .errors import Refused
from .log import Log, PlainLog
from .manifest import Manifest
from .output.starts import Starts
from .prepare.node import prepare_node
from .world.cluster import Cluster

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    from typing import Any

    from .output.history import History
    from .shared_gpus import SharedGpus


class Preparation:
    """Prepares the node, starts the run's history and claims this start of the run.

    The thread sets `history`, `starts` and `cluster`, which then has the GPUs that this node has taken.
    """

    def __init__(
        self,
        manifest: Manifest,
        cluster: Cluster,
        environ: Mapping[str, str],
        source: str,
        log: Log,
        status: dict[str, Any],
        shared: SharedGpus | None,
    ) -> None:
        self._manifest, self._environ, self._source, self._log = manifest, environ, source, log
        self._status, self._shared = status, shared
        self.cluster = cluster
        self.history: History | None = None
        self.starts: Starts | None = None
        self._result: Prepared | Refused | None = None
        self._prepared: Prepared | None = None

    def start(self, secrets: Mapping[str, str]) -> None:
        """Start the thread. Its end wakes the loop by SIGCHLD."""
        self._in_thread(lambda: self._prepare(secrets))

    def again(self) -> None:
        """Prepare for another start of the ranks, as `start` does: it gets an epoch of its own in the output."""
        self._in_thread(self._claim_next)

    def take_result(self) -> Prepared | Refused | None:
        """Return what came of it, once; None before its end and from then on."""
        if self._result is None:
            return None
        self._thread.join()
        result, self._result = self._result, None
        self._prepared = None if isinstance(result, Refused) else result
        return result

    def replaced(self) -> str:
        """Return why this start of the run is to end, "" where none has begun after it."""
        if self.starts is not None:
            return self.starts.replaced()
        return self._prepared.sync.replaced if self._prepared is not None and self._prepared.sync is not None else ""

    def end(self) -> str:
        """End this start of the run, and return why a later one has replaced it, "" where none has."""
        replaced = self.replaced()
        if self.starts is not None and not (replaced and self._manifest.nodes > 1):  # others' ranks have some seconds
            self.starts.end()
        return replaced

    def _in_thread(self, prepare: Callable[[], Prepared]) -> None:
        def work() -> None:
            try:
                prepared = prepare()
                if self.history is not None and prepared.sync is not None:
                    self.history.epoch = prepared.sync.epoch
                self._result = prepared
            except Refused as reason:
                self._result = reason
            except BaseException as error:
                self._result = Refused(f"the node cannot be prepared: {type(error).__name__}: {error}")
            os.kill(os.getpid(), signal.SIGCHLD)

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def _prepare(self, secrets: Mapping[str, str]) -> Prepared:
        prepared = prepare_node(
            self._manifest,
            self.cluster,
            self._environ,
            secrets,
            self._source,
            self._log,
            self._start_history,
            self._take_gpus if self._shared is not None else None,
        )
        if prepared.sync is None:  # else this start is claimed in the output
            self._claim()
        return prepared

    def _claim_next(self) -> Prepared:
        assert self._prepared is not None, "its ranks have run"
        if self._prepared.sync is not None:
            self._prepared.sync.claim_next()
        return self._prepared

    def _start_history(self) -> None:
        """Start uploading the run's history, where there is an output; raises Refused."""
        nowhere = not self._manifest.output and not self.cluster.does.copies_folders
        if nowhere or isinstance(self._log, PlainLog):
            self._log.forget()
            return
        from .output import history

        where = history.place(self._manifest, self.cluster, self._environ)
        if where is not None:
            self.history = history.History(where, self._manifest, self.cluster, self._log)
            self.history.begin(self._status, self._source)

    def _take_gpus(self) -> Cluster:
        assert self._shared is not None, "the host is shared"
        self.cluster = self._shared.take(self.cluster)
        return self.cluster

    def _claim(self) -> None:
        """Claim this start in the run's folder and wait for the end of earlier ones; raises Refused."""
        run = self._environ.get("CLOUDTRAIN_RUN_DIR")
        try:
            if run and self.cluster.node_rank == 0 and not self.cluster.launched:
                self.starts = Starts(run, self._manifest.attempt, self._log.clock)
                if beside := self.starts.await_earlier():
                    self._log.event("alarm", reason=beside)
        except OSError as error:
            self._log.event("alarm", reason=f"this start of the run could not be recorded: {error}")
