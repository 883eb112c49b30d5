"""Resolve the digest of an image tag in Google's container registries (Artifact Registry, gcr.io).

The request is GET /v2/NAME/manifests/TAG of the OCI distribution specification, with the account's access token, as
https://cloud.google.com/artifact-registry/docs/reference/docker-api shows it for the list of tags. It needs the download
permission of roles/artifactregistry.reader: https://cloud.google.com/artifact-registry/docs/repositories/download-files
(both read 2026-11-22; never tried against a real registry).
"""

from __future__ import annotations

import re
from hashlib import sha256
from urllib.parse import quote

from cloudtrain.backends import images
from cloudtrain.backends.google import GoogleApi

# Without these a registry may convert a multi-platform image into one platform's, which has another digest.
MANIFESTS = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)
TRIES, TIMEOUT_S = 2, 10.0  # short, because the watcher reads no log meanwhile and its lease is short
_GOOGLES = re.compile(r"[a-z0-9-]+-docker\.pkg\.dev|([a-z0-9-]+\.)*gcr\.io")


def manifest_address(image: str) -> tuple[str, str] | None:
    """Return (host, path) of a tag's manifest; None for an image with a digest or in another registry.

    Other hosts are never called, because the request carries an access token.
    """
    registry, name, tag, _ = images.parse_reference(image)
    if "@" in image or not _GOOGLES.fullmatch(registry):
        return None
    return registry, f"/v2/{quote(name)}/manifests/{quote(tag)}"


def resolve_digest(api: GoogleApi, image: str) -> str:
    """Return an image's name with the digest that its tag stands for now; blocking.

    A name with a digest is returned as it is. Returns "" for other registries and for a tag that does not exist. Raises
    ApiError, Unreachable.
    """
    if (host_and_path := manifest_address(image)) is None:
        return images.pinned_image(image)
    host, path = host_and_path
    answer = api.call(
        "GET",
        "registry",
        path if api.endpoint else f"https://{host}{path}",
        f"the digest of {image} is unknown",
        headers={"Accept": MANIFESTS},
        tries=TRIES,
        timeout_s=TIMEOUT_S,
        accept=(404,),
    )
    if answer.status == 404:
        return ""
    # The header is optional; without it the digest is the SHA-256 of the manifest's bytes.
    digest = answer.headers.get("docker-content-digest") or f"sha256:{sha256(answer.data).hexdigest()}"
    return images.with_digest(image, digest)
