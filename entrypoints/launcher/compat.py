"""Node variables of SkyPilot and dstack, so that the texts of their files work as they are.

https://docs.skypilot.co/en/latest/running-jobs/environment-variables.html and
https://dstack.ai/docs/reference/environment-variables/ (both of 2026-11-23).
"""

from __future__ import annotations

from .manifest import Manifest
from .world.channel import World


def variables(manifest: Manifest, world: World) -> dict[str, str]:
    """Return the variables that `compat` asks for."""
    addresses = "\n".join(world.addresses)
    gpus = manifest.gpus_per_node
    if manifest.compat == "skypilot":
        return {
            "SKYPILOT_NODE_RANK": str(world.node_rank),
            "SKYPILOT_NODE_IPS": addresses,
            "SKYPILOT_NUM_NODES": str(world.nodes),
            "SKYPILOT_NUM_GPUS_PER_NODE": str(gpus),
            "SKYPILOT_TASK_ID": manifest.attempt_id,
        }
    return {
        "DSTACK_NODE_RANK": str(world.node_rank),
        "DSTACK_NODES_IPS": addresses,
        "DSTACK_NODES_NUM": str(world.nodes),
        "DSTACK_MASTER_NODE_IP": world.master_host,
        "DSTACK_GPUS_PER_NODE": str(gpus),
        "DSTACK_GPUS_NUM": str(gpus * world.nodes),
        "DSTACK_RUN_NAME": manifest.run_id,
    }
