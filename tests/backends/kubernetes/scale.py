"""How calls grow with nodes and with runs, on the simulated cluster whose pods run nothing, by a virtual clock.

python -m tests.backends.kubernetes.scale measures and draws docs/pictures/calls.svg: some minutes.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

from cloudtrain.backends.kubernetes.names import UNPACK
from cloudtrain.events import State
from cloudtrain.nodes.process import Process
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from cloudtrain.runs.watching.groups import ProcessorShare
from cloudtrain.runs.watching.scheduler import Multiplexer
from cloudtrain.testing.clock import VirtualClock
from tests.simulators.kubernetes_cluster import kubelet
from tests.simulators.kubernetes_cluster.server import Cluster

PICTURE = Path(__file__).parents[3] / "docs" / "pictures" / "calls.svg"
NODES, RUNS = (1, 8, 64, 256), (1, 20, 100, 200)


class Asleep:
    """Stands in for the process of a container: it prints a line; what unpacks the source ends at once."""

    def __init__(self, task: str, command: list[str], env: dict[str, str], folder: Path, write: Callable) -> None:
        self.code = 0 if folder.name == f"machine-{UNPACK}" else None
        write([f"0 -1 2026-11-20T10:15:03Z line of {task}"])

    def terminate(self) -> None:
        self.code = 143

    def kill(self) -> None:
        pass


class Stepped(VirtualClock):
    """A virtual clock that lets the cluster work whenever time passes."""

    step: Callable[[], object] = staticmethod(lambda: None)

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.step()


class Calls:
    """A cluster, and the calls that it gets from one home."""

    def __init__(self, folder: Path, home: Path, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(kubelet, "Replica", Asleep)
        patch.setattr(kubelet.Kubelet, "start", lambda _: None)
        patch.setattr(kubelet.Kubelet, "close", lambda _: None)
        patch.setattr(ProcessorShare, "measure", lambda _: None)  # of the processor that runs this test
        random.seed(0)
        self.clock, self._home = Stepped(), home
        self.cluster = Cluster(folder / "cluster", clock=self.clock)
        self.clock.step = self.cluster.kubelet.step
        self._source = folder / "source"
        self._source.mkdir()
        (self._source / "train.py").write_text("print(1)\n")

    @property
    def count(self) -> int:
        return len(self.cluster.server.requests)

    def submit(self, nodes: int = 1) -> Run:
        options = {"kubernetes": {"kubeconfig": str(self.cluster.kubeconfig), "image": "any:1"}}
        job = {"name": "x", "source": str(self._source), "entrypoint": "train.py", "num_nodes": nodes}
        return Submitter("kubernetes", watch=False, clock=self.clock).submit({**job, "options": options}, new=True)

    def watch(self, runs: list[Run]) -> None:
        """Watch runs until all of them run; from then on the cluster has nothing to do."""
        self._multiplexer = Multiplexer(self._home, Process.here(), clock=self.clock, here=True)
        for run in runs:
            self._multiplexer.add(run.run_id, None)
        entries = self._multiplexer.runs.values()
        while any(entry.seen is None or entry.seen.state is not State.RUNNING for entry in entries):
            self._multiplexer.turn(1.0)
        self.clock.step = lambda: None

    def minute(self) -> int:
        """Return the calls of the next minute."""
        until, before = self.clock.monotonic() + 60, self.count
        while self.clock.monotonic() < until:
            self._multiplexer.turn(1.0)
        return self.count - before

    def of_a_start(self, nodes: int) -> tuple[int, int]:
        """Return the calls until all nodes of a run are known to run, and those of the minute after it."""
        self.watch([self.submit(nodes)])
        return self.count, self.minute()

    def of_live_runs(self, runs: int) -> list[int]:
        """Return the calls of two minutes in which runs are new, and of two in which they are old."""
        self.watch([self.submit() for _ in range(runs)])
        new = [self.minute(), self.minute()]
        self.clock.sleep(700)
        self.minute()
        return [*new, self.minute(), self.minute()]


@contextmanager
def calls(folder: Path, home: Path, patch: pytest.MonkeyPatch) -> Iterator[Calls]:
    made = Calls(folder, home, patch)
    try:
        yield made
    finally:
        made.cluster.close()


def draw(starts: Mapping[int, int], live: Mapping[int, float]) -> str:
    """Return two charts as SVG: calls of a start by nodes, calls a second by live runs."""
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 260" font-family="sans-serif" font-size="12">',
             '<rect width="720" height="260" fill="#ffffff"/>']  # fmt: skip
    charts = [
        (
            40,
            "calls until all nodes run",
            "nodes of a run",
            {n: float(count) for n, count in starts.items()},
            3.0,
            768.0,
        ),
        (400, "calls a second, all runs together", "live runs", dict(live), None, 2.0),
    ]
    for left, title, below, points, slope, limit in charts:
        most = max(points)
        top = max(limit, *points.values()) * 1.1
        where = {x: (left + 20 + 260 * x / most, 210 - 160 * y / top) for x, y in points.items()}
        limits = [(0.0, 0.0 if slope else limit), (float(most), limit)]
        ends = " ".join(f"{left + 20 + 260 * x / most:.1f},{210 - 160 * y / top:.1f}" for x, y in limits)
        parts += [f'<text x="{left}" y="24" font-weight="bold" fill="#222222">{escape(title)}</text>',
                  f'<polyline points="{left + 20},40 {left + 20},210 {left + 290},210" fill="none" stroke="#888888"/>',
                  f'<polyline points="{ends}" fill="none" stroke="#c0392b" stroke-dasharray="5 4"/>',
                  f'<text x="{left + 24}" y="40" fill="#c0392b">limit: {"3 a node" if slope else f"{limit:g}"}</text>',
                  f'<text x="{left + 110}" y="248" fill="#222222">{below}</text>']  # fmt: skip
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in where.values())
        parts.append(f'<polyline points="{line}" fill="none" stroke="#2471a3" stroke-width="2"/>')
        for x, (at, height) in where.items():
            parts += [f'<circle cx="{at:.1f}" cy="{height:.1f}" r="3" fill="#2471a3"/>',
                      f'<text x="{at - 6:.1f}" y="{height - 8:.1f}" fill="#2471a3">{points[x]:g}</text>',
                      f'<text x="{at - 6:.1f}" y="228" fill="#222222">{x}</text>']  # fmt: skip
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    """Measure, and draw the picture."""
    starts, live = {}, {}
    for counts, found in ((NODES, starts), (RUNS, live)):
        for count in counts:
            with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
                folder = Path(name)
                patch.setenv("CLOUDTRAIN_HOME", str(folder / "home"))
                with calls(folder, folder / "home", patch) as measured:
                    if found is starts:
                        starts[count] = measured.of_a_start(count)[0]
                    else:
                        live[count] = round(max(measured.of_live_runs(count)) / 60, 2)
    PICTURE.write_text(draw(starts, live))
    sys.stdout.write(f"{PICTURE.name}: {starts}, {live}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
