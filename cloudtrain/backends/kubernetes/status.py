"""What a Job and its pods say about an attempt: its state, why it waits, how it ended. Pure: objects in, a Status out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cloudtrain.backends.images import exact
from cloudtrain.backends.kubernetes.log_merge import result
from cloudtrain.backends.kubernetes.request import CANCELLED, CONTAINER, QUEUE, UNPACK
from cloudtrain.events import EXIT_RESUMABLE, State, Status

INDEX = "batch.kubernetes.io/job-completion-index"
GONE = ("Evicted", "Preempting", "NodeLost", "NodeShutdown", "Terminated", "NodeAffinity")  # a pod's own reason
SOON = ("ContainerCreating", "PodInitializing")  # waits for nothing that anyone could change
_CODE = re.compile(r"failed with exit code (\d+)")
Object = dict[str, Any]


def status_of(job: Object, pods: Sequence[Object]) -> Status:
    """Return an attempt's state; `pods` are all that are left of it, in the order in which they were made."""
    newest = by_node(pods)
    began = [at for pod in pods if (at := container(pod).get("startedAt"))]
    started = min(began, default=None)
    over = condition(job, "Complete") or condition(job, "Failed")
    ended = over.get("lastTransitionTime") if over else None
    if over and over["type"] == "Complete":
        return Status(State.SUCCEEDED, 0, "", started, job["status"].get("completionTime") or ended)
    if CANCELLED in marks(job):
        paused = condition(job, "Suspended")
        if over or (paused and not any(lives(pod) for pod in pods)):
            at = ended or (paused or {}).get("lastTransitionTime")
            return Status(State.CANCELLED, EXIT_RESUMABLE, "cancelled", started, at)
        return Status(State.STOPPING, None, "", started)
    if over:
        return _failed(over, newest, started, ended)
    if target := condition(job, "FailureTarget"):
        return Status(State.STOPPING, None, str(target.get("message", "")), started)
    if job["spec"].get("suspend"):
        queue = (job["metadata"].get("labels") or {}).get(QUEUE)
        return Status(State.QUEUED, None, f"waits in the queue {queue}" if queue else "the Job is suspended", started)
    runs = [pod for pod in newest.values() if container(pod).get("startedAt") and not failed(pod)]
    if len(runs) == job["spec"]["completions"]:
        return Status(State.RUNNING, None, "", started)
    return Status(State.STARTING, None, waits_for(newest.values()), started)


def waits_for(pods: Iterable[Object]) -> str:
    """Return why pods do not run yet, in their own words; "" where they have none."""
    for pod in pods:
        for said in pod["status"].get("conditions") or ():
            if said["type"] == "PodScheduled" and said["status"] == "False":
                return f"{said.get('reason', '')}: {said.get('message', '')}".strip(": ")
        for found in (pod["status"].get(kind) or () for kind in ("initContainerStatuses", "containerStatuses")):
            for each in found:
                waiting = (each.get("state") or {}).get("waiting") or {}
                if waiting.get("reason", SOON[0]) not in SOON:
                    return f"{waiting['reason']}: {waiting.get('message', '')}".strip(": ")
    return ""


def age(pod: Object | None, made: str) -> tuple[bool, str, int]:
    """Return what one node's pods are in order by: first what has failed or is gone, then the time, then what is still there.

    The Job replaces a pod only when it has failed (podReplacementPolicy), while times are in whole seconds, and that of a
    pod that is gone, None, is often by its launcher's clock instead of the server's: no time decides against what lives or
    has succeeded.
    """
    if pod is None:
        return False, made, 0
    return not failed(pod), made, 1 if "deletionTimestamp" in pod["metadata"] else 2


def by_node(pods: Iterable[Object]) -> dict[int, Object]:
    """Return pods by node rank, of each the newest, lowest rank first."""
    found = {node_of(pod): pod for pod in pods}
    return dict(sorted(found.items()))


def node_of(pod: Object) -> int:
    """Return the node rank of a pod of an Indexed Job."""
    return int((pod["metadata"].get("labels") or {}).get(INDEX) or marks(pod)[INDEX])


def container(pod: Object, name: str = CONTAINER) -> Object:
    """Return what is known of a pod's container since it began: running or terminated, {} before.

    By its name: sidecars and admission hooks may put others beside ours, in any order.
    """
    kind = "initContainerStatuses" if name == UNPACK else "containerStatuses"
    for found in pod["status"].get(kind) or ():
        if found.get("name") == name:
            state = found.get("state") or {}
            return dict(state.get("running") or state.get("terminated") or {})
    return {}


def image(pod: Object) -> str:
    """Return the image that a pod's container runs, by its digest; "" before it was pulled.

    A node whose runtime has the image from no registry tells its own id of it (kubernetes.io/docs, ContainerStatus.imageID).
    """
    for found in pod["status"].get("containerStatuses") or ():
        if found.get("name") == CONTAINER:
            return exact(str(found.get("imageID") or ""))
    return ""


def failed(pod: Object) -> bool:
    return bool(pod["status"].get("phase") == "Failed")


def lives(pod: Object) -> bool:
    return pod["status"].get("phase") in ("Pending", "Running", "Unknown")


def marks(found: Object) -> Mapping[str, str]:
    """Return the annotations of an object."""
    return found["metadata"].get("annotations") or {}


def condition(job: Object, kind: str) -> Object:
    """Return a condition that holds, {} where it does not."""
    known = (job.get("status") or {}).get("conditions") or ()
    return next((c for c in known if c["type"] == kind and c["status"] == "True"), {})


def _failed(over: Object, pods: Mapping[int, Object], started: str | None, ended: str | None) -> Status:
    """Return how a Job has failed: by the platform, by the launcher's own word, by its container's end."""
    said = str(over.get("message", ""))
    if over.get("reason") == "DeadlineExceeded":
        return Status(State.TIMED_OUT, None, "the Job's deadline is over (options.kubernetes.wait)", started, ended)
    taken = [pod for pod in pods.values() if _disruption(pod)]
    # A script's own end is a rule's: what has used up the starts, and left no pod, was taken away each time.
    worn = over.get("reason") == "BackoffLimitExceeded" and not pods
    if "DisruptionTarget" in said or taken or worn:
        why = f": {_disruption(taken[0])}" if taken else ""
        return Status(State.PREEMPTED, EXIT_RESUMABLE, f"a pod was taken away{why}", started, ended)
    for rank, pod in pods.items():
        if container(pod).get("reason") == "OOMKilled":
            reason = f"node {rank} ran out of memory and was killed (resources.memory)"
            return Status(State.FAILED, 137, reason, started, ended)
    for pod in pods.values():
        word = result(str(container(pod).get("message", "")))
        if word is not None and word.get("state") not in (None, "SUCCEEDED"):
            state = State[str(word["state"])]
            code = None if state is State.LOST else int(word["code"])
            return Status(state, code, str(word.get("reason", "")), started, ended)
    states = [container(pod, name) for pod in pods.values() for name in (UNPACK, CONTAINER)]
    ends = [state for state in states if state.get("exitCode")]
    told = _CODE.search(said)
    code = int(ends[0]["exitCode"]) if ends else int(told[1]) if told else None
    reason = str(ends[0].get("message") or "").strip().split("\n")[-1][:300] if ends else ""
    return Status(State.FAILED, code, reason or said, started, ended)


def _disruption(pod: Object) -> str:
    """Return the cluster's word for why it took a pod away, "" where it did not."""
    for said in pod["status"].get("conditions") or ():
        if said["type"] == "DisruptionTarget" and said["status"] == "True":
            return str(said.get("reason", "DisruptionTarget"))
    reason = str(pod["status"].get("reason", ""))
    return reason if reason in GONE else ""
