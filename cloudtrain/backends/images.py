"""Container images by name: the parts of a reference, and the digest that tells one image from a later one of the same tag."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

MAX_LENGTH = 500  # characters of what is kept
PULLED_S = 3600.0  # after a job's start what a tag stands for is what was pulled; later it may long be another image
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_PINNED = re.compile(r"(?:[\w.:/-]+@)?sha256:[0-9a-f]{64}", re.ASCII)
_SCHEMES = ("docker-pullable://", "docker://", "containerd://")  # of older kubelets


class Reference(NamedTuple):
    """The parts of REGISTRY/NAME:TAG@DIGEST; docker.io and latest where they are left out, "" for no digest."""

    registry: str
    name: str
    tag: str
    digest: str


def parse_reference(text: str) -> Reference:
    """Return the parts of an image's name as Docker reads it (distribution/reference, 2026-11-22)."""
    path_and_tag, _, digest = text.partition("@")
    head, slash, rest = path_and_tag.partition("/")
    # What comes first is a registry only where it cannot be a folder of Docker Hub.
    registry, path = (
        (head, rest) if slash and (set(head) & set(".:") or head == "localhost") else ("docker.io", path_and_tag)
    )
    name, _, tag = path.partition(":")
    if registry == "docker.io" and "/" not in name:
        name = f"library/{name}"
    return Reference(registry, name, tag or "latest", digest if _DIGEST.fullmatch(digest) else "")


def pinned_image(image: str) -> str:
    """Return what a platform said of an image that runs as NAME@sha256:... or sha256:..., "" where that names no one image."""
    for scheme in _SCHEMES:
        image = image.removeprefix(scheme)
    return image if len(image) <= MAX_LENGTH and _PINNED.fullmatch(image) else ""


def with_digest(text: str, digest: str) -> str:
    """Return an image's name with the digest that its tag stood for, the tag kept: NAME:TAG@sha256:...; "" without one."""
    return pinned_image(f"{text.partition('@')[0]}@{digest}")


def tag_is_current(name: str, age_s: float | None) -> bool:
    """Return whether a name stands for what a job pulled that began so many seconds ago; None is one that never began."""
    return age_s is not None and ("@" in name or age_s <= PULLED_S)


def describe_images(images: Mapping[int, str]) -> list[str]:
    """Return node -> image in words: one line where all that are known run the same, else one for each image."""
    nodes: dict[str, list[int]] = {}  # by digest: one image may be known by several names
    for node, image in sorted(images.items()):
        nodes.setdefault(digest_of(image), []).append(node)
    if len(nodes) < 2:
        return [images[ranks[0]] for ranks in nodes.values()]
    return [
        f"node{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {images[ranks[0]]}" for ranks in nodes.values()
    ]


def digest_of(image: str) -> str:
    """Return the digest of what `exact` returned."""
    return image.rpartition("@")[2]
