"""A small container registry: manifests by tag, as the OCI distribution specification has them, errors included."""

from __future__ import annotations

from hashlib import sha256

from cloudtrain.simulators.server import Answer, Request, Route

DENIED = 'Permission "artifactregistry.repositories.downloadArtifacts" denied on resource "%s" (or it may not exist)'


class Registry:
    """Manifests by name and tag; `routes` is its service."""

    def __init__(self) -> None:
        self.manifests: dict[tuple[str, str], bytes] = {}
        self.tells = True  # the digest in a header, which the specification leaves open
        self.token = ""  # what a question has to bring
        self.denied: set[str] = set()  # names that the account may not read
        self.heard: list[Request] = []  # the questions

    def push(self, name: str, tag: str, manifest: bytes) -> str:
        """Keep a manifest and return its digest; the tag stands for this one from now on."""
        self.manifests[name, tag] = manifest
        return f"sha256:{sha256(manifest).hexdigest()}"

    @property
    def routes(self) -> list[Route]:
        place = r"/v2/(.+)/manifests/([^/]+)"
        return [("PUT", place, self._put), ("GET", place, self._get)]

    def _put(self, request: Request, name: str, tag: str) -> Answer:
        return Answer(None, 201, {"Docker-Content-Digest": self.push(name, tag, request.body)})

    def _get(self, request: Request, name: str, tag: str) -> Answer:
        self.heard.append(request)
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            return _error(401, "UNAUTHORIZED", "authentication failed")
        if name in self.denied:
            return _error(403, "DENIED", DENIED % name)
        if (name, tag) not in self.manifests:
            return _error(404, "MANIFEST_UNKNOWN", f"Failed to fetch {tag!r}")
        if "application/vnd.oci.image.index.v1+json" not in request.headers.get("accept", ""):
            return _error(404, "MANIFEST_UNKNOWN", "OCI index found, but accept header does not support OCI indexes")
        found = self.manifests[name, tag]
        told = {"Docker-Content-Digest": f"sha256:{sha256(found).hexdigest()}"} if self.tells else {}
        return Answer(found, 200, {"Content-Type": "application/vnd.oci.image.index.v1+json", **told})


def _error(status: int, code: str, message: str) -> Answer:
    return Answer({"errors": [{"code": code, "message": message, "detail": {}}]}, status)
