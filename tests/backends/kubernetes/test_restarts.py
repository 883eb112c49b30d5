"""Pods that the cluster starts anew by itself: one that is alone, and those of a queue that comes back; and which cluster."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from uuid import UUID

import pytest

from cloudtrain.backends.kubernetes.log_merge import SEQ_PER_START
from cloudtrain.errors import BackendError
from cloudtrain.events import State
from tests.backends.kubernetes.clusters import Ground
from tests.backends.kubernetes.test_faults import ended, place, planned, pod_of, said, started  # noqa: F401 - a fixture
from tests.conftest import wait_for
from tests.simulators.kubernetes_cluster.server import Cluster

# Counts its starts in a checkpoint; the first two wait until they are asked to leave.
COUNTS = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"])
count = len(list(folder.glob("start-*"))) + 1
signal.signal(signal.SIGTERM, lambda *_: ((folder / f"start-{count}").write_text("saved"), sys.exit(75)))
print("start", count, flush=True)
if count < 3:
    time.sleep(600)
"""


@pytest.mark.parametrize("output", ["gs://local/out", "/data/out"])
def test_a_pod_that_is_alone_is_started_anew_by_the_cluster(place: Ground, output: str):  # noqa: F811
    place.cluster.objects.add("persistentvolumeclaims", "default", {"metadata": {"name": "shared"}, "spec": {}})
    options = {"volumes": [{"claim": "shared", "path": "/data"}]}
    backend, plan, bundle = planned(place, COUNTS, options, output=output, retry={"max_attempts": 3})
    assert plan.retries == "platform"
    handle = backend.submit(plan, bundle)
    cursor, heard = None, []
    for number in (1, 2):
        wait_for(lambda number=number: f"start {number}" in said(backend, handle), f"start {number}", 120)
        for line in backend.logs(handle, after=cursor):
            cursor = line.cursor
            heard.append(line)
        with place.cluster.objects.lock:
            place.cluster.kubelet.disrupt(pod_of(place, handle), "PreemptionByScheduler")
        wait_for(lambda: backend.status(handle).state is State.STARTING, "its end", 120)
    status = ended(backend, handle)
    assert (status.state, status.exit_code) == (State.SUCCEEDED, 0)
    heard += list(backend.logs(handle, after=cursor))
    texts = [line.text for line in heard if line.rank == 0]
    assert texts == ["start 1", "start 2", "start 3"], "each once, whoever looked when"
    numbers = [line.seq for line in heard]
    assert len(set(numbers)) == len(numbers) and {number // SEQ_PER_START for number in numbers} == {0, 1, 2}
    whole = list(place.backend(**options).logs(handle))  # two of three pods are gone, and the output has all of it
    assert [(line.seq, line.text) for line in whole] == [(line.seq, line.text) for line in heard]
    assert len(place.cluster.objects.all("jobs")) == 1, "no second attempt was needed"


def test_it_is_started_no_more_often_than_the_job_says(place: Ground):  # noqa: F811
    backend, handle = started(place, COUNTS.replace("< 3", "< 9"), retry={"max_attempts": 2})
    for number in (1, 2):
        wait_for(lambda: "start 1" in said(backend, handle), f"start {number}", 120)
        with place.cluster.objects.lock:
            place.cluster.kubelet.disrupt(pod_of(place, handle), "EvictionByEvictionAPI")
        if number == 1:
            wait_for(lambda: backend.status(handle).state is State.STARTING, "its end", 120)
            wait_for(lambda: backend.status(handle).state is State.RUNNING, "its start", 120)
    status = ended(backend, handle)
    assert (status.state, status.exit_code) == (State.PREEMPTED, 75)


def test_a_failure_of_its_own_is_not_repeated(place: Ground):  # noqa: F811
    backend, handle = started(place, "import sys; print('once'); sys.exit(3)", retry={"max_attempts": 3})
    status = ended(backend, handle)
    assert (status.state, status.exit_code) == (State.FAILED, 3) and said(backend, handle) == ["once"]


def test_a_pod_that_a_person_deletes_is_not_started_again(place: Ground):  # noqa: F811
    """No condition says that the cluster took it. A pod at the end of its own deadline looks the same."""
    script = COUNTS.replace("< 3", "< 2")
    backend, handle = started(place, script, output="gs://local/out", retry={"max_attempts": 3})
    wait_for(lambda: "start 1" in said(backend, handle), "start 1", 120)
    with place.cluster.objects.lock:
        place.cluster.kubelet.delete(pod_of(place, handle))
    assert ended(backend, handle).state is State.PREEMPTED
    assert said(backend, handle) == ["start 1"]


def test_one_whose_time_is_over_is_not_started_again(place: Ground):  # noqa: F811
    limits = {"max_runtime": "2s", "grace": "1s"}
    backend, handle = started(place, "import time; time.sleep(600)", limits=limits, retry={"max_attempts": 3})
    status = ended(backend, handle)
    assert (status.state, status.exit_code) == (State.TIMED_OUT, 75)
    (job,) = place.cluster.objects.all("jobs")
    assert job["status"]["failed"] == 1, job["status"]


@pytest.mark.parametrize("later", ["lower", "higher"])
def test_pods_of_one_second_come_one_after_the_other(place: Ground, monkeypatch: pytest.MonkeyPatch, later: str):  # noqa: F811
    """Creation times are in whole seconds and uids have no order; the launchers' clocks are hours ahead of the server's."""
    numbers = itertools.count(2**64, -1 if later == "lower" else 1)
    monkeypatch.setattr("tests.simulators.kubernetes_cluster.objects.uuid.uuid4", lambda: UUID(int=next(numbers)))
    monkeypatch.setattr("tests.simulators.kubernetes_cluster.objects.now", lambda *_: "2026-01-01T00:00:00Z")
    taken_back_and_given_anew(place)


def test_a_queue_takes_its_pods_back_and_gives_new_ones(place: Ground):  # noqa: F811
    taken_back_and_given_anew(place)


def taken_back_and_given_anew(place: Ground) -> None:  # noqa: F811
    script = COUNTS.replace("< 3", "< 2")
    backend, handle = started(place, script, {"queue": "research"}, output="gs://local/out", num_nodes=2)
    name = handle.split("/")[-2]

    def admitted(yes: bool) -> None:  # what Kueue does
        with place.cluster.objects.lock:
            job = place.cluster.objects.get("jobs", "default", name)
            assert job is not None
            job["spec"]["suspend"] = not yes

    admitted(True)
    wait_for(lambda: said(backend, handle).count("start 1") == 2, "both pods", 120)
    before = list(backend.logs(handle))
    admitted(False)
    wait_for(lambda: backend.status(handle).state is State.QUEUED and not place.left(handle), "the pods go", 120)
    admitted(True)
    assert ended(backend, handle).state is State.SUCCEEDED
    after = list(backend.logs(handle, after=before[-1].cursor))
    assert sorted(line.text for line in before + after if line.rank >= 0) == ["start 1"] * 2 + ["start 2"] * 2
    numbers = [(line.node, line.seq) for line in before + after]
    assert len(set(numbers)) == len(numbers)
    whole = [(line.node, line.text) for line in place.backend(queue="research").logs(handle) if line.rank >= 0]
    assert [text for node, text in whole if node == 0] == ["start 1", "start 2"], (
        "in order, for who reads it all at once"
    )


# -- which cluster ----------------------------------------------------------------------------------------------------


def test_a_job_is_never_looked_for_in_another_cluster(place: Ground, tmp_path: Path):  # noqa: F811
    backend, handle = started(place, "print('here')")
    assert ended(backend, handle).state is State.SUCCEEDED
    with Cluster(tmp_path / "other") as other:
        elsewhere = place.backend(kubeconfig=str(other.kubeconfig))
        for look in (
            elsewhere.status,
            elsewhere.cancel,
            lambda h: list(elsewhere.logs(h)),
            lambda h: elsewhere.fetch(h, tmp_path),
        ):
            with pytest.raises(BackendError, match="was submitted to the cluster"):
                look(handle)
        assert other.server.count_requests("PATCH", "jobs") == other.server.count_requests("DELETE", "jobs") == 0


def test_a_plan_names_its_cluster_and_goes_to_no_other(place: Ground, tmp_path: Path):  # noqa: F811
    backend, plan, bundle = planned(place, "print('there')")
    config = json.loads(place.cluster.kubeconfig.read_text())
    pinned = plan.job["options"]["kubernetes"]
    assert pinned == {"context": "simulated", "server": place.cluster.url}
    with Cluster(tmp_path / "other") as other:
        # The current context is changed after the plan was made: the plan's own is still found.
        theirs = json.loads(other.kubeconfig.read_text())
        for kind in ("clusters", "users", "contexts"):
            config[kind] += [{**item, "name": "other"} for item in theirs[kind]]
        config["contexts"][1]["context"] = {"cluster": "other", "user": "other"}
        config["current-context"] = "other"
        both = tmp_path / "both"
        both.write_text(json.dumps(config))
        later = place.backend(kubeconfig=str(both), **pinned)
        handle = later.submit(plan, bundle)
        assert ended(later, handle).state is State.SUCCEEDED and other.objects.all("jobs") == []
        wrong = place.backend(kubeconfig=str(other.kubeconfig), **pinned)
        for look in (lambda: wrong.find(plan.attempt_id), lambda: wrong.submit(plan, bundle)):
            with pytest.raises(BackendError, match="but the target allows only the cluster"):
                look()
        assert other.server.requests == []


def test_another_authority_behind_the_same_address_is_another_cluster(place: Ground, tmp_path: Path):  # noqa: F811
    config = json.loads(place.cluster.kubeconfig.read_text())
    found = []
    for number, authority in enumerate(("b25l", "dHdv")):
        config["clusters"][0]["cluster"]["certificate-authority-data"] = authority
        path = tmp_path / f"config-{number}"
        path.write_text(json.dumps(config))
        found.append(str(path))
    pins = place.backend(kubeconfig=found[0])._api.pin()
    assert len(pins["ca"]) == 16 and pins["server"] == place.cluster.url
    assert place.backend(kubeconfig=found[0], **pins)._api.access.ca == pins["ca"]
    with pytest.raises(BackendError, match="is not the cluster that the target allows: options.kubernetes.ca differs"):
        place.backend(kubeconfig=found[1], **pins).find("a-run-a1")
    assert place.cluster.server.requests == []
