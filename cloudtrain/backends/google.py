"""Google's REST APIs with google-auth alone: calls, retries, and errors as sentences that say what to do.

A simulator's address stands for all services and needs no credentials.
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
PAUSE_S = 0.25  # doubled from try to try
RETRYABLE = (408, 429, 500, 502, 503, 504)  # the same call may work later
_QUOTA_METRIC = re.compile(r"(?:aiplatform\.googleapis\.com/)?(custom_model_training[a-z0-9_]+)")
_CALL_RATE = re.compile(
    r"per (minute|second|100 seconds|day)|rate.?limit|requests", re.IGNORECASE
)  # of calls, not of machines


class ApiError(BackendError):
    """An API answered with an error; `status` is that of HTTP, `said` its own words."""

    def __init__(self, status: int, api_message: str, failure: str) -> None:
        message, hint = explain_error(status, api_message, failure)
        super().__init__(message, hint)
        self.status, self.api_message = status, api_message


class ApiUnreachable(ApiError, Unreachable):
    """An API is overloaded or failed by itself: what was asked may have been done."""


class ApiNoCapacity(ApiError, NoCapacity):
    """There are no such machines, or a quota for them is used up."""


def api_error(status: int, api_message: str, failure: str) -> ApiError:
    """Return an API's answer as the error of its kind."""
    if is_capacity_error(status, api_message):
        return ApiNoCapacity(status, api_message, failure)
    return (ApiUnreachable if status in RETRYABLE or status >= 500 else ApiError)(status, api_message, failure)


class Answer(NamedTuple):
    """What an API answered: status, headers by small letters, body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as data; raises Unreachable where something on the way has answered in place of the API."""
        try:
            return json.loads(self.body or b"null")
        except ValueError:
            body_start = " ".join(self.body[:100].decode("utf-8", "replace").split())
            raise Unreachable(
                f"Google was not reached: the answer is not JSON: {body_start}", "check proxies"
            ) from None


class GoogleApi:
    """Calls of one account. `endpoint` gives a simulator's address; it is asked again when that does not answer."""

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
        """Return the address of aiplatform, storage or logging."""
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

        Raises ApiError, Unreachable where nobody knows whether it was done, BackendError without credentials.
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
        """Write a large answer into a file, from byte `at` on; blocking. Raises ApiError, Unreachable."""
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
                    return  # all of it was there
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
    """Follows a redirect, and to another place without the token: urllib itself would take it along."""

    def redirect_request(self, req: urllib.request.Request, *rest: Any) -> urllib.request.Request | None:
        redirected = super().redirect_request(req, *rest)
        if redirected is not None and _origin(redirected.full_url) != _origin(req.full_url):
            redirected.remove_header("Authorization")
        return redirected


def _origin(address: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(address)
    return parts.scheme, parts.netloc


def is_capacity_error(status: int, api_message: str) -> bool:
    """Return whether an answer tells of missing machines or a used up quota for them; a rate of calls is no quota."""
    lowercase = api_message.lower()
    if _QUOTA_METRIC.search(api_message) or "resources are insufficient" in lowercase or "stockout" in lowercase:
        return True
    return status == 429 and "quota" in lowercase and not _CALL_RATE.search(api_message)


def explain_error(status: int, api_message: str, failure: str) -> tuple[str, str]:
    """Return one sentence and a hint for an error of Google's APIs."""
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
    """Return what came with a refusal, as far as it came: the refusal itself is known."""
    try:
        return error.read()
    except http.client.IncompleteRead as broken:
        return broken.partial
    except (OSError, http.client.HTTPException):
        return b""


def _error_message(body: bytes) -> str:
    """Return an error's own words; a registry has a list of errors."""
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
    """Return what google-auth sends its own requests with: urllib, so that it needs no further package."""
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
