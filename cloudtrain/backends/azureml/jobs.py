"""Jobs of a workspace: create once, find, cancel, their states and logs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cloudtrain import events
from cloudtrain.backends.azureml.client import AzureError, Workspace, api_error
from cloudtrain.backends.azureml.request import ATTEMPT_TAG, DATASTORE, ENVIRONMENT, RUN_TAG
from cloudtrain.backends.manifest import sent_record
from cloudtrain.backends.plan import FoundAttempt, Plan
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import before_sending, first_request
from cloudtrain.events import LogLine, State, Status, short_reason
from cloudtrain.job.units import format_time, unix_time
from cloudtrain.nodes.logs import merge

# JobStatus of azure-rest-api-specs (2024-10-01) -> ours; what is final is decided by the launcher's own last line too
STATES = {
    "NotStarted": State.QUEUED, "Queued": State.QUEUED, "Starting": State.STARTING, "Provisioning": State.STARTING,
    "Preparing": State.STARTING, "Running": State.RUNNING, "Finalizing": State.RUNNING, "CancelRequested": State.STOPPING,
    "Completed": State.SUCCEEDED, "Failed": State.FAILED, "Canceled": State.CANCELLED, "NotResponding": State.RUNNING,
    "Paused": State.QUEUED, "Unknown": State.STARTING, "Scheduled": State.QUEUED,
}  # fmt: skip
# azure-ai-ml 1.35.2, constants/_job/job.py: COMMON_RUNTIME_ALL_USER_LOG_PATTERN; with a distribution one file a process
_EVICTED = re.compile(r"preempt|evict|low.?priority|spot", re.IGNORECASE)
_LINE = re.compile(r"\d+ (-?\d+) (\d{4}-\S+Z) (.*)")
TOGETHER = 100  # jobs that are asked for in one call
TAIL_BYTES = 64 << 10  # of a log, in which the launcher's last state is
_LOG = re.compile(r"user_logs/std_log(?:_process_(\d+)(?:_\w+)?)?\.txt")
# What Resource Manager says where more than the job does not exist: then it is not known whether there is such a job.
NO_WORKSPACE = ("SubscriptionNotFound", "ResourceGroupNotFound", "ResourceNotFound", "ParentResourceNotFound")


class Jobs:
    """The jobs of one workspace. Every call blocks; raises AzureError, Unreachable."""

    def __init__(self, workspace: Workspace, follow_s: float, clock: Clock = SYSTEM) -> None:
        self._workspace, self._follow_s, self._clock = workspace, follow_s, clock
        self._starts: dict[str, str] = {}
        self._ends: dict[str, Status] = {}  # of ended jobs, whose logs need not be read again

    def check_place(self, compute: str) -> None:
        """Raise BackendError where there is no workspace, or no such cluster in it; blocking."""
        if compute:
            self._workspace.call("GET", f"/computes/{compute}", f"the cluster {compute} cannot be read")
        else:
            self._workspace.call("GET", "", "the workspace cannot be read")

    def create(self, plan: Plan) -> str:
        """Create the job of a plan under its attempt's name, which is its handle; one that is there already is the same."""
        environment = plan.request["environment"]
        with before_sending():
            if environment:
                path = f"/environments/{ENVIRONMENT}/versions/{environment['version']}"
                failure = "the environment of the image was not made"
                if self._workspace.call("GET", path, failure, accept=(404,)).status == 404:
                    self._workspace.call("PUT", path, failure, environment["body"], accept=(409,))
            if self.read(plan.attempt_id) is not None:
                return plan.attempt_id
        path, failure = f"/jobs/{plan.attempt_id}", "the job was not created"
        with first_request():
            answer = self._workspace.call("PUT", path, failure, plan.request["job"], accept=(400, 409))
        if answer.status >= 400 and self.read(plan.attempt_id) is None:
            raise api_error(answer, failure)  # else an earlier try made it, whose answer was lost
        return plan.attempt_id

    def read(self, name: str) -> dict[str, Any] | None:
        """Return a job, None where the workspace has none of that name."""
        try:
            answer = self._workspace.call("GET", f"/jobs/{name}", f"the job {name} cannot be read")
        except AzureError as error:
            if error.status == 404 and error.code not in NO_WORKSPACE:
                return None
            raise
        return dict(answer.json)

    def status(self, name: str) -> Status:
        if name in self._ends:
            return self._ends[name]
        job = self.read(name)
        if job is None:
            return Status(State.LOST, reason="the workspace has no such job")
        own = job["properties"]
        state = STATES.get(str(own.get("status")), State.STARTING)
        if not state.final:
            return self._open(name, state, self._started(name) if state is State.RUNNING else None)
        status = self._end(name, state)
        self._ends[name] = status
        return status

    def statuses(self, experiment: str, names: Sequence[str]) -> dict[str, Status]:
        """Return the states of jobs that have not ended, from a call for some hundred; without those that need more calls."""
        found = {}
        for first in range(0, len(names), TOGETHER):
            for name, run in self._workspace.runs(experiment, names[first : first + TOGETHER]).items():
                state = STATES.get(str(run.get("status")), State.STARTING)
                started = _time(run, "startTimeUtc") if state is State.RUNNING else None
                if not state.final and (started or state is not State.RUNNING):
                    found[name] = self._open(name, state, started)
        return found

    def _open(self, name: str, state: State, started: str | None) -> Status:
        return Status(state, None, url=self._url(name), started_at=started)

    def _url(self, name: str) -> str:
        return f"https://ml.azure.com/runs/{name}?wsid={self._workspace.id}"

    def _end(self, name: str, state: State) -> Status:
        """Return the state of a job that has ended: what the launcher of node 0 wrote last, else Azure's word."""
        first, last, result, url = None, None, None, self._url(name)
        run = self._workspace.run(name)
        for _, address in sorted(_files(run).items()):
            for line in self._workspace.both_ends(address, TAIL_BYTES):
                found = _LINE.match(line)
                if found:
                    first, last = min(first or found[2], found[2]), max(last or found[2], found[2])
                    event = events.parse(found[3]) if found[1] == "-1" else None
                    result = event[1] if event and event[0] == "result" else result
            if result:
                break
        lost = State.LOST if state is State.SUCCEEDED or first else State.FAILED
        first, last = _time(run, "startTimeUtc") or first, _time(run, "endTimeUtc") or last
        told = short_reason(str(((run.get("error") or {}).get("error") or {}).get("message") or ""))
        if result is None:
            if state is State.CANCELLED:
                return Status(state, None, "", first, last, url)
            if _EVICTED.search(told):
                return Status(State.PREEMPTED, None, told, first, last, url)
            return Status(lost, None, told or "the job ended before its launcher did", first, last, url)
        ours, code = State(result["state"]), result.get("code")
        if state is State.CANCELLED and ours is State.PREEMPTED:
            return Status(State.CANCELLED, None, "", first, last, url)
        known = isinstance(code, int) and ours in (State.SUCCEEDED, State.FAILED)
        return Status(ours, code if known else None, str(result.get("reason") or ""), first, last, url)

    def _started(self, name: str) -> str | None:
        """Return when a job began to run, by Run History or by the first line of node 0; it is read once."""
        if name not in self._starts:
            run = self._workspace.run(name)
            began = _time(run, "startTimeUtc")
            if not began and (address := _files(run).get(0)):
                lines = map(_LINE.match, self._workspace.both_ends(address, 0))
                began = next((found[2] for found in lines if found), None)
            self._starts.update({name: began} if began else {})
        return self._starts.get(name)

    def logs(self, name: str, follow: bool = False, after: str | None = None) -> Iterator[LogLine]:
        job = self.read(name)
        nodes = int(((job or {}).get("properties", {}).get("resources") or {}).get("instanceCount") or 1)

        def read(offsets: Sequence[int]) -> list[Iterable[bytes] | None]:
            found = _files(self._workspace.run(name))
            return [
                [self._workspace.log(found[node], offsets[node])] if node in found else None for node in range(nodes)
            ]

        def ended() -> bool:
            now = self.read(name)
            return now is None or STATES.get(str(now["properties"].get("status")), State.STARTING).final

        return merge(read, nodes, after=after, follow=follow, ended=ended, pause_s=self._follow_s, clock=self._clock)

    def place(self, uri: str) -> str:
        """Return the place in Blob Storage of a path in a datastore."""
        found = DATASTORE.fullmatch(uri)
        assert found is not None, "our own request has it"
        return f"{self._workspace.container(found[1])}/{found[2]}"

    def cancel(self, name: str) -> None:
        job = self.read(name)
        if job is not None and not STATES.get(str(job["properties"].get("status")), State.STARTING).final:
            self._workspace.call(
                "POST", f"/jobs/{name}/cancel", f"the job {name} cannot be cancelled", accept=(400, 404, 409)
            )

    def tagged(self, name: str, value: str) -> Iterator[FoundAttempt]:
        """Yield the attempts with a tag, newest first. The service finds tags by their name alone."""
        for job in self._workspace.pages("/jobs", "jobs cannot be listed", {"tag": name, "jobType": "Command"}):
            own = job["properties"]
            tags = own.get("tags") or {}
            if tags.get(name) == value and ATTEMPT_TAG in tags:
                record = sent_record(own.get("environmentVariables") or {})
                created = str((job.get("systemData") or {}).get("createdAt") or "") or None
                yield FoundAttempt(tags[ATTEMPT_TAG], str(job["name"]), record, created)


def _files(run: Mapping[str, Any]) -> dict[int, str]:
    """Return node -> address of its log."""
    matches = ((_LOG.fullmatch(file), url) for file, url in (run.get("logFiles") or {}).items())
    return {int(found[1] or 0): url for found, url in matches if found}


def _time(run: Mapping[str, Any], name: str) -> str | None:
    return format_time(unix_time(str(run[name]))) if run.get(name) else None


def labels_of(job: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels among a job's tags."""
    tags = job["properties"].get("tags") or {}
    return {name: value for name, value in tags.items() if name not in (RUN_TAG, ATTEMPT_TAG)}
