"""The backend `akash`: one deployment on the Akash network for each attempt, one service for each node.

sdl.py builds the SDL, submit.py creates deployment and lease, jobs.py looks at them, container.py runs in each container.
"""

from __future__ import annotations

import base64
import gzip
import io
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.akash import container, doctor
from cloudtrain.backends.akash.client import Console
from cloudtrain.backends.akash.jobs import Attempts
from cloudtrain.backends.akash.request import KEYS, Request, fill
from cloudtrain.backends.akash.submit import Submission
from cloudtrain.backends.api import FETCHABLE, Backend, Facts, Plan, TimeLimit, Traits
from cloudtrain.backends.aws import Aws
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BadJob, BadRequest, Problem
from cloudtrain.job import units

if TYPE_CHECKING:
    from pydantic import BaseModel

    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle

POLL_S, PAUSE_S = 10.0, 2.0  # between looks at a lease; between looks for bids
SIMULATED_POLL_S, SIMULATED_PAUSE_S = 0.5, 0.02
CONSOLE = "https://console-api.akash.network"
MOST_INLINE = 900_000  # characters of source in an SDL for all nodes; etcd, where providers keep it, takes 1.5 MiB
PIECE = 100_000  # characters of a variable; Linux takes 128 KiB


class AkashBackend(Attempts, Backend):
    """Runs jobs as deployments of an Akash Console account."""

    name = "akash"
    poll_s = follow_s = POLL_S
    logs_per_s = 2.0
    variables = ("AKASH_*", "AWS_*", "BOTO_*", "*_PROXY", "*_proxy", "*_CA_BUNDLE", "SSL_CERT_*", "HOME")
    traits = Traits(keys=KEYS, client="boto3")

    def __init__(self, options: Mapping[str, Any], workdir: Path, clock: Clock = SYSTEM) -> None:
        self._options = dict(options)
        address = str(options.get("console") or CONSOLE)
        simulated = address.startswith("http://")  # which is allowed on this machine alone
        if simulated:
            self.poll_s = self.follow_s = SIMULATED_POLL_S
            self.logs_per_s = 100.0
        region, profile = options.get("store_region") or "us-east-1", options.get("profile")
        aws = Aws(self.name, region, profile, options.get("store_endpoint"), clock)
        key = str(options.get("api_key") or "env:AKASH_API_KEY")
        console = Console(address, key, clock)
        store = str(options.get("store") or "").rstrip("/")
        pause_s = SIMULATED_PAUSE_S if simulated else PAUSE_S
        super().__init__(
            console,
            aws,
            store,
            Submission(console, aws, store, options, lambda attempt_id: self.control(attempt_id), pause_s),
            lost_after_s=units.duration_s(str(options.get("lost_after") or "5m")),
            settle_s=float(options.get("settle_s", 45.0)),
        )

    @classmethod
    def options(cls) -> type[BaseModel]:
        from cloudtrain.backends.akash.options import AkashOptions

        return AkashOptions

    def plan(self, job: Job, bundle: Bundle, run_id: str, attempt: int = 1) -> Plan:
        request = Request(job, bundle, run_id, attempt, self._options)
        if request.problems:
            raise BadJob(request.problems)
        usd = round(request.ceiling_usd * request.manifest.nodes, 6)
        notes = [
            f"cloudtrain accepts Akash bids of at most {usd:.4g} USD an hour, for all nodes together",
            "source, log, results and values of env: secrets go through the store, not through the Console;"
            " the provider can read all of a job",
            "the lease is billed until cloudtrain closes it: a watcher must run when the job ends",
        ]
        price = {"usd_per_hour": usd, "as_of": "", "source": "the ceiling of bids"}
        notes = [*request.notes, *notes, *request.manifest.notes()]
        return Plan.of(self.name, job, bundle, request.manifest.to_dict(), request.to_dict(), notes, price=price)

    def facts(self, plan: Plan) -> Facts:
        """Return the images and GPUs; accounts, regions and machines are the bids', which the plan does not know."""
        sdl = plan.request["sdl"]
        images = tuple(dict.fromkeys(str(each.get("image") or "") for each in sdl["services"].values()))
        compute, deployed = sdl["profiles"]["compute"], sdl["deployment"].values()
        profiles = [compute[place["profile"]]["resources"] for each in deployed for place in each.values()]
        return Facts("", "", (), images, gpus=sum(int((each.get("gpu") or {}).get("units") or 0) for each in profiles))

    def manifests(self, plan: Plan, packed: bytes) -> str:
        """Return the SDL as YAML with the source in it, to be sent by hand; raises BadRequest where it is too large."""
        smaller = io.BytesIO()  # a bundle is compressed for speed
        with gzip.open(io.BytesIO(packed)) as tar, gzip.GzipFile(fileobj=smaller, mode="wb", mtime=0) as best:
            shutil.copyfileobj(tar, best)
        packed, nodes = smaller.getvalue(), int(plan.manifest["nodes"])
        text = base64.b64encode(packed).decode()
        if len(text) * nodes > MOST_INLINE:
            message = f"the source takes {len(packed):,} bytes packed, too many for the SDL of {nodes} nodes"
            raise BadRequest(
                message,
                "list files to leave out in .cloudtrainignore, or use cloudtrain submit, which uploads the source to the bucket",
            )
        import yaml

        pieces = {
            f"{container.INLINE}{number}": text[at : at + PIECE] for number, at in enumerate(range(0, len(text), PIECE))
        }
        named = sorted(
            source.removeprefix("env:")
            for sources in (plan.manifest.get("secrets") or {}).values()
            for source in sources
            if source.startswith("env:")
        )
        secrets = dict.fromkeys(named, "REPLACE-ME")
        values = {container.URLS: "", container.GIVEN: ",".join(named), **secrets, **pieces}
        sdl = fill(plan.request["sdl"], dict.fromkeys(range(nodes), values))
        head = [
            f"# {plan.attempt_id}: paste this at console.akash.network, or send it with provider-services.",
            "# Close the lease yourself when the job has ended: it is billed until then.",
        ]
        if named:
            head.append(f"# Replace the values of {', '.join(named)}; whoever sees the SDL sees them.")
        return "\n".join(head) + "\n" + yaml.safe_dump(sdl, sort_keys=False, width=1000)

    def time_limit(self, plan: Plan) -> TimeLimit:
        limit = TimeLimit.of_launcher(plan)
        return TimeLimit(
            limit.seconds, "the launcher ends the job by its own clock; cloudtrain must then close the lease"
        )

    def preflight(self, plan: Plan) -> None:
        self._console.check_credentials()
        self._aws.check_credentials()

    def submit(self, plan: Plan, bundle: Bundle) -> str:
        return f"{plan.attempt_id}/{self._submission.submit(plan, bundle)}"

    def fetch(self, handle: str, into: Path, what: tuple[str, ...] = FETCHABLE) -> Path:
        lease = self.known_lease(handle, "its results may still be in the job's output")
        into.mkdir(parents=True, exist_ok=True)
        for folder in what:
            self.files(lease).bring(folder, into / folder)
        return into

    def check(self) -> list[Problem]:
        return doctor.check(self._console, self._aws, self._options)

    def capacity(self) -> str:
        return doctor.capacity(self._console)

    @classmethod
    def discover(cls) -> dict[str, Any]:
        """Return options that the environment shows: the variable of the API key, the store's endpoint and region."""
        found = {"api_key": "env:AKASH_API_KEY"} if os.environ.get("AKASH_API_KEY") else {}
        variables = {
            "store_endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
            "store_region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
        }
        for option, names in variables.items():
            if value := next((os.environ[name] for name in names if os.environ.get(name)), ""):
                found[option] = value
        return found
