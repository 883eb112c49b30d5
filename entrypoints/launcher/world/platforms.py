"""What platforms do by themselves around the launcher: the only place that asks for one by its name."""

from __future__ import annotations

from collections import namedtuple

EXIT_RESTART = 134  # Vertex AI starts the job again

Platform = namedtuple(
    "Platform",
    "copies_folders sets_aip ends_together preempted_code restart_codes has_pod_names signals_all shares_source has_routes"
    " divides_gpus",
    defaults=(False, False, False, None, (), False, False, False, False, False),
)
Platform.__doc__ = """What a platform does by itself; all by default: nothing.

copies_folders  the service brings the run's folders to the store and back, and describes the job in files
sets_aip        AIP_* variables name the folders already
ends_together   the first replica that ends is the end of all others
preempted_code  what the launcher exits with after PREEMPTED, so that the platform starts the job again; None: as elsewhere
restart_codes   exit codes that start the container again: nothing else may leave with them
has_pod_names   the hosts are names of pods, which the cluster's DNS knows
signals_all     a stop signals every process of the job, not the first alone
shares_source   all nodes have one working directory
divides_gpus    roles on one machine have containers of their own, each with its GPUs
has_routes      a machine may have several networks: the interface is the one of the route to node 0
"""

_NONE = Platform()
_PLATFORMS = {
    "local": Platform(has_routes=True),
    "sagemaker": Platform(copies_folders=True),
    "vertex": Platform(sets_aip=True, ends_together=True, preempted_code=EXIT_RESTART),
    "kubernetes": Platform(restart_codes=(75, 69), has_pod_names=True, divides_gpus=True),
    "slurm": Platform(signals_all=True, shares_source=True, has_routes=True),
}


def of(name: str) -> Platform:
    """Return what a platform of this name does by itself (`Cluster.platform`)."""
    return _PLATFORMS.get(name, _NONE)
