"""Log in to a cluster as a kubeconfig says: tokens, certificates, credential plugins, impersonation; connect by its proxy.

Cases are compared with kubectl 1.37.1 by tests/backends/kubernetes/test_kubeconfigs.py.
"""

from __future__ import annotations

import base64
import http.client
import ipaddress
import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cloudtrain.backends.kubernetes.kubeconfig import ClusterAccess, read_data
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError
from cloudtrain.job.units import unix_time

LOGIN_S = 120.0  # timeout of a credential plugin, which may open a login page
FILES_S = 60.0  # a token or a certificate in a file may be renewed in place: it is read again after so long
PLUGIN_CONFIG = "client.authentication.k8s.io/exec"  # a cluster's extension with this name is for its plugins
HEADER_CHARACTERS = "!#$&'*+-.^_`|~"  # with letters and digits: what a header's name may have, but for %
CLUSTER_KEYS = ("tls-server-name", "insecure-skip-tls-verify", "proxy-url", "disable-compression")


class Credentials(NamedTuple):
    """What a request needs to be accepted, until it expires (seconds since 1970)."""

    authorization: str  # "" without a token
    tls: ssl.SSLContext | None
    expires_at: float
    renewable: bool  # whether another login may give others


def log_in(access: ClusterAccess, clock: Clock = SYSTEM) -> Credentials:
    """Return a user's credentials; blocking: a credential plugin may open a login page. Raises BackendError."""
    user, status = access.user, dict[str, Any]()
    authorization = _token(user)
    if not authorization and user.get("username"):
        pair = f"{user['username']}:{user.get('password') or ''}"
        authorization = f"Basic {base64.b64encode(pair.encode()).decode()}"
    if not authorization and isinstance(user.get("exec"), dict):
        status = _run_plugin(access)
        authorization = f"Bearer {status['token']}" if status.get("token") else ""
    key = str(status.get("clientCertificateData") or ""), str(status.get("clientKeyData") or "")
    files = any(user.get(name) for name in ("tokenFile", "client-certificate", "client-key"))
    expires_at = clock.now() + FILES_S if files else float("inf")
    if status.get("expirationTimestamp"):
        expires_at = min(expires_at, unix_time(str(status["expirationTimestamp"])) - 60)
    tls = _tls_context(access, *key) if access.server.startswith("https://") else None
    return Credentials(authorization, tls, expires_at, files or bool(status))


def impersonation(user: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the headers for `as`, `as-uid`, `as-groups` and `as-user-extra`."""
    # https://kubernetes.io/docs/reference/access-authn-authz/authentication/#user-impersonation (2026-11-29)
    headers = [("Impersonate-User", user.get("as")), ("Impersonate-Uid", user.get("as-uid"))]
    headers += [("Impersonate-Group", group) for group in user.get("as-groups") or ()]
    for key, values in (user.get("as-user-extra") or {}).items():
        name = f"Impersonate-Extra-{urllib.parse.quote(str(key), safe=HEADER_CHARACTERS)}"
        headers += [(name, value) for value in values or ()]
    return [(name, str(value)) for name, value in headers if value]


def _token(user: Mapping[str, Any]) -> str:
    path, token = user.get("tokenFile"), user.get("token")
    if path:  # it counts more than `token`, which is its copy
        try:
            token = Path(path).read_text("utf-8").strip() or token
        except (OSError, ValueError) as error:
            if not token:
                reason = error.strerror if isinstance(error, OSError) else "it is no text"
                raise BackendError(f"the token {path} cannot be read: {reason}") from None
        if not token:
            raise BackendError(f"the token {path} is empty", "let the tool that writes it renew it")
    return f"Bearer {token}" if token else ""


def _tls_context(access: ClusterAccess, certificate: str, key: str) -> ssl.SSLContext:
    """Return the TLS context with the cluster's authority and our client certificate; raises BackendError."""
    # No ssl.create_default_context: kubectl trusts the kubeconfig's authority alone, an intermediate one too, and takes
    # authorities that OpenSSL's strict mode (Python 3.13) refuses.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    own = certificate.encode() or read_data(access.user, "client-certificate")
    own_key = key.encode() or read_data(access.user, "client-key")
    try:
        if access.cluster.get("insecure-skip-tls-verify"):
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        elif authority := read_data(access.cluster, "certificate-authority"):
            context.load_verify_locations(cadata=authority.decode())
        else:
            context.load_default_certs()
        if own:
            with tempfile.NamedTemporaryFile() as file:  # mode 600; OpenSSL reads files only
                file.write(own + b"\n" + own_key)
                file.flush()
                context.load_cert_chain(file.name, password="")  # never ask for one on the terminal
    except (OSError, ValueError) as error:
        raise BackendError(f"the certificates of the kubeconfig cannot be used: {error}") from None
    return context


def _run_plugin(access: ClusterAccess) -> dict[str, Any]:
    """Run a credential plugin (gke-gcloud-auth-plugin, aws) and return its status; blocking. Raises BackendError."""
    # https://kubernetes.io/docs/reference/config-api/client-authentication.v1/ (2026-11-29)
    plugin = access.user["exec"]
    command, version, mode = str(plugin.get("command")), plugin.get("apiVersion"), plugin.get("interactiveMode")
    has_terminal = sys.stdin is not None and sys.stdin.isatty()
    if mode == "Always" and not has_terminal:
        raise BackendError(
            f"{command}, the kubeconfig's credential plugin, wants a terminal (interactiveMode: Always)",
            "log in with that tool first, or use a user of the kubeconfig that needs no terminal",
        )
    interactive = has_terminal and mode != "Never"
    spec: dict[str, Any] = {"interactive": interactive}
    if plugin.get("provideClusterInfo"):
        spec["cluster"] = _cluster_info(access)
    exec_info = {"kind": "ExecCredential", "apiVersion": version, "spec": spec}
    env = {**os.environ, "KUBERNETES_EXEC_INFO": json.dumps(exec_info)}
    env |= {str(item["name"]): str(item["value"]) for item in plugin.get("env") or ()}
    argv = [command, *map(str, plugin.get("args") or ())]
    try:
        completed = subprocess.run(
            argv,
            env=env,
            stdin=None if interactive else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if interactive else subprocess.PIPE,  # questions go to the terminal
            text=True,
            errors="replace",
            timeout=LOGIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        message = f"{command}, the kubeconfig's credential plugin, did not end within {LOGIN_S:.0f} s"
        raise BackendError(message, "log in with that tool, then check with: kubectl get pods") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        hint = str(plugin.get("installHint") or "the kubeconfig uses it as its credential plugin: install it")
        raise BackendError(f"{command} cannot be run: {reason}", " ".join(hint.split())[:500]) from None
    try:
        answer = json.loads(completed.stdout) if completed.returncode == 0 else {}
        status = dict(answer["status"])
    except (ValueError, KeyError, TypeError):
        lines = (completed.stderr or "").strip().splitlines() or [f"exit code {completed.returncode}"]
        raise BackendError(
            f"the login command of the kubeconfig, {command}, returned no credentials: {lines[-1][:300]}",
            "log in with that tool, then check with: kubectl get pods",
        ) from None
    if answer.get("apiVersion") != version:
        message = f"{command} answers as {answer.get('apiVersion')}, the kubeconfig's exec.apiVersion is {version}"
        raise BackendError(message, "write the kubeconfig again with a current version of the tool that made it")
    pair = [bool(status.get(name)) for name in ("clientCertificateData", "clientKeyData")]
    if any(pair) != all(pair) or not (any(pair) or status.get("token")):
        raise BackendError(f"{command} returned neither a token nor a certificate with its key")
    return status


def _cluster_info(access: ClusterAccess) -> dict[str, Any]:
    """Return what `provideClusterInfo` gives a plugin."""
    info: dict[str, Any] = {key: access.cluster[key] for key in CLUSTER_KEYS if access.cluster.get(key)}
    info |= {"server": access.server, "config": None}
    if authority := read_data(access.cluster, "certificate-authority"):
        info["certificate-authority-data"] = base64.b64encode(authority).decode()
    for extension in access.cluster.get("extensions") or ():
        if extension.get("name") == PLUGIN_CONFIG:
            info["config"] = extension.get("extension")
    return info


class Handler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Lets urllib send requests over `connect`, with the headers of an impersonated user."""

    def __init__(self, access: ClusterAccess, tls: Callable[[], ssl.SSLContext | None]) -> None:
        urllib.request.AbstractHTTPHandler.__init__(self)  # HTTPSHandler's would read all authorities of the system
        self._access, self._tls = access, tls

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        tls = self._tls() if req.type == "https" else None
        return self.do_open(partial(_Connection, self._access, tls), req)

    https_open = http_open


class _Connection(http.client.HTTPConnection):
    def __init__(self, access: ClusterAccess, tls: ssl.SSLContext | None, host: str, timeout: float) -> None:
        self.default_port = 443 if tls else 80
        super().__init__(host, timeout=timeout)
        self._access, self._tls = access, tls

    def connect(self) -> None:
        self.sock = connect(self._access, self._tls, self.host, self.port, self.timeout)

    def endheaders(self, *args: Any, **options: Any) -> None:
        for name, value in impersonation(self._access.user):  # a dict, as urllib has it, holds a name once
            self.putheader(name, value.encode())
        super().endheaders(*args, **options)


def connect(
    access: ClusterAccess, tls: ssl.SSLContext | None, host: str, port: int, timeout_s: float | None
) -> socket.socket:
    """Return a connection to a server, by the proxy if there is one, after TLS if it has that; raises OSError."""
    proxy = find_proxy(access, host)
    if not proxy:
        connection = socket.create_connection((host, port), timeout_s)
    elif proxy.scheme in ("socks5", "socks5h"):
        connection = socket.create_connection((str(proxy.hostname), proxy.port or 1080), timeout_s)
        _ask_socks(connection, host, port)
    else:
        tunnel = http.client.HTTPConnection(str(proxy.hostname), proxy.port or 80, timeout=timeout_s)
        account = f"{urllib.parse.unquote(proxy.username or '')}:{urllib.parse.unquote(proxy.password or '')}"
        basic = {"Proxy-Authorization": f"Basic {base64.b64encode(account.encode()).decode()}"}
        tunnel.set_tunnel(host, port, basic if proxy.username else {})
        tunnel.connect()
        connection = tunnel.sock
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls is None:
        return connection
    name = str(access.cluster.get("tls-server-name") or host)
    return tls.wrap_socket(connection, server_hostname=name)


def find_proxy(access: ClusterAccess, host: str) -> urllib.parse.SplitResult | None:
    """Return the proxy to a host: `proxy-url`, else the environment's as Go reads it; raises BackendError for other kinds."""
    # https://pkg.go.dev/golang.org/x/net/http/httpproxy (2026-11-29): never for this machine; $NO_PROXY may hold networks
    found = str(access.cluster.get("proxy-url") or "")
    if not found:
        if _is_excluded(host):
            return None
        found = urllib.request.getproxies().get(access.server.partition(":")[0], "")
    proxy = urllib.parse.urlsplit(found if "://" in found else f"http://{found}")
    if found and proxy.scheme not in ("http", "socks5", "socks5h"):
        message = f"a proxy with {proxy.scheme}:// is not supported ({proxy.hostname})"
        raise BackendError(message, "use one with http:// or socks5://: proxy-url of the kubeconfig, or HTTPS_PROXY")
    return proxy if found else None


def _is_excluded(host: str) -> bool:
    """Return whether the environment's proxy is not for a host."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host == "localhost" or bool(urllib.request.proxy_bypass(host))
    for entry in urllib.request.getproxies().get("no", "").split(","):
        try:
            if address in ipaddress.ip_network(entry.strip(), strict=False):
                return True
        except ValueError:
            continue
    return address.is_loopback or bool(urllib.request.proxy_bypass(host))


def _ask_socks(connection: socket.socket, host: str, port: int) -> None:
    """Ask a SOCKS5 proxy without a login for a connection, by name: RFC 1928. Raises OSError."""
    connection.sendall(b"\x05\x01\x00")
    if _read(connection, 2) != b"\x05\x00":
        raise OSError("the SOCKS5 proxy wants a login")
    name = host.encode("idna")
    connection.sendall(b"\x05\x01\x00\x03" + bytes([len(name)]) + name + port.to_bytes(2, "big"))
    _, refusal, _, kind = _read(connection, 4)
    if refusal:
        raise OSError(f"the SOCKS5 proxy does not connect to {host}:{port} (error {refusal})")
    length = {1: 4, 4: 16}.get(kind) or _read(connection, 1)[0]
    _read(connection, length + 2)


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise OSError("the SOCKS5 proxy closed the connection")
        data += piece
    return data
