"""Container image names: parse a reference, pin it by digest, and describe the images of a run's nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_LENGTH = 500  # characters of an image name that is stored
PULLED_S = (
    3600.0  # this long after a job's start its tag is taken to mean the image that was pulled; later it may have moved
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_PINNED = re.compile(r"(?:[\w.:/-]+@)?sha256:[0-9a-f]{64}", re.ASCII)
_AWS = re.compile(r"(?P<torch>\d+\.\d+\.\d+)(?:-transformers(?P<transformers>\d+\.\d+\.\d+))?-")
_GOOGLE = re.compile(
    r"huggingface-pytorch-training-\w+\.(?P<torch>\d+-\d+)\.transformers\.(?P<transformers>\d+-\d+)\..*"
)
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_HOST = r"[a-zA-Z0-9][a-zA-Z0-9.-]*(?::\d+)?"
_NAME = re.compile(rf"(?:{_HOST}/)?{_PART}(?:/{_PART})*(?::\w[\w.-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?", re.ASCII)
_SCHEMES = ("docker-pullable://", "docker://", "containerd://")  # prefixes that older kubelets report


class Reference(NamedTuple):
    """The parts of REGISTRY/NAME:TAG@DIGEST; docker.io and latest where they are left out, "" for no digest."""

    registry: str
    name: str
    tag: str
    digest: str


@dataclass(frozen=True)
class ImageRegistry:
    """A registry and who is logged in to it; the password is in no text of it."""

    host: str  # as in an image's name, with the port
    user: str
    password: str = field(repr=False)


def is_image(text: str) -> bool:
    """Return whether a text is an image's name for every registry (distribution/reference, 2026-11-22)."""
    return len(text) <= MAX_LENGTH and _NAME.fullmatch(text) is not None


def parse_reference(text: str) -> Reference:
    """Return the parts of an image's name as Docker reads it (distribution/reference, 2026-11-22)."""
    path_and_tag, _, digest = text.partition("@")
    head, slash, rest = path_and_tag.partition("/")
    # The first part is a registry only if it cannot be a namespace on Docker Hub: it has a dot, a colon, or is localhost.
    registry, path = (
        (head, rest) if slash and (set(head) & set(".:") or head == "localhost") else ("docker.io", path_and_tag)
    )
    name, _, tag = path.partition(":")
    if registry == "docker.io" and "/" not in name:
        name = f"library/{name}"
    return Reference(registry, name, tag or "latest", digest if _DIGEST.fullmatch(digest) else "")


def pinned_image(image: str) -> str:
    """Return an image that a platform reported as NAME@sha256:... or sha256:..., "" if it has no digest."""
    for scheme in _SCHEMES:
        image = image.removeprefix(scheme)
    return image if len(image) <= MAX_LENGTH and _PINNED.fullmatch(image) else ""


def with_digest(text: str, digest: str) -> str:
    """Return an image's name with a digest added, the tag kept: NAME:TAG@sha256:...; "" for an invalid digest."""
    return pinned_image(f"{text.partition('@')[0]}@{digest}")


def library_versions(text: str) -> dict[str, str]:
    """Return the versions of torch and transformers that the name of a stock image says; empty for any other image.

    AWS: pytorch-training:2.8.0-gpu-py312, huggingface-pytorch-training:2.8.0-transformers4.56.2-gpu-py312-cu129
    (https://github.com/aws/deep-learning-containers, 2026-11). Google: huggingface-pytorch-training-cu121.2-3.transformers.4-42
    (https://github.com/huggingface/Google-Cloud-Containers, 2026-11). PyTorch: pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime
    (https://hub.docker.com/r/pytorch/pytorch/tags, 2026-11).
    """
    reference = parse_reference(text)
    name, tag = reference.name.rpartition("/")[2], reference.tag
    if name.endswith("pytorch-training") and (found := _AWS.match(tag)):
        return {key: value for key, value in found.groupdict().items() if value}
    if reference.name == "pytorch/pytorch" and (found := _AWS.match(reference.tag)):
        return {"torch": found["torch"]}
    if found := _GOOGLE.fullmatch(name):
        return {key: value.replace("-", ".") for key, value in found.groupdict().items()}
    return {}


def python_version(text: str) -> str:
    """Return the Python that an image's tag names, as 3.12; "" where it names none.

    AWS: ...:2.8.0-gpu-py312-cu129 (as above). Docker's own: python:3.12-slim (https://hub.docker.com/_/python, 2026-11).
    """
    reference = parse_reference(text)
    named = reference.name.rpartition("/")[2] == "python" and re.match(r"3\.(\d+)", reference.tag)
    found = named or re.search(r"(?:^|-)py3(\d+)(?:-|$)", reference.tag)
    return f"3.{found[1]}" if found else ""


def tag_is_current(name: str, age_s: float | None) -> bool:
    """Return whether an image's tag still means what a job pulled `age_s` seconds ago; None: the job never started."""
    return age_s is not None and ("@" in name or age_s <= PULLED_S)


def describe_images(images: Mapping[int, str]) -> list[str]:
    """Return the lines that describe node -> image: one line if all nodes run the same image, else one for each."""
    nodes: dict[str, list[int]] = {}  # by digest: one image may have several names
    for node, image in sorted(images.items()):
        nodes.setdefault(digest_of(image), []).append(node)
    if len(nodes) < 2:
        return [images[ranks[0]] for ranks in nodes.values()]
    return [
        f"node{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {images[ranks[0]]}" for ranks in nodes.values()
    ]


def digest_of(image: str) -> str:
    """Return the digest of an image that `pinned_image` returned."""
    return image.rpartition("@")[2]
