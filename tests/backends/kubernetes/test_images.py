"""Which image each pod runs, as the simulated kubelet tells it."""

from __future__ import annotations

import hashlib

from cloudtrain.events import State
from tests.backends.kubernetes.clusters import Ground
from tests.backends.kubernetes.test_faults import ended, place, started  # noqa: F401 - a fixture
from tests.conftest import wait_for


def test_the_image_that_was_pulled_is_told_by_its_digest(place: Ground):  # noqa: F811
    place.cluster.kubelet.absent_images.add("any:1")
    script = "import time; time.sleep(600)"
    backend, handle = started(place, script, num_nodes=2)
    wait_for(lambda: "ImagePullBackOff" in (backend.status(handle).reason or ""), "no image", 120)
    assert backend.images(handle) == {}, "nothing was pulled"
    place.cluster.kubelet.absent_images.clear()
    wait_for(lambda: backend.status(handle).state is State.RUNNING, "its start", 120)
    assert set(backend.images(handle)) == {0, 1} and set(backend.images(handle).values()) == {
        f"docker.io/library/any@sha256:{hashlib.sha256(b'any:1').hexdigest()}"
    }
    backend.cancel(handle)


def test_an_image_with_a_digest_is_that_one_whatever_runs_beside_it(place: Ground):  # noqa: F811
    pinned = "team.example.com/train@sha256:" + "7" * 64
    other, its = started(place, "print(1)", image=pinned)
    assert ended(other, its).state is State.SUCCEEDED and other.images(its) == {0: pinned}
    for pod in place.cluster.objects.all("pods"):  # a sidecar that an admission hook has put before ours
        its_own = pod["status"]["containerStatuses"]
        its_own.insert(0, {**its_own[0], "name": "mesh", "imageID": "docker.io/mesh@sha256:" + "1" * 64})
    assert other.images(its) == {0: pinned}
