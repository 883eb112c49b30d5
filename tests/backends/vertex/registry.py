"""A small container registry: manifests by tag, as the OCI distribution specification has them; and Google's hosts over TLS."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cloudtrain.simulators.http import Request, Response, Route

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
        return [("GET", place, self._get)]

    def _get(self, request: Request, name: str, tag: str) -> Response:
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
        return Response(found, 200, {"Content-Type": "application/vnd.oci.image.index.v1+json", **told})


def _error(status: int, code: str, message: str) -> Response:
    return Response({"errors": [{"code": code, "message": message, "detail": {}}]}, status)


class Googles:
    """A proxy that answers itself for every host behind it, over TLS with a certificate of its own."""

    def __init__(self, folder: Path, registry: Registry) -> None:
        self.connected: list[str] = []  # host:port, as clients asked for them
        self.heard: list[tuple[str, str, str]] = []  # host, path, the token that came with it
        self.moved = ""  # where every question for a manifest is sent
        self.certificate = folder / "googles.pem"
        _certify(
            self.certificate,
            ["us-central1-docker.pkg.dev", "us-central1-aiplatform.googleapis.com", "elsewhere.example"],
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate)
        googles = self

        class Handler(BaseHTTPRequestHandler):
            def do_CONNECT(self) -> None:
                googles.connected.append(self.path)
                self.send_response(200)
                self.end_headers()
                with context.wrap_socket(self.connection, server_side=True) as inside:
                    googles.answer(inside)
                self.close_connection = True

            def log_message(self, *_: object) -> None: ...

        self.registry = registry
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def answer(self, inside: socket.socket) -> None:
        """Response one request, which came through the proxy."""
        lines = inside.makefile("rb")
        _, path, _ = lines.readline().decode().split(" ")
        headers = {}
        while line := lines.readline().decode().strip():
            field, _, value = line.partition(": ")
            headers[field.lower()] = value
        self.heard.append((headers["host"], path, headers.get("authorization", "")))
        name, _, tag = path.removeprefix("/v2/").partition("/manifests/")
        known = self.registry.manifests.get((name, tag), b"")
        said = b"HTTP/1.1 200 OK\r\n"
        if self.moved and self.moved not in f"https://{headers['host']}{path}":
            said = f"HTTP/1.1 302 Found\r\nLocation: {self.moved}\r\n".encode()
        inside.sendall(said + f"Content-Length: {len(known)}\r\nConnection: close\r\n\r\n".encode() + known)

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


def _certify(into: Path, hosts: list[str]) -> None:
    """Write a key and a certificate that it has signed itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "Googles")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName(host) for host in hosts]
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    plain = key.private_bytes(serialization.Encoding.PEM, *form)
    into.write_bytes(plain + made.public_bytes(serialization.Encoding.PEM))
