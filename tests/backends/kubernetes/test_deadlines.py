"""What ends a pod that hangs: its own deadline, which the cluster enforces with every client gone."""

from __future__ import annotations

from cloudtrain.events import State
from tests.backends.kubernetes.test_faults import WAITING, Ground, ended, place, planned, started  # noqa: F401
from tests.backends.kubernetes.test_request import made


def test_a_pod_may_use_its_limit_and_a_margin_only():
    """An hour's job that hangs holds its GPUs for an hour and 17 minutes; waiting for a node is not in that."""
    limits = {"limits": {"max_runtime": "1h", "grace": "30s"}}
    spec = made(limits, {}).job["spec"]
    pod_s = spec["template"]["spec"]["activeDeadlineSeconds"]
    assert pod_s == 3600 + 30 + 90 + 900
    assert spec["activeDeadlineSeconds"] == pod_s + 24 * 3600, "the Job's own deadline counts the wait as well"


def test_nodes_that_come_late_are_waited_for():
    """The wait for other nodes holds a machine: it is in a pod's deadline, and the launcher has the same limit."""
    limits = {"max_runtime": "1h", "grace": "30s"}
    usual = made({"num_nodes": 2, "limits": limits}, {})
    assert usual.job["spec"]["template"]["spec"]["activeDeadlineSeconds"] == 3600 + 30 + 90 + 900 + 1800
    assert usual.manifest.join_s is None
    longer = made({"num_nodes": 2, "limits": {**limits, "max_wait": "2h"}}, {})
    spec = longer.job["spec"]
    pod_s = spec["template"]["spec"]["activeDeadlineSeconds"]
    assert (pod_s, longer.manifest.join_s) == (3600 + 30 + 90 + 900 + 7200, 7200)
    assert spec["activeDeadlineSeconds"] == pod_s + 7200
    assert made({"limits": {**limits, "max_wait": "2h"}}, {}).manifest.join_s is None, "one node waits for no other"


def test_limits_that_are_not_set_are_those_of_the_page():
    """docs/kubernetes.md: a pod's margin of 16.5 minutes, 24 h of waiting, 30 minutes for each other, 7 days of ttl."""
    limits = {"limits": {"max_runtime": "1h", "grace": "30s"}}
    for nodes, together_s in ((1, 0), (2, 1800)):
        spec = made({**limits, "num_nodes": nodes}, {}).job["spec"]
        pod_s = spec["template"]["spec"]["activeDeadlineSeconds"]
        assert pod_s == 3600 + 30 + 990 + together_s
        assert spec["activeDeadlineSeconds"] == pod_s + 24 * 3600
        assert spec["ttlSecondsAfterFinished"] == 7 * 24 * 3600


def test_a_pod_is_ended_at_its_deadline(place: Ground):  # noqa: F811
    overlay = {"spec": {"template": {"spec": {"activeDeadlineSeconds": 3}}}}
    backend, handle = started(place, WAITING, {"overlay": overlay})
    status = ended(backend, handle)
    assert status.state is State.TIMED_OUT and "deadline" in status.reason


def test_a_pod_past_its_deadline_is_not_started_again(place: Ground):  # noqa: F811
    overlay = {"spec": {"template": {"spec": {"activeDeadlineSeconds": 3}}}}
    retry = {"retry": {"max_attempts": 3}}
    backend, plan, bundle = planned(place, WAITING, {"overlay": overlay}, **retry)
    handle = backend.submit(plan, bundle)
    assert ended(backend, handle).state is State.TIMED_OUT
    pods = [pod for pod in place.cluster.objects.all("pods") if pod["metadata"]["namespace"] == "default"]
    assert len(pods) == 1
