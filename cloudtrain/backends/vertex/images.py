"""Container images in Google's registries: the digest that a tag stands for now, asked of the registry itself.

The question is GET /v2/NAME/manifests/TAG of the OCI distribution specification, with the account's access token, as
https://cloud.google.com/artifact-registry/docs/reference/docker-api shows it for the list of tags. It needs
the right to download, of roles/artifactregistry.reader: https://cloud.google.com/artifact-registry/docs/repositories/download-files
(both read 2026-11-22; no real registry was asked).
"""

from __future__ import annotations

import re
from hashlib import sha256
from urllib.parse import quote

from cloudtrain.backends import images
from cloudtrain.backends.google import GoogleApi

# Without them a registry may translate an image with several platforms into one of them, which has another digest.
MANIFESTS = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)
TRIES, TIMEOUT_S = 2, 10.0  # a watcher reads no log meanwhile, and its lease is short
_GOOGLES = re.compile(r"[a-z0-9-]+-docker\.pkg\.dev|([a-z0-9-]+\.)*gcr\.io")


def manifest_address(image: str) -> tuple[str, str] | None:
    """Return (host, path) of the question for a tag's digest; None for an image that needs none, or is not Google's.

    No other host is ever asked: an access token goes with the question.
    """
    registry, name, tag, _ = images.parse_reference(image)
    if "@" in image or not _GOOGLES.fullmatch(registry):
        return None
    return registry, f"/v2/{quote(name)}/manifests/{quote(tag)}"


def resolve_digest(api: GoogleApi, image: str) -> str:
    """Return an image with its digest: its own where it is pinned, else that of its tag at this moment; "" where the
    registry is not Google's, or has no such tag. Blocking; raises ApiError, Unreachable."""
    if (asked := manifest_address(image)) is None:
        return images.pinned_image(image)
    host, path = asked
    found = api.call(
        "GET",
        "registry",
        path if api.endpoint else f"https://{host}{path}",
        f"the digest of {image} is not known",
        headers={"Accept": MANIFESTS},
        tries=TRIES,
        timeout_s=TIMEOUT_S,
        accept=(404,),
    )
    if found.status == 404:
        return ""
    # A manifest's digest is that of its bytes; the specification leaves the header open.
    digest = found.headers.get("docker-content-digest") or f"sha256:{sha256(found.body).hexdigest()}"
    return images.with_digest(image, digest)
