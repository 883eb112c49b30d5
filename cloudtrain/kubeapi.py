"""A Kubernetes API server as seen from a client: kubeconfig or the pod we run in, calls, retries, errors as sentences.

The standard library alone: plans, and looks that are repeated, should not wait for a large SDK to be imported.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cloudtrain.errors import BackendError, Unreachable

POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 60.0
LOGIN_S = 120.0  # of a credential plugin, which may ask a person
TRIES = 5
PAUSE_S = 0.25  # doubled from try to try
LATER = (429, 500, 502, 503, 504)
Document = dict[str, Any]


class KubeError(BackendError):
    """The server answered with an error; `status` is that of HTTP."""

    def __init__(self, status: int, said: str, what: str) -> None:
        message, hint = _explained(status, said, what)
        super().__init__(message, hint)
        self.status, self.said = status, said


class Place(NamedTuple):
    """Where a server is and who we are there."""

    server: str
    user: Mapping[str, Any]
    cluster: Mapping[str, Any]
    folder: Path  # what paths in a kubeconfig are relative to


class KubeApi:
    """Calls of one context. Nothing is read or asked before it is needed; raises BackendError, Unreachable."""

    def __init__(self, kubeconfig: str | None, context: str | None, server: str | None = None) -> None:
        self._kubeconfig, self._context, self._pinned = kubeconfig, context, server
        self._place: Place | None = None
        self._opener: Any = None
        self._token: tuple[str, float] | None = None  # and until when it is good

    @property
    def place(self) -> Place:
        """Where calls go; raises BackendError where no configuration is found, or another server than the pinned one."""
        if self._place is None:
            found = _from_files(self._kubeconfig, self._context)
            if self._pinned and found.server.rstrip("/") != self._pinned.rstrip("/"):
                said = f"the context leads to {found.server}, the target is pinned to {self._pinned}"
                raise BackendError(said, "choose another context, or change options.kubernetes.server")
            self._place = found
        return self._place

    def get(self, path: str, what: str, query: Mapping[str, str] | None = None) -> Document | None:
        """Return an object or a list, None where there is no such thing; blocking."""
        found = self.call("GET", path, what, query=query, fine=(404,))
        return None if found[0] == 404 else json.loads(found[1])

    def call(
        self,
        method: str,
        path: str,
        what: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        fine: tuple[int, ...] = (),
    ) -> tuple[int, bytes]:
        """Return status and body of an answer of 2xx, or of one in `fine`; blocking.

        Every call may be repeated: creating says by 409 that it was done, patches are merged. Raises KubeError.
        """
        data = None if body is None else json.dumps(body).encode()
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        address = self.place.server.rstrip("/") + path + (f"?{urllib.parse.urlencode(query)}" if query else "")
        for turn in range(TRIES):
            if turn:
                time.sleep(min(PAUSE_S * 2**turn, 8.0))
            last = turn == TRIES - 1
            headers = {"Accept": "application/json, */*", **self._signed(), **({"Content-Type": kind} if data else {})}
            try:
                request = urllib.request.Request(address, data, headers, method=method)
                with self._open(request) as answer:
                    return answer.status, answer.read()
            except urllib.error.HTTPError as error:
                with error:
                    status, text = error.code, error.read()
                if status in fine:
                    return status, text
                if status == 401 and self._token is not None and not last:
                    self._token = None  # it was revoked: the plugin, or the file, has a new one
                    continue
                if last or status not in LATER:
                    raise KubeError(status, _said(text), what) from None
            except (OSError, http.client.HTTPException) as error:
                if last:
                    reason = getattr(error, "reason", None) or error
                    raise Unreachable(
                        f"{what}: {self.place.server} was not reached: {reason}", _network(reason)
                    ) from None
        raise AssertionError("the last try returns or raises")

    def _open(self, request: urllib.request.Request) -> Any:
        if self._opener is None:
            handlers: list[Any] = [urllib.request.HTTPSHandler(context=_tls(self.place))]
            if proxy := self.place.cluster.get("proxy-url"):
                handlers.append(urllib.request.ProxyHandler({"http": proxy, "https": proxy}))
            self._opener = urllib.request.build_opener(*handlers)
        return self._opener.open(request, timeout=TIMEOUT_S)

    def _signed(self) -> dict[str, str]:
        user = self.place.user
        if self._token is None or self._token[1] <= time.time():
            self._token = self._new_token(user)
        return {"Authorization": f"Bearer {self._token[0]}"} if self._token else {}

    def _new_token(self, user: Mapping[str, Any]) -> tuple[str, float] | None:
        if user.get("token"):
            return str(user["token"]), float("inf")
        if path := user.get("tokenFile"):
            try:
                return (self.place.folder / path).read_text().strip(), time.time() + 60  # it is renewed in place
            except OSError as error:
                raise BackendError(f"the token {path} cannot be read: {error.strerror}") from None
        return _from_plugin(user["exec"], self.place.folder) if user.get("exec") else None


def _from_files(kubeconfig: str | None, context: str | None) -> Place:
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
    return Place(str(cluster["server"]), user, cluster, folder)


def _from_pod() -> Place:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    host = f"[{host}]" if ":" in host else host
    return Place(
        f"https://{host}:{port}", {"tokenFile": str(POD / "token")}, {"certificate-authority": str(POD / "ca.crt")}, POD
    )


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


def _tls(place: Place) -> ssl.SSLContext:
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


def _explained(status: int, said: str, what: str) -> tuple[str, str]:
    text = " ".join(said.split())[:500]
    if status == 401:
        return f"{what}: the cluster does not accept the credentials", "log in again; kubectl shows the same"
    if "exceeded quota" in text:
        return f"{what}: the namespace's quota does not allow it: {text}", "kubectl describe quota"
    if status == 403:
        return f"{what}: permission denied: {text}", "docs/kubernetes.md lists the rules that are needed"
    if status == 404 and "namespaces" in text:
        return f"{what}: {text}", "options.kubernetes.namespace names another"
    return f"{what}: {text or 'no reason was given'} ({status})", "" if status < 500 else "try again"


def _said(body: bytes) -> str:
    text = body.decode("utf-8", "replace")
    try:
        found = json.loads(text)
        return str(found.get("message") or found["error"]["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return text


def _network(reason: object) -> str:
    if isinstance(reason, ssl.SSLCertVerificationError):
        return "the kubeconfig's certificate authority is not the server's"
    return "check the network, a VPN, and the context (options.kubernetes.context)"


def _moment(text: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
