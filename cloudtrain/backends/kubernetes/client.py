"""HTTP client for the Kubernetes API server: requests, retries, readable errors.

It uses the standard library only, because importing the Kubernetes SDK would slow down every plan and status call.
"""

from __future__ import annotations

import json
import ssl
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from cloudtrain.backends.http import RETRYABLE, Answer, Http, HttpError
from cloudtrain.backends.kubernetes import kubeconfig
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
        self._token: tuple[str, float] | None = None  # token, and the time when it expires
        self._http = Http(
            self._address, error_for_answer, _network_hint, self._handlers, self._drop_expired_token, clock
        )

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

    def socket_address(self, path: str) -> tuple[str, Mapping[str, str], ssl.SSLContext | None, str | None]:
        """Return address, headers, TLS and proxy of a websocket to the server; blocking where a token must be obtained."""
        scheme, _, rest = (self.access.server.rstrip("/") + path).partition("://")
        tls = kubeconfig.tls_context(self.access) if scheme == "https" else None
        proxy = self.access.cluster.get("proxy-url")
        return f"{'wss' if tls else 'ws'}://{rest}", self._auth_headers(), tls, str(proxy) if proxy else None

    def _address(self, path: str) -> tuple[str, Mapping[str, str]]:
        return self.access.server.rstrip("/") + path, {"Accept": "application/json, */*", **self._auth_headers()}

    def _handlers(self) -> list[urllib.request.BaseHandler]:
        handlers: list[urllib.request.BaseHandler] = [
            urllib.request.HTTPSHandler(context=kubeconfig.tls_context(self.access))
        ]
        if proxy := self.access.cluster.get("proxy-url"):
            handlers.append(urllib.request.ProxyHandler({"http": proxy, "https": proxy}))
        return handlers

    def _drop_expired_token(self) -> bool:
        """Drop a token that the server answered with 401; return whether a new one can be obtained."""
        if self._token is None or self.access.user.get("token"):
            return False
        self._token = None
        return True

    def _auth_headers(self) -> dict[str, str]:
        user = self.access.user
        if self._token is None or self._token[1] <= self.clock.now():
            self._token = kubeconfig.bearer_token(self.access, self.clock)
        if user.get("as-groups") or user.get("as-user-extra"):
            raise BackendError("the kubeconfig impersonates a group", "cloudtrain supports only `as: NAME`")
        headers = {"Impersonate-User": str(user["as"])} if user.get("as") else {}
        return {**headers, "Authorization": f"Bearer {self._token[0]}"} if self._token else headers


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
    if status == 403:
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
    return f"{failure}: {text or 'no reason was given'} ({status})", "" if status < 500 else "try again"


def _error_message(body: bytes) -> str:
    text = body.decode("utf-8", "replace")
    try:
        document = json.loads(text)
        return str(document.get("message") or document["error"]["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return text


def _network_hint(reason: object) -> str:
    if isinstance(reason, ssl.SSLCertVerificationError):
        return "the kubeconfig's certificate authority is not the server's"
    return "check the network, a VPN, and the context (options.kubernetes.context)"
