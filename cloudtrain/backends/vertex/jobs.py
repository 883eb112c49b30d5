"""Call Vertex AI's custom job API: create a job once, find it, look at it, cancel it, fetch its results.

The handle is the job's resource name. Creation uses Google's SDK if the options say so and it is installed. All other
calls use the REST API with google-auth alone.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import images
from cloudtrain.backends.api import FETCHABLE, FoundAttempt, Plan, Shell
from cloudtrain.backends.google import GoogleApi, api_error, credentials_error
from cloudtrain.backends.http import Answer, network_hint
from cloudtrain.backends.manifest import sent_record
from cloudtrain.backends.store.gcs import Gcs
from cloudtrain.backends.vertex import images as google_images
from cloudtrain.backends.vertex.logs import JobLogs, node_of
from cloudtrain.backends.vertex.request import ATTEMPT, RUN
from cloudtrain.backends.vertex.status import STATES, has_ended, job_status
from cloudtrain.errors import BackendError, Unreachable, before_sending, first_request
from cloudtrain.events import State, Status
from cloudtrain.job.units import unix_time

if TYPE_CHECKING:
    from cloudtrain.events import LogLine
    from cloudtrain.source.bundle import Bundle

FAILURE = "Vertex AI did not accept the job"
CREATES = 3  # tries; before each one `find` checks whether the last one created the job
PAGE = 100  # jobs in one answer of the list
LOOKS = 3  # a new job may be missing from the first list
CREATE_S = 120.0
_HANDLE = re.compile(r"projects/[^/]+/locations/[^/]+/customJobs/\d+")


class CustomJobs:
    """The custom jobs of one project and region: the calls of a backend that the API answers. They raise BackendError."""

    def __init__(
        self,
        api: GoogleApi,
        project: str,
        region: str,
        *,
        settle_s: float,
        pause_s: float,
        look_s: float,
        console: bool = True,
        client: str = "rest",
    ) -> None:
        self._api, self._project, self._region, self._console = api, project, region, console
        self._client = client
        self._settle_s, self._pause_s, self._look_s = settle_s, pause_s, look_s
        self._logs = JobLogs(api, project, settle_s=settle_s, pause_s=pause_s)
        self._parent = f"projects/{project}/locations/{region}"
        # Handle -> when its status was asked for (monotonic), and the job as it was
        self._known: dict[str, tuple[float, Mapping[str, Any]]] = {}

    # -- submit --------------------------------------------------------------------------------------------------------

    def submit(self, plan: Plan, bundle: Bundle) -> str:
        """Upload the bundle, create the job unless its attempt exists, and return its handle."""
        request, job = plan.request, plan.request["customJob"]
        attempt_id = job["labels"][ATTEMPT]
        with before_sending():
            if (handle := self.find(attempt_id)) is not None:
                return handle
            Gcs(self._api, f"gs://{request['source']['bucket']}").add(request["source"]["object"], bundle.path)
        by_sdk = self._client == "sdk" and has_sdk()
        lost = False
        for turn in range(CREATES):
            try:
                with nullcontext() if lost else first_request():
                    return (
                        self._create_by_sdk(request["parent"], job) if by_sdk else self._create(request["parent"], job)
                    )
            except BackendError as error:
                lost = lost or isinstance(error, Unreachable) or getattr(error, "status", 0) >= 500
                if not lost:
                    raise
                # The job may have been created: a second one would train twice.
                if (handle := self._find_after_error(attempt_id, error)) is not None:
                    return handle
                if turn == CREATES - 1 or not isinstance(error, Unreachable):
                    raise
        raise AssertionError("the last try returns or raises")

    def _find_after_error(self, attempt_id: str, error: BackendError) -> str | None:
        """Look several times for a job whose create had no answer; raises Unreachable if the list has no answer either."""
        try:
            for look in range(LOOKS):
                self._api.clock.sleep(self._look_s * look)
                if (handle := self.find(attempt_id)) is not None:
                    return handle
        except BackendError as lookup_error:
            message = f"{error.message}; Vertex AI did not answer whether the job exists: {lookup_error.message}"
            raise Unreachable(message, lookup_error.hint) from None
        return None

    def find(self, attempt_id: str) -> str | None:
        """Return the handle of an attempt's job, None without one; raises BackendError if the jobs cannot be listed."""
        query = {"filter": f"labels.{ATTEMPT}={attempt_id}", "pageSize": "10"}
        jobs = list(self._list(query))
        return min(jobs, key=lambda job: str(job.get("createTime", "")))["name"] if jobs else None

    def _list(self, query: dict[str, str]) -> Iterator[Mapping[str, Any]]:
        """Yield the jobs of a list, page by page."""
        path = f"/v1/{self._parent}/customJobs"
        while True:
            page = self._api.call("GET", "aiplatform", path, "jobs cannot be listed", query=query).json
            yield from page.get("customJobs", ())
            if not page.get("nextPageToken"):
                return
            query = {**query, "pageToken": page["nextPageToken"]}

    def _create(self, parent: str, job: Mapping[str, Any]) -> str:
        answer = self._api.call("POST", "aiplatform", f"/v1/{parent}/customJobs", FAILURE, body=job, tries=1)
        try:
            return str(answer.json["name"])
        except (LookupError, TypeError):
            raise Unreachable(
                "Vertex AI did not accept the job: the answer does not contain a job name", "check proxies"
            ) from None

    def _create_by_sdk(self, parent: str, job: Mapping[str, Any]) -> str:
        """Create the job through aiplatform.CustomJob, with exactly the fields of the plan."""
        import logging

        from google.api_core.exceptions import GoogleAPICallError
        from google.auth.exceptions import GoogleAuthError

        created = self._sdk_job(parent, job)
        logger = logging.getLogger("google.cloud.aiplatform.jobs")  # the SDK's own; it logs every step at INFO
        level = logger.level
        logger.setLevel(logging.WARNING)
        try:
            created.submit(create_request_timeout=CREATE_S)
        except GoogleAPICallError as error:
            raise api_error(Answer(int(error.code or 500), {}, error.response.content), FAILURE) from None
        except GoogleAuthError as error:  # before the job was sent, or after a 401
            raise credentials_error(error) from None
        except Exception as error:  # while the job was sent: its answer is lost
            text = f"{FAILURE}: it cannot be reached: {type(error).__name__}: {error}".partition("\n")[0][:400]
            raise Unreachable(text, network_hint(str(error))) from None
        finally:
            logger.setLevel(level)
        return str(created.resource_name)

    def _sdk_job(self, parent: str, job: Mapping[str, Any]) -> Any:
        """Return the SDK's object of a job that was not sent; raises BackendError for what the SDK does not take.

        It is sent by REST: proxies, certificates and errors are those of the other calls, and the SDK's settings in
        this process stay as they are.
        """
        from google.auth.credentials import AnonymousCredentials
        from google.cloud import aiplatform
        from google.cloud.aiplatform_v1 import CustomJob, CustomJobSpec, JobServiceClient

        _, project, _, region = parent.split("/")
        simulated = self._api.endpoint is not None
        credentials: Any = AnonymousCredentials() if simulated else self._api.credentials()  # type: ignore[no-untyped-call]
        try:
            planned = CustomJob.from_json(json.dumps(job))
            output = planned.job_spec.base_output_directory.output_uri_prefix
            created: Any = aiplatform.CustomJob(
                display_name=planned.display_name,
                worker_pool_specs=list(planned.job_spec.worker_pool_specs),
                base_output_dir=output,
                staging_bucket="/".join(output.split("/")[:3]),
                labels=dict(planned.labels),
                encryption_spec_key_name=planned.encryption_spec.kms_key_name or None,
                project=project,
                location=region,
                credentials=credentials,
            )
            place = {"api_endpoint": self._api.url("aiplatform")}
            created.api_client = JobServiceClient(credentials=credentials, transport="rest", client_options=place)
        except Exception as error:
            text = f"the Vertex AI SDK refuses the job: {error}".partition("\n")[0][:400]
            raise BackendError(text, "set options.vertex.client: rest to submit without the SDK") from None
        CustomJobSpec.copy_from(created.job_spec, planned.job_spec)  # fields that the constructor has no argument for
        return created

    # -- look ----------------------------------------------------------------------------------------------------------

    def get(self, handle: str) -> dict[str, Any] | None:
        """Return the job's resource from the API, None if it does not exist."""
        if not _HANDLE.fullmatch(handle):
            raise BackendError(f"{handle!r} is not a job's name", "projects/P/locations/R/customJobs/ID")
        answer = self._api.call("GET", "aiplatform", f"/v1/{handle}", "the job cannot be read", accept=(404,))
        return None if answer.status == 404 else dict(answer.json)

    def shell(self, handle: str, node: int, words: Sequence[str], *, stdin: bool, terminal: bool) -> Shell:
        """Return the address of a node's web shell, which the job offers with enableWebAccess.

        https://docs.cloud.google.com/vertex-ai/docs/training/monitor-debug-interactive-shell (2026-11-23): the keys are
        workerpool0-0, workerpool1-0, ..., and they are there while the job runs.
        """
        job = self.get(handle)
        if job is None:
            raise BackendError(f"the Vertex AI job {handle} no longer exists")
        if not job["jobSpec"].get("enableWebAccess"):
            return Shell(
                note="Vertex AI opens shells only in jobs with options.vertex.web_access: true; submit it again with it"
            )
        pools = [int(pool.get("replicaCount") or 1) for pool in job["jobSpec"]["workerPoolSpecs"]]
        names = [f"workerpool{pool}-{index}" for pool, count in enumerate(pools) for index in range(count)]
        if node >= len(names):
            raise BackendError(f"there is no node {node}: they are counted from 0, and the last is {len(names) - 1}")
        address = str((job.get("webAccessUris") or {}).get(names[node]) or "")
        if not address:
            return Shell(
                note=f"Vertex AI has no address for {names[node]} yet: it is there some minutes after the start"
            )
        return Shell(
            address=address,
            note="open it in a browser; the image needs bash, and your account aiplatform.customJobs.get",
        )

    def status(self, handle: str) -> Status:
        """Return the attempt's status; a failure has the exit code and reason of the launcher's `result` event.

        For `settle_s` after the end the status is STOPPING while that event has not arrived.
        """
        job = self.get(handle)
        if job is None:
            return Status(State.LOST, None, f"the Vertex AI job {handle} no longer exists")
        self._known[handle] = self._api.clock.monotonic(), job
        return self._status(handle, job)

    def statuses(self, handles: Sequence[str]) -> dict[str, Status]:
        """Return handle -> status of the jobs that have not ended, from one list of our live jobs."""
        ended = [name for name, state in STATES.items() if state.final]
        query = {
            "filter": " AND ".join([f"labels.{ATTEMPT}:*", *(f'state!="{name}"' for name in ended)]),
            "readMask": "name,state,createTime,startTime,error",
            "pageSize": str(PAGE),
        }
        jobs = self._list(query) if handles else ()
        wanted = set(handles)
        live = {str(job["name"]): job for job in jobs if job["name"] in wanted}
        moment = self._api.clock.monotonic()
        known = {handle: known for handle, known in list(self._known.items()) if moment - known[0] < self._pause_s}
        self._known = known | {handle: (moment, job) for handle, job in live.items()}
        return {handle: self._status(handle, job) for handle, job in live.items()}

    def _status(self, handle: str, job: Mapping[str, Any]) -> Status:
        status = job_status(
            handle, job, self._project, self._settle_s, lambda: self._logs.result_event(job), self._api.clock
        )
        return status if self._console else replace(status, url=None)

    def pinned_images(self, handle: str) -> dict[int, str]:
        """Return node -> the image of its worker pool, with the digest that the tag stands for now.

        Vertex AI reports no digest, so each image is resolved once, in Google's registries only. A tag is not resolved
        more than an hour after the job's start, nor for a job that never started.
        """
        job = self.get(handle)
        if not job or "startTime" not in job:
            return {}
        age_s = self._api.clock.now() - unix_time(str(job["startTime"]))
        image_names: dict[int, str] = {}
        for number, pool in enumerate(job["jobSpec"]["workerPoolSpecs"]):
            image = (pool.get("containerSpec") or {}).get("imageUri")
            for replica in range(int(pool.get("replicaCount", 0))):
                node = node_of(f"workerpool{number}-{replica}")
                if image and node is not None and images.tag_is_current(image, age_s):
                    image_names[node] = image
        pinned = {
            image: google_images.resolve_digest(self._api, image) for image in dict.fromkeys(image_names.values())
        }
        return {node: pinned[image] for node, image in image_names.items() if pinned[image]}

    def labels(self, handle: str) -> dict[str, str]:
        """Return a job's labels without those that cloudtrain adds to every job."""
        job = self.get(handle)
        if job is None:
            raise BackendError(f"the Vertex AI job {handle} no longer exists")
        return {name: str(value) for name, value in job.get("labels", {}).items() if name not in (ATTEMPT, RUN)}

    def labelled(self, name: str, value: str, known: Container[str]) -> Iterator[FoundAttempt]:
        """Yield our jobs that have a label."""
        for job in self._list({"filter": f"labels.{name}={value}", "pageSize": str(PAGE)}):
            attempt_id = str(job["labels"].get(ATTEMPT, ""))
            if attempt_id not in known:
                container = job["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]
                sent = {variable["name"]: variable.get("value", "") for variable in container.get("env", ())}
                yield FoundAttempt(attempt_id, job["name"], sent_record(sent), job["createTime"])

    def cancel(self, handle: str) -> None:
        """Cancel the job; does nothing for one that has ended or does not exist."""
        job = self.get(handle)
        if job is None or has_ended(job):
            return
        fine = (400, 404, 409)  # the job has ended in the meantime
        self._api.call(
            "POST", "aiplatform", f"/v1/{handle}:cancel", "the job cannot be cancelled", body={}, accept=fine
        )

    def remove(self, handle: str) -> None:
        """Delete the record of a job that has ended; its output and its log stay.

        https://cloud.google.com/vertex-ai/docs/reference/rest/v1/projects.locations.customJobs/delete (2026-11-23)
        """
        self._api.call("DELETE", "aiplatform", f"/v1/{handle}", "the job cannot be deleted", accept=(404,))

    def remains(self, handle: str) -> dict[str, int | None]:
        return {handle: None} if self.get(handle) else {}

    def logs(self, handle: str, *, follow: bool = False, after: str | None = None) -> Iterator[LogLine]:
        """Yield the log lines of all nodes after a cursor; with `follow` until the job has ended."""

        def job() -> Mapping[str, Any] | None:
            asked_at, known = self._known.get(handle, (-math.inf, None))
            return (
                known
                if known and not follow and self._api.clock.monotonic() - asked_at < self._pause_s
                else self.get(handle)
            )

        return self._logs.lines(job, follow=follow, after=after)

    # -- results -------------------------------------------------------------------------------------------------------

    def fetch(self, handle: str, into: Path, what: tuple[str, ...] = FETCHABLE) -> Path:
        """Download the run's folders into `into`; equal files are not downloaded again."""
        job = self.get(handle)
        if job is None:
            raise BackendError(f"the Vertex AI job {handle} no longer exists", "its results may still be in the bucket")
        base = str(job["jobSpec"]["baseOutputDirectory"]["outputUriPrefix"])
        into.mkdir(parents=True, exist_ok=True)
        for folder in what:
            Gcs(self._api, base).bring(folder, into / folder)
        return into


def has_sdk() -> bool:
    """Return whether google-cloud-aiplatform is installed, without importing it."""
    try:
        return find_spec("google.cloud.aiplatform") is not None
    except ModuleNotFoundError:
        return False
