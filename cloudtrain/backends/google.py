"""Call Google Cloud's REST APIs with google-auth alone: authentication, retries, and errors with a hint what to do.

A simulator has one address for all services and needs no credentials.
"""

from __future__ import annotations

import json
import os
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cloudtrain.backends import http
from cloudtrain.backends.http import RETRYABLE, TIMEOUT_S, Answer, HttpError
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError, MissingExtra, NoCapacity, Unreachable
from cloudtrain.job.providers import EXTRAS

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
LOGIN = "gcloud auth application-default login"
# What the token server and google-auth write -> what is wrong, and what to do (google-auth 2.62, 2026-11-28)
_CAUSES = (
    (("expired or revoked", "reauth", "invalid_rapt"), "the login has expired or was revoked", LOGIN),
    (("short-lived token",), "Google does not accept the time of this machine's clock", "timedatectl set-ntp true"),
    (
        ("invalid jwt signature", "account not found", "invalid_client"),
        "the service account or its key was deleted",
        "gcloud iam service-accounts keys create FILE --iam-account=ACCOUNT; GOOGLE_APPLICATION_CREDENTIALS names the file",
    ),
    (
        ("impersonat",),
        "the service account cannot be impersonated",
        "grant yourself roles/iam.serviceAccountTokenCreator on it",
    ),
    (
        ("executable",),
        "the program that gives the credentials failed",
        "run the command in the file of GOOGLE_APPLICATION_CREDENTIALS; GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES=1 allows it",
    ),
)
_QUOTA_METRIC = re.compile(r"(?:aiplatform\.googleapis\.com/)?(custom_model_training[a-z0-9_]+)")
_CALL_RATE = re.compile(
    r"per (minute|second|100 seconds|day)|rate.?limit|requests", re.IGNORECASE
)  # a rate limit of calls, not a quota of machines


class ApiError(HttpError):
    """An API answered with an error; `status` is the HTTP status, `api_message` the API's own message."""

    def __init__(self, answer: Answer, api_message: str, failure: str) -> None:
        super().__init__(*explain_error(answer.status, api_message, failure), answer)
        self.api_message = api_message


class ApiUnreachable(ApiError, Unreachable):
    """An API throttles or failed with 5xx: the request may have been carried out."""


class ApiNoCapacity(ApiError, NoCapacity):
    """Insufficient capacity, or a quota for machines is used up."""


def api_error(answer: Answer, failure: str) -> ApiError:
    """Return the error for an API's answer: ApiNoCapacity, ApiUnreachable, or ApiError for a refusal."""
    api_message = _error_message(answer.data)
    if is_capacity_error(answer.status, api_message):
        return ApiNoCapacity(answer, api_message, failure)
    unreachable = answer.status in RETRYABLE or answer.status >= 500
    return (ApiUnreachable if unreachable else ApiError)(answer, api_message, failure)


class GoogleApi:
    """A client of Google's APIs for one account and region. `endpoint` returns a simulator's address, for every call."""

    def __init__(self, region: str, endpoint: Callable[[], str] | None = None, clock: Clock = SYSTEM) -> None:
        self._region, self._endpoint, self.clock = region, endpoint, clock
        self._credentials: Any = None
        direct = (urllib.request.ProxyHandler({}),) if endpoint else ()

        def hint(reason: object) -> str:
            if endpoint:
                return "the simulator does not answer"
            near = _near_region(region) if isinstance(reason, socket.gaierror) else ""
            text = f"there is no region {region}; did you mean {near}? change the target's region"
            return text if near else http.network_hint(str(reason))

        self._http = http.Http(self._address, api_error, hint, lambda: direct, clock=clock)

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
        tries: int | None = None,
        timeout_s: float = TIMEOUT_S,
        accept: tuple[int, ...] = (),
    ) -> Answer:
        """Return an answer of 2xx or a status in `accept`; `failure` begins the error's sentence. Blocking.

        Raises ApiError, Unreachable if the request may or may not have been carried out, BackendError without credentials.
        """
        if body is not None:
            data, headers = json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})}
        path = path if path.startswith("http") else service + path
        if query:
            path += ("&" if "?" in path else "?") + urllib.parse.urlencode(query)
        return self._http.call(
            method, path, failure, data=data, headers=headers, tries=tries, timeout_s=timeout_s, accept=accept
        )

    def stream(self, service: str, path: str, failure: str, first: int = 0, last: int | None = None) -> Iterator[bytes]:
        """Yield a large answer in chunks; an interrupted one continues where it was. Blocking. Raises ApiError, Unreachable."""
        return self._http.stream(service + path, failure, None, first, last)

    def check_credentials(self) -> None:
        """Raise MissingExtra, or BackendError without credentials that Google accepts; no answer is no error. Blocking."""
        if self._endpoint is None:
            with suppress(Unreachable):
                self.credentials()

    def credentials(self) -> Any:
        """Return google-auth's credentials with a valid token; blocking. Raises BackendError, MissingExtra."""
        try:
            import google.auth
        except ImportError:
            raise MissingExtra("Google Cloud", EXTRAS["google-auth"]) from None
        try:
            if self._credentials is None:
                self._credentials, _ = google.auth.default(scopes=[SCOPE])
            if not self._credentials.valid:
                self._credentials.refresh(_auth_transport())
        except Exception as error:  # of plugins and files, too
            raise credentials_error(error) from None
        return self._credentials

    def _address(self, path: str) -> tuple[str, Mapping[str, str]]:
        """Return the URL of SERVICE/PATH, or of a whole URL, and the access token's header."""
        service, _, rest = path.partition("/")
        url = path if path.startswith("http") else f"{self.url(service)}/{rest}"
        return url, {} if self._endpoint else {"Authorization": f"Bearer {self.credentials().token}"}


def _near_region(region: str) -> str:
    """Return the region of the SDK's list that has nearly this name; "" for one in the list, or without the SDK.

    The list is read as text, since to import the SDK takes seconds.
    """
    from difflib import get_close_matches
    from importlib.util import find_spec

    try:
        found = find_spec("google.cloud.aiplatform")
        page = Path(str(found and found.origin)).with_name("constants") / "base.py"
        known = re.findall(r'"([a-z]+-[a-z]+[0-9]+)"', page.read_text("utf-8"))
    except (ImportError, OSError):
        return ""
    return "" if region in known else next(iter(get_close_matches(region, known, 1)), "")


def credentials_error(error: Exception) -> BackendError:
    """Return the error for what google-auth raises: which credentials cannot be used, and the command that helps."""
    from google.auth import exceptions

    first = error.args[0] if isinstance(error, exceptions.GoogleAuthError) and error.args else error
    text = " ".join(str(first).split())[:300]
    if isinstance(error, exceptions.TransportError):
        return Unreachable(f"cannot reach Google's token server: {text}", http.network_hint(text))
    named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS", "")
    if isinstance(error, exceptions.DefaultCredentialsError) and not named:
        return BackendError("no credentials for Google Cloud were found", LOGIN)
    for words, cause, hint in _CAUSES:
        if any(word in text.lower() for word in words):
            return BackendError(f"{cause}: {text}", hint)
    if isinstance(error, exceptions.DefaultCredentialsError | OSError):
        what = f"the file of GOOGLE_APPLICATION_CREDENTIALS ({named})" if named else "the credentials' file"
        return BackendError(
            f"{what} cannot be used: {text}", "correct the path, or unset GOOGLE_APPLICATION_CREDENTIALS"
        )
    kind = "" if isinstance(error, exceptions.GoogleAuthError) else f"{type(error).__name__}: "
    return BackendError(f"Google does not accept the credentials: {kind}{text}".removesuffix(": "), LOGIN)


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
        hint = "request an increase in the Google Cloud console under IAM & Admin > Quotas, or try another region"
        if metric and "preemptible" in metric[1]:
            hint += "; Spot machines have separate quotas for GPUs and CPUs"
        return f"{failure}: the quota is used up{metric_name}: {text}", hint
    if "resources are insufficient" in lowercase or "stockout" in lowercase:
        return (
            f"{failure}: Google has insufficient capacity now: {text}",
            "try another region or machine, or Spot later",
        )
    if "actas" in lowercase or "act as" in lowercase:
        return (
            f"{failure}: you may not use this service account: {text}",
            "grant your user roles/iam.serviceAccountUser on it: the target's service_account, or else the default account",
        )
    if "has not been used" in lowercase or "service_disabled" in lowercase or "it is disabled" in lowercase:
        return (
            f"{failure}: the API is switched off in this project: {text}",
            "gcloud services enable aiplatform.googleapis.com",
        )
    if status == 401:
        return f"{failure}: Google does not accept the credentials: {text}", LOGIN
    if status == 404 and "bucket does not exist" in lowercase:
        return (
            f"{failure}: the bucket does not exist: {text}",
            "set the target's bucket, or create it: gcloud storage buckets create",
        )
    if status == 404 and "<html" in lowercase:
        return f"{failure}: Google does not know this project or region", "check the target's region and project"
    if re.search(r"\blocation\b", lowercase) and (  # not of an address, .../locations/...
        "unsupported" in lowercase or "not supported" in lowercase or "not found" in lowercase
    ):
        return f"{failure}: the service is not available in this region: {text}", "check the target's region"
    if status == 403:
        return (
            f"{failure}: permission denied: {text}",
            "`cloudtrain permissions -t TARGET` prints the roles that you need",
        )
    hint = "try again in some minutes" if status in RETRYABLE or status >= 500 else ""
    return f"{failure}: {text or 'no reason was given'} ({status})", hint


def _error_message(body: bytes) -> str:
    """Return the message in an error's JSON body; a container registry answers with a list of errors."""
    text = body.decode("utf-8", "replace")
    try:
        answer = json.loads(text)
        error = answer["errors"][0] if "errors" in answer else answer["error"]
        return str(error.get("message") or error) if isinstance(error, dict) else str(error)
    except (ValueError, LookupError, TypeError):
        return text


def _auth_transport() -> Any:
    """Return google-auth's transport, built on urllib so that no other HTTP package is needed."""
    from google.auth import exceptions

    def request(
        url: str,
        method: str = "GET",
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = TIMEOUT_S,
        **_: Any,
    ) -> Answer:
        try:
            return http.ask(method, url, body, headers or {}, timeout)
        except OSError as error:
            raise exceptions.TransportError(error) from None  # type: ignore[no-untyped-call]

    return request
