"""Azure's REST APIs for one workspace: Resource Manager and Run History, their errors, and what to do about them.

Paths and versions: azure-rest-api-specs, machinelearningservices stable/2024-10-01; Run History, discovery address and scopes:
azure-ai-ml 1.35.2, _restclient/runhistory and operations/_job_operations.py (2026-11-30).
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from cloudtrain.backends import http
from cloudtrain.backends.azure import LOGIN, Tokens
from cloudtrain.backends.azureml.request import workspace_id
from cloudtrain.backends.http import RETRYABLE, Answer, Http, HttpError
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError, NoCapacity, Unreachable

MANAGEMENT = "https://management.azure.com"
SCOPES = {MANAGEMENT: "https://management.azure.com/.default", "": "https://ml.azure.com/.default"}
VERSION = "2024-10-01"
HEAD_BYTES = 4096  # of a log, in which its first line is
ROLE = "AzureML Data Scientist"
_CAPACITY = re.compile(
    r"quota|insufficient capacity|not enough (quota|capacity)|SkuNotAvailable|AllocationFailed", re.IGNORECASE
)
_CALLS = re.compile(r"too many requests|rate limit", re.IGNORECASE)  # of calls, not of machines


class AzureError(HttpError):
    """Azure refused a request; `code` is its own word for why."""

    def __init__(self, message: str, hint: str, answer: Answer, code: str = "") -> None:
        super().__init__(message, hint, answer)
        self.code = code


class AzureUnreachable(AzureError, Unreachable):
    """Azure throttles or failed: the request may have been carried out."""


class AzureNoCapacity(AzureError, NoCapacity):
    """A quota is used up, or there are no such machines."""


class Workspace:
    """Calls about one workspace. Every call blocks; raises AzureError, Unreachable, BackendError, MissingExtra."""

    def __init__(self, options: Mapping[str, Any], clock: Clock = SYSTEM) -> None:
        self.id, self._endpoint = workspace_id(options), str(options.get("endpoint") or "").rstrip("/")
        self._tokens, self._clock = Tokens(clock), clock
        self._held: dict[str, tuple[str, float]] = {}
        self._api = ""
        direct = (urllib.request.ProxyHandler({}),) if self._endpoint else ()

        def hint(reason: object) -> str:
            return "the simulator does not answer" if self._endpoint else http.network_hint(str(reason))

        self._http = Http(self._address, api_error, hint, lambda: direct, renew=self._renew, clock=clock)
        self._files = Http(lambda url: (url, {}), api_error, hint, lambda: direct, clock=clock)  # signed addresses

    def call(
        self,
        method: str,
        path: str,
        failure: str,
        body: Any = None,
        accept: tuple[int, ...] = (),
        query: Mapping[str, str] | None = None,
    ) -> Answer:
        """Call Resource Manager for something below the workspace: /jobs/NAME."""
        where = f"{MANAGEMENT}{self.id}{path}?{urlencode({'api-version': VERSION, **(query or {})})}"
        data = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        return self._http.call(
            method, where, failure, data=data if method != "POST" else data or b"", headers=headers, accept=accept
        )

    def pages(self, path: str, failure: str, query: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        """Yield what a listing has on all of its pages."""
        page = self.call("GET", path, failure, query=query).json
        while True:
            yield from page.get("value", ())
            following = str(page.get("nextLink") or "")
            if not following:
                return
            page = self._http.call("GET", following, failure).json

    def container(self, datastore: str) -> str:
        """Return az://CONTAINER@ACCOUNT of a datastore. Raises BackendError for one that is no Blob Storage."""
        found = self.call("GET", f"/datastores/{datastore}", f"the datastore {datastore} cannot be read").json[
            "properties"
        ]
        name = found.get("containerName") or found.get("filesystem")
        if not name or not found.get("accountName"):
            message = f"the datastore {datastore} is of {found.get('datastoreType')}, which cloudtrain does not read"
            raise BackendError(message, "copy the results with the Azure CLI, or use az://CONTAINER@ACCOUNT/PATH")
        return f"az://{name}@{found['accountName']}"

    def run(self, job: str) -> dict[str, Any]:
        """Return what Run History knows of a job, with signed addresses of its logs; {} for a job that it does not know yet."""
        path = f"{self._history()}/history/v1.0{self.id}/runs/{quote(job)}/details"
        answer = self._http.call("GET", path, f"the log of {job} cannot be read", accept=(404,))
        return {} if answer.status == 404 else dict(answer.json)

    def runs(self, experiment: str, jobs: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return what Run History knows of jobs of one experiment; without those that it does not have there."""
        path = f"{self._history()}/history/v1.0{self.id}/experiments/{quote(experiment)}/runs/runIds"
        body, headers = json.dumps({"runIds": list(jobs)}).encode(), {"Content-Type": "application/json"}
        answer = self._http.call("POST", path, "jobs cannot be read", data=body, headers=headers, accept=(404,))
        return {} if answer.status == 404 else dict(answer.json.get("runs") or {})

    def both_ends(self, url: str, tail: int) -> list[str]:
        """Return the first lines of a log file, and the lines in its last `tail` bytes."""
        head = self._read_log(url, 0, HEAD_BYTES - 1)
        size = int(head.headers.get("content-range", "").rpartition("/")[2] or 0)
        data = head.data
        if tail and size > len(data):
            data += b"\n" + self._read_log(url, max(len(data), size - tail)).data
        return data.decode("utf-8", "replace").split("\n")

    def log(self, url: str, first: int) -> bytes:
        """Return the bytes of a log file from an offset on; b"" for none."""
        answer = self._read_log(url, first)
        return answer.data if answer.status == 206 else answer.data[first:]

    def _read_log(self, url: str, first: int, last: int | None = None) -> Answer:
        """Return the answer with a part of a log file. The address holds a signature: no message names it."""
        span = {"Range": f"bytes={first}-{'' if last is None else last}"}
        try:
            answer = self._files.call("GET", url, "a log cannot be read", headers=span, accept=(404, 416))
        except Unreachable as error:
            raise Unreachable(error.message.partition("?")[0], error.hint) from None
        return Answer(206, {}) if answer.status in (404, 416) else answer

    def _history(self) -> str:
        if not self._api:
            found = self.call("GET", "", "the workspace cannot be read").json["properties"]["discoveryUrl"]
            self._api = str(
                self._http.call("GET", found, "the workspace's addresses cannot be read").json["api"]
            ).rstrip("/")
        return self._api

    def _address(self, url: str) -> tuple[str, Mapping[str, str]]:
        if self._endpoint:
            return url.replace(MANAGEMENT, self._endpoint, 1), {}
        if not url.startswith("https://"):  # Azure's answers name some of the addresses
            raise BackendError(f"no token is sent to {url[:200]!r}, which is not encrypted")
        scope = SCOPES[MANAGEMENT if url.startswith(f"{MANAGEMENT}/") else ""]
        token, until = self._held.get(scope, ("", 0.0))
        if not token or self._clock.monotonic() > until:
            token, seconds = self._tokens.token(scope)
            self._held[scope] = token, self._clock.monotonic() + max(0.0, seconds - 120)
        return url, {"Authorization": f"Bearer {token}"}

    def _renew(self) -> bool:
        had = bool(self._held)
        self._held.clear()
        return had


def api_error(answer: Answer, failure: str) -> AzureError:
    """Return the error of an answer: AzureNoCapacity, AzureUnreachable, or AzureError for a refusal."""
    code, text = _words(answer.data)
    message = f"{failure}: {' '.join(text.split())[:400] or 'no reason was given'} ({code or answer.status})"
    words = f"{code} {text}"
    if _CAPACITY.search(words) and not _CALLS.search(words) and answer.status < 500:
        hint = "request quota in the studio (Quota), choose another size or region, or use_spot, which has a quota of its own"
        return AzureNoCapacity(message, hint, answer, code)
    if answer.status in RETRYABLE or answer.status >= 500:
        return AzureUnreachable(message, "try again in some minutes", answer, code)
    return AzureError(message, _hint(answer.status, code, text), answer, code)


def _hint(status: int, code: str, text: str) -> str:
    if status == 401:
        return LOGIN
    if status == 403:
        return f"grant yourself {ROLE} on the workspace; `cloudtrain permissions -t TARGET` prints what is needed"
    if code in ("SubscriptionNotFound", "InvalidSubscriptionId"):
        return "check the target's subscription: az account list"
    if code == "ResourceGroupNotFound":
        return "check the target's resource_group: az group list"
    if "compute" in text.lower():
        return "check options.azureml.compute: az ml compute list"
    if "environment" in text.lower() or "image" in text.lower():
        return "check image or options.azureml.environment: az ml environment list"
    if code == "ResourceNotFound" or status == 404:
        return "check the target's workspace: az ml workspace list"
    return ""


def _words(body: bytes) -> tuple[str, str]:
    """Return code and message of an error of Resource Manager or Run History; of storage the code of its XML."""
    text = body.decode("utf-8", "replace")
    try:
        error = json.loads(text)["error"]
        inner = error.get("details") or []
        more = "; ".join(str(each.get("message")) for each in inner if isinstance(each, dict) and each.get("message"))
        return str(error.get("code") or ""), str(error.get("message") or "") + (f": {more}" if more else "")
    except (ValueError, LookupError, TypeError, AttributeError):
        found = re.search(r"<Code>(\w+)</Code>", text)
        return (found[1], "") if found else ("", text[:400])
