"""A simulated cluster with a bucket beside it, and what is needed to submit to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cloudtrain.backends.kubernetes.backend import KubernetesBackend
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.simulators import replicas
from cloudtrain.simulators.gcs import Storage
from cloudtrain.simulators.http import Server
from tests.simulators.kubernetes_cluster.server import Cluster


class Ground:
    """A cluster, Cloud Storage, and backends over both; the client finds the store by STORAGE_EMULATOR_HOST."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.storage = Storage(folder / "storage")
        self.storage.create_bucket("local")
        self.store = Server(self.storage.routes)
        self.cluster = Cluster(folder / "cluster", env={"STORAGE_EMULATOR_HOST": self.store.url})

    def backend(self, clock: Clock = SYSTEM, **options) -> KubernetesBackend:
        given = {"kubeconfig": str(self.cluster.kubeconfig), "image": "any:1", "poll_s": 0.1, **options}
        return KubernetesBackend(given, self.folder / "runs", clock)

    def left(self, handle: str = "") -> list[str]:
        """The processes of an attempt's pods, or of all."""
        uids = {
            pod["metadata"]["uid"]
            for pod in self.cluster.objects.all("pods")
            if any(owner["uid"] == handle.rpartition("/")[2] for owner in pod["metadata"]["ownerReferences"])
        }
        mine = [(pid, place) for pid, place in replicas.list_processes() if place.startswith(str(self.folder))]
        return [f"{pid} in {place}" for pid, place in mine if not handle or any(uid in place for uid in uids)]


@contextmanager
def ground(folder: Path) -> Iterator[Ground]:
    made = Ground(folder)
    try:
        yield made
    finally:
        made.cluster.close()
        made.store.close()
    assert made.left() == []
