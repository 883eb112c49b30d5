"""Call the Akash Console API: deployments, bids, leases, providers. The answer's `Date` is the clock that counts.

Routes and fields: akash-network/console, apps/api/src (deployment, bid, provider; 2026-08-22).
"""

from __future__ import annotations

import json
import os
import stat
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from cloudtrain.backends import http
from cloudtrain.backends.http import RETRYABLE, Answer, HttpError
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError, Unreachable

KEY_HINT = (
    "create a key at console.akash.network (Settings, API keys), then export AKASH_API_KEY=..., "
    "or set options.akash.api_key: file:PATH"
)
PAGE = 100  # deployments in one answer of the list


class ConsoleError(HttpError):
    """The Console refused a request."""


class ConsoleUnreachable(ConsoleError, Unreachable):
    """The Console throttles or failed with 5xx: the request may have been carried out."""


@contextmanager
def _shaped(failure: str) -> Iterator[None]:
    """Raise Unreachable where an answer is JSON of another shape than the Console's."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError):
        message = f"{failure}: the answer is not one of Akash's Console API"
        raise Unreachable(message, "check options.akash.console, and proxies (HTTPS_PROXY)") from None


class Console:
    """A client of the Console API for one key. Every call blocks; raises BackendError, Unreachable."""

    def __init__(self, address: str, key_source: str, clock: Clock = SYSTEM) -> None:
        self.clock = clock
        self.address, self._key_source = address.rstrip("/"), key_source
        local = self.address.startswith("http://127.0.0.1")
        direct = (urllib.request.ProxyHandler({}),) if local else ()
        self._http = http.Http(self._target, _error, lambda it: http.network_hint(str(it)), lambda: direct, clock=clock)
        self._clock_s = 0.0  # how far the Console's clock is ahead of this one

    def now(self) -> float:
        """Return the Console's time in seconds since 1970, as of its last answer; this machine's clock before the first."""
        return self.clock.now() + self._clock_s

    def check_credentials(self) -> None:
        """Raise BackendError where there is no API key."""
        read_key(self._key_source)

    def create(self, sdl: str, deposit_usd: float | None = None) -> dict[str, Any]:
        """Create a deployment and return `dseq` and `manifest`; tried once, for a second try would be a second one."""
        data = {"sdl": sdl, **({"deposit": deposit_usd} if deposit_usd else {})}
        failure = "the deployment was not accepted"
        with _shaped(failure):
            made = self._call("POST", "/v1/deployments", failure, {"data": data}, tries=1)["data"]
            return {"dseq": str(made["dseq"]), "manifest": str(made["manifest"])}

    def deployments(self) -> Iterator[Mapping[str, Any]]:
        """Yield the active deployments of the account, page by page."""
        skip = 0
        while True:
            path = f"/v1/deployments?skip={skip}&limit={PAGE}"
            failure = "deployments cannot be listed"
            with _shaped(failure):
                data = self._call("GET", path, failure)["data"]
                found, more = [dict(each) for each in data["deployments"]], data["pagination"].get("hasMore")
            yield from found
            skip += PAGE
            if not more or not found:
                return

    def deployment(self, dseq: str) -> Mapping[str, Any] | None:
        """Return a deployment with its leases, None where there is none."""
        failure = "the deployment cannot be read"
        with _shaped(failure):
            answer = self._call("GET", f"/v1/deployments/{dseq}", failure, accept=(404,))
            _check_absence(answer, failure)
            return dict(answer["data"]) if "data" in answer else None

    def close(self, dseq: str) -> None:
        """Close a deployment with its leases; none, or a closed one, is no error."""
        failure = "the deployment cannot be closed"
        with _shaped(failure):
            _check_absence(self._call("DELETE", f"/v1/deployments/{dseq}", failure, accept=(404,)), failure)

    def bids(self, dseq: str) -> list[Mapping[str, Any]]:
        """Return the bids on a deployment."""
        failure = "bids cannot be listed"
        with _shaped(failure):
            return [dict(item["bid"]) for item in self._call("GET", f"/v1/bids?dseq={dseq}", failure)["data"]]

    def lease(self, manifest: str, bid: Mapping[str, Any]) -> None:
        """Accept a bid and send the manifest to its provider; safe to repeat: an active lease is not created again.

        akash-network/console, lease.service.ts, createLeasesAndSendManifest (2026-08).
        """
        lease = {name: bid["id"][name] for name in ("dseq", "gseq", "oseq", "provider")}
        body = {"manifest": manifest, "leases": [{**lease, "dseq": str(lease["dseq"])}]}
        self._call("POST", "/v1/leases", "the bid cannot be accepted", body)

    def providers(self, addresses: list[str]) -> dict[str, Mapping[str, Any]]:
        """Return address -> what the Console knows of providers; at most 20 in one call."""
        found: dict[str, Mapping[str, Any]] = {}
        for first in range(0, len(addresses), 20):
            path = f"/v1/providers?addresses={','.join(addresses[first : first + 20])}"
            with _shaped(failure := "providers cannot be listed"):
                found.update({item["owner"]: dict(item) for item in self._call("GET", path, failure)})
        return found

    def gpus(self) -> Mapping[str, Any]:
        """Return how many GPUs of each model the network has and which are free."""
        failure = "GPUs cannot be listed"
        with _shaped(failure):
            return dict(self._call("GET", "/v1/gpu", failure))

    def _call(
        self,
        method: str,
        path: str,
        failure: str,
        body: Any = None,
        *,
        tries: int | None = None,
        accept: tuple[int, ...] = (),
    ) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data else {}
        answer = self._http.call(method, path, failure, data=data, headers=headers, tries=tries, accept=accept)
        with suppress(ValueError):  # a proxy's date may be anything
            if date := answer.headers.get("date"):
                self._clock_s = parsedate_to_datetime(date).timestamp() - self.clock.now()
        return answer.json

    def _target(self, path: str) -> tuple[str, Mapping[str, str]]:
        headers = {"Accept": "application/json", "User-Agent": "cloudtrain", "x-api-key": read_key(self._key_source)}
        return f"{self.address}{path}", headers


def _check_absence(answer: Mapping[str, Any], failure: str) -> None:
    """Raise BackendError for a 404 that is not about a deployment: a missing wallet, or another server's."""
    text = str(answer.get("message") or "not found")
    if "data" not in answer and "deployment not found" not in text.lower():
        raise BackendError(f"{failure}: {text}", "options.akash.console, and the account of the API key")


def _error(answer: Answer, failure: str) -> ConsoleError:
    unreachable = answer.status in RETRYABLE or answer.status >= 500
    return (ConsoleUnreachable if unreachable else ConsoleError)(*_explain(answer, failure), answer)


def _explain(answer: Answer, failure: str) -> tuple[str, str]:
    try:
        said = json.loads(answer.data)
        text = str(said.get("message") or said["error"])
    except (ValueError, LookupError, TypeError, AttributeError):
        text = answer.data.decode("utf-8", "replace")
    text = " ".join(text.split())[:300] or "no reason was given"
    if answer.status == 401:
        return f"{failure}: the Console does not accept the API key", "make another one; options.akash.api_key names it"
    if answer.status == 402:
        return f"{failure}: the account has too little money: {text}", "add funds at console.akash.network"
    hint = "try again" if answer.status >= 500 or answer.status == 429 else ""
    return f"{failure}: {text} ({answer.status})", hint


def refused(error: BackendError) -> bool:
    """Return whether the Console said no, so that nothing was carried out."""
    return isinstance(error, ConsoleError) and not isinstance(error, Unreachable)


def read_key(source: str) -> str:
    """Return the API key of `env:NAME` or `file:PATH`, which goes into request headers and nowhere else.

    Raises BackendError where it is missing, or others can read it.
    """
    kind, _, name = source.partition(":")
    if kind == "env":
        if key := os.environ.get(name, "").strip():
            return key
        raise BackendError(f"the Akash API key is not known: environment variable {name} is not set", KEY_HINT)
    path = Path(name).expanduser()
    try:
        with path.open(encoding="utf-8") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise BackendError(f"the file of the Akash API key, {path}, can be read by others", f"chmod 600 {path}")
            key = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BackendError(f"the file of the Akash API key, {path}, cannot be read: {error}", KEY_HINT) from None
    if not key:
        raise BackendError(f"the file of the Akash API key, {path}, is empty", KEY_HINT)
    return key
