"""A run that was cancelled or removed leaves nothing on the cluster; log and results of a cancelled one can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain.events import State
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from cloudtrain.runs.watching.watch import Watcher
from cloudtrain.simulators.http import Fault
from tests.backends.kubernetes.clusters import Ground
from tests.backends.kubernetes.test_faults import place  # noqa: F401 - a fixture
from tests.conftest import wait_for

SCRIPT = """
import os, pathlib, time
pathlib.Path(os.environ["CLOUDTRAIN_OUTPUT_DIR"], "kept").write_text("a result")
print("ready", flush=True)
time.sleep(600)
"""


def cancelled(place: Ground, home: Path) -> Run:  # noqa: F811
    place.cluster.objects.add("persistentvolumeclaims", "default", {"metadata": {"name": "shared"}, "spec": {}})
    (home / "code").mkdir(parents=True)
    (home / "code" / "train.py").write_text(SCRIPT)
    options = {"kubeconfig": str(place.cluster.kubeconfig), "image": "any:1", "poll_s": 0.1}
    volumes = [{"claim": "shared", "path": "/data"}]
    job = {"source": str(home / "code"), "entrypoint": "train.py", "output": "/data/runs"}
    run = Submitter("kubernetes", watch=False, volumes=volumes, **options).submit(job)

    def look() -> list[str]:
        assert Watcher(run.store, run.run_id).refresh() is not None
        return [line.text for line in run.logs()]

    wait_for(lambda: "ready" in look(), "its line")
    run.cancel()
    wait_for(lambda: look() and run.record.status.state.final, "its end")
    assert run.state is State.CANCELLED
    return run


def test_a_cancelled_job_is_deleted_and_its_log_and_results_stay(place: Ground, home: Path, tmp_path: Path):  # noqa: F811
    run = cancelled(place, home)
    objects = place.cluster.objects
    assert objects.all("jobs") == []
    wait_for(lambda: not any(objects.all(plural) for plural in ("pods", "services", "configmaps")), "what it owned")
    assert "ready" in [line.text for line in run.logs()]
    assert (run.fetch(tmp_path / "results") / "outputs" / "kept").read_text() == "a result"
    assert objects.all("pods") == [] or wait_for(lambda: objects.all("pods") == [], "the pod that gave it out")


def test_rm_deletes_an_ended_run_on_the_cluster_and_here(place: Ground, home: Path, cli):  # noqa: F811
    (home / "code").mkdir(parents=True)
    (home / "code" / "train.py").write_text("print(1)")
    options = {"kubeconfig": str(place.cluster.kubeconfig), "image": "any:1", "poll_s": 0.1}
    job = {"source": str(home / "code"), "entrypoint": "train.py", "num_nodes": 2}
    first, second = (Submitter("kubernetes", watch=False, **options).submit(job, new=True) for _ in range(2))
    for run in (first, second):
        wait_for(lambda run=run: Watcher(run.store, run.run_id).refresh() and run.state.final, "its end")
        assert run.state is State.SUCCEEDED and (home / "runs" / run.run_id).exists()
    objects, own = place.cluster.objects, ("jobs", "pods", "services", "configmaps")
    _, shown, _ = cli("rm", first.run_id, "--dry-run")
    assert f"Job default/{first.run_id}-a1" in shown and len(objects.all("jobs")) == 2
    assert cli("rm", first.run_id, "--yes")[0] == 0 and not (home / "runs" / first.run_id).exists()
    assert [each["metadata"]["name"] for each in objects.all("jobs")] == [f"{second.run_id}-a1"]
    assert cli("rm", second.run_id, "--yes", "--here")[0] == 0 and not (home / "runs" / second.run_id).exists()
    (kept,) = objects.all("jobs")
    wait_for(
        lambda: all(kept["metadata"]["name"] in str(each) for name in own for each in objects.all(name)), "the rest"
    )


@pytest.mark.parametrize("lost", ["log", "answer"])
def test_a_job_stays_while_its_log_is_nowhere_else_or_the_cluster_does_not_answer(
    place: Ground,  # noqa: F811
    home: Path,
    lost: str,
    monkeypatch: pytest.MonkeyPatch,
):
    if lost == "log":
        monkeypatch.setattr("cloudtrain.history.spool.Spool.open", lambda *_: None)
    else:
        place.cluster.faults.append(Fault("DELETE", r"/jobs/", times=100))
    run = cancelled(place, home)
    assert [job["metadata"]["name"] for job in place.cluster.objects.all("jobs")] == [f"{run.run_id}-a1"]
