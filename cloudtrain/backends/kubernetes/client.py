"""A Kubernetes API server as seen from a client: calls, retries, errors as sentences.

The standard library alone: plans, and looks that are repeated, should not wait for a large SDK to be imported.
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
from cloudtrain.backends.kubernetes.kubeconfig import Place
from cloudtrain.errors import BackendError, NoCapacity, Unreachable

TIMEOUT_S = 60.0
TRIES = 5
PAUSE_S = 0.25  # doubled from try to try
MAX_PAUSE_S = 30.0  # of what a server may ask for by Retry-After
LATER = (429, 500, 502, 503, 504)
PIECE = 1 << 20  # bytes in memory at a time
Document = dict[str, Any]


class KubeError(BackendError):
    """The server answered with an error; `status` is that of HTTP."""

    def __init__(self, status: int, body: bytes, what: str, retry_after: str | None = None) -> None:
        super().__init__(*_explained(status, _said(body), what))
        self.status, self.body = status, body
        self.retry_after = float(retry_after) if retry_after and retry_after.isdigit() else 0.0  # seconds


class KubeUnreachable(KubeError, Unreachable):
    """The server failed, is overloaded, or an object changed too often: the call may have been done or not."""


class KubeQuota(KubeError, NoCapacity):
    """The namespace's quota does not allow another object."""


def refusal(status: int, body: bytes, what: str, retry_after: str | None = None) -> KubeError:
    """Return an answer of the server that is an error as the class that says what it means for a submission."""
    if status in (408, 409, 429) or status >= 500:
        return KubeUnreachable(status, body, what, retry_after)
    kind = KubeQuota if status == 403 and "exceeded quota" in _said(body) else KubeError
    return kind(status, body, what, retry_after)


class KubeApi:
    """Calls of one context. Nothing is read or asked before it is needed; raises BackendError, Unreachable."""

    def __init__(
        self, kubeconfig: str | None, context: str | None, server: str | None = None, ca: str | None = None
    ) -> None:
        self._kubeconfig, self._context, self._pinned, self._ca = kubeconfig, context, server, ca
        self._place: Place | None = None
        self._opener: Any = None
        self._token: tuple[str, float] | None = None  # and until when it is good

    @property
    def place(self) -> Place:
        """Where calls go; raises BackendError where no configuration is found, or another server than the pinned one."""
        if self._place is None:
            found = kubeconfig.read(self._kubeconfig, self._context)
            if self._pinned and found.server.rstrip("/") != self._pinned.rstrip("/"):
                said = f"the context leads to {found.server}, the target is pinned to {self._pinned}"
                raise BackendError(said, "choose another context, or change options.kubernetes.server")
            if self._ca and found.ca != self._ca:
                said = f"{found.server} is another cluster than the one that the target is pinned to: its authority differs"
                raise BackendError(said, "choose another context, or change options.kubernetes.ca")
            self._place = found
        return self._place

    def pin(self) -> dict[str, str]:
        """Return the options by which later looks go to this cluster and no other; {} where no cluster is known here.

        Only files are read. A context that leads elsewhere than the pinned server is told by the first call.
        """
        try:
            place = self.place
        except BackendError:
            return {}
        found = {"context": place.context, "server": place.server, "ca": place.ca}
        return {name: value for name, value in found.items() if value}

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

        Every call may be repeated: creating says by 409 that it was done, patches are merged. Raises KubeError, and
        Unreachable where an earlier try may have been carried out although the last one was refused.
        """
        data = None if body is None else json.dumps(body).encode()
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Content-Type": kind} if data else {}
        # A patch names no version: 409 says that the object changed too often meanwhile, not that ours is stale.
        later = (*LATER, 409) if method == "PATCH" else LATER
        doubtful = False  # whether an earlier try may have changed something
        for turn in range(TRIES):
            try:
                with self._ask(method, path, what, query, data, headers) as answer:
                    return answer.status, answer.read()
            except KubeError as error:
                if error.status in fine:
                    return error.status, error.body
                if turn == TRIES - 1 or not (error.status in later or self._forgot(error)):
                    if doubtful and not isinstance(error, Unreachable):
                        raise Unreachable(error.message, error.hint) from None
                    raise
                doubtful = doubtful or (method != "GET" and error.status >= 500)
                time.sleep(_pause(turn, error.retry_after))
            except BackendError as error:  # no credentials any more
                if doubtful and not isinstance(error, Unreachable):
                    raise Unreachable(error.message, error.hint) from None
                raise
            except (OSError, http.client.HTTPException) as error:
                if turn == TRIES - 1:
                    raise self._unreachable(what, error) from None
                doubtful = method != "GET"
                time.sleep(_pause(turn))
        raise AssertionError("the last try returns or raises")

    def copy(self, path: str, what: str, query: Mapping[str, str], headers: Mapping[str, str], file: BinaryIO) -> None:
        """Append an answer's bytes to a file, piece by piece; blocking. What broke off goes on at `from=<bytes>`."""
        turn = 0
        while True:
            start = file.tell()
            try:
                with self._ask("GET", path, what, {**query, "from": str(start)}, None, headers) as answer:
                    expected = int(answer.headers.get("Content-Length") or 0)
                    while piece := answer.read(PIECE):
                        file.write(piece)
                if file.tell() - start < expected:
                    raise http.client.IncompleteRead(b"")
                return
            except KubeError as error:
                if turn == TRIES - 1 or error.status not in LATER:
                    raise
                time.sleep(_pause(turn, error.retry_after))
            except (OSError, http.client.HTTPException) as error:
                if turn == TRIES - 1:
                    raise self._unreachable(what, error) from None
                time.sleep(_pause(turn))
            turn = 0 if file.tell() > start else turn + 1

    def _ask(
        self,
        method: str,
        path: str,
        what: str,
        query: Mapping[str, str] | None,
        data: bytes | None,
        headers: Mapping[str, str],
    ) -> Any:
        """Send one request and return its open answer; raises KubeError for an answer that is none of 2xx, OSError."""
        address = self.place.server.rstrip("/") + path + (f"?{urllib.parse.urlencode(query)}" if query else "")
        signed = {"Accept": "application/json, */*", **self._signed(), **headers}
        try:
            return self._open(urllib.request.Request(address, data, signed, method=method))
        except urllib.error.HTTPError as error:
            with error:
                raise refusal(error.code, error.read(), what, error.headers.get("Retry-After")) from None

    def _forgot(self, error: KubeError) -> bool:
        """Drop a token that is not accepted and may have been renewed; True where there may be another one."""
        if error.status != 401 or self._token is None or self.place.user.get("token"):
            return False
        self._token = None
        return True

    def _unreachable(self, what: str, error: Exception) -> Unreachable:
        reason = getattr(error, "reason", None) or error
        return Unreachable(f"{what}: {self.place.server} was not reached: {reason}", _network(reason))

    def _open(self, request: urllib.request.Request) -> Any:
        if self._opener is None:
            handlers: list[Any] = [urllib.request.HTTPSHandler(context=kubeconfig.tls(self.place))]
            if proxy := self.place.cluster.get("proxy-url"):
                handlers.append(urllib.request.ProxyHandler({"http": proxy, "https": proxy}))
            self._opener = urllib.request.build_opener(*handlers)
        return self._opener.open(request, timeout=TIMEOUT_S)

    def _signed(self) -> dict[str, str]:
        user = self.place.user
        if self._token is None or self._token[1] <= time.time():
            self._token = kubeconfig.token(self.place)
        if user.get("as-groups") or user.get("as-user-extra"):
            raise BackendError("the kubeconfig impersonates a group", "only `as: NAME` is known here")
        found = {"Impersonate-User": str(user["as"])} if user.get("as") else {}
        return {**found, "Authorization": f"Bearer {self._token[0]}"} if self._token else found


def _pause(turn: int, asked_s: float = 0.0) -> float:
    """Return how long to wait before the next try; a server's own word counts."""
    return max(min(2 * PAUSE_S * 2.0**turn, 8.0), min(asked_s, MAX_PAUSE_S))


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
