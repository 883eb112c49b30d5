"""The end of a Job that Kueue has deactivated at its total time."""

from __future__ import annotations

import pytest

from cloudtrain.backends.kubernetes.kueue import JOB_UID
from cloudtrain.backends.kubernetes.names import MAX_EXEC
from cloudtrain.events import State
from tests.backends.kubernetes.clusters import Ground
from tests.backends.kubernetes.test_faults import place, started  # noqa: F401

AT = "2026-11-23T12:00:00Z"


@pytest.mark.parametrize("kind", ["job", "jobset"])
@pytest.mark.parametrize("prefix", ["DeactivatedDueTo", "InactiveWorkload"])
def test_a_job_past_its_total_time_has_timed_out(place: Ground, kind: str, prefix: str):  # noqa: F811
    place.cluster.queues.add("research")
    overlay = {"metadata": {"labels": {MAX_EXEC: "60"}}}
    backend, handle = started(place, "print(1)", {"kind": kind, "queue": "research", "overlay": overlay})
    workload = {"metadata": {"name": "workload", "labels": {JOB_UID: handle.rpartition("/")[2]}}}
    evicted = {
        "type": "Evicted",
        "status": "True",
        "reason": "Preempted",
        "message": "another",
        "lastTransitionTime": AT,
    }
    workload["status"] = {"conditions": [evicted]}
    place.cluster.objects.add("workloads", "default", workload)
    assert backend.status(handle).state is State.QUEUED, "it is admitted again"
    evicted.update(reason=f"{prefix}MaximumExecutionTimeExceeded", message="exceeding the maximum execution time")
    status = backend.status(handle)
    assert (status.state, status.ended_at) == (State.TIMED_OUT, AT)
    assert backend.statuses([handle]) == {handle: status}
    assert list(backend.logs(handle, follow=True)) == []
    place.cluster.resources.denied.add(("list", "workloads"))
    assert backend.status(handle).state is State.QUEUED
