"""Submit an attempt: deployment, bids, lease, manifest; each step is found again where an earlier submission stopped.

The Console takes no name for a deployment. Before each POST the hash of the manifest, which the attempt's id makes unique,
is stored as an intent; the active deployments are listed for it before another POST. A deployment without a lease runs
nothing: only the lease, accepted by this module alone, makes an attempt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.akash import bids, container, groups
from cloudtrain.backends.akash.client import Console, refused
from cloudtrain.backends.akash.control import Control
from cloudtrain.backends.akash.request import fill
from cloudtrain.backends.akash.sdl import usd_per_hour
from cloudtrain.backends.aws import Aws
from cloudtrain.backends.manifest import env_secrets
from cloudtrain.backends.store.s3 import S3
from cloudtrain.errors import BackendError, NoCapacity, NotReached, Unreachable, before_sending, first_request
from cloudtrain.job import units

if TYPE_CHECKING:
    from cloudtrain.backends.plan import Plan
    from cloudtrain.source.bundle import Bundle

LOOKS = 4  # a new deployment may be missing from the first list
MOST_TRIES = 3  # bids that are tried, the cheapest one first
SPARE_S = 86400  # of presigned URLs, beyond the attempt's deadline
SETTLE_PAUSES = 15  # behind the first possible bid others are waited for: half a minute
OPEN = "active"  # state of a deployment or lease that is not closed


class Submission:
    """Submits the attempts of one account and store. Every call blocks; raises BackendError."""

    def __init__(
        self,
        console: Console,
        aws: Aws,
        store: str,
        options: Mapping[str, Any],
        control: Callable[[str], Control],
        pause_s: float,
    ) -> None:
        self._console, self._aws, self._store, self._options = console, aws, store, options
        self._control, self._pause_s = control, pause_s

    def submit(self, plan: Plan, bundle: Bundle) -> str:
        """Return the dseq of the attempt's deployment, which has a lease and its manifest."""
        control = self._control(plan.attempt_id)
        source = S3(self._aws, str(plan.request["source"]["uri"]))
        with before_sending():
            if lease := control.read("lease"):
                return str(lease["dseq"])
            source.add("", bundle.path)
        dseq, manifest = self.deployment(plan.attempt_id) or self._create(plan, control, source)
        return self._accept_bid(plan, control, dseq, manifest)

    def deployment(self, attempt_id: str) -> tuple[str, str] | None:
        """Return dseq and manifest of an attempt's active deployment, None where the Console lists none of its hashes."""
        intents = {intent["hash"]: intent for intent in self._control(attempt_id).intents()}
        if intents:
            for item in self._console.deployments():
                about = item["deployment"]
                if about["hash"] in intents and about["state"] == OPEN:
                    return str(about["id"]["dseq"]), str(intents[about["hash"]]["manifest"])
        return None

    # -- the deployment ------------------------------------------------------------------------------------------------

    def _create(self, plan: Plan, control: Control, source: S3) -> tuple[str, str]:
        """Create the deployment and return its dseq and manifest."""
        sdl = self._filled(plan, control, source)
        manifest = groups.manifest_json(sdl)
        intent = {"hash": groups.manifest_hash(manifest), "manifest": manifest}
        number = len(control.intents())
        while not control.create(f"intent-{number:04d}", intent):
            number += 1
        try:
            with first_request():
                dseq = self._console.create(json.dumps(sdl), self._options.get("deposit_usd"))["dseq"]  # JSON is YAML
        except NotReached:
            raise
        except BackendError as error:
            if refused(error):
                raise
            found = self._look(plan.attempt_id, error)
            if found is None:
                raise
            return found
        return dseq, manifest

    def _look(self, attempt_id: str, error: BackendError) -> tuple[str, str] | None:
        """Look several times for a deployment whose POST had no answer; raises Unreachable if the list has none either."""
        try:
            for look in range(LOOKS):
                self._console.clock.sleep(self._pause_s * look)
                if found := self.deployment(attempt_id):
                    return found
        except BackendError as lookup_error:
            message = f"{error.message}; whether the deployment exists could not be asked: {lookup_error.message}"
            raise Unreachable(message, lookup_error.hint) from None
        return None

    def _filled(self, plan: Plan, control: Control, source: S3) -> dict[str, Any]:
        """Return the plan's SDL with presigned URLs; values of secrets go through the store, not through the SDL."""
        seconds = int(plan.request["deadline_s"]) + SPARE_S
        given = {"secrets": env_secrets(plan)}
        if given["secrets"]:
            control.delete("given")
            control.create("given", given)
        values = {}
        for node in range(int(plan.manifest["nodes"])):
            urls = {
                "source": source.url("", "GET", seconds),
                "seen": control.url(f"began-{node}", "GET", seconds),
                "began": control.url(f"began-{node}", "PUT", seconds),
                "end": control.url(f"end-{node}", "PUT", seconds),
            }
            if given["secrets"]:
                urls["given"] = control.url("given", "GET", seconds)
            values[node] = {container.URLS: json.dumps(urls, separators=(",", ":"))}
        return fill(plan.request["sdl"], values)

    # -- bids and the lease --------------------------------------------------------------------------------------------

    def _accept_bid(self, plan: Plan, control: Control, dseq: str, manifest: str) -> str:
        """Accept the best bid and send the manifest; without one the deployment is closed and NoCapacity raised."""
        if (found := self._console.deployment(dseq)) and (lease := open_lease(found)):
            # An earlier submission has accepted a bid; whether its manifest arrived is not known.
            bid = {"id": lease["id"], "price": lease["price"]}
            self._console.lease(manifest, bid)
            return self._leased(plan, control, dseq, bid, [])
        offers = self._await_bids(plan, dseq)
        possible = [offer for offer in offers if not offer.why_not]
        refusals = []
        for offer in possible[:MOST_TRIES]:
            try:
                self._console.lease(manifest, offer.bid)
            except BackendError as error:
                if not refused(error):
                    raise
                refusals.append(f"{offer.name}: {error.message}")
                if (found := self._console.deployment(dseq)) and open_lease(found):
                    break  # the lease was made, and its provider does not take the manifest
                continue
            return self._leased(plan, control, dseq, offer.bid, [one.to_dict() for one in offers])
        self._console.close(dseq)
        reason = "; ".join(refusals) or bids.table(offers) or "no bid has come"
        message = (
            f"no provider on Akash accepts the job for {plan.request['ceiling_usd_per_hour']:.4g} USD an hour: {reason}"
        )
        raise NoCapacity(message, "raise max_usd_per_hour, ask for another GPU, or wait (retry.on_events: capacity)")

    def _await_bids(self, plan: Plan, dseq: str) -> list[bids.Offer]:
        """Return the offers: all that come within half a minute behind the first possible one, at most as long as bid_wait."""
        limits = plan.job.get("limits") or {}
        wait_s = units.duration_s(str(limits.get("max_wait") or self._options.get("bid_wait") or "2m"))
        options = {**self._options, **({"reclamation_window": w} if (w := self._window(plan)) else {})}
        started, first_at = self._console.clock.monotonic(), None
        while True:
            open_bids = self._console.bids(dseq)
            addresses = sorted({str(bid["id"]["provider"]) for bid in open_bids})
            offers = bids.rate(
                open_bids,
                self._console.providers(addresses) if addresses else {},
                ceiling_usd=float(plan.request["ceiling_usd_per_hour"]),
                gpus=plan.request.get("gpus") or [model for model in [plan.request["gpu"]] if model],
                options=options,
            )
            now = self._console.clock.monotonic()
            if first_at is None and any(not offer.why_not for offer in offers):
                first_at = now
            if now - started >= wait_s or (
                first_at is not None and now - first_at >= min(SETTLE_PAUSES * self._pause_s, wait_s)
            ):
                return offers
            self._console.clock.sleep(self._pause_s)

    @staticmethod
    def _window(plan: Plan) -> str:
        return str((plan.request["sdl"].get("reclamation") or {}).get("min_window") or "")

    def _leased(
        self, plan: Plan, control: Control, dseq: str, bid: Mapping[str, Any], offers: list[dict[str, Any]]
    ) -> str:
        provider = str(bid["id"]["provider"])
        lease = {
            "dseq": dseq,
            "provider": provider,
            "provider_name": next((row["name"] for row in offers if row["provider"] == provider), provider),
            "usd_per_hour": round(usd_per_hour(float(bid["price"]["amount"])), 6),
            "bids": offers,
            "leased_at": self._console.now(),
            "deadline_s": plan.request["deadline_s"],
            "output": plan.request["output"],
            "nodes": plan.manifest["nodes"],
            "labels": dict(plan.job.get("labels") or {}),
        }
        control.create("lease", lease)
        return str(control.read("lease")["dseq"])


def open_lease(deployment: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the lease of a deployment that is not closed, None without one."""
    return next((lease for lease in deployment["leases"] if lease["state"] in (OPEN, "reclaiming")), None)
