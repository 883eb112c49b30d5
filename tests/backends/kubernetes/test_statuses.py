"""Many Jobs from one list of Jobs and one of pods of a simulated cluster whose requests are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloudtrain.backends.kubernetes import listing
from cloudtrain.backends.kubernetes.backend import KubernetesBackend
from cloudtrain.errors import Unreachable
from cloudtrain.events import State
from cloudtrain.job.job import Job
from cloudtrain.runs.submit import Submitter
from cloudtrain.runs.watching.watch import Watcher
from cloudtrain.simulators.http import Fault
from cloudtrain.source.bundle import Bundle
from tests.backends.kubernetes.clusters import Ground, ground
from tests.conftest import wait_for

MANY = 50
NOWHERE = {"node_selector": {"rack": "x"}}  # no node has it: the pod stays pending


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    monkeypatch.setattr("cloudtrain.backends.http.PAUSE_S", 0.001)
    with ground(tmp_path / "ground") as made:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", made.store.url)
        made.cluster.kubelet.absent_images.add("absent:1")
        yield made


Submit = Callable[..., str]


@pytest.fixture
def submit(place: Ground) -> Iterator[Submit]:
    """Return a function that submits an attempt of a run with some options; all are cancelled at the end."""
    source = place.folder / "source"
    source.mkdir()
    (source / "script.py").write_text("import sys, time\nif len(sys.argv) > 1: time.sleep(600)\n")
    bundle = Bundle.make(source, place.folder / "bundles")
    handles = []

    def submit(run_id: str, options: dict | None = None, **changes) -> str:
        data = {
            "name": "many",
            "source": str(source),
            "entrypoint": "script.py",
            "environment": {"requirements": "none"},
        }
        backend = place.backend(**(options or {}))
        handles.append(backend.submit(backend.plan(Job.from_dict({**data, **changes}), bundle, run_id), bundle))
        return handles[-1]

    yield submit
    for handle in handles:
        place.backend().cancel(handle)


def asked(place: Ground, function: Callable[[], object]) -> list[str]:
    """Return the resources that a function lists or gets."""
    before = len(place.cluster.server.requests)
    function()
    paths = [path.partition("?")[0] for _, path in place.cluster.server.requests[before:]]
    return [path.rpartition("/")[2] for path in paths]


def test_many_attempts_are_two_lists(place: Ground, submit: Submit):
    backend = place.backend()
    handles = [submit(f"many-{n}", NOWHERE) for n in range(MANY - 4)]
    handles += [submit("queued", {"queue": "research"}), submit("image", {"image": "absent:1"})]
    handles += [submit("runs", args=["wait"]), submit("done")]
    backend.cancel(handles[0])
    wait_for(lambda: backend.status(handles[0]).state is State.CANCELLED)
    wait_for(lambda: backend.status(handles[-1]).state is State.SUCCEEDED)
    wait_for(lambda: backend.status(handles[-2]).state is State.RUNNING)
    wait_for(lambda: all(backend.status(handle).reason for handle in handles[1:-2]))
    missing = handles[1][:-1] + ("8" if handles[1][-1] != "8" else "9")
    found: dict = {}
    assert asked(place, lambda: found.update(backend.statuses([*handles, missing]))) == ["jobs", "pods"]
    assert found == {handle: backend.status(handle) for handle in handles}
    assert {status.state for status in found.values()} == {State.QUEUED, State.STARTING, State.RUNNING, State.CANCELLED,
                                                          State.SUCCEEDED}  # fmt: skip
    assert "Unschedulable: 0/1 nodes are available" in found[handles[1]].reason
    assert "ImagePullBackOff" in found[handles[-3]].reason and "research" in found[handles[-4]].reason


def test_a_log_is_read_with_the_pods_that_were_just_listed(place: Ground, submit: Submit):
    backend, handle = place.backend(poll_s=60.0), submit("prints", args=["wait"])
    wait_for(lambda: backend.statuses([handle])[handle].state is State.RUNNING)
    assert asked(place, lambda: list(backend.logs(handle))) == ["log"]
    assert asked(place, lambda: list(place.backend().logs(handle))) == ["prints-a1", "pods", "log"], "nobody had asked"


def test_warnings_are_one_list_for_all_that_say_nothing_else(place: Ground, submit: Submit):
    backend = place.backend()
    handles = [submit(f"mount-{n}", {"volumes": [{"claim": "none", "path": "/data"}]}) for n in range(5)]
    wait_for(lambda: all("FailedMount" in backend.status(handle).reason for handle in handles))
    found: dict = {}
    assert asked(place, lambda: found.update(backend.statuses(handles))) == ["jobs", "pods", "events"]
    assert found == {handle: backend.status(handle) for handle in handles}
    place.cluster.resources.denied.add(("list", "events"))
    assert {status.reason for status in backend.statuses(handles).values()} == {""}


def test_a_slow_image_says_since_when_it_is_fetched(place: Ground, submit: Submit):
    place.cluster.kubelet.slow_images.add("large:1")
    backend, handle = place.backend(), submit("slow", {"image": "large:1"})
    wait_for(lambda: 'Pulling: Pulling image "large:1" (since 20' in backend.status(handle).reason)
    found: dict = {}
    assert asked(place, lambda: found.update(backend.statuses([handle]))) == ["jobs", "pods", "events", "events"]
    assert found == {handle: backend.status(handle)}


def test_lists_have_pages_and_selectors_an_end(place: Ground, submit: Submit, monkeypatch: pytest.MonkeyPatch):
    backend = place.backend()
    handles = [submit(f"many-{n}", NOWHERE) for n in range(7)]
    submit("another", NOWHERE)
    expected = {handle: backend.status(handle) for handle in handles}
    monkeypatch.setattr(listing, "PAGE", 2)
    assert asked(place, lambda: backend.statuses(handles[:4])) == ["jobs", "jobs", "pods", "pods"]
    monkeypatch.setattr(listing, "NAMES", 3)
    assert {handle: status.state for handle, status in backend.statuses(handles).items()} == {
        handle: status.state for handle, status in expected.items()
    }
    assert backend.statuses([]) == {}


def test_who_may_not_list_jobs_asks_one_by_one(place: Ground, submit: Submit):
    backend, handle = place.backend(), submit("alone", NOWHERE)
    place.cluster.resources.denied.add(("list", "jobs"))
    assert backend.statuses([handle]) == {} and backend.status(handle).state is State.STARTING


def test_a_server_that_fails_is_no_answer(place: Ground, submit: Submit):
    backend, handle = place.backend(), submit("alone", NOWHERE)
    place.cluster.server.faults.append(Fault("GET", r"/jobs\?", times=20))
    with pytest.raises(Unreachable):
        backend.statuses([handle])


def test_clusters_and_namespaces_are_groups(tmp_path: Path):
    options = [{}, {"namespace": "ml"}, {"context": "a"}, {"server": "https://a"}, {"server": "https://b"}]
    assert len({KubernetesBackend(given, tmp_path).group for given in options}) == len(options)


def test_a_reason_that_changes_is_an_event_of_the_run(place: Ground, home: Path):
    options = {"kubeconfig": str(place.cluster.kubeconfig), "image": "any:1", "queue": "research", **NOWHERE}
    (home / "code").mkdir(parents=True)
    (home / "code" / "train.py").write_text("print(1)\n")
    run = Submitter("kubernetes", watch=False, **options).submit(
        {"source": str(home / "code"), "entrypoint": "train.py"}
    )

    def look() -> str:
        assert Watcher(run.store, run.run_id).refresh() is not None
        return run.record.status.reason

    assert look() == "waits in the queue research"
    job = place.cluster.objects.get("jobs", "default", run.attempts[-1].attempt_id)
    with place.cluster.objects.lock:
        job["spec"]["suspend"] = False  # what Kueue does
    wait_for(lambda: "Unschedulable" in look())
    events = [(event.data["state"], event.data["reason"][:20]) for event in run.store.events(run.run_id, "status")]
    assert events[0] == ("QUEUED", "waits in the queue r") and events[-1] == ("STARTING", "Unschedulable: 0/1 n")
    run.cancel()
