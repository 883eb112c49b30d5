"""A Vertex AI simulator with a job to run on it."""

from __future__ import annotations

import json
from pathlib import Path

from cloudtrain.backends.api import Plan
from cloudtrain.backends.vertex.backend import VertexBackend
from cloudtrain.events import MARK
from cloudtrain.job.job import Job
from cloudtrain.simulators.vertex.lifecycle import Behavior
from cloudtrain.simulators.vertex.server import Simulator
from cloudtrain.source.bundle import Bundle
from tests.conftest import wait_for

CREATE, LIST = r"/customJobs$", r"/customJobs\?"
UPLOAD = r"^/upload/"


class Bench:
    """A simulator and what is needed to submit to it."""

    def __init__(self, folder: Path, behavior: Behavior | None = None) -> None:
        self.folder = folder
        self.simulator = Simulator(folder / "simulator", behavior=behavior)
        self._count = 0

    def backend(self, **options) -> VertexBackend:
        place = {"project": "local", "bucket": "local", "endpoint": self.simulator.url, "image": "any:1"}
        return VertexBackend({**place, "client": "rest", "settle_s": 1.0, **options}, self.folder / "runs")

    def plan(self, script: str, run_id: str = "", attempt: int = 1, **changes) -> tuple[Plan, Bundle]:
        self._count += 1
        source = self.folder / f"source-{self._count}"
        source.mkdir()
        (source / "script.py").write_text(script)
        data = {"name": "vertex", "source": str(source), "entrypoint": "script.py"}
        job = Job.from_dict({**data, "environment": {"requirements": "none"}, **changes})
        bundle = Bundle.make(source, self.folder / "bundles")
        return self.backend().plan(job, bundle, run_id or f"vertex-run-{self._count}", attempt), bundle

    def asked(self, method: str, path: str) -> int:
        return self.simulator.server.count_requests(method, path)

    def sent(self) -> list[dict]:
        """The jobs that were created, as they were sent."""
        return [
            json.loads(body)
            for method, path, body in self.simulator.server.request_bodies
            if method == "POST" and "/customJobs" in path
        ]


def ended(backend: VertexBackend, handle: str):
    def final():
        status = backend.status(handle)
        return status if status.state.final else None

    return wait_for(final, "the end", 200)


def log_texts(backend: VertexBackend, handle: str, **more) -> list[str]:
    return [line.text for line in backend.logs(handle, **more) if line.rank >= 0 and not line.text.startswith(MARK)]
