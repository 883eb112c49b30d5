"""What the supervisors of an attempt on SSH machines get: folder, command and environment; a node fills in its own part."""

from __future__ import annotations

from typing import Any

from cloudtrain.backends.manifest import Manifest


def build_request(
    manifest: Manifest,
    run_id: str,
    attempt: int,
    root: str,
    sha256: str,
    output: str | None,
    lease_s: float | None,
    gpus: str,
    gpu_wait_s: int | None,
    umask: str,
) -> dict[str, Any]:
    """Return the request of an attempt, without the machines.

    Args:
        root: folder of cloudtrain on the machines.
        sha256: digest of the bundle.
        output: folder of the run's results, where the job names one.
        gpus: the GPUs that a node may use, as CLOUDTRAIN_GPUS has them; only launchers in older bundles use the numbers.
        gpu_wait_s: longest wait for them; None for no limit.
        umask: of the node's processes, in octal.
        lease_s: seconds without the client after which the attempt ends; None where it needs no client.
    """
    folder = f"{root}/runs/{run_id}/a{attempt}"
    env = manifest.environment() | {
        "CLOUDTRAIN_HOST": "${node.address}",
        "CLOUDTRAIN_NODE_RANK": "${node.rank}",
        "CLOUDTRAIN_NUM_NODES": "${nodes}",
        "CLOUDTRAIN_NODE_DIR": f"{folder}/node-${{node.rank}}",
        "CLOUDTRAIN_RUN_DIR": f"{output or root + '/runs'}/{run_id}",
        "CLOUDTRAIN_GPUS": gpus,
        "CLOUDTRAIN_UMASK": umask,
        "CLOUDTRAIN_STDIN": "1",
    }
    if manifest.nodes > 1:
        env["CLOUDTRAIN_CONTROL"] = "${node-0.control}"  # not for node 0 itself, which says it
    if gpus:
        env["CLOUDTRAIN_SHARED_GPUS"] = "1"
    if gpu_wait_s is not None:
        env["CLOUDTRAIN_GPU_WAIT_S"] = str(gpu_wait_s)
    if lease_s is not None:
        env["CLOUDTRAIN_LEASE_S"] = f"{lease_s:g}"
    return {
        "nodes": manifest.nodes,
        "folder": folder,
        "source": f"{root}/src/{sha256}.tar.gz",
        "argv": ["${node.python}", ".cloudtrain/launch.py"],
        "env": env,
    }
