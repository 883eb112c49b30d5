"""Call Google Cloud's REST APIs with google-auth alone: authentication, retries, and errors with a hint what to do.

A simulator has one address for all services and needs no credentials.
"""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from typing import IO, Any, NamedTuple

from cloudtrain.errors import BackendError, MissingExtra, NoCapacity, Unreachable

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
TIMEOUT_S = 60.0
TRIES = 5
PAUSE_S = 0.25  # before the second try; doubled after each
RETRYABLE = (408, 429, 500, 502, 503, 504)  # HTTP statuses after which the same call may succeed later
_QUOTA_METRIC = re.compile(r"(?:aiplatform\.googleapis\.com/)?(custom_model_training[a-z0-9_]+)")
_CALL_RATE = re.compile(
    r"per (minute|second|100 seconds|day)|rate.?limit|requests", re.IGNORECASE
)  # a rate limit of calls, not a quota of machines


class ApiError(BackendError):
    """An API answered with an error; `status` is the HTTP status, `api_message` the API's own message."""

    def __init__(self, status: int, api_message: str, failure: str) -> None:
        message, hint = explain_error(status, api_message, failure)
        super().__init__(message, hint)
        self.status, self.api_message = status, api_message


class ApiUnreachable(ApiError, Unreachable):
    """An API throttles or failed with 5xx: the request may have been carried out."""


class ApiNoCapacity(ApiError, NoCapacity):
    """Insufficient capacity, or a quota for machines is used up."""


def api_error(status: int, api_message: str, failure: str) -> ApiError:
    """Return the error for an API's answer: ApiNoCapacity, ApiUnreachable, or ApiError for a refusal."""
    if is_capacity_error(status, api_message):
        return ApiNoCapacity(status, api_message, failure)
    return (ApiUnreachable if status in RETRYABLE or status >= 500 else ApiError)(status, api_message, failure)


class Answer(NamedTuple):
    """An HTTP response: status, headers with lowercase names, body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body parsed as JSON; raises Unreachable where a proxy answered instead of the API."""
        try:
            return json.loads(self.body or b"null")
        except ValueError:
            body_start = " ".join(self.body[:100].decode("utf-8", "replace").split())
            raise Unreachable(
                f"Google was not reached: the answer is not JSON: {body_start}", "check proxies"
            ) from None


class GoogleApi:
    """A client of Google's APIs for one account and region. `endpoint` returns a simulator's address, for every call."""

    def __init__(self, region: str, endpoint: Callable[[], str] | None = None) -> None:
        self._region, self._endpoint = region, endpoint
        self._credentials: Any = None
        direct = [urllib.request.ProxyHandler({})] if endpoint else []
        self._opener = urllib.request.build_opener(_Redirects, *direct)

    @property
    def endpoint(self) -> str | None:
        """The simulator's address, None for Google's own."""
        return self._endpoint() if self._endpoint else None

    def url(self, service: str) -> str:
        """Return the base URL of aiplatform, storage or logging."""
        if self._endpoint is not None:
            return self._endpoint()
        return (
            f"https://{self._region}-{service}.googleapis.com"
            if service == "aiplatform"
            else f"https://{service}.googleapis.com"
        )

    def call(
        self,
        method: str,
        service: str,
        path: str,
        failure: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        tries: int = TRIES,
        timeout_s: float = TIMEOUT_S,
        accept: tuple[int, ...] = (),
    ) -> Answer:
        """Return an answer of 2xx or a status in `accept`; `failure` begins the error's sentence. Blocking.

        Raises ApiError, Unreachable if the request may or may not have been carried out, BackendError without credentials.
        """
        if body is not None:
            data, headers = json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})}
        for turn in range(tries):
            if turn:
                time.sleep(min(PAUSE_S * 2**turn, 8.0))
            last = turn == tries - 1
            try:
                address = path if path.startswith("http") else self.url(service) + path
                if query:
                    address += ("&" if "?" in address else "?") + urllib.parse.urlencode(query)
                request = urllib.request.Request(
                    address, data, {**self._auth_header(), **(headers or {})}, method=method
                )
                with self._opener.open(request, timeout=timeout_s) as answer:
                    return Answer(answer.status, _lowercase_names(answer.headers), answer.read())
            except urllib.error.HTTPError as error:
                with error:
                    refusal = Answer(error.code, _lowercase_names(error.headers), _read_body(error))
                if refusal.status in accept:
                    return refusal
                if last or refusal.status not in RETRYABLE:
                    raise api_error(refusal.status, _error_message(refusal.body), failure) from None
            except (OSError, http.client.HTTPException) as error:
                if last:
                    reason = getattr(error, "reason", None) or error
                    hint = "check the network" if self._endpoint is None else "the simulator does not answer"
                    raise Unreachable(
                        f"{failure}: {urllib.parse.urlsplit(address).hostname} was not reached: {reason}", hint
                    ) from None
        raise AssertionError("the last try returns or raises")

    def download(self, service: str, path: str, failure: str, into: IO[bytes], offset: int = 0) -> None:
        """Download a large answer into a file, from byte `offset` on; blocking. Raises ApiError, Unreachable."""
        for turn in range(TRIES):
            try:
                headers = {**self._auth_header(), **({"Range": f"bytes={offset}-"} if offset else {})}
                request = urllib.request.Request(self.url(service) + path, headers=headers)
                with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                    while chunk := answer.read(1 << 20):
                        into.write(chunk)
                        offset += len(chunk)
                    if answer.length in (None, 0):
                        return
            except urllib.error.HTTPError as error:
                with error:
                    api_message = _error_message(_read_body(error))
                if error.code == 416:
                    return  # the file was complete already
                if error.code not in RETRYABLE or turn == TRIES - 1:
                    raise api_error(error.code, api_message, failure) from None
            except (OSError, http.client.HTTPException) as error:
                if turn == TRIES - 1:
                    raise Unreachable(f"{failure}: the transfer broke off: {error}") from None
            time.sleep(PAUSE_S * 2**turn)

    def credentials(self) -> Any:
        """Return google-auth's credentials with a valid token; blocking. Raises BackendError, MissingExtra."""
        try:
            import google.auth
            from google.auth import exceptions
        except ImportError:
            raise MissingExtra("Google Cloud", "vertex") from None
        login = "gcloud auth application-default login"
        try:
            if self._credentials is None:
                self._credentials, _ = google.auth.default(scopes=[SCOPE])
            if not self._credentials.valid:
                self._credentials.refresh(_auth_transport())
        except exceptions.DefaultCredentialsError:
            raise BackendError("no credentials for Google Cloud were found", login) from None
        except exceptions.TransportError as error:
            message = f"Google's token server was not reached: {error}".split("\n")[0][:300]
            raise Unreachable(message, "check the network") from None
        except exceptions.GoogleAuthError as error:
            raise BackendError(f"Google does not accept the credentials: {error}".split("\n")[0][:300], login) from None
        return self._credentials

    def _auth_header(self) -> dict[str, str]:
        return {} if self._endpoint else {"Authorization": f"Bearer {self.credentials().token}"}


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, without the access token when the host changes; urllib itself would send it there."""

    def redirect_request(self, req: urllib.request.Request, *rest: Any) -> urllib.request.Request | None:
        redirected = super().redirect_request(req, *rest)
        if redirected is not None and _origin(redirected.full_url) != _origin(req.full_url):
            redirected.remove_header("Authorization")
        return redirected


def _origin(address: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(address)
    return parts.scheme, parts.netloc


def is_capacity_error(status: int, api_message: str) -> bool:
    """Return whether an error means insufficient capacity or a used up quota of machines, not a rate limit of calls."""
    lowercase = api_message.lower()
    if _QUOTA_METRIC.search(api_message) or "resources are insufficient" in lowercase or "stockout" in lowercase:
        return True
    return status == 429 and "quota" in lowercase and not _CALL_RATE.search(api_message)


def explain_error(status: int, api_message: str, failure: str) -> tuple[str, str]:
    """Return a message and a hint for an error of Google's APIs."""
    text = " ".join(api_message.split())[:400]
    lowercase = text.lower()
    metric = _QUOTA_METRIC.search(text)
    if metric or (status == 429 and "quota" in lowercase and not _CALL_RATE.search(text)):
        metric_name = f" ({metric[1]})" if metric else ""
        hint = "ask for more on the console's page IAM & Admin > Quotas, or try another region"
        if metric and "preemptible" in metric[1]:
            hint += "; Spot has quotas of its own, for GPUs and for CPUs"
        return f"{failure}: the quota is used up{metric_name}: {text}", hint
    if "resources are insufficient" in lowercase or "stockout" in lowercase:
        return (
            f"{failure}: Google has no such machines free now: {text}",
            "try another region or machine, or Spot later",
        )
    if "actas" in lowercase or "act as" in lowercase:
        return (
            f"{failure}: you may not use this service account: {text}",
            "grant yourself roles/iam.serviceAccountUser on it",
        )
    if "has not been used" in lowercase or "service_disabled" in lowercase or "it is disabled" in lowercase:
        return (
            f"{failure}: the API is switched off in this project: {text}",
            "gcloud services enable aiplatform.googleapis.com",
        )
    if status == 401:
        return f"{failure}: Google does not accept the credentials: {text}", "gcloud auth application-default login"
    if status == 404 and "bucket" in lowercase:
        return (
            f"{failure}: the bucket does not exist: {text}",
            "options.vertex.bucket; gcloud storage buckets create makes one",
        )
    if status == 404 and "<html" in lowercase:
        return f"{failure}: there is no such place at Google", "check options.vertex.region and project"
    if "location" in lowercase and (
        "unsupported" in lowercase or "not supported" in lowercase or "not found" in lowercase
    ):
        return f"{failure}: Vertex AI is not offered there: {text}", "check options.vertex.region"
    if status == 403:
        return f"{failure}: permission denied: {text}", "docs/vertex.md lists the roles that are needed"
    hint = "try again in some minutes" if status in RETRYABLE or status >= 500 else ""
    return f"{failure}: {text or 'no reason was given'} ({status})", hint


def _read_body(error: urllib.error.HTTPError) -> bytes:
    """Return an error's body, or the part that arrived before the connection broke off."""
    try:
        return error.read()
    except http.client.IncompleteRead as broken:
        return broken.partial
    except (OSError, http.client.HTTPException):
        return b""


def _error_message(body: bytes) -> str:
    """Return the message in an error's JSON body; a container registry answers with a list of errors."""
    text = body.decode("utf-8", "replace")
    try:
        answer = json.loads(text)
        error = answer["errors"][0] if "errors" in answer else answer["error"]
        return str(error.get("message") or error) if isinstance(error, dict) else str(error)
    except (ValueError, LookupError, TypeError):
        return text


def _lowercase_names(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _auth_transport() -> Any:
    """Return google-auth's transport, built on urllib so that no other HTTP package is needed."""
    from google.auth import exceptions, transport

    class Response(transport.Response):
        def __init__(self, status: int, headers: Mapping[str, str], data: bytes) -> None:
            self._status, self._headers, self._data = status, headers, data

        status = property(lambda self: self._status)
        headers = property(lambda self: self._headers)
        data = property(lambda self: self._data)

    class Request(transport.Request):
        def __call__(
            self,
            url: str,
            method: str = "GET",
            body: bytes | None = None,
            headers: Mapping[str, str] | None = None,
            timeout: float | None = TIMEOUT_S,
            **_: Any,
        ) -> Response:
            request = urllib.request.Request(url, body, dict(headers or {}), method=method)
            try:
                with urllib.request.urlopen(request, timeout=timeout) as answer:
                    return Response(answer.status, _lowercase_names(answer.headers), answer.read())
            except urllib.error.HTTPError as error:
                with error:
                    return Response(error.code, _lowercase_names(error.headers), _read_body(error))
            except OSError as error:
                raise exceptions.TransportError(error) from None  # type: ignore[no-untyped-call]

    return Request()
