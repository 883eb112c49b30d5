"""What an attempt's status is made of: Job and pods, as the cluster shows them."""

from __future__ import annotations

import pytest

from cloudtrain.backends.kubernetes.names import CANCELLED, CONTAINER
from cloudtrain.backends.kubernetes.status import INDEX, first_start, status_of
from cloudtrain.events import State

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
