"""Variables by which TensorFlow, JAX and Keras find their world; torch's own are in environment.py.

Read in tensorflow 2.21 (TFConfigClusterResolver), jax 0.10 (jax/_src/distributed.py, clusters/ompi_cluster.py) and keras 3.15
(distribution/distribution_lib.py) on 2026-11-29.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    from ..manifest import Manifest
    from .channel import World

TENSORFLOW, JAX, KERAS = "tensorflow", "jax", "keras"  # Keras runs on either of them


def ports_needed(manifest: Manifest) -> int:
    """Return on how many ports a node's ranks listen; workers of TensorFlow know each other's beforehand."""
    return manifest.processes_per_node if manifest.framework in (TENSORFLOW, KERAS) else 0


def variables(manifest: Manifest, world: World, local_rank: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return what a rank gets for the framework of its script, beside RANK and MASTER_ADDR."""
    count, framework = manifest.processes_per_node, manifest.framework
    rank, size = world.node_rank * count + local_rank, world.nodes * count
    coordinator = address(world.master_host, world.master_port)
    made = {}
    if framework in (TENSORFLOW, KERAS):
        workers = [address(world.addresses[node], port) for node, held in enumerate(world.ports) for port in held]
        task = {"type": "worker", "index": rank}
        made["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    if framework in (JAX, KERAS):
        # JAX has no variables for count and rank: it takes Open MPI's, and of the first only that it is set.
        made.update(
            OMPI_MCA_orte_hnp_uri="cloudtrain",
            OMPI_COMM_WORLD_SIZE=str(size),
            OMPI_COMM_WORLD_RANK=str(rank),
            OMPI_COMM_WORLD_LOCAL_RANK=str(local_rank),
            JAX_COORDINATOR_ADDRESS=coordinator,
        )
    if framework == KERAS:
        made.update(
            KERAS_DISTRIBUTION_JOB_ADDRESSES=coordinator,
            KERAS_DISTRIBUTION_NUM_PROCESSES=str(size),
            KERAS_DISTRIBUTION_PROCESS_ID=str(rank),
        )
    if share := manifest.gpus_per_node // count:  # each of these takes all GPUs that it sees
        numbers = list(map(str, range(share * count)))
        own = slice(local_rank * share, (local_rank + 1) * share)
        if framework != JAX:
            visible = env["CUDA_VISIBLE_DEVICES"].split(",") if env.get("CUDA_VISIBLE_DEVICES") else numbers
            made["CUDA_VISIBLE_DEVICES"] = ",".join(visible[own])
        if framework != TENSORFLOW:
            made["JAX_LOCAL_DEVICE_IDS"] = ",".join(numbers[own] if framework == JAX else numbers[:share])
    return made


def address(host: str, port: int) -> str:
    """Return host:port, an address of IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
