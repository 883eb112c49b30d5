"""Derive an attempt's Status from its Job and pods: its state, why it waits, how it ended. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from cloudtrain.backends.images import pinned_image
from cloudtrain.backends.kubernetes.kinds import beside, count_nodes, pods_owners
from cloudtrain.backends.kubernetes.log_merge import parse_launcher_result
from cloudtrain.backends.kubernetes.names import CANCELLED, CONTAINER, FIRST_NODE, MAX_EXEC, QUEUE, UNPACK
from cloudtrain.events import ENDED, EXIT_RESUMABLE, State, Status

INDEX = "batch.kubernetes.io/job-completion-index"
# Values of a pod's status.reason when the platform took it away
EVICTION_REASONS = ("Evicted", "Preempting", "NodeLost", "NodeShutdown", "Terminated", "NodeAffinity")
NORMAL_WAITS = ("ContainerCreating", "PodInitializing")  # nothing for the user to act on
PULLING = "Pulling"  # reason of the event of a node that fetches an image
_CODE = re.compile(r"failed with exit code (\d+)")
Object = dict[str, Any]


def status_of(job: Object, pods: Sequence[Object]) -> Status:
    """Return an attempt's state; `pods` are its pods that still exist, in order of creation."""
    newest_pods = newest_by_node(pods)
    started = _started_at(job, newest_pods, pods)
    end_condition = condition(job, "Complete") or condition(job, "Failed")
    ended = end_condition.get("lastTransitionTime") if end_condition else None
    if end_condition and end_condition["type"] == "Complete":
        return Status(State.SUCCEEDED, 0, "", started, job["status"].get("completionTime") or ended)
    if (noted := get_annotations(job).get(CANCELLED)) is not None:
        started = started if noted == "yes" else noted or None  # version 0.1 wrote "yes"
        suspended = condition(job, "Suspended")
        live = any(is_live(pod) for pod in pods) or job["status"].get("active") or job["status"].get("terminating")
        if end_condition or (suspended and not live):
            at = ended or (suspended or {}).get("lastTransitionTime")
            return Status(State.CANCELLED, EXIT_RESUMABLE, "cancelled", started, at)
        return Status(State.STOPPING, None, "", started)
    if end_condition:
        return _failed(end_condition, newest_pods, started, ended)
    if target := condition(job, "FailureTarget"):
        return Status(State.STOPPING, None, str(target.get("message", "")), started)
    if job["spec"].get("suspend"):
        queue = (job["metadata"].get("labels") or {}).get(QUEUE)
        return Status(State.QUEUED, None, f"waits in the queue {queue}" if queue else "the Job is suspended", started)
    running = [pod for pod in newest_pods.values() if container_state(pod).get("startedAt") and not has_failed(pod)]
    if len(running) == count_nodes(job):
        return Status(State.RUNNING, None, "", started)
    if not pods and job["status"].get("ready") == job["spec"]["completions"]:  # the account may not list pods
        return Status(State.RUNNING, None, "", job["status"].get("startTime"))
    return Status(State.STARTING, None, waiting_reason(job, pods), started)


def first_start(pods: Iterable[Object]) -> str | None:
    """Return when the first of some pods got its node, None before that: its deadline and its node's time count from then."""
    return min((at for pod in pods if (at := pod["status"].get("startTime"))), default=None)


def _started_at(job: Object, newest_pods: Mapping[int, Object], pods: Sequence[Object]) -> str | None:
    """Return when an attempt's first pod got its node.

    None where a pod is not there: nobody knows then when it began. Of a capped Job that a queue may have started before,
    only its creation is known.
    """
    if newest_pods and MAX_EXEC in (job["metadata"].get("labels") or {}):
        return str(job["metadata"]["creationTimestamp"])
    return first_start(pods) if len(newest_pods) == count_nodes(job) else None


def waiting_reason(job: Object, pods: Iterable[Object], noted: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return why pods do not run yet, as the cluster reports it; "" if it gives no reason.

    Args:
        noted: uid -> the newest event of a pod, or of the Job, that says nothing itself (`silent_objects`).
    """
    newest = newest_by_node(pods)
    of_job = next((note for each in pods_owners(job) if (note := noted.get(str(each["metadata"]["uid"]), ""))), "")
    ranks: dict[str, list[int]] = {}
    for rank in range(count_nodes(job)):
        if pod := newest.get(rank):
            reason = (pod_reason(pod) or noted.get(str(pod["metadata"]["uid"]), "")) if is_waiting(pod) else ""
        else:
            reason = of_job
        if reason:
            ranks.setdefault(reason, []).append(rank)
    if not newest or count_nodes(job) == 1:
        return next(iter(ranks), of_job)
    return "; ".join(f"node {', '.join(map(str, nodes))}: {reason}" for reason, nodes in ranks.items())


def silent_objects(job: Object, pods: Iterable[Object]) -> list[Object]:
    """Return the pods that wait and do not say why, and the Job if pods of it are missing (an exceeded quota)."""
    newest = newest_by_node(pods).values()
    silent = [pod for pod in newest if is_waiting(pod) and not pod_reason(pod)]
    return silent if len(newest) == count_nodes(job) else [*silent, *pods_owners(job)]


def newest_note(events: Iterable[Object]) -> str:
    """Return the newest of an object's events that says why it waits, as text; "" without any."""
    notes = [event for event in events if event.get("type") == "Warning" or event.get("reason") == PULLING]
    newest = max(notes, key=_event_time, default=None)
    if newest is None:
        return ""
    since = f" (since {_event_time(newest)})" if newest.get("reason") == PULLING else ""
    return f"{newest.get('reason')}: {newest.get('message')}{since}"


def _event_time(event: Object) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")


def pod_reason(pod: Object) -> str:
    """Return why a pod waits, by its own status; "" where that says nothing."""
    for pod_condition in pod["status"].get("conditions") or ():
        if pod_condition["type"] == "PodScheduled" and pod_condition["status"] == "False":
            return f"{pod_condition.get('reason', '')}: {pod_condition.get('message', '')}".strip(": ")
    for kind in ("initContainerStatuses", "containerStatuses"):
        for container_status in pod["status"].get(kind) or ():
            waiting = (container_status.get("state") or {}).get("waiting") or {}
            if waiting.get("reason", NORMAL_WAITS[0]) not in NORMAL_WAITS:
                return f"{waiting['reason']}: {waiting.get('message', '')}".strip(": ")
    return ""


def is_waiting(pod: Object) -> bool:
    """Return whether no container of a pod has started yet."""
    return is_live(pod) and not container_state(pod) and not container_state(pod, UNPACK)


def creation_order(pod: Object | None, created_at: str) -> tuple[bool, str, int]:
    """Return the sort key for the pods of one node: failed or vanished ones first, then by time, existing ones last.

    The Job replaces a pod only after it has failed (podReplacementPolicy), so a pod that runs or has succeeded is the
    newest. Times alone cannot decide: they are whole seconds, and the time of a vanished pod (None) is often from its
    launcher's clock.
    """
    if pod is None:
        return False, created_at, 0
    return not has_failed(pod), created_at, 1 if "deletionTimestamp" in pod["metadata"] else 2


def newest_by_node(pods: Iterable[Object]) -> dict[int, Object]:
    """Return the newest pod of each node by rank, lowest rank first."""
    pods_by_rank = {node_rank(pod): pod for pod in pods}
    return dict(sorted(pods_by_rank.items()))


def node_rank(pod: Object) -> int:
    """Return the node rank of a pod of an Indexed Job."""
    labels = pod["metadata"].get("labels") or {}
    return int(labels.get(INDEX) or get_annotations(pod)[INDEX]) + int(labels.get(FIRST_NODE) or 0)


def split_pod(pod: Object) -> list[Object]:
    """Return a pod once for each node that it has: each with the status of that node's container, as if it were CONTAINER.

    `container` is the name that the container has in the pod.
    """
    others, views = beside(pod), [pod]
    index = int((pod["metadata"].get("labels") or {}).get(INDEX) or get_annotations(pod).get(INDEX) or 0)
    for name, first in others.items():
        labels = {**(pod["metadata"].get("labels") or {}), INDEX: str(index), FIRST_NODE: str(first)}
        statuses = pod["status"].get("containerStatuses") or ()
        own = [{**each, "name": CONTAINER} for each in statuses if each["name"] == name]
        status = {**pod["status"], "containerStatuses": own}
        views.append({**pod, "metadata": {**pod["metadata"], "labels": labels}, "status": status, "container": name})
    return views


def container_state(pod: Object, name: str = CONTAINER) -> Object:
    """Return the `running` or `terminated` state of a pod's container, {} before it starts.

    The container is found by name, because sidecars and admission hooks may add others in any order.
    """
    kind = "initContainerStatuses" if name == UNPACK else "containerStatuses"
    for container_status in pod["status"].get(kind) or ():
        if container_status.get("name") == name:
            state = container_status.get("state") or {}
            return dict(state.get("running") or state.get("terminated") or {})
    return {}


def image_digest(pod: Object) -> str:
    """Return the image of a pod's container by digest; "" before it was pulled.

    For an image that came from no registry, this is the node runtime's own id (kubernetes.io/docs, ContainerStatus.imageID).
    """
    for container_status in pod["status"].get("containerStatuses") or ():
        if container_status.get("name") == CONTAINER:
            return pinned_image(str(container_status.get("imageID") or ""))
    return ""


def has_failed(pod: Object) -> bool:
    return bool(pod["status"].get("phase") == "Failed")


def is_live(pod: Object) -> bool:
    return pod["status"].get("phase") in ("Pending", "Running", "Unknown")


def get_annotations(manifest: Object) -> Mapping[str, str]:
    """Return the annotations of an object."""
    return manifest["metadata"].get("annotations") or {}


def condition(job: Object, condition_type: str) -> Object:
    """Return a Job's condition of a type if it is True, else {}."""
    conditions = (job.get("status") or {}).get("conditions") or ()
    return next((entry for entry in conditions if entry["type"] == condition_type and entry["status"] == "True"), {})


def _failed(end_condition: Object, pods: Mapping[int, Object], started: str | None, ended: str | None) -> Status:
    """Return why a Job failed: by the platform, by the launcher's result, by its container's exit code."""
    message = str(end_condition.get("message", ""))
    if end_condition.get("reason") == "DeadlineExceeded":
        return Status(State.TIMED_OUT, None, "the Job's deadline is over (limits.max_wait)", started, ended)
    if any(pod["status"].get("reason") == "DeadlineExceeded" for pod in pods.values()):
        return Status(State.TIMED_OUT, None, "a pod's deadline is over (limits.max_runtime)", started, ended)
    disrupted = [pod for pod in pods.values() if _disruption_reason(pod)]
    # A script that exits makes a failure rule end the Job. So if the retries ran out and no pod is left, each was preempted.
    retries_exhausted = end_condition.get("reason") == "BackoffLimitExceeded" and not pods
    if "DisruptionTarget" in message or disrupted or retries_exhausted:
        why = f": {_disruption_reason(disrupted[0])}" if disrupted else ""
        return Status(State.PREEMPTED, EXIT_RESUMABLE, f"a pod was evicted{why}", started, ended)
    for rank, pod in pods.items():
        if container_state(pod).get("reason") == "OOMKilled":
            reason = f"node {rank} ran out of memory and was killed (resources.memory)"
            return Status(State.FAILED, 137, reason, started, ended)
    for pod in pods.values():
        launcher_result = parse_launcher_result(str(container_state(pod).get("message", "")))
        if launcher_result is not None and launcher_result.get("state") not in (None, "SUCCEEDED"):
            state = State[str(launcher_result["state"])]
            code = None if state is State.LOST else int(launcher_result["code"])
            event = ENDED if state is State.LOST else ""
            return Status(state, code, str(launcher_result.get("reason", "")), started, ended, event=event)
    states = [container_state(pod, name) for pod in pods.values() for name in (UNPACK, CONTAINER)]
    failures = [state for state in states if state.get("exitCode")]
    exit_match = _CODE.search(message)
    code = int(failures[0]["exitCode"]) if failures else int(exit_match[1]) if exit_match else None
    reason = str(failures[0].get("message") or "").strip().split("\n")[-1][:300] if failures else ""
    if code == EXIT_RESUMABLE and not pods:  # nothing else leaves with it: the launcher left on request
        return Status(State.PREEMPTED, EXIT_RESUMABLE, "a pod was deleted", started, ended)
    return Status(State.FAILED, code, reason or message, started, ended)


def _disruption_reason(pod: Object) -> str:
    """Return the cluster's reason for evicting or preempting a pod, "" if it did not."""
    for pod_condition in pod["status"].get("conditions") or ():
        if pod_condition["type"] == "DisruptionTarget" and pod_condition["status"] == "True":
            return str(pod_condition.get("reason", "DisruptionTarget"))
    reason = str(pod["status"].get("reason", ""))
    return reason if reason in EVICTION_REASONS else ""
