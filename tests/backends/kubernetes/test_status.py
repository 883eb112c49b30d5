"""What an attempt's status is made of: Job and pods, as the cluster shows them."""

from __future__ import annotations

import pytest

from cloudtrain.backends.kubernetes.names import CANCELLED, CONTAINER
from cloudtrain.backends.kubernetes.status import INDEX, first_start, silent_objects, status_of, waiting_reason
from cloudtrain.events import ENDED, State

AT = "2026-11-22T12:00:00Z"
POD = {
    "metadata": {"uid": "pod", "labels": {INDEX: "0"}},
    "status": {
        "phase": "Failed",
        "startTime": AT,
        "containerStatuses": [
            {"name": CONTAINER, "state": {"terminated": {"startedAt": "2026-11-22T12:03:00Z", "exitCode": 75}}}
        ],
    },
}


@pytest.mark.parametrize("pods", [[POD], []], ids=["before its pods are deleted", "afterwards"])
@pytest.mark.parametrize("started", [AT, ""])
def test_a_cancelled_attempt_has_one_status(pods: list, started: str):
    suspended = {"type": "Suspended", "status": "True", "lastTransitionTime": AT}
    job = {
        "metadata": {"annotations": {CANCELLED: started}},
        "spec": {"completions": 1},
        "status": {"conditions": [suspended]},
    }
    status = status_of(job, pods)
    assert (status.state, status.started_at, status.ended_at) == (State.CANCELLED, started or None, AT)


def test_the_first_start_is_that_of_a_pod_on_its_node():
    assert first_start([POD, {"status": {"phase": "Pending"}}]) == AT
    assert first_start([]) is None


def waiting(rank: int, **status) -> dict:
    return {"metadata": {"uid": f"pod-{rank}", "labels": {INDEX: str(rank)}}, "status": {"phase": "Pending", **status}}


def test_each_node_that_waits_has_its_reason():
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    runs = {"name": CONTAINER, "state": {"running": {"startedAt": AT}}}
    pods = [
        waiting(0) | {"status": {"phase": "Running", "startTime": AT, "containerStatuses": [runs]}},
        waiting(1, conditions=[unscheduled]),
        waiting(2, startTime=AT),
        waiting(3, conditions=[unscheduled]),
    ]
    job = {"metadata": {"uid": "job"}, "spec": {"completions": 4}, "status": {}}
    assert status_of(job, pods).state is State.STARTING
    assert status_of(job, pods).reason == "node 1, 3: Unschedulable: 0/3 nodes"
    assert silent_objects(job, pods) == [pods[2]] and silent_objects(job, []) == [job]
    notes = {"pod-1": "not asked", "pod-2": "Pulling: the image"}
    assert waiting_reason(job, pods, notes) == "node 1, 3: Unschedulable: 0/3 nodes; node 2: Pulling: the image"
    assert waiting_reason(job, [], {"job": "FailedCreate: exceeded quota"}) == "FailedCreate: exceeded quota"
    refused = {"pod-2": "Pulling: the image", "job": "FailedCreate: exceeded quota"}
    assert silent_objects(job, pods[:3]) == [pods[2], job], "a pod that is not there cannot say why"
    found = waiting_reason(job, pods[::2], refused)
    assert found == "node 1, 3: FailedCreate: exceeded quota; node 2: Pulling: the image"


def test_the_end_of_a_job_that_the_launcher_calls_lost_is_known():
    result = '0 -1 2026-11-22T12:04:00Z ::cloudtrain::{"kind": "result", "code": 69, "state": "LOST", "reason": "hung"}'
    terminated = {"startedAt": AT, "exitCode": 69, "message": result}
    pod = {
        **POD,
        "status": {**POD["status"], "containerStatuses": [{"name": CONTAINER, "state": {"terminated": terminated}}]},
    }
    failed = {
        "type": "Failed",
        "status": "True",
        "lastTransitionTime": "2026-11-22T12:05:00Z",
        "reason": "PodFailurePolicy",
    }
    job = {"metadata": {}, "spec": {"completions": 1}, "status": {"conditions": [failed]}}
    status = status_of(job, [pod])
    assert (status.state, status.event, status.ended_at) == (State.LOST, ENDED, "2026-11-22T12:05:00Z")
