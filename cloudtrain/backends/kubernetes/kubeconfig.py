"""Read a kubeconfig, or a pod's service account: the server's address and what is known of its user. credentials.py logs in.

Files are merged as kubectl does: the first file that has an entry, or a current context, counts as a whole, and paths
are relative to the file that names them.
https://kubernetes.io/docs/concepts/configuration/organize-cluster-access-kubeconfig/ (2026-11-29)
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cloudtrain.errors import BackendError
from cloudtrain.source.secrets import SAFE_ADDRESS

SERVICE_ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")
FILES = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
# Login methods that kubectl has removed, or that only it has, and what replaces them
AUTH_PROVIDERS = {
    "gcp": "install gke-gcloud-auth-plugin and run: gcloud container clusters get-credentials CLUSTER",
    "azure": "install kubelogin of Azure and run: kubelogin convert-kubeconfig",
    "oidc": "use an exec plugin, for example kubelogin: kubectl oidc-login setup --oidc-issuer-url=URL writes it",
}
EXPECTED = "write it with `kubectl config`, `gcloud`, `aws` or `kind`"
Document = dict[str, Any]


class ClusterAccess(NamedTuple):
    """Address and credentials of a cluster: one context of a kubeconfig. Paths in it are absolute."""

    server: str
    user: Mapping[str, Any]
    cluster: Mapping[str, Any]
    context: str = ""  # the context's name, "" in a pod

    @property
    def ca(self) -> str:
        """A digest of the certificate authority, which tells clusters apart; "" if there is none."""
        try:
            certificate = read_data(self.cluster, "certificate-authority")
        except BackendError:
            return ""  # connecting with it raises the error
        return hashlib.sha256(b"".join(certificate.split())).hexdigest()[:16] if certificate else ""

    @property
    def identity(self) -> str:
        """The cluster's identity in handles: its address, and the digest of its own certificate authority if it has one."""
        return "#".join(part for part in (self.server.rstrip("/"), self.ca) if part)


def parse_kubeconfig(kubeconfig: str | None, context: str | None) -> ClusterAccess:
    """Return address and credentials of a context, by default the current one; raises BackendError if there is none."""
    setting = kubeconfig or os.environ.get("KUBECONFIG", "")
    paths = [Path(part).expanduser() for part in setting.split(os.pathsep) if part] or [
        Path("~/.kube/config").expanduser()
    ]
    documents = [(path, document) for path in paths if (document := _read_document(path)) is not None]
    if not documents:
        if not setting and "KUBERNETES_SERVICE_HOST" in os.environ:
            return _in_cluster_access()
        message = f"there is no kubeconfig ({os.pathsep.join(map(str, paths))})"
        raise BackendError(
            message, "set options.kubernetes.kubeconfig or $KUBECONFIG, or let `gcloud`, `aws` or `kind` write one"
        )

    def find_entry(kind: str, name: str) -> Document:
        available = []
        for path, document in documents:
            for entry in document.get(kind) or ():
                values = entry.get(kind.rstrip("s")) or {} if isinstance(entry, dict) else None
                if not isinstance(values, dict):
                    raise BackendError(f"{path}: {kind} must be a list of named entries", EXPECTED)
                if str(entry.get("name")) == name:
                    return _with_absolute_paths(path.parent.absolute(), values)
                available.append(str(entry.get("name")))
        raise BackendError(
            f"the kubeconfig has no {kind.rstrip('s')} {name!r}", f"it has {', '.join(sorted(available)) or 'none'}"
        )

    context_name = context or next((str(d["current-context"]) for _, d in documents if d.get("current-context")), "")
    if not context_name:
        raise BackendError("the kubeconfig has no current context", "choose one with options.kubernetes.context")
    chosen = find_entry("contexts", context_name)
    cluster = find_entry("clusters", str(chosen.get("cluster")))
    user = find_entry("users", str(chosen["user"])) if chosen.get("user") else {}
    if not cluster.get("server"):
        raise BackendError(f"the context {context_name} has no server address")
    server = str(cluster["server"])
    if user and not re.match(SAFE_ADDRESS, server):
        message = f"the context {context_name} would send credentials to {server} without encryption"
        raise BackendError(message, "use an https address in the kubeconfig, or a tunnel to 127.0.0.1")
    _check_user(str(chosen.get("user")), user)
    return ClusterAccess(server, user, cluster, context_name)


def _read_document(path: Path) -> Document | None:
    """Return a kubeconfig's content, None where there is no file; raises BackendError."""
    import yaml

    try:
        document = yaml.safe_load(path.read_text("utf-8")) or {}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise BackendError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    lists = ("contexts", "clusters", "users")
    if not isinstance(document, dict) or not all(isinstance(document.get(kind) or [], list) for kind in lists):
        raise BackendError(f"{path} is no kubeconfig: it must be a mapping with lists of {', '.join(lists)}", EXPECTED)
    return document


def _with_absolute_paths(folder: Path, values: Document) -> Document:
    """Return an entry whose paths are below its file's folder; a plugin without a slash is looked for in $PATH."""
    found = {key: str(folder / str(value)) if key in FILES and value else value for key, value in values.items()}
    plugin = found.get("exec")
    if isinstance(plugin, dict) and "/" in str(plugin.get("command")):
        found["exec"] = {**plugin, "command": str(folder / str(plugin["command"]))}
    return found


def _check_user(name: str, user: Document) -> None:
    """Refuse what kubectl refuses too, or what only kubectl has; raises BackendError."""
    if provider := user.get("auth-provider"):
        kind = str(provider.get("name")) if isinstance(provider, dict) else ""
        raise BackendError(
            f"the kubeconfig's user {name} logs in with the auth-provider {kind}, which is not supported",
            AUTH_PROVIDERS.get(kind, "use a credential plugin (exec) or a token"),
        )
    if not user.get("as") and any(user.get(key) for key in ("as-uid", "as-groups", "as-user-extra")):
        raise BackendError(
            f"the kubeconfig's user {name} has as-uid, as-groups or as-user-extra without `as`",
            "name the user to impersonate: kubectl refuses it too",
        )
    if user.get("token") and (user.get("username") or user.get("password")):
        raise BackendError(f"the kubeconfig's user {name} has a token and a password", "remove one of them")


def read_data(entry: Mapping[str, Any], name: str) -> bytes:
    """Return a certificate or key of a kubeconfig, from `NAME-data` or the file NAME; b"" without it.

    Raises:
        BackendError: It is not readable or not base64.
    """
    try:
        if data := entry.get(f"{name}-data"):
            return base64.b64decode(data)
        return Path(entry[name]).read_bytes() if entry.get(name) else b""
    except (OSError, ValueError, TypeError) as error:
        raise BackendError(f"{name} of the kubeconfig cannot be read: {error}") from None


def _in_cluster_access() -> ClusterAccess:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    host = f"[{host}]" if ":" in host else host
    return ClusterAccess(
        f"https://{host}:{port}",
        {"tokenFile": str(SERVICE_ACCOUNT_DIR / "token")},
        {"certificate-authority": str(SERVICE_ACCOUNT_DIR / "ca.crt")},
    )
