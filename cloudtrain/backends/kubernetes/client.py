"""HTTP client for the Kubernetes API server: requests, retries, readable errors.

It uses the standard library only, because importing the Kubernetes SDK would slow down every plan and status call.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from cloudtrain.backends.http import RETRYABLE, Answer, Http, HttpError
from cloudtrain.backends.kubernetes import credentials, kubeconfig
from cloudtrain.backends.kubernetes.credentials import Credentials
from cloudtrain.backends.kubernetes.kubeconfig import ClusterAccess
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError, NoCapacity, Unreachable

Document = dict[str, Any]


class KubeError(HttpError):
    """The server answered with an error; `status` is the HTTP status code."""

    def __init__(self, answer: Answer, failure: str) -> None:
        super().__init__(*_describe_error(answer.status, _error_message(answer.data), failure), answer)


class KubeUnreachable(KubeError, Unreachable):
    """The server failed, is overloaded, or reported a conflict: the call may or may not have been carried out."""


class KubeQuota(KubeError, NoCapacity):
    """The namespace's quota does not allow another object."""


def error_for_answer(answer: Answer, failure: str) -> KubeError:
    """Return the exception for an error answer: unreachable, quota exceeded, or refused."""
    if answer.status in (408, 409, 429) or answer.status >= 500:
        return KubeUnreachable(answer, failure)
    quota = answer.status == 403 and "exceeded quota" in _error_message(answer.data)
    return (KubeQuota if quota else KubeError)(answer, failure)


class KubeApi:
    """Calls the API server of one kubeconfig context. Connects on first use; raises BackendError, Unreachable."""

    def __init__(
        self,
        kubeconfig: str | None,
        context: str | None,
        server: str | None = None,
        ca: str | None = None,
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        self.clock = clock
        self._kubeconfig, self._context, self._pinned_server, self._ca = kubeconfig, context, server, ca
        self._access: ClusterAccess | None = None
        self._credentials: Credentials | None = None
        self._http = Http(self._address, error_for_answer, self._network_hint, self._handlers, self._renew, clock)

    @property
    def access(self) -> ClusterAccess:
        """Server and credentials; raises BackendError without a kubeconfig, or if it names another than the pinned cluster."""
        if self._access is None:
            access = kubeconfig.parse_kubeconfig(self._kubeconfig, self._context)
            if self._pinned_server and access.server.rstrip("/") != self._pinned_server.rstrip("/"):
                message = (
                    f"the kubeconfig's context points to {access.server}, but the target allows only the cluster "
                    f"{self._pinned_server}"
                )
                raise BackendError(message, "choose another context, or change options.kubernetes.server")
            if self._ca and access.ca != self._ca:
                message = f"{access.server} is not the cluster that the target allows: options.kubernetes.ca differs"
                raise BackendError(message, "choose another context, or change options.kubernetes.ca")
            self._access = access
        return self._access

    def pin(self) -> dict[str, str]:
        """Return the options (context, server, ca) that pin later calls to this cluster; {} if no cluster is configured.

        Reads local files only. If the context names another server than the pinned one, the first call raises the error.
        """
        try:
            access = self.access
        except BackendError:
            return {}
        pinned = {"context": access.context, "server": access.server, "ca": access.ca}
        return {name: value for name, value in pinned.items() if value}

    def get(self, path: str, failure: str, query: Mapping[str, str] | None = None) -> Document | None:
        """Return an object or a list, None on 404; blocking."""
        answer = self.call("GET", path, failure, query=query, accept=(404,))
        return None if answer.status == 404 else answer.json

    def call(
        self,
        method: str,
        path: str,
        failure: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        accept: tuple[int, ...] = (),
    ) -> Answer:
        """Send a request with retries and return an answer of 2xx, or of a status in `accept`; blocking.

        `failure` begins the error message. Every call is safe to repeat: a second create answers 409, patches are merged.
        Raises KubeError, and Unreachable if an earlier try may have been carried out although the last one was refused.
        """
        data = None if body is None else json.dumps(body).encode()
        content_type = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Content-Type": content_type} if data else {}
        # A patch carries no resourceVersion, so 409 means that the object changed too often, not that ours is stale.
        retryable = (*RETRYABLE, 409) if method == "PATCH" else RETRYABLE
        return self._http.call(
            method, _with_query(path, query), failure, data=data, headers=headers, accept=accept, retryable=retryable
        )

    def stream(
        self,
        path: str,
        failure: str,
        query: Mapping[str, str],
        headers: Mapping[str, str] | None = None,
        first: int = 0,
        last: int | None = None,
    ) -> Iterator[bytes]:
        """Yield a body in chunks, or a span of its bytes; blocking. An interrupted download continues where it was."""
        return self._http.stream(_with_query(path, query), failure, headers, first, last)

    def open_socket(self, path: str, timeout_s: float) -> tuple[str, list[tuple[str, str]], socket.socket]:
        """Return address, headers and connection of a websocket to the server, TLS included; blocking. Raises OSError."""
        known = self._log_in()
        url = urllib.parse.urlsplit(self.access.server.rstrip("/") + path)
        port = url.port or (443 if known.tls else 80)
        connection = credentials.connect(self.access, known.tls, str(url.hostname), port, timeout_s)
        headers = [("Authorization", known.authorization)] if known.authorization else []
        return url._replace(scheme="ws").geturl(), [*headers, *credentials.impersonation(self.access.user)], connection

    def _address(self, path: str) -> tuple[str, Mapping[str, str]]:
        authorization = self._log_in().authorization
        headers = {"Accept": "application/json, */*", **({"Authorization": authorization} if authorization else {})}
        return self.access.server.rstrip("/") + path, headers

    def _handlers(self) -> list[urllib.request.BaseHandler]:
        return [credentials.Handler(self.access, lambda: self._log_in().tls), urllib.request.ProxyHandler({})]

    def _log_in(self) -> Credentials:
        if self._credentials is None or self._credentials.expires_at <= self.clock.now():
            self._credentials = credentials.log_in(self.access, self.clock)
        return self._credentials

    def _renew(self) -> bool:
        """Drop credentials that the server answered with 401; return whether others can be obtained."""
        renewable = self._credentials is not None and self._credentials.renewable
        if renewable:
            self._credentials = None
        return renewable

    def _network_hint(self, reason: object) -> str:
        proxy = credentials.find_proxy(self.access, str(urllib.parse.urlsplit(self.access.server).hostname))
        if isinstance(reason, ssl.SSLCertVerificationError):
            if "ostname" in reason.verify_message or "address mismatch" in reason.verify_message:
                return "the certificate is for another name: set tls-server-name of the kubeconfig's cluster to one of its names"
            if "expired" in reason.verify_message or "not yet valid" in reason.verify_message:
                return "the server's certificate has ended or begins later: check the date here, and renew it"
            ends = f", or the proxy {proxy.hostname}:{proxy.port or ''} ends TLS itself" if proxy else ""
            return f"the kubeconfig's certificate authority is not the server's{ends}"
        if proxy:
            where = "proxy-url of the kubeconfig" if self.access.cluster.get("proxy-url") else "HTTPS_PROXY, NO_PROXY"
            return f"check the proxy {proxy.hostname}:{proxy.port or ''} ({where})"
        return "check the network, a VPN, and the context (options.kubernetes.context)"


# https://github.com/kubernetes/apiserver, pkg/endpoints/handlers/responsewriters/errors.go (2026-11-29). Other refusals are of
# admission: webhooks, policies, Pod Security, quotas, a namespace that is being deleted.
_RBAC = re.compile(r'[^:]*forbidden: User ".*" cannot (?!impersonate)\S+ (resource|path) "')


def _with_query(path: str, query: Mapping[str, str] | None) -> str:
    return f"{path}?{urllib.parse.urlencode(query)}" if query else path


def _describe_error(status: int, server_message: str, failure: str) -> tuple[str, str]:
    text = " ".join(server_message.split())[:500]
    if status == 401:
        return (
            f"{failure}: the cluster does not accept the credentials",
            "log in to the cluster again; `kubectl get jobs` shows the same error",
        )
    if status == 403 and '"system:anonymous"' in text:  # as servers name a request without credentials
        return f"{failure}: the kubeconfig has no credentials", "log in to the cluster, or choose another context"
    if "exceeded quota" in text:
        return f"{failure}: the namespace's quota does not allow it: {text}", "see: kubectl describe quota"
    if status == 403 and _RBAC.match(text):
        return (
            f"{failure}: permission denied: {text}",
            "`cloudtrain permissions -t TARGET` prints the role that you need",
        )
    if status == 400 and "strict decoding error" in text:
        return (
            f"{failure}: {text}",
            "correct options.kubernetes.overlay: a field is misspelt, or this cluster is too old for it",
        )
    if status == 404 and "namespaces" in text:
        return f"{failure}: {text}", "choose another one with options.kubernetes.namespace"
    if "failed calling webhook" in text:
        return (
            f"{failure}: {text}",
            "a webhook of the cluster does not answer: who administers it can mend or remove it",
        )
    return f"{failure}: {text or 'no reason was given'} ({status})", "" if status < 500 else "try again"


def _error_message(body: bytes) -> str:
    text = body.decode("utf-8", "replace")
    try:
        document = json.loads(text)
        return str(document.get("message") or document["error"]["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return text
