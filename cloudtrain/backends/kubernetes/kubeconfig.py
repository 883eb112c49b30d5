"""Where a cluster is and who we are there: kubeconfig, the pod we run in, credential plugins, certificates.

Standard library and yaml alone.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import ssl
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cloudtrain.errors import BackendError

POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LOGIN_S = 120.0  # of a credential plugin, which may ask a person
Document = dict[str, Any]


class Place(NamedTuple):
    """Where a server is and who we are there."""

    server: str
    user: Mapping[str, Any]
    cluster: Mapping[str, Any]
    folder: Path  # what paths in a kubeconfig are relative to
    context: str = ""  # its name, "" in a pod

    @property
    def ca(self) -> str:
        """A digest of the certificate authority, which another cluster does not share; "" where none is given."""
        try:
            if data := self.cluster.get("certificate-authority-data"):
                given = base64.b64decode(data)
            elif path := self.cluster.get("certificate-authority"):
                given = (self.folder / path).read_bytes()
            else:
                return ""
        except (OSError, ValueError):
            return ""  # whoever connects with it is told
        return hashlib.sha256(b"".join(given.split())).hexdigest()[:16]

    @property
    def identity(self) -> str:
        """Which cluster this is, as a handle keeps it: its address, and its authority where it has one of its own."""
        return "#".join(part for part in (self.server.rstrip("/"), self.ca) if part)


def read(kubeconfig: str | None, context: str | None) -> Place:
    """Return the place of a context, by default the current one; raises BackendError where there is none."""
    import yaml

    given = kubeconfig or os.environ.get("KUBECONFIG", "")
    paths = [Path(part).expanduser() for part in given.split(os.pathsep) if part] or [
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
        if not given and "KUBERNETES_SERVICE_HOST" in os.environ:
            return _from_pod()
        said = f"there is no kubeconfig ({os.pathsep.join(map(str, paths))})"
        raise BackendError(said, "options.kubernetes.kubeconfig, $KUBECONFIG, or `gcloud`/`aws`/`kind` write one")

    def named(kind: str, name: str) -> tuple[Path, Document]:
        for path, document in documents:
            for item in document.get(kind) or ():
                if item.get("name") == name:
                    return path.parent, item.get(kind.rstrip("s")) or {}
        known = sorted(str(i.get("name")) for _, document in documents for i in document.get(kind) or ())
        raise BackendError(f"the kubeconfig has no {kind.rstrip('s')} {name!r}", f"it has {', '.join(known) or 'none'}")

    chosen = context or next((str(d["current-context"]) for _, d in documents if d.get("current-context")), "")
    if not chosen:
        raise BackendError("the kubeconfig has no current context", "options.kubernetes.context names one")
    _, about = named("contexts", chosen)
    folder, cluster = named("clusters", str(about.get("cluster")))
    user_folder, user = named("users", str(about["user"])) if about.get("user") else (folder, {})
    if not cluster.get("server"):
        raise BackendError(f"the context {chosen} names no server")
    if folder != user_folder:
        user = {
            k: str(user_folder / v) if k in ("tokenFile", "client-certificate", "client-key") else v
            for k, v in user.items()
        }
    return Place(str(cluster["server"]), user, cluster, folder, chosen)


def _from_pod() -> Place:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    host = f"[{host}]" if ":" in host else host
    return Place(
        f"https://{host}:{port}", {"tokenFile": str(POD / "token")}, {"certificate-authority": str(POD / "ca.crt")}, POD
    )


def token(place: Place) -> tuple[str, float] | None:
    """Return a token and until when it is good, None for who has none; blocking. Raises BackendError."""
    user = place.user
    if user.get("token"):
        return str(user["token"]), float("inf")
    if path := user.get("tokenFile"):
        try:
            return (place.folder / path).read_text().strip(), time.time() + 60  # it is renewed in place
        except OSError as error:
            raise BackendError(f"the token {path} cannot be read: {error.strerror}") from None
    return _from_plugin(user["exec"], place.folder) if user.get("exec") else None


def tls(place: Place) -> ssl.SSLContext:
    """Return what a connection trusts and shows; raises BackendError."""
    cluster, user = place.cluster, place.user
    context = ssl.create_default_context()
    try:
        if cluster.get("insecure-skip-tls-verify"):
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        elif data := cluster.get("certificate-authority-data"):
            context.load_verify_locations(cadata=base64.b64decode(data).decode())
        elif path := cluster.get("certificate-authority"):
            context.load_verify_locations(cafile=str(place.folder / path))
        if user.get("client-certificate-data"):
            with tempfile.NamedTemporaryFile() as file:  # mode 600; OpenSSL reads files only
                file.write(base64.b64decode(user["client-certificate-data"]) + b"\n")
                file.write(base64.b64decode(user["client-key-data"]))
                file.flush()
                context.load_cert_chain(file.name)
        elif user.get("client-certificate"):
            context.load_cert_chain(place.folder / user["client-certificate"], place.folder / user["client-key"])
    except (OSError, ValueError, KeyError) as error:
        raise BackendError(f"the certificates of the kubeconfig cannot be used: {error}") from None
    return context


def _from_plugin(plugin: Mapping[str, Any], folder: Path) -> tuple[str, float]:
    """Ask a credential plugin (gke-gcloud-auth-plugin, aws) for a token; blocking. Raises BackendError."""
    command = str(plugin.get("command"))
    if "/" in command:
        command = str(folder / command)
    about = {"apiVersion": plugin.get("apiVersion"), "kind": "ExecCredential", "spec": {"interactive": False}}
    env = {**os.environ, "KUBERNETES_EXEC_INFO": json.dumps(about)}
    env |= {str(item["name"]): str(item["value"]) for item in plugin.get("env") or ()}
    argv = [command, *map(str, plugin.get("args") or ())]
    try:
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=LOGIN_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        hint = str(plugin.get("installHint") or "the kubeconfig names it as its credential plugin").strip()
        raise BackendError(f"{plugin.get('command')} did not give credentials: {error}", hint) from None
    try:
        status = json.loads(done.stdout)["status"]
        token = str(status["token"])
    except (ValueError, KeyError, TypeError):
        words = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise BackendError(f"{plugin.get('command')} did not give a token: {words[:300]}", "log in again") from None
    until = _moment(str(status["expirationTimestamp"])) - 60 if status.get("expirationTimestamp") else float("inf")
    return token, until


def _moment(text: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
