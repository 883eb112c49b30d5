"""Custom jobs of Vertex AI as a client sees them: create once, find, look, follow, stop, bring home.

The handle is the job's resource name. Creating goes through Google's SDK where the options say so and it is installed;
everything else goes the light way, and so does that in all other cases.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import images
from cloudtrain.backends.gcs import Bucket
from cloudtrain.backends.google import ApiError, GoogleApi, api_error, explain_error, is_capacity_error
from cloudtrain.backends.vertex import images as google_images
from cloudtrain.backends.vertex.logs import Merge, node_of, result, seconds
from cloudtrain.backends.vertex.request import ATTEMPT, RUN
from cloudtrain.errors import BackendError, Unreachable
from cloudtrain.events import EXIT_RESUMABLE, State, Status
from cloudtrain.importing import Quickly

if TYPE_CHECKING:
    from cloudtrain.events import LogLine
    from cloudtrain.source.bundle import Bundle

STATES = {
    "JOB_STATE_UNSPECIFIED": State.QUEUED,
    "JOB_STATE_QUEUED": State.QUEUED,
    "JOB_STATE_PENDING": State.STARTING,
    "JOB_STATE_RUNNING": State.RUNNING,
    "JOB_STATE_UPDATING": State.RUNNING,
    "JOB_STATE_CANCELLING": State.STOPPING,
    "JOB_STATE_SUCCEEDED": State.SUCCEEDED,
    "JOB_STATE_FAILED": State.FAILED,
    "JOB_STATE_CANCELLED": State.CANCELLED,
    "JOB_STATE_EXPIRED": State.TIMED_OUT,
    "JOB_STATE_PARTIALLY_SUCCEEDED": State.FAILED,
    "JOB_STATE_PAUSED": State.FAILED,  # a custom job is never resumed
}
CREATES = 3  # tries, each after a look whether the last one was heard after all
LOOKS = 3  # a job that was just created may be missing from a first list
OVERLAP_S = 5.0  # beyond twice the settle time; what was read there before is dropped
CREATE_S = 120.0
_STATUS = re.compile(r"non-zero status of (\d+)")
_HANDLE = re.compile(r"projects/[^/]+/locations/[^/]+/customJobs/\d+")


class CustomJobs:
    """The custom jobs of one project and region. Every call blocks; raises BackendError."""

    def __init__(
        self, api: GoogleApi, project: str, region: str, *, settle_s: float, pause_s: float, look_s: float
    ) -> None:
        self._api, self._project, self._region = api, project, region
        self._settle_s, self._pause_s, self._look_s = settle_s, pause_s, look_s
        self._parent = f"projects/{project}/locations/{region}"

    # -- submit --------------------------------------------------------------------------------------------------------

    def submit(self, request: Mapping[str, Any], bundle: Bundle, client: str) -> str:
        """Upload the bundle, create the job unless its attempt exists, and return its handle."""
        job = request["customJob"]
        attempt_id = job["labels"][ATTEMPT]
        if (known := self.find(attempt_id)) is not None:
            return known
        Bucket(self._api, request["source"]["bucket"]).upload_once(bundle.path, request["source"]["object"])
        by_sdk = client == "sdk" and has_sdk()
        lost = False
        for turn in range(CREATES):
            try:
                return self._create_by_sdk(request["parent"], job) if by_sdk else self._create(request["parent"], job)
            except BackendError as error:
                lost = lost or isinstance(error, Unreachable) or getattr(error, "status", 0) >= 500
                if not lost:
                    raise
                # Nobody knows whether it was heard: a second job would train twice.
                if (known := self._look_again(attempt_id, error)) is not None:
                    return known
                if turn == CREATES - 1 or not isinstance(error, Unreachable):
                    raise
        raise AssertionError("the last try returns or raises")

    def _look_again(self, attempt_id: str, error: BackendError) -> str | None:
        """Look for a job whose create had no answer, more than once; raises Unreachable where a list has none either."""
        try:
            for look in range(LOOKS):
                time.sleep(self._look_s * look)
                if (known := self.find(attempt_id)) is not None:
                    return known
        except BackendError as silence:
            said = f"{error.message}; whether the job exists could not be asked: {silence.message}"
            raise Unreachable(said, silence.hint) from None
        return None

    def find(self, attempt_id: str) -> str | None:
        """Return the handle of an attempt's job; a list that fails is an error, never an absence."""
        query = {"filter": f'labels.{ATTEMPT}="{attempt_id}"', "pageSize": "10"}
        found: list[Mapping[str, Any]] = []
        while True:
            page = self._api.call(
                "GET", "aiplatform", f"/v1/{self._parent}/customJobs", "jobs cannot be listed", query=query
            ).json
            found += page.get("customJobs", ())
            if not page.get("nextPageToken"):
                break
            query["pageToken"] = page["nextPageToken"]
        return min(found, key=lambda job: str(job.get("createTime", "")))["name"] if found else None

    def _create(self, parent: str, job: Mapping[str, Any]) -> str:
        made = self._api.call(
            "POST", "aiplatform", f"/v1/{parent}/customJobs", "the job was not accepted", body=job, tries=1
        )
        try:
            return str(made.json["name"])
        except (LookupError, TypeError):
            raise Unreachable("the job was not accepted: the answer names no job", "check proxies") from None

    def _create_by_sdk(self, parent: str, job: Mapping[str, Any]) -> str:
        """Create the job through aiplatform.CustomJob; the message is the plan's, field by field."""
        import logging

        with Quickly():
            from google.api_core.exceptions import GoogleAPICallError, GoogleAPIError
            from google.auth import exceptions
            from google.auth.credentials import AnonymousCredentials
            from google.cloud import aiplatform
            from google.cloud.aiplatform_v1 import CustomJob, CustomJobSpec

        wanted = CustomJob.from_json(json.dumps(job))
        _, project, _, region = parent.split("/")
        endpoint = self._api.endpoint
        if endpoint is not None:
            credentials: Any = AnonymousCredentials()  # type: ignore[no-untyped-call]
            aiplatform.init(
                project=project, location=region, credentials=credentials, api_endpoint=endpoint, api_transport="rest"
            )
        else:
            credentials = self._api.credentials()
        output = wanted.job_spec.base_output_directory.output_uri_prefix
        made = aiplatform.CustomJob(
            display_name=wanted.display_name,
            worker_pool_specs=list(wanted.job_spec.worker_pool_specs),
            base_output_dir=output,
            staging_bucket="/".join(output.split("/")[:3]),
            project=project,
            location=region,
            credentials=credentials,
            labels=dict(wanted.labels),
            encryption_spec_key_name=wanted.encryption_spec.kms_key_name or None,
        )
        CustomJobSpec.copy_from(made.job_spec, wanted.job_spec)  # what the constructor has no argument for
        talk = logging.getLogger("google.cloud.aiplatform.jobs")  # it prints what it does
        level = talk.level
        talk.setLevel(logging.WARNING)
        try:
            made.submit(create_request_timeout=CREATE_S)
        except GoogleAPICallError as error:
            raise api_error(int(error.code or 500), str(error.message), "the job was not accepted") from None
        except exceptions.RefreshError as error:
            said = f"the job was not accepted: Google does not accept the credentials: {error}".split("\n")[0][:300]
            raise BackendError(said, "gcloud auth application-default login") from None
        except (OSError, GoogleAPIError, exceptions.TransportError) as error:  # requests' errors are OSErrors
            raise Unreachable(f"the job was not accepted: {type(error).__name__}") from None
        finally:
            talk.setLevel(level)
        return str(made.resource_name)

    # -- look ----------------------------------------------------------------------------------------------------------

    def get(self, handle: str) -> dict[str, Any] | None:
        """Return the job as the API tells it, None where it does not exist."""
        if not _HANDLE.fullmatch(handle):
            raise BackendError(f"{handle!r} is no job's name", "projects/P/locations/R/customJobs/ID")
        found = self._api.call("GET", "aiplatform", f"/v1/{handle}", "the job cannot be looked at", accept=(404,))
        return None if found.status == 404 else dict(found.json)

    def status(self, handle: str) -> Status:
        """Return the attempt's state; a failure is told by the launcher's own word, which is waited for a little."""
        job = self.get(handle)
        if job is None:
            return Status(State.LOST, None, f"{handle} is gone")
        state = STATES.get(job["state"], State.RUNNING)
        started, ended = _time(job.get("startTime")), _time(job.get("endTime"))
        url = console_url(handle, self._project)
        if not state.final:
            return Status(state, started_at=started, url=url)
        said = str((job.get("error") or {}).get("message", ""))
        if state is State.SUCCEEDED:
            return Status(state, 0, "", started, ended, url)
        if state is State.CANCELLED:
            return Status(state, EXIT_RESUMABLE, "cancelled", started, ended, url)
        if state is State.TIMED_OUT:
            return Status(state, None, f"expired before it ran: {said}".rstrip(": "), started, ended, url)
        if job["state"] != "JOB_STATE_FAILED":
            return Status(
                state, None, f"{job['state'].removeprefix('JOB_STATE_').lower()}: {said}", started, ended, url
            )
        word = self._word(job) if started else None
        if word is None and started and time.time() - seconds(str(job["endTime"])) < self._settle_s:
            return Status(State.STOPPING, started_at=started, url=url)
        if word is not None and word.get("state") != "SUCCEEDED":
            its = State[str(word["state"])]
            code = None if its is State.LOST else int(word["code"])
            return Status(its, code, str(word.get("reason", "")), started, ended, url)
        code_said = _STATUS.search(said)
        reason = explain_error(0, said, "Vertex AI")[0] if said else "Vertex AI gives no reason"
        code = int(code_said[1]) if code_said else None
        event = "capacity" if started is None and is_capacity_error(0, said) else ""
        return Status(state, code, reason, started, ended, url, event=event)

    def images(self, handle: str) -> dict[int, str]:
        """Return node -> the image that its pool names, with the digest that the tag stands for now.

        The service itself tells no digest. Each image is asked for once, of Google's registries alone; a tag of a job that
        began more than an hour ago is not asked for, nor is anything said of one that never began.
        """
        job = self.get(handle)
        if not job or "startTime" not in job:
            return {}
        age_s = time.time() - seconds(str(job["startTime"]))
        named: dict[int, str] = {}
        for number, pool in enumerate(job["jobSpec"]["workerPoolSpecs"]):
            image = (pool.get("containerSpec") or {}).get("imageUri")
            for replica in range(int(pool.get("replicaCount", 0))):
                node = node_of(f"workerpool{number}-{replica}")
                if image and node is not None and images.tag_is_current(image, age_s):
                    named[node] = image
        known = {image: google_images.resolve_digest(self._api, image) for image in dict.fromkeys(named.values())}
        return {node: known[image] for node, image in named.items() if known[image]}

    def labels(self, handle: str) -> dict[str, str]:
        """Return a job's labels, those that every job of ours has left out."""
        job = self.get(handle)
        if job is None:
            raise BackendError(f"{handle} is gone")
        return {name: str(value) for name, value in job.get("labels", {}).items() if name not in (ATTEMPT, RUN)}

    def cancel(self, handle: str) -> None:
        """Ask for the end; a job that has ended or is gone stays as it is."""
        job = self.get(handle)
        if job is None or STATES.get(job["state"], State.RUNNING).final:
            return
        fine = (400, 404, 409)  # it has ended meanwhile
        self._api.call(
            "POST", "aiplatform", f"/v1/{handle}:cancel", "the job cannot be cancelled", body={}, accept=fine
        )

    # -- log -----------------------------------------------------------------------------------------------------------

    def logs(self, handle: str, *, follow: bool, after: str | None) -> Iterator[LogLine]:
        """Yield the lines of all nodes behind a cursor; to the end, or with what has come so far."""
        if after == DENIED:
            after, denied = None, True
        else:
            denied = False
        merge = Merge(after)
        while True:
            job = self.get(handle)
            if job is None:
                return
            final = STATES.get(job["state"], State.RUNNING).final
            try:
                merge.take(self._entries(job, merge.newest))
            except ApiError as error:
                if error.status != 403 and not (error.status == 429 and not final):
                    raise
                if error.status == 403 and not denied:
                    denied = True
                    yield _denied(error, console_url(handle, self._project))
            now = time.time()
            nodes = sum(int(pool.get("replicaCount", 0)) for pool in job["jobSpec"]["workerPoolSpecs"])
            over = final and (denied or "startTime" not in job or now - seconds(str(job["endTime"])) >= self._settle_s)
            yield from merge.ready(_stamp(now - self._settle_s), everything=over)
            if over or (final and merge.complete(nodes)) or (not follow and not final):
                return
            time.sleep(self._pause_s)

    def _entries(
        self, job: Mapping[str, Any], newest: str, more: str = "", order: str = "timestamp asc"
    ) -> Iterator[Any]:
        """Yield the entries of a job's log from a little before the newest known line on."""
        since = _stamp(seconds(newest) - 2 * self._settle_s - OVERLAP_S) if newest else str(job["createTime"])
        number = str(job["name"]).rpartition("/")[2]
        text = f'resource.type="ml_job" AND resource.labels.job_id="{number}" AND timestamp>="{since}"{more}'
        body = {"resourceNames": [f"projects/{self._project}"], "filter": text, "orderBy": order, "pageSize": 1000}
        while True:
            page = self._api.call("POST", "logging", "/v2/entries:list", "the log cannot be read", body=body).json
            yield from page.get("entries", ())
            if not page.get("nextPageToken"):
                return
            body["pageToken"] = page["nextPageToken"]

    def _word(self, job: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the launcher's last word, None where it has not come, or may not be read."""
        only = ' AND jsonPayload.message:"::cloudtrain::{\\"kind\\":\\"result\\""'
        try:
            return result(self._entries(job, "", only, "timestamp desc"))
        except ApiError as error:
            if error.status in (403, 429):
                return None
            raise

    # -- results -------------------------------------------------------------------------------------------------------

    def fetch(self, handle: str, into: Path, what: tuple[str, ...]) -> Path:
        """Copy the run's folders below `into`; what is there already is not read again."""
        job = self.get(handle)
        if job is None:
            raise BackendError(f"{handle} is gone", "its results may still lie in the bucket")
        base = str(job["jobSpec"]["baseOutputDirectory"]["outputUriPrefix"])
        name, _, prefix = base.removeprefix("gs://").partition("/")
        into.mkdir(parents=True, exist_ok=True)
        for folder in what:
            Bucket(self._api, name).download_prefix(f"{prefix.rstrip('/')}/{folder}/", into / folder)
        return into


DENIED = "denied"


def _denied(error: ApiError, url: str) -> LogLine:
    from cloudtrain.events import LogLine

    said = f"{error.message}; grant roles/logging.viewer, or look at {url}"
    return LogLine(_stamp(time.time()), 0, -1, 0, said, DENIED)


def has_sdk() -> bool:
    """Return whether google-cloud-aiplatform is installed, without importing it."""
    try:
        return find_spec("google.cloud.aiplatform") is not None
    except ModuleNotFoundError:
        return False


def console_url(handle: str, project: str) -> str:
    """Return the job's page in Google's console."""
    _, _, _, region, _, number = handle.split("/")
    return f"https://console.cloud.google.com/vertex-ai/locations/{region}/training/{number}?project={project}"


def _time(text: str | None) -> str | None:
    return _stamp(seconds(text)) if text else None


def _stamp(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
