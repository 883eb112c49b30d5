"""What connects the GPUs of a job: links within a node by GPU, the network between nodes by machine type."""

from __future__ import annotations

from typing import NamedTuple

from cloudtrain.forecast.offers import machines_of


class Band(NamedTuple):
    """A figure with its uncertainty: 10 %, 50 % and 90 % lie below."""

    low: float
    middle: float
    high: float

    def plus(self, other: Band) -> Band:
        """Return the sum with another one; both are high together."""
        return Band(*(own + more for own, more in zip(self, other, strict=True)))


class Pool(NamedTuple):
    """GPUs of a job, and what connects them, in bytes per second and direction."""

    gpu: str  # as in a job file
    nodes: int
    per_node: int
    link: Band  # of one GPU to the others of its node
    network: Band | None  # of a node; None: not known


GB = 1e9
# NVLink, GB/s of a GPU in one direction. Source: NVIDIA's data sheets, half of what they give for both directions
# (https://www.nvidia.com/en-us/data-center/nvlink/, read on 2026-11-23). All others: PCIe Gen4 x16.
NVLINK = {"V100": 150, "A100": 300, "H100": 450, "H200": 450, "B200": 900, "GB200": 900}
PCIE = 32
REACHED = (0.6, 0.7, 0.8)  # of what is promised; opinion
ETHERNET = (0.3, 0.5, 0.7)  # over TCP; opinion
_RDMA_GBPS = 800  # Google's machines with that and more have GPUDirect


def pool(gpu: str, nodes: int, per_node: int, machine: str = "") -> Pool:
    """Return the GPUs of a job.

    Args:
        gpu: as in a job file.
        nodes: number of nodes.
        per_node: GPUs of each.
        machine: its type as provider/region/name; "" where it is not known, then the links may be PCIe too.
    """
    promised = next((rate for name, rate in NVLINK.items() if gpu.upper().startswith(name)), PCIE)
    link = Band(*(share * promised * GB for share in REACHED))
    if not machine or "PCIE" in gpu.upper():
        link = link._replace(low=REACHED[0] * PCIE * GB)
    return Pool(gpu, nodes, per_node, link, network(machine))


def network(machine: str) -> Band | None:
    """Return the bytes per second of a machine type's network, one direction; None where the tables do not have it."""
    if not machine:
        return None
    provider, _, name = machine.partition("/")
    name = name.partition("/")[2].partition("+")[0]
    known = machines_of(provider)
    found = known.get(name) or next((each for each in known.values() if each.name == name), None)
    gbps = float(found.more.get("network_gbps") or 0) if found else 0.0
    if not found or not gbps:
        return None
    rdma = found.more["efa"] == "1" if "efa" in found.more else gbps >= _RDMA_GBPS
    return Band(*(share * gbps / 8 * GB for share in (REACHED if rdma else ETHERNET)))
