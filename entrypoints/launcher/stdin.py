"""Launcher inputs besides the environment: secrets on standard input, the client's lease, SageMaker's files; world checks."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Mapping

from .clock import SYSTEM, Clock
from .errors import Refused
from .manifest import Manifest
from .world.cluster import Cluster, sagemaker_base

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    from typing import Any

STDIN_S = 60
LEASE = "lease"  # in the node's folder: touched whenever a client looks


def check_world(manifest: Manifest, cluster: Cluster, environ: Mapping[str, str]) -> None:
    """Refuse a world that is not what was asked for."""
    if cluster.launched:
        real = int(environ["WORLD_SIZE"])
        if real != manifest.world_size:
            raise Refused(
                f"{manifest.world_size} processes were requested in all (num_nodes x processes_per_node),"
                f" but the launcher that started them (torchrun, mpirun, srun, the platform) started {real}"
            )
    elif manifest.compat == "sbatch":
        manifest.nodes, manifest.min_nodes = 1, None  # the other nodes run steps of srun
    elif cluster.nodes is not None and not manifest.fewest_nodes <= cluster.nodes <= manifest.nodes:
        raise Refused(f"{manifest.nodes} nodes were requested, but {cluster.platform} gave {cluster.nodes}")
    elif not 0 <= cluster.node_rank < manifest.nodes:
        raise Refused(f"node rank {cluster.node_rank} is not one of {manifest.nodes} nodes")
    elif cluster.node_rank > 0 and not cluster.control_port:
        raise Refused("CLOUDTRAIN_CONTROL is not set, so node 0 cannot be found")
    elif cluster.nodes is not None:
        manifest.nodes = cluster.nodes  # min_nodes allows it


def later_rank(environ: Mapping[str, str]) -> bool:
    """Return whether the torchrun of SageMaker's toolkit has started this launcher for another than the node's first rank."""
    return "SM_HOSTS" in environ and environ.get("LOCAL_RANK", "0") != "0" and "RANK" in environ


def sagemaker_file(name: str) -> str:
    """Return the text of one of SageMaker's configuration files, "" elsewhere."""
    try:
        with open(os.path.join(sagemaker_base(os.environ), "input", "config", name), encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def starter_died() -> bool:
    """Return whether standard input was closed while still empty: the process that started this one was killed.

    Nothing has begun then, so that the attempt can be started again, secrets included.
    """
    poll = select.poll()
    poll.register(0, select.POLLIN)
    return any(event & select.POLLHUP and not event & select.POLLIN for _, event in poll.poll(STDIN_S * 1000))


def standard_input() -> dict[str, Any]:
    """Return the JSON object on standard input, and leave nothing there; raises Refused."""
    text = b""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    while poll.poll(STDIN_S * 1000):
        data = os.read(0, 65536)
        if not data:
            break
        text += data
    else:
        raise Refused(f"standard input did not end within {STDIN_S} s")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    try:
        data = json.loads(text) if text.strip() else {}
        if not isinstance(data, dict):
            raise ValueError
    except ValueError:
        raise Refused("standard input does not hold one JSON object") from None
    return data


class Lease:
    """A job that ends when no client looks at it any more; only where its backend asks for that (CLOUDTRAIN_LEASE_S)."""

    def __init__(self, path: str, length_s: float, clock: Clock = SYSTEM) -> None:
        self._path, self.length_s, self._clock = path, length_s, clock
        self._seen = 0.0
        self._since = clock.monotonic()  # by our own clock: the files' may be set

    @classmethod
    def of(cls, environ: Mapping[str, str], clock: Clock = SYSTEM) -> Lease | None:
        length, folder = environ.get("CLOUDTRAIN_LEASE_S"), environ.get("CLOUDTRAIN_NODE_DIR")
        return cls(os.path.join(folder, LEASE), float(length), clock) if length and folder else None

    def over(self) -> bool:
        """Return whether no client has looked for as long as the lease lasts."""
        try:
            seen = os.stat(self._path).st_mtime
        except OSError:
            seen = 0.0
        if seen != self._seen:
            self._seen, self._since = seen, self._clock.monotonic()
        return self._clock.monotonic() - self._since > self.length_s
