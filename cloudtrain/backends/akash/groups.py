"""Convert an SDL into the manifest that providers receive, and its hash, which the chain keeps with a deployment.

As `generateManifest`, `manifestToSortedJSON` and `generateManifestVersion` of npm @akashnetwork/chain-sdk 1.0.0-alpha.25
do it for SDLs that sdl.py builds; tests/backends/akash/test_validator.py compares both.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any

UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
HTTP_OPTIONS = {
    "maxBodySize": 1048576,
    "nextCases": ["error", "timeout"],
    "nextTimeout": 0,
    "nextTries": 3,
    "readTimeout": 60000,
    "sendTimeout": 60000,
}


def manifest_json(sdl: Mapping[str, Any]) -> str:
    """Return the manifest of an SDL as providers receive it: sorted JSON, with <, > and & escaped."""
    text = json.dumps(_groups(sdl), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def manifest_hash(manifest: str) -> str:
    """Return the hash of a manifest as the Console shows it: SHA-256, base64."""
    return base64.b64encode(hashlib.sha256(manifest.encode()).digest()).decode()


def size_bytes(size: str) -> int:
    """Return the bytes of a size such as 16Gi."""
    unit = size.lstrip("0123456789")
    return int(size.removesuffix(unit)) * UNITS.get(unit, 1)


def _groups(sdl: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for name in sorted(sdl["deployment"]):
        for placement, about in sdl["deployment"][name].items():
            profile = sdl["profiles"]["compute"][about["profile"]]["resources"]
            service = _service(name, sdl["services"][name], profile, about["count"])
            groups.setdefault(placement, []).append(service)
    return [{"name": placement, "services": services} for placement, services in sorted(groups.items())]


def _service(name: str, service: Mapping[str, Any], profile: Mapping[str, Any], count: int) -> dict[str, Any]:
    expose = [_expose(port, to) for port in service.get("expose") or () for to in port["to"]]
    expose.sort(key=lambda port: (port["service"], port["port"], port["proto"], port["global"]))
    endpoints = [{"sequence_number": 0}] if any(port["global"] for port in expose) else []
    mounts = (service.get("params") or {}).get("storage") or {}
    volumes = [
        {"mount": mount["mount"], "name": volume, "readOnly": bool(mount.get("readOnly"))}
        for volume, mount in sorted(mounts.items())
    ]
    return {
        "args": service.get("args"),
        "command": service.get("command"),
        "count": count,
        "credentials": None,
        "env": service.get("env") or None,
        "expose": expose,
        "image": service["image"],
        "name": name,
        **({"params": {"storage": volumes}} if volumes else {}),
        "resources": _resources(profile, endpoints),
    }


def _expose(port: Mapping[str, Any], to: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "endpointSequenceNumber": 0,
        "externalPort": port.get("as", 0),
        "global": bool(to.get("global")),
        "hosts": port.get("accept"),
        "httpOptions": HTTP_OPTIONS,
        "ip": "",
        "port": port["port"],
        "proto": str(port.get("proto", "tcp")).upper(),
        "service": to.get("service", ""),
    }


def _resources(profile: Mapping[str, Any], endpoints: list[dict[str, Any]]) -> dict[str, Any]:
    gpu: dict[str, Any] = {"units": {"val": "0"}}
    if given := profile.get("gpu"):
        keys = []
        for model in given["attributes"]["vendor"]["nvidia"]:
            parts = [f"vendor/nvidia/model/{model.get('model', '*')}"]
            parts += [f"{name}/{model[name]}" for name in ("ram", "interface") if name in model]
            keys.append("/".join(parts))
        gpu = {
            "attributes": [{"key": key, "value": "true"} for key in sorted(keys)],
            "units": {"val": str(given["units"])},
        }
    storage = []
    for volume in profile["storage"]:
        attributes = volume.get("attributes") or {}
        pairs = [{"key": key, "value": str(value).lower()} for key, value in sorted(attributes.items())]
        storage.append(
            {
                **({"attributes": pairs} if pairs else {}),
                "name": volume.get("name", "default"),
                "size": {"val": str(size_bytes(volume["size"]))},
            }
        )
    return {
        "cpu": {"units": {"val": str(int(float(profile["cpu"]["units"]) * 1000))}},
        "endpoints": endpoints,
        "gpu": gpu,
        "id": 1,
        "memory": {"size": {"val": str(size_bytes(profile["memory"]["size"]))}},
        "storage": storage,
    }
