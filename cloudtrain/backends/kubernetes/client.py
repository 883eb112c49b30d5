"""HTTP client for the Kubernetes API server: requests, retries, readable errors.

It uses the standard library only, because importing the Kubernetes SDK would slow down every plan and status call.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any, BinaryIO

from cloudtrain.backends.kubernetes import kubeconfig
from cloudtrain.backends.kubernetes.kubeconfig import ClusterAccess
from cloudtrain.errors import BackendError, NoCapacity, Unreachable

TIMEOUT_S = 60.0
TRIES = 5
PAUSE_S = 0.25  # doubled after each try
MAX_PAUSE_S = 30.0  # upper limit for a server's Retry-After
RETRYABLE = (429, 500, 502, 503, 504)
CHUNK_BYTES = 1 << 20  # read at a time
Document = dict[str, Any]


class KubeError(BackendError):
    """The server answered with an error; `status` is the HTTP status code."""

    def __init__(self, status: int, body: bytes, failure: str, retry_after: str | None = None) -> None:
        super().__init__(*_describe_error(status, _error_message(body), failure))
        self.status, self.body = status, body
        self.retry_after = float(retry_after) if retry_after and retry_after.isdigit() else 0.0  # seconds


class KubeUnreachable(KubeError, Unreachable):
    """The server failed, is overloaded, or reported a conflict: the call may or may not have been carried out."""


class KubeQuota(KubeError, NoCapacity):
    """The namespace's quota does not allow another object."""


def error_for_response(status: int, body: bytes, failure: str, retry_after: str | None = None) -> KubeError:
    """Return the exception for an error response: unreachable, quota exceeded, or refused."""
    if status in (408, 409, 429) or status >= 500:
        return KubeUnreachable(status, body, failure, retry_after)
    error_class = KubeQuota if status == 403 and "exceeded quota" in _error_message(body) else KubeError
    return error_class(status, body, failure, retry_after)


class KubeApi:
    """Calls the API server of one kubeconfig context. Connects on first use; raises BackendError, Unreachable."""

    def __init__(
        self, kubeconfig: str | None, context: str | None, server: str | None = None, ca: str | None = None
    ) -> None:
        self._kubeconfig, self._context, self._pinned_server, self._ca = kubeconfig, context, server, ca
        self._access: ClusterAccess | None = None
        self._opener: Any = None
        self._token: tuple[str, float] | None = None  # token, and the time when it expires

    @property
    def access(self) -> ClusterAccess:
        """Server and credentials; raises BackendError without a kubeconfig, or if it names another than the pinned cluster."""
        if self._access is None:
            access = kubeconfig.parse_kubeconfig(self._kubeconfig, self._context)
            if self._pinned_server and access.server.rstrip("/") != self._pinned_server.rstrip("/"):
                message = f"the context leads to {access.server}, the target is pinned to {self._pinned_server}"
                raise BackendError(message, "choose another context, or change options.kubernetes.server")
            if self._ca and access.ca != self._ca:
                message = f"{access.server} is another cluster than the one that the target is pinned to: its authority differs"
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
        status, body = self.call("GET", path, failure, query=query, accept=(404,))
        return None if status == 404 else json.loads(body)

    def call(
        self,
        method: str,
        path: str,
        failure: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        accept: tuple[int, ...] = (),
    ) -> tuple[int, bytes]:
        """Send a request with retries and return status and body of a 2xx answer, or of a status in `accept`; blocking.

        `failure` begins the error message. Every call is safe to repeat: a second create answers 409, patches are merged.
        Raises KubeError, and Unreachable if an earlier try may have been carried out although the last one was refused.
        """
        payload = None if body is None else json.dumps(body).encode()
        content_type = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Content-Type": content_type} if payload else {}
        # A patch carries no resourceVersion, so 409 means that the object changed too often, not that ours is stale.
        retryable = (*RETRYABLE, 409) if method == "PATCH" else RETRYABLE
        maybe_applied = False  # whether an earlier try may have changed something
        for attempt in range(TRIES):
            try:
                with self._send(method, path, failure, query, payload, headers) as answer:
                    return answer.status, answer.read()
            except KubeError as error:
                if error.status in accept:
                    return error.status, error.body
                if attempt == TRIES - 1 or not (error.status in retryable or self._drop_expired_token(error)):
                    if maybe_applied and not isinstance(error, Unreachable):
                        raise Unreachable(error.message, error.hint) from None
                    raise
                maybe_applied = maybe_applied or (method != "GET" and error.status >= 500)
                time.sleep(_retry_delay(attempt, error.retry_after))
            except BackendError as error:  # no credentials any more
                if maybe_applied and not isinstance(error, Unreachable):
                    raise Unreachable(error.message, error.hint) from None
                raise
            except (OSError, http.client.HTTPException) as error:
                if attempt == TRIES - 1:
                    raise self._unreachable(failure, error) from None
                maybe_applied = method != "GET"
                time.sleep(_retry_delay(attempt))
        raise AssertionError("the last try returns or raises")

    def download(
        self, path: str, failure: str, query: Mapping[str, str], headers: Mapping[str, str], file: BinaryIO
    ) -> None:
        """Download a response into a file in chunks; blocking. An interrupted download resumes with `from=<bytes>`."""
        attempt = 0
        while True:
            start = file.tell()
            try:
                with self._send("GET", path, failure, {**query, "from": str(start)}, None, headers) as answer:
                    expected = int(answer.headers.get("Content-Length") or 0)
                    while chunk := answer.read(CHUNK_BYTES):
                        file.write(chunk)
                if file.tell() - start < expected:
                    raise http.client.IncompleteRead(b"")
                return
            except KubeError as error:
                if attempt == TRIES - 1 or error.status not in RETRYABLE:
                    raise
                time.sleep(_retry_delay(attempt, error.retry_after))
            except (OSError, http.client.HTTPException) as error:
                if attempt == TRIES - 1:
                    raise self._unreachable(failure, error) from None
                time.sleep(_retry_delay(attempt))
            attempt = 0 if file.tell() > start else attempt + 1

    def _send(
        self,
        method: str,
        path: str,
        failure: str,
        query: Mapping[str, str] | None,
        payload: bytes | None,
        headers: Mapping[str, str],
    ) -> Any:
        """Send one request and return the open response; raises KubeError for a status other than 2xx, OSError."""
        url = self.access.server.rstrip("/") + path + (f"?{urllib.parse.urlencode(query)}" if query else "")
        all_headers = {"Accept": "application/json, */*", **self._auth_headers(), **headers}
        try:
            return self._open(urllib.request.Request(url, payload, all_headers, method=method))
        except urllib.error.HTTPError as error:
            with error:
                raise error_for_response(error.code, error.read(), failure, error.headers.get("Retry-After")) from None

    def _drop_expired_token(self, error: KubeError) -> bool:
        """Drop a token that the server answered with 401; return whether a new one can be obtained."""
        if error.status != 401 or self._token is None or self.access.user.get("token"):
            return False
        self._token = None
        return True

    def _unreachable(self, failure: str, error: Exception) -> Unreachable:
        reason = getattr(error, "reason", None) or error
        return Unreachable(f"{failure}: {self.access.server} was not reached: {reason}", _network_hint(reason))

    def _open(self, request: urllib.request.Request) -> Any:
        if self._opener is None:
            handlers: list[Any] = [urllib.request.HTTPSHandler(context=kubeconfig.tls_context(self.access))]
            if proxy := self.access.cluster.get("proxy-url"):
                handlers.append(urllib.request.ProxyHandler({"http": proxy, "https": proxy}))
            self._opener = urllib.request.build_opener(*handlers)
        return self._opener.open(request, timeout=TIMEOUT_S)

    def _auth_headers(self) -> dict[str, str]:
        user = self.access.user
        if self._token is None or self._token[1] <= time.time():
            self._token = kubeconfig.bearer_token(self.access)
        if user.get("as-groups") or user.get("as-user-extra"):
            raise BackendError("the kubeconfig impersonates a group", "only `as: NAME` is known here")
        headers = {"Impersonate-User": str(user["as"])} if user.get("as") else {}
        return {**headers, "Authorization": f"Bearer {self._token[0]}"} if self._token else headers


def _retry_delay(attempt: int, retry_after_s: float = 0.0) -> float:
    """Return the seconds to wait before the next try; a server's Retry-After counts."""
    return max(min(2 * PAUSE_S * 2.0**attempt, 8.0), min(retry_after_s, MAX_PAUSE_S))


def _describe_error(status: int, server_message: str, failure: str) -> tuple[str, str]:
    text = " ".join(server_message.split())[:500]
    if status == 401:
        return f"{failure}: the cluster does not accept the credentials", "log in again; kubectl shows the same"
    if "exceeded quota" in text:
        return f"{failure}: the namespace's quota does not allow it: {text}", "kubectl describe quota"
    if status == 403:
        return f"{failure}: permission denied: {text}", "docs/kubernetes.md lists the rules that are needed"
    if status == 404 and "namespaces" in text:
        return f"{failure}: {text}", "options.kubernetes.namespace names another"
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
