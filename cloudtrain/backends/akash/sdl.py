"""Build the SDL of a job: one service for each node, all in one group, with a price ceiling; pure data.

Akash's Stack Definition Language, versions 2.0 and 2.1: https://github.com/akash-network/chain-sdk, go/sdl/
sdl-input.schema.yaml (2026-08). Services of a lease share a Kubernetes namespace: they reach each other by their names at
exposed ports, and directly by pod address at any port (provider, cluster/kube/builder/netpol.go, 2026-06).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cloudtrain.backends.akash import container

CONTROL_PORT = 29380  # where node 0 listens for the others
# Providers refuse a manifest without a global service (chain-sdk, go/manifest/v2beta3/groups.go, 2026-07). Nothing
# listens at this port: who opens the address gets an error of the provider's proxy.
GLOBAL_PORT = 29381
PROFILE, PLACEMENT = "node", "akash"
DENOM = "uact"  # a millionth of an ACT, which stands for a US dollar; the Console pays with it
BLOCKS_PER_HOUR = 600  # blocks of 6 s: akash-network/console, apps/api/src/utils/constants.ts (2026-08)
_GPU = re.compile(r"(.+?)(?:-(\d+)GB)?", re.IGNORECASE)


def service_name(node: int) -> str:
    """Return the name of a node's service, which is its host name for the others."""
    return f"node-{node}"


def usd_per_hour(amount: float) -> float:
    """Return dollars an hour of a price in uact for a block."""
    return amount * BLOCKS_PER_HOUR / 1e6


def price_amount(usd: float) -> int:
    """Return the price in uact for a block of dollars an hour, rounded down: a ceiling stays below."""
    return int(usd * 1e6 / BLOCKS_PER_HOUR)


def gpu_model(accelerator: str) -> dict[str, str]:
    """Return model and memory of an accelerator's name as Akash has them: A100-80GB is a100 with 80Gi."""
    match = _GPU.fullmatch(accelerator)
    assert match is not None
    name = re.sub(r"[^a-z0-9]", "", match[1].lower())
    return {"model": name, **({"ram": f"{match[2]}Gi"} if match[2] else {})}


def build_sdl(
    *,
    image: str,
    python: str,
    environments: list[dict[str, str]],
    resources: Mapping[str, tuple[int, Mapping[str, Any]]],
    options: Mapping[str, Any],
    ceiling_usd: float,
) -> dict[str, Any]:
    """Return the SDL of a job as plain data.

    Args:
        environments: the variables of each node.
        resources: how many nodes, in their order, have which `cpus`, `memory`, `disk_gb`, `gpus` and `accelerator`, by
            the name of their profile.
        ceiling_usd: highest price of a node in USD an hour.
    """
    profiles = [name for name, (count, _) in resources.items() for _ in range(count)]
    nodes, services = len(profiles), {}
    for node in range(nodes):
        service: dict[str, Any] = {
            "image": image,
            "command": [python, "-c", container.COMMAND],
            "env": [f"{name}={value}" for name, value in environments[node].items()],
            "expose": _expose(node, nodes),
        }
        if mounts := _storage(options)[1]:
            service["params"] = {"storage": mounts}
        services[service_name(node)] = service
    placement: dict[str, Any] = {}
    if options.get("attributes"):
        placement["attributes"] = dict(options["attributes"])
    if options.get("auditors"):
        placement["signedBy"] = {"anyOf": list(options["auditors"])}
    placement["pricing"] = {name: {"denom": DENOM, "amount": price_amount(ceiling_usd)} for name in resources}
    sdl: dict[str, Any] = {"version": "2.1" if options.get("reclamation_window") else "2.0"}
    if options.get("reclamation_window"):
        sdl["reclamation"] = {"min_window": options["reclamation_window"]}
    return sdl | {
        "services": services,
        "profiles": {
            "compute": {name: {"resources": _compute(own, options)} for name, (_, own) in resources.items()},
            "placement": {PLACEMENT: placement},
        },
        "deployment": {
            name: {PLACEMENT: {"profile": profile, "count": 1}}
            for name, profile in zip(services, profiles, strict=True)
        },
    }


def _compute(resources: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    compute: dict[str, Any] = {
        "cpu": {"units": resources["cpus"]},
        "memory": {"size": resources["memory"]},
        "storage": [{"size": f"{resources['disk_gb']}G"}, *_storage(options)[0]],
    }
    if resources["gpus"]:
        model = gpu_model(resources["accelerator"])
        if options.get("gpu_interface"):
            model["interface"] = options["gpu_interface"]
        compute["gpu"] = {"units": resources["gpus"], "attributes": {"vendor": {"nvidia": [model]}}}
    return compute


def _expose(node: int, nodes: int) -> list[dict[str, Any]]:
    """Return the ports of a node: node 0's control port for every other node, and one for everybody."""
    others = [service_name(other) for other in range(nodes) if other != node]
    if node:
        # A service without a port has no name in the cluster's DNS. Other nodes connect to node 0 only.
        return [{"port": CONTROL_PORT, "proto": "tcp", "to": [{"service": service_name(0)}]}]
    control = [{"port": CONTROL_PORT, "proto": "tcp", "to": [{"service": name} for name in others]}] if others else []
    return [*control, {"port": GLOBAL_PORT, "as": 80, "proto": "tcp", "to": [{"global": True}]}]


def _storage(options: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return the volumes of a node beside its disk, and where they are mounted."""
    volumes: list[dict[str, Any]] = []
    mounts: dict[str, dict[str, Any]] = {}
    if persistent := options.get("persistent"):
        kind = persistent.get("storage_class", "beta3")
        volumes.append({"name": "data", "size": persistent["size"], "attributes": {"persistent": True, "class": kind}})
        mounts["data"] = {"mount": persistent.get("mount", "/data"), "readOnly": False}
    if options.get("shm"):
        volumes.append({"name": "shm", "size": options["shm"], "attributes": {"persistent": False, "class": "ram"}})
        mounts["shm"] = {"mount": "/dev/shm", "readOnly": False}  # noqa: S108 - of the container
    return volumes, mounts
