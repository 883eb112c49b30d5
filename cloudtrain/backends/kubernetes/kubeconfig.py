"""Read a kubeconfig, or a pod's service account: server address, credentials, credential plugins, TLS certificates.

Standard library and PyYAML only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import ssl
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cloudtrain.backends.http import SAFE_ADDRESS
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError
from cloudtrain.job.units import unix_time

SERVICE_ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LOGIN_S = 120.0  # timeout of a credential plugin, which may open a login page
Document = dict[str, Any]


class ClusterAccess(NamedTuple):
    """Address and credentials of a cluster: one context of a kubeconfig."""

    server: str
    user: Mapping[str, Any]
    cluster: Mapping[str, Any]
    folder: Path  # paths in the kubeconfig are relative to it
    context: str = ""  # the context's name, "" in a pod

    @property
    def ca(self) -> str:
        """A digest of the certificate authority, which tells clusters apart; "" if there is none."""
        try:
            if data := self.cluster.get("certificate-authority-data"):
                certificate = base64.b64decode(data)
            elif path := self.cluster.get("certificate-authority"):
                certificate = (self.folder / path).read_bytes()
            else:
                return ""
        except (OSError, ValueError):
            return ""  # connecting with it raises the error
        return hashlib.sha256(b"".join(certificate.split())).hexdigest()[:16]

    @property
    def identity(self) -> str:
        """The cluster's identity in handles: its address, and the digest of its own certificate authority if it has one."""
        return "#".join(part for part in (self.server.rstrip("/"), self.ca) if part)


def parse_kubeconfig(kubeconfig: str | None, context: str | None) -> ClusterAccess:
    """Return address and credentials of a context, by default the current one; raises BackendError if there is none."""
    import yaml

    setting = kubeconfig or os.environ.get("KUBECONFIG", "")
    paths = [Path(part).expanduser() for part in setting.split(os.pathsep) if part] or [
        Path("~/.kube/config").expanduser()
    ]
    documents: list[tuple[Path, Document]] = []
    for path in paths:
        try:
            documents.append((path, yaml.safe_load(path.read_text()) or {}))
        except FileNotFoundError:
            continue
        except (OSError, yaml.YAMLError) as error:
            raise BackendError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    if not documents:
        if not setting and "KUBERNETES_SERVICE_HOST" in os.environ:
            return _in_cluster_access()
        message = f"there is no kubeconfig ({os.pathsep.join(map(str, paths))})"
        raise BackendError(
            message, "set options.kubernetes.kubeconfig or $KUBECONFIG, or let `gcloud`, `aws` or `kind` write one"
        )

    def find_entry(kind: str, name: str) -> tuple[Path, Document]:
        for path, document in documents:
            for entry in document.get(kind) or ():
                if entry.get("name") == name:
                    return path.parent, entry.get(kind.rstrip("s")) or {}
        available = sorted(str(i.get("name")) for _, document in documents for i in document.get(kind) or ())
        raise BackendError(
            f"the kubeconfig has no {kind.rstrip('s')} {name!r}", f"it has {', '.join(available) or 'none'}"
        )

    context_name = context or next((str(d["current-context"]) for _, d in documents if d.get("current-context")), "")
    if not context_name:
        raise BackendError("the kubeconfig has no current context", "choose one with options.kubernetes.context")
    _, context_entry = find_entry("contexts", context_name)
    folder, cluster = find_entry("clusters", str(context_entry.get("cluster")))
    user_folder, user = find_entry("users", str(context_entry["user"])) if context_entry.get("user") else (folder, {})
    if not cluster.get("server"):
        raise BackendError(f"the context {context_name} has no server address")
    if user and not re.match(SAFE_ADDRESS, str(cluster["server"])):
        message = f"the context {context_name} would send credentials to {cluster['server']} without encryption"
        raise BackendError(message, "use an https address in the kubeconfig, or a tunnel to 127.0.0.1")
    if folder != user_folder:
        user = {
            k: str(user_folder / v) if k in ("tokenFile", "client-certificate", "client-key") else v
            for k, v in user.items()
        }
    return ClusterAccess(str(cluster["server"]), user, cluster, folder, context_name)


def _in_cluster_access() -> ClusterAccess:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    host = f"[{host}]" if ":" in host else host
    return ClusterAccess(
        f"https://{host}:{port}",
        {"tokenFile": str(SERVICE_ACCOUNT_DIR / "token")},
        {"certificate-authority": str(SERVICE_ACCOUNT_DIR / "ca.crt")},
        SERVICE_ACCOUNT_DIR,
    )


def bearer_token(access: ClusterAccess, clock: Clock = SYSTEM) -> tuple[str, float] | None:
    """Return a bearer token and when it expires, None if the user has none; blocking. Raises BackendError."""
    user = access.user
    if user.get("token"):
        return str(user["token"]), float("inf")
    if path := user.get("tokenFile"):
        try:
            return (access.folder / path).read_text().strip(), clock.now() + 60  # it is renewed in place
        except OSError as error:
            raise BackendError(f"the token {path} cannot be read: {error.strerror}") from None
    return _exec_plugin_token(user["exec"], access.folder) if user.get("exec") else None


def tls_context(access: ClusterAccess) -> ssl.SSLContext:
    """Return the TLS context with the cluster's authority and our client certificate; raises BackendError."""
    cluster, user = access.cluster, access.user
    context = ssl.create_default_context()
    try:
        if cluster.get("insecure-skip-tls-verify"):
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        elif data := cluster.get("certificate-authority-data"):
            context.load_verify_locations(cadata=base64.b64decode(data).decode())
        elif path := cluster.get("certificate-authority"):
            context.load_verify_locations(cafile=str(access.folder / path))
        if user.get("client-certificate-data"):
            with tempfile.NamedTemporaryFile() as file:  # mode 600; OpenSSL reads files only
                file.write(base64.b64decode(user["client-certificate-data"]) + b"\n")
                file.write(base64.b64decode(user["client-key-data"]))
                file.flush()
                context.load_cert_chain(file.name)
        elif user.get("client-certificate"):
            context.load_cert_chain(access.folder / user["client-certificate"], access.folder / user["client-key"])
    except (OSError, ValueError, KeyError) as error:
        raise BackendError(f"the certificates of the kubeconfig cannot be used: {error}") from None
    return context


def _exec_plugin_token(plugin: Mapping[str, Any], folder: Path) -> tuple[str, float]:
    """Run a credential plugin (gke-gcloud-auth-plugin, aws) and return its token; blocking. Raises BackendError."""
    command = str(plugin.get("command"))
    if "/" in command:
        command = str(folder / command)
    exec_info = {"apiVersion": plugin.get("apiVersion"), "kind": "ExecCredential", "spec": {"interactive": False}}
    env = {**os.environ, "KUBERNETES_EXEC_INFO": json.dumps(exec_info)}
    env |= {str(item["name"]): str(item["value"]) for item in plugin.get("env") or ()}
    argv = [command, *map(str, plugin.get("args") or ())]
    try:
        completed = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=LOGIN_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        hint = str(plugin.get("installHint") or "the kubeconfig uses it as its credential plugin: install it").strip()
        raise BackendError(f"{plugin.get('command')} returned no credentials: {error}", hint) from None
    try:
        status = json.loads(completed.stdout)["status"]
        token = str(status["token"])
    except (ValueError, KeyError, TypeError):
        last_line = (completed.stderr.strip().splitlines() or [f"exit code {completed.returncode}"])[-1]
        raise BackendError(
            f"the login command of the kubeconfig, {plugin.get('command')}, returned no token: {last_line[:300]}",
            "log in with that tool, then check with: kubectl get pods",
        ) from None
    expires_at = (
        unix_time(str(status["expirationTimestamp"])) - 60 if status.get("expirationTimestamp") else float("inf")
    )
    return token, expires_at
