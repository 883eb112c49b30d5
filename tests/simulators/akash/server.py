"""Simulates the Akash Console API and the gateways of providers on one loopback port; services really run.

    with Simulator(folder) as simulator: ...          in this process: tests

Routes, fields and errors as in akash-network/console, apps/api/src (2026-08-22) and akash-network/provider, gateway/rest
(2026-06-29). Simulated: deployments, bids, leases, containers that are started again, and what providers do wrong. Not
simulated: the chain, images, GPUs, storage classes, network policies, the WebSocket routes for logs and shells.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudtrain.backends.akash import groups
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.simulators import http
from cloudtrain.simulators.http import Request, Response, Server
from tests.simulators.akash.lease import Lease
from tests.simulators.akash.market import OWNER, Provider
from tests.simulators.akash.tokens import Tokens

API_KEY = "ac.sk.simulated.0123456789"
NAMES = {400: "BadRequestError", 401: "UnauthorizedError", 402: "PaymentRequiredError", 404: "NotFoundError",
         422: "UnprocessableEntityError"}  # fmt: skip
UNITS = {"s": 1, "m": 60, "h": 3600}


class ApiError(http.ApiError):
    """An error with the body of the Console's API."""

    @property
    def response(self) -> Response:
        name = NAMES.get(self.status, "InternalServerError")
        return Response({"error": name, "message": self.message, "code": "", "type": "client_error"}, self.status)


@dataclass
class Behavior:
    """How the simulated network behaves."""

    execute: bool = True
    funds: bool = True
    deposit_required: bool = False


class Simulator(AbstractContextManager["Simulator"]):
    """One account; `url` serves the Console and every gateway.

    Args:
        check_sdl: raises ValueError with what is wrong with an SDL, by a public schema for example.
    """

    def __init__(
        self,
        folder: Path,
        providers: list[Provider] | None = None,
        *,
        behavior: Behavior | None = None,
        check_sdl: Callable[[Mapping[str, Any]], None] = lambda _: None,
        port: int = 0,
        clock: Clock = SYSTEM,
    ) -> None:
        self._folder, self._check_sdl, self._clock = folder, check_sdl, clock
        self.behavior = behavior or Behavior()
        self.providers = providers or [
            Provider("akash1provider0000000000000000000000000cheap", "cheap.example", 0.5),
            Provider("akash1provider0000000000000000000000000solid", "solid.example", 0.8, uptime=1.0),
        ]
        self.deployments: dict[str, dict[str, Any]] = {}
        self.leases: dict[str, Lease] = {}
        self._tokens = Tokens(OWNER, clock)
        self._lock = threading.RLock()
        number = r"/v1/deployments/(\d+)"
        lease = r"/lease/(\d+)/(\d+)/(\d+)"
        self.server = Server(
            [
                ("POST", "/v1/deployments", self._keyed(self._create)),
                ("GET", "/v1/deployments", self._keyed(self._list)),
                ("GET", number, self._keyed(self._get)),
                ("DELETE", number, self._keyed(self._delete)),
                ("GET", "/v1/bids", self._keyed(self._bids)),
                ("POST", "/v1/leases", self._keyed(self._lease)),
                ("POST", "/v1/create-jwt-token", self._keyed(self._token)),
                ("GET", "/v1/providers", self._list_providers),
                ("GET", "/v1/gpu", self._gpu),
                ("PUT", r"/deployment/(\d+)/manifest", self._tokened(self._put_manifest)),
                ("GET", lease + "/status", self._tokened(self._lease_status)),
            ],
            secret=secrets.token_urlsafe(16),
            port=port,
        )
        self.url, self.faults = self.server.url, self.server.faults

    # -- what a test does to it ----------------------------------------------------------------------------------------

    def vanish(self, address: str) -> None:
        """A provider is gone: its containers are killed, its gateway does not answer, and the leases stay open."""
        self._provider(address).gone = True
        for dseq, lease in list(self.leases.items()):
            if self.deployments[dseq]["leases"][-1]["id"]["provider"] == address:
                lease.kill()

    def close_lease(self, dseq: str, reason: str = "lease_closed_reason_unstable", state: str = "closed") -> None:
        """The provider, or the chain when no funds are left, closes a lease."""
        with self._lock:
            self.deployments[dseq]["leases"][-1].update(state=state, closed_on="2", reason=reason)
        if dseq in self.leases:
            self.leases[dseq].close()

    def reclaim(self, dseq: str, deadline_s: float) -> None:
        """The provider gives notice that it takes its capacity back."""
        with self._lock:
            notice = {
                "window": "60s",
                "started_at": "1",
                "deadline": str(int(self._clock.now() + deadline_s)),
                "reason": "",
            }
            self.deployments[dseq]["leases"][-1].update(state="reclaiming", reclamation=notice)

    def active(self) -> list[str]:
        """Return the deployments that are billed."""
        return [dseq for dseq, deployment in self.deployments.items() if deployment["state"] == "active"]

    def close(self) -> None:
        """End every container and the server; blocking."""
        for lease in self.leases.values():
            lease.kill()
        self.server.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the Console -----------------------------------------------------------------------------------------------------

    def _keyed(self, route: Callable[..., Response]) -> Callable[..., Response]:
        def checked(request: Request, *parts: str) -> Response:
            if request.headers.get("x-api-key") and request.headers.get("authorization"):
                raise ApiError(400, "Authorization and X-Api-Key headers are mutually exclusive")
            if request.headers.get("x-api-key") != API_KEY:
                raise ApiError(401, "Invalid API key")
            return route(request, *parts)

        return checked

    def _create(self, request: Request) -> Response:
        import yaml

        data = request.json.get("data") or {}
        if not isinstance(data.get("sdl"), str):
            raise ApiError(400, "Validation error")
        if self.behavior.deposit_required and "deposit" not in data:
            raise ApiError(400, "deposit is required")
        try:
            sdl = yaml.safe_load(data["sdl"])
            self._check_sdl(sdl)
            manifest = groups.manifest_json(sdl)
        except (yaml.YAMLError, ValueError, LookupError, TypeError) as error:
            raise ApiError(400, f"Invalid SDL: {error}") from None
        if not any(
            port["global"] for group in json.loads(manifest) for each in group["services"] for port in each["expose"]
        ):
            raise ApiError(400, "Invalid SDL: zero global services")
        if not self.behavior.funds:
            raise ApiError(402, "Insufficient balance")
        window = (sdl.get("reclamation") or {}).get("min_window", "0s")
        pricing = [place["pricing"] for place in sdl["profiles"]["placement"].values()]
        with self._lock:
            dseq = str(max([int(self._clock.now() * 1000), *(int(known) + 1 for known in self.deployments)]))
            parsed = json.loads(manifest)
            ceiling = float(next(iter(pricing[0].values()))["amount"])
            self.deployments[dseq] = {
                "dseq": dseq,
                "state": "active",
                "hash": groups.manifest_hash(manifest),
                "created": self._clock.monotonic(),
                "groups": parsed,
                "ceiling": ceiling * sum(service["count"] for service in parsed[0]["services"]),
                "min_window_s": int(window[:-1]) * UNITS[window[-1]],
                "leases": [],
            }
        transaction = {"code": 0, "transactionHash": "00", "rawLog": ""}
        return Response({"data": {"dseq": dseq, "manifest": manifest, "signTx": transaction}}, 201)

    def _list(self, request: Request) -> Response:
        with self._lock:
            items = [self._view(deployment, status=False) for deployment in self.deployments.values()
                     if deployment["state"] == "active"]  # fmt: skip
        paged = "skip" in request.query and "limit" in request.query
        skip, limit = int(request.query.get("skip", 0)), int(request.query.get("limit", 1000))
        pagination = {"total": len(items), "skip": skip, "limit": limit, "hasMore": paged and len(items) > skip + limit}
        return Response({"data": {"deployments": items[skip : skip + limit], "pagination": pagination}})

    def _get(self, _: Request, dseq: str) -> Response:
        return Response({"data": self._view(self._deployment(dseq))})

    def _delete(self, _: Request, dseq: str) -> Response:
        deployment = self._deployment(dseq)
        with self._lock:
            if deployment["state"] == "active":
                deployment["state"] = "closed"
                for lease in deployment["leases"]:
                    if lease["state"] != "closed":
                        lease.update(state="closed", closed_on="2", reason="lease_closed_owner")
        if dseq in self.leases:
            self.leases[dseq].close()
        return Response({"data": {"success": True}})

    def _bids(self, request: Request) -> Response:
        deployment = self._deployment(request.query.get("dseq", ""))
        bids = [bid for provider in self.providers if (bid := provider.bid(deployment, self._clock.monotonic()))]
        return Response({"data": [{"bid": bid, "escrow_account": {}} for bid in bids]})

    def _lease(self, request: Request) -> Response:
        body = request.json
        wanted = (body.get("leases") or [{}])[0]
        deployment, provider = self._deployment(str(wanted.get("dseq"))), self._provider(str(wanted.get("provider")))
        with self._lock:
            open_leases = [lease for lease in deployment["leases"] if lease["state"] != "closed"]
            if not open_leases:
                bid = provider.bid(deployment, self._clock.monotonic())
                if bid is None or bid["state"] != "open" or deployment["state"] != "active":
                    raise ApiError(400, "bid not open")
                lease = {"id": bid["id"], "state": "active", "price": bid["price"], "created_at": "1", "closed_on": "0"}
                deployment["leases"].append(lease)
        self._send_manifest(deployment["dseq"], str(body.get("manifest")))
        return Response({"data": self._view(deployment)})

    def _send_manifest(self, dseq: str, manifest: str) -> None:
        """Give a manifest to the lease's provider, which starts its services; the same one again changes nothing."""
        deployment = self._deployment(dseq)
        provider = self._provider(deployment["leases"][-1]["id"]["provider"])
        if provider.gone:
            raise ApiError(503, "provider is not reachable")
        if provider.refuses_manifest or groups.manifest_hash(manifest) != deployment["hash"]:
            raise ApiError(422, "manifest version validation failed")
        with self._lock:
            if dseq not in self.leases and self.behavior.execute:
                services = json.loads(manifest)[0]["services"]
                identity = deployment["leases"][-1]["id"]
                self.leases[dseq] = Lease(self._folder / dseq, identity, services, self._clock)

    def _view(self, deployment: Mapping[str, Any], status: bool = True) -> dict[str, Any]:
        leases = [dict(lease) for lease in deployment["leases"]]
        for lease in leases if status else ():
            running = self.leases.get(deployment["dseq"])
            gone = self._provider(lease["id"]["provider"]).gone or lease["state"] == "closed"
            empty: dict[str, Any] = {"services": {}, "forwarded_ports": {}, "ips": {}}
            lease["status"] = None if gone else running.status() if running else empty
        identity = {"owner": OWNER, "dseq": deployment["dseq"]}
        about = {"id": identity, "state": deployment["state"], "hash": deployment["hash"], "created_at": "1"}
        return {"deployment": about, "leases": leases, "escrow_account": {}}

    def _list_providers(self, request: Request) -> Response:
        addresses = [text for text in request.query.get("addresses", "").split(",") if text]
        if len(addresses) > 20:
            raise ApiError(400, "Validation error")
        return Response([each.to_dict() for each in self.providers if not addresses or each.address in addresses])

    def _gpu(self, _: Request) -> Response:
        rows: dict[str, int] = {}
        for provider in self.providers:
            for gpu in provider.gpus:
                rows[gpu.split("/")[3]] = rows.get(gpu.split("/")[3], 0) + 1
        details = [{"model": name, "ram": "", "interface": "", "allocatable": count, "allocated": 0}
                   for name, count in rows.items()]  # fmt: skip
        return Response(
            {"gpus": {"total": {"allocatable": sum(rows.values()), "allocated": 0}, "details": {"nvidia": details}}}
        )

    def _token(self, request: Request) -> Response:
        data = request.json.get("data") or {}
        if not isinstance(data.get("ttl"), int) or "leases" not in data:
            raise ApiError(400, "Validation error")
        return Response({"data": {"token": self._tokens.issue(data["ttl"], data["leases"])}}, 201)

    # -- a provider's gateway ----------------------------------------------------------------------------------------------

    def _tokened(self, route: Callable[..., Response]) -> Callable[..., Response]:
        def checked(request: Request, *parts: str) -> Response:
            if not self._tokens.valid(request.headers.get("authorization", "").removeprefix("Bearer ")):
                raise ApiError(401, "unauthorized access")
            return route(request, *parts)

        return checked

    def _put_manifest(self, request: Request, dseq: str) -> Response:
        self._send_manifest(dseq, request.body.decode())
        return Response(None)

    def _lease_status(self, _: Request, dseq: str, __: str, ___: str) -> Response:
        if dseq not in self.leases:
            raise ApiError(404, "no lease for deployment")
        return Response(self.leases[dseq].status())

    def _deployment(self, dseq: str) -> dict[str, Any]:
        if dseq not in self.deployments:
            raise ApiError(404, "Deployment not found")
        return self.deployments[dseq]

    def _provider(self, address: str) -> Provider:
        for provider in self.providers:
            if provider.address == address:
                return provider
        raise ApiError(404, "Provider not found")
