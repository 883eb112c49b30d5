"""Events by which a node reports its world, and every some seconds what its ranks use and which checkpoints they have."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from . import resume
from .environment import Prepared
from .health.stragglers import Pace
from .log import Log
from .loop import Loop
from .manifest import Manifest
from .output.written import NewCheckpoints
from .usage import EVERY_S, Usage
from .world.channel import World
from .world.cluster import Cluster


class Reports:
    """Writes the events of one node. To be made before its ranks start: what older processes have used is not counted."""

    def __init__(self, loop: Loop, log: Log, manifest: Manifest, environ: Mapping[str, str]) -> None:
        self._loop, self._log, self._manifest, self._environ = loop, log, manifest, environ
        self._usage = Usage(loop.clock)
        self.pace = Pace(loop.clock)
        self._prepared: Prepared | None = None
        self._gpus: str | None = None
        self._checkpoints: NewCheckpoints | None = None
        self._due: float | None = None
        self._has_files = False

    @property
    def gpus_idle_s(self) -> float:
        """For how long no GPU of the node was in use, as far as they were reported."""
        return self._usage.gpus_idle_s

    @property
    def speed(self) -> dict[str, object]:
        """What node 0 compares with other nodes: seconds per step, and the clock of the GPUs."""
        step_s = self.pace.step_s
        return {**({} if step_s is None else {"step_s": round(step_s, 6)}), **self._usage.gpu_clock}

    def world(self, world: World, world_size: int, cluster: Cluster) -> None:
        """Report where this node stands among the others."""
        self._log.event(
            "world",
            nodes=world.nodes,
            processes=self._manifest.processes_per_node,
            world_size=world_size,
            node_rank=world.node_rank,
            hostname=os.uname().nodename,
            name=cluster.name,
            pid=os.getpid(),
            gpus=self._manifest.gpus_per_node,
            platform=cluster.platform,
            python=sys.version.split()[0],
        )

    def begin(self, prepared: Prepared, cluster: Cluster) -> None:
        """The ranks are about to start: what lies in their folders now is of earlier starts."""
        self._prepared, self._gpus, self._due = prepared, cluster.gpus, None
        if not self._manifest.is_service:
            self._checkpoints = NewCheckpoints(
                resume.checkpoint_folders(prepared.folders),
                {"{model_dir}": prepared.folders["model"], "{output_dir}": prepared.folders["outputs"]},
                prepared.keeper.is_kept_output,
            )

    def look(self, running: list[int], now: float) -> bool:
        """Report usage and new checkpoints where it is time; return whether it was."""
        if self._due is None and running:
            self._due = now + EVERY_S
            if self._manifest.gpus_per_node:
                self._usage.watch_gpus(self._loop, self._gpus, self._environ)
        if self._due is None or now < self._due:
            return False
        self._due = now + EVERY_S
        self._log.event("usage", **self._usage.sample(), **self._checkpoint_age(), **self._files())
        if alarm := self._usage.idle_alarm():
            self._log.event("alarm", idle=True, reason=alarm)
        self.new_checkpoints()
        return True

    def new_checkpoints(self) -> None:
        """Report a script's own checkpoints, so that progress of a run can be seen; with a store when it has them."""
        if self._prepared is not None and self._checkpoints is not None and (new := self._checkpoints.look()):
            self._prepared.keeper.report(self._checkpoints.path_of(new), **new)

    def _checkpoint_age(self) -> dict[str, float]:
        """Return how old the newest checkpoint in the output is, where there is one to be."""
        age_s = None
        if self._prepared is not None and self._prepared.sync is not None:
            age_s = self._prepared.sync.freshness.age_s
        return {} if age_s is None else {"checkpoint_age_s": round(age_s, 1)}

    def _files(self) -> dict[str, bool]:
        """Return, where the run's files are on this node alone, whether a script has any from which it could resume."""
        if self._manifest.output or self._prepared is None:
            return {}
        reports = self._manifest.is_ours  # the shared trainer continues from checkpoints that it reports
        self._has_files = self._has_files or (not reports and resume.has_files(*self._prepared.folders.values()))
        return {"files": self._has_files}
