"""Detect the cluster (nodes, node rank, hosts, ports) from the platform's environment variables.

Trap: on Vertex, PAI and Kubeflow RANK and WORLD_SIZE count nodes. They are ranks of processes only beside LOCAL_RANK.
"""

from __future__ import annotations

import json
import os
import re
from collections import namedtuple
from collections.abc import Mapping, Sequence

from ..errors import Refused
from . import platforms
from .platforms import Platform

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    from ..manifest import Manifest

LOOPBACK = "127.0.0.1"
CONTROL_PORT = 29380  # node 0, where no port can be announced; below the ephemeral range
VERTEX_MASTER_PORT = 3333  # the port that Vertex leaves open for training
ALL_GPUS = "all"  # CLOUDTRAIN_GPUS of a job that names no accelerators: those that are there
SHARED_GPUS = (
    "CLOUDTRAIN_SHARED_GPUS"  # set on a host that several jobs share: shared_gpus.py takes GPUs, whatever their numbers
)
# Below /opt/ml. SageMaker copies `checkpoints` to S3 and back; ours lies beside the script's folder there, which is empty
# at first. cloudtrain/backends/checkpoints.py reads both.
SAGEMAKER = {"checkpoints": "checkpoints/checkpoint_dir", "outputs": "output/data", "model": "model"}
SAGEMAKER_OURS = "checkpoints/.cloudtrain"

_Cluster = namedtuple(
    "_Cluster",
    "platform nodes node_rank hosts host control_host control_port master_host master_port gpus interface launched name",
    defaults=("local", None, 0, (), LOOPBACK, "", 0, LOOPBACK, 0, None, "", False, ""),
)


class Cluster(_Cluster):
    """This node's place.

    platform      local, launched, sagemaker, vertex, kubeflow, kubernetes, slurm or generic
    nodes         how many there are, None where the platform does not say (then: as the manifest says)
    node_rank     0..nodes-1
    hosts         addresses by node rank, where they are known
    host          the address by which other nodes see this one
    control_host  where node 0 listens for the others, with control_port (0: any free one, announced in status.json)
    master_host   MASTER_ADDR of the ranks; master_port 0: node 0 picks one
    gpus          the GPUs that this node may use ("0,1"), None: all that are visible
    interface     the network interface that the platform names, or ""
    launched      ranks were started from outside already: this process is one of them
    name          what the platform, or a list of hosts, calls this machine; the host's own name where neither says it
    """

    __slots__ = ()

    @property
    def does(self) -> Platform:
        """What the platform does by itself."""
        return platforms.of(self.platform)


def resolve(environ: Mapping[str, str], resourceconfig: str = "") -> Cluster:
    """Return this node's place from its environment and, on SageMaker, the text of resourceconfig.json.

    Raises Refused when what the platform says cannot be understood.
    """
    try:
        for detect in (_cloudtrain, _launched, _sagemaker, _vertex, _kubeflow, _kubernetes, _slurm, _generic):
            cluster = detect(environ, resourceconfig)
            if cluster is not None:
                return cluster._replace(gpus=_chosen_gpus(environ), name=_name(environ))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise Refused(f"the platform's environment cannot be read: {type(error).__name__}: {error}") from None
    return Cluster(nodes=1, gpus=_chosen_gpus(environ), name=_name(environ))


def _name(environ: Mapping[str, str]) -> str:
    return environ.get("CLOUDTRAIN_NODE_NAME") or environ.get("SLURMD_NODENAME") or os.uname().nodename


def _chosen_gpus(environ: Mapping[str, str]) -> str | None:
    chosen = environ.get("CLOUDTRAIN_GPUS")
    return None if chosen == ALL_GPUS else chosen


def _cloudtrain(environ: Mapping[str, str], _: str) -> Cluster | None:
    """Local and SSH: the backend says everything itself. It goes first: a shell inside Slurm may start a local run."""
    if "CLOUDTRAIN_NODE_RANK" not in environ:
        return None
    host = environ.get("CLOUDTRAIN_HOST") or LOOPBACK
    control_host, _, port = environ.get("CLOUDTRAIN_CONTROL", "").rpartition(":")
    control_host = control_host.strip("[]") or host
    rank = int(environ["CLOUDTRAIN_NODE_RANK"])
    nodes = environ.get("CLOUDTRAIN_NUM_NODES")
    return Cluster("local", int(nodes) if nodes else None, rank, (), host, control_host, int(port or 0), control_host)


def _launched(environ: Mapping[str, str], resourceconfig: str) -> Cluster | None:
    """Under torchrun, srun or mpirun with one task for a rank: do not launch again. SageMaker's toolkit has a torchrun."""
    if not {"LOCAL_RANK", "RANK", "WORLD_SIZE"} <= environ.keys():
        return None
    node_rank = int(environ.get("GROUP_RANK") or environ.get("NODE_RANK") or 0)
    master = environ.get("MASTER_ADDR") or LOOPBACK
    port = int(environ.get("MASTER_PORT") or 0)
    cluster = _sagemaker(environ, resourceconfig) or Cluster("launched", None, node_rank)
    return cluster._replace(master_host=master, master_port=port, launched=True)


def _sagemaker(environ: Mapping[str, str], resourceconfig: str) -> Cluster | None:
    if environ.get("SM_HOSTS") and environ.get("SM_CURRENT_HOST"):
        hosts, current = json.loads(environ["SM_HOSTS"]), environ["SM_CURRENT_HOST"]
        interface = environ.get("SM_NETWORK_INTERFACE_NAME", "")
    elif resourceconfig:
        # With our launcher as the container's own command no toolkit has run: there is no SM_* variable at all.
        config = json.loads(resourceconfig)
        hosts, current, interface = config["hosts"], config["current_host"], config.get("network_interface_name", "")
    else:
        return None
    hosts = sorted(hosts, key=_natural)
    if current not in hosts:
        raise Refused(f"this host, {current}, is not one of SageMaker's hosts: {', '.join(hosts)}")
    return Cluster(
        "sagemaker",
        len(hosts),
        hosts.index(current),
        tuple(hosts),
        current,
        hosts[0],
        CONTROL_PORT,
        hosts[0],
        interface=interface,
    )


def in_groups(cluster: Cluster, resourceconfig: str, names: Sequence[str]) -> Cluster:
    """Return a place on SageMaker by the instance groups, where each role has one of its name: hosts in the roles' order."""
    config = json.loads(resourceconfig) if resourceconfig and cluster.does.copies_folders else {}
    groups = {group["instance_group_name"]: group["hosts"] for group in config.get("instance_groups") or ()}
    if not names or not groups.keys() >= set(names):
        return cluster
    hosts = [host for name in names for host in sorted(groups[name], key=_natural)]
    return cluster._replace(
        hosts=tuple(hosts), node_rank=hosts.index(cluster.host), control_host=hosts[0], master_host=hosts[0]
    )


def with_own_gpus(cluster: Cluster, manifest: Manifest, environ: Mapping[str, str]) -> Cluster:
    """Return a place with the GPUs of its own node alone, where one allocation has those of several roles."""
    own = manifest.gpus_per_node
    before, together, _ = manifest.shared_gpus(cluster.node_rank)
    if own == together or cluster.gpus is not None:
        return cluster
    if own and cluster.does.divides_gpus:
        return cluster
    # Where a platform divides them: an image may show all GPUs to a container that asks for none.
    there = environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(together)))
    return cluster._replace(gpus=",".join(there.split(",")[before : before + own]))


def sagemaker_base(environ: Mapping[str, str]) -> str:
    """Return the folder in which SageMaker lays everything; a simulator on a plain machine has another."""
    return environ.get("SAGEMAKER_BASE_DIR") or "/opt/ml"


def _vertex(environ: Mapping[str, str], _: str) -> Cluster | None:
    if not environ.get("CLUSTER_SPEC"):
        return None
    spec = json.loads(environ["CLUSTER_SPEC"])
    task, index = spec["task"]["type"], int(spec["task"]["index"])
    if task not in ("workerpool0", "workerpool1"):
        raise Refused(f"this replica belongs to {task}, which does not train")
    pools = spec["cluster"]
    hosts = [*pools["workerpool0"], *pools.get("workerpool1", ())]
    rank = index if task == "workerpool0" else len(pools["workerpool0"]) + index
    names = tuple(_without_port(host) for host in hosts)
    control_port = int(hosts[0].rpartition(":")[2]) if ":" in hosts[0] else CONTROL_PORT
    # RANK and WORLD_SIZE of this platform count nodes and are not looked at.
    return Cluster(
        "vertex",
        len(hosts),
        rank,
        names,
        names[rank],
        names[0],
        control_port,
        names[0],
        int(environ.get("MASTER_PORT") or VERTEX_MASTER_PORT),
    )


def _kubeflow(environ: Mapping[str, str], _: str) -> Cluster | None:
    if not {"PET_NNODES", "PET_NODE_RANK"} <= environ.keys():
        return None
    nodes = int(environ["PET_NNODES"].rpartition(":")[2])  # "1:4" is torchrun's elastic form
    rank = int(environ["PET_NODE_RANK"])
    master = environ.get("PET_MASTER_ADDR") or (LOOPBACK if nodes == 1 else "")
    if not master:
        raise Refused("PET_MASTER_ADDR is not set, so node 0 cannot be found")
    return Cluster(
        "kubeflow",
        nodes,
        rank,
        (),
        master if rank == 0 else "",
        master,
        CONTROL_PORT,
        master,
        int(environ.get("PET_MASTER_PORT") or 0),
    )


def _kubernetes(environ: Mapping[str, str], _: str) -> Cluster | None:
    if not environ.get("JOB_COMPLETION_INDEX"):
        return None
    rank = int(environ["JOB_COMPLETION_INDEX"]) + int(environ.get("CLOUDTRAIN_FIRST_NODE") or 0)
    nodes = int(environ["CLOUDTRAIN_NUM_NODES"]) if environ.get("CLOUDTRAIN_NUM_NODES") else None
    master = environ.get("MASTER_ADDR") or (LOOPBACK if rank == 0 and nodes in (None, 1) else "")
    if not master:
        raise Refused("MASTER_ADDR is not set, so the pod with index 0 cannot be found")
    # A pod's name may be unknown to DNS for a while: node 0 listens on its address, the others ask again.
    own = environ.get("CLOUDTRAIN_POD_IP") or master
    return Cluster(
        "kubernetes",
        nodes,
        rank,
        (),
        own if rank == 0 else "",
        own if rank == 0 else master,
        CONTROL_PORT,
        own if rank == 0 else master,
        int(environ.get("MASTER_PORT") or 0),
    )


def _slurm(environ: Mapping[str, str], _: str) -> Cluster | None:
    if "SLURM_JOB_ID" not in environ or "SLURM_NODEID" not in environ:
        return None
    if environ.get("CLOUDTRAIN_NUM_NODES") == "1":  # a body of sbatch, which the batch script's node runs alone
        return Cluster("slurm", 1, 0, (), LOOPBACK, LOOPBACK, 0, LOOPBACK)
    launchers = [
        int(each) for each in environ.get("CLOUDTRAIN_LAUNCHERS", "").split(",") if each
    ]  # of each node, by part
    if environ.get("SLURM_HET_SIZE"):  # one step over all components, with one task on each node for each launcher
        parts = range(int(environ["SLURM_HET_SIZE"]))
        lists = [expand_hosts(environ[f"SLURM_JOB_NODELIST_HET_GROUP_{n}"]) for n in parts]
        hosts = tuple(host for n in parts for host in lists[n] * (launchers[n] if launchers else 1))
        nodes, rank, job = len(hosts), int(environ["SLURM_PROCID"]), environ["SLURM_JOB_ID_HET_GROUP_0"]
    else:
        nodes = int(
            environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_JOB_NUM_NODES") or environ["SLURM_NNODES"]
        )
        rank, job = int(environ["SLURM_NODEID"]), environ["SLURM_JOB_ID"]
        hosts = expand_hosts(
            environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
        )
        if launchers:
            hosts, nodes, rank = hosts * launchers[0], nodes * launchers[0], int(environ["SLURM_PROCID"])
    if len(hosts) != nodes:
        raise Refused(f"Slurm gave {nodes} nodes but names {len(hosts)}: {', '.join(hosts) or 'none'}")
    # Two jobs may share a machine: the port comes from the job's number, below the ephemeral range.
    port = 20000 + int(job) % 10000
    return Cluster("slurm", nodes, rank, hosts, hosts[rank], hosts[0], port, hosts[0])


def _generic(environ: Mapping[str, str], _: str) -> Cluster | None:
    """Platforms that set RANK and WORLD_SIZE for nodes (PAI, PyTorchJob): there is no LOCAL_RANK beside them."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environ.keys() or "LOCAL_RANK" in environ:
        return None
    rank, master = int(environ["RANK"]), environ["MASTER_ADDR"]
    return Cluster(
        "generic",
        int(environ["WORLD_SIZE"]),
        rank,
        (),
        master if rank == 0 else "",
        master,
        CONTROL_PORT,
        master,
        int(environ.get("MASTER_PORT") or 0),
    )


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts of a Slurm node list: "n[01-03,7],login" is n01 n02 n03 n7 login."""
    hosts = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", text):
        names = [""]
        for plain, ranges in re.findall(r"([^\[]*)(?:\[([^\]]*)\])?", part):
            choices = [plain + number for number in _numbers(ranges)] if ranges else [plain]
            names = [name + choice for name in names for choice in choices]
        hosts += names
    return tuple(hosts)


def _numbers(ranges: str) -> list[str]:
    numbers = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
    return numbers


def _natural(name: str) -> list[object]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def _without_port(host: str) -> str:
    return host.rpartition(":")[0] if ":" in host else host


def absolute(host: str, resolv_conf: str = "/etc/resolv.conf") -> str:
    """Return a pod's name as the cluster's DNS has it, with its final dot; blocking: reads a file.

    A name with one dot is looked up below every search domain first, for IPv4 and IPv6: ten questions instead of two.
    https://kubernetes.io/docs/concepts/services-networking/dns-pod-service/ (2026-11-23): the first search domain of a
    pod is <namespace>.svc.<cluster domain>.
    """
    try:
        with open(resolv_conf, encoding="utf-8") as file:
            searches = [line.split()[1:] for line in file if line.startswith("search")]
    except OSError:
        return host
    first = searches[-1][0].rstrip(".") if searches and searches[-1] else ""
    return f"{host}.{first}." if host.count(".") == 1 and ".svc." in first else host
