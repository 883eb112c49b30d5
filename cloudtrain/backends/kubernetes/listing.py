"""Read the statuses of many attempts: lists of objects and pods, by a label selector that names the attempts."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace

from cloudtrain.backends.kubernetes.client import KubeApi, KubeError
from cloudtrain.backends.kubernetes.jobs import PATHS, KubeJobs, parse_handle, pods_of
from cloudtrain.backends.kubernetes.kinds import as_job, is_child
from cloudtrain.backends.kubernetes.kueue import with_ends
from cloudtrain.backends.kubernetes.names import ATTEMPT, STARTED
from cloudtrain.backends.kubernetes.status import (
    PULLING,
    Object,
    get_annotations,
    newest_note,
    silent_objects,
    status_of,
    waiting_reason,
)
from cloudtrain.backends.manifest import sent_record
from cloudtrain.backends.plan import FoundAttempt
from cloudtrain.events import State, Status

# Two requests a second for 200 live runs: half are the lists of their states (two lists for each 100 runs), half are logs.
# One client of client-go makes up to five (DefaultQPS, k8s.io/client-go/rest/config.go of v0.34.1, 2026-11-23).
CALLS_PER_S, LOGS_PER_S = 0.7, 0.8
NAMES = 100  # in one selector, of up to 63 characters each: with them an address is shorter than proxies allow (8 KiB)
PAGE = 500  # objects in one answer


class KubeList:
    """The Jobs of one cluster. Every call blocks; raises BackendError."""

    def __init__(self, api: KubeApi, jobs: KubeJobs) -> None:
        self._api, self._jobs = api, jobs

    def statuses(self, handles: Sequence[str]) -> dict[str, Status]:
        """Return handle -> status of the Jobs that exist; {} where the account may not list Jobs."""
        self._jobs.forget_old()
        namespaces: dict[str, list[str]] = {}
        for handle in handles:
            namespaces.setdefault(parse_handle(handle)[1], []).append(handle)
        found: dict[str, Status] = {}
        for namespace, own in namespaces.items():
            try:
                for first in range(0, len(own), NAMES):
                    found |= self._statuses(namespace, own[first : first + NAMES])
            except KubeError as error:
                if error.status != 403:
                    raise
        return found

    def labelled(self, namespace: str, name: str, value: str, known: Container[str]) -> Iterator[FoundAttempt]:
        """Yield the started Jobs of a namespace that have a label, or its objects of the target's kind."""
        kind = self._jobs.kind
        query = {"labelSelector": f"{ATTEMPT},{name}={value}"}
        for each in self._list(PATHS[kind].format(namespace), f"the {kind}s cannot be listed", query):
            job, metadata = {**each, "kind": kind}, each["metadata"]  # the items of a list have no kind
            if metadata["name"] not in known and STARTED in get_annotations(job):
                container = as_job(job)["spec"]["template"]["spec"]["containers"][0]
                sent = {variable["name"]: variable.get("value", "") for variable in container.get("env") or ()}
                record, created_at = sent_record(sent), metadata.get("creationTimestamp")
                yield FoundAttempt(metadata["name"], self._jobs.handle(job), record, created_at)

    def _statuses(self, namespace: str, handles: Sequence[str]) -> dict[str, Status]:
        parsed = {parse_handle(handle): handle for handle in handles}
        by_uid = {each.uid: handle for each, handle in parsed.items()}
        names = sorted({each.name for each in parsed})
        query = {"labelSelector": f"{ATTEMPT} in ({','.join(names)})"}
        jobs = list(self._list(PATHS["Job"].format(namespace), "the Jobs cannot be listed", query))
        for kind in sorted({each.kind for each in parsed} - {"Job"}):
            for parent in self._list(PATHS[kind].format(namespace), f"the {kind}s cannot be listed", query):
                uid, name = parent["metadata"]["uid"], parent["metadata"]["name"]
                own = [job for job in jobs if is_child(job, uid, name)]
                jobs.append(as_job(parent, sorted(own, key=lambda job: str(job["metadata"]["name"]))))
        pods: list[Object] = []
        seen = True
        try:
            pods += self._list(f"/api/v1/namespaces/{namespace}/pods", "the pods cannot be listed", query)
        except KubeError as error:
            if error.status != 403:  # else the Jobs alone say the states
                raise
            seen = False
        found: dict[str, Status] = {}
        waiting: dict[str, tuple[Object, list[Object]]] = {}  # handle -> a Job and its pods, some of which wait
        silent: set[str] = set()  # uids of objects whose newest event is the reason
        for job in with_ends(self._api, namespace, jobs):
            if handle := by_uid.get(str(job["metadata"]["uid"])):
                own = pods_of(job, pods)
                if seen:
                    self._jobs.remember(handle, job, own)
                status = found[handle] = status_of(job, own)
                if status.state is State.STARTING:
                    waiting[handle] = job, own
                    silent |= {str(each["metadata"]["uid"]) for each in silent_objects(job, own)}
        notes: dict[str, str] = {}
        for selector in ("type=Warning", f"reason={PULLING}"):
            if silent := {uid for uid in silent if not notes.get(uid)}:
                notes |= {uid: newest_note(its) for uid, its in self._events(namespace, selector).items()}
        for handle, (job, own) in waiting.items():
            found[handle] = replace(found[handle], reason=waiting_reason(job, own, notes))
        return found

    def _events(self, namespace: str, selector: str) -> dict[str, list[Object]]:
        """Return uid -> events of a namespace's objects, {} where events may not be read."""
        events: dict[str, list[Object]] = {}
        try:
            path = f"/api/v1/namespaces/{namespace}/events"
            for event in self._list(path, "events cannot be listed", {"fieldSelector": selector}):
                events.setdefault(str((event.get("involvedObject") or {}).get("uid")), []).append(event)
        except KubeError:
            pass  # nothing depends on it
        return events

    def _list(self, path: str, failure: str, query: Mapping[str, str]) -> Iterator[Object]:
        """Yield the objects of a list, page by page."""
        more = ""
        while True:
            page = {"limit": str(PAGE), **({"continue": more} if more else {})}
            answer = self._api.get(path, failure, {**query, **page}) or {}
            yield from answer.get("items") or ()
            more = str((answer.get("metadata") or {}).get("continue") or "")
            if not more:
                return
