"""What administrators have and do on a real Slurm: licences, reservations, shared nodes, requeues, drained nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain.backends.slurm import reasons
from cloudtrain.errors import BackendError
from cloudtrain.events import State
from tests.backends.slurm.test_ends import PATIENT, Cluster, cluster, final, job_of, lines  # noqa: F401 - a fixture
from tests.conftest import wait_for
from tests.lab.slurm import Slurm


def waits(backend, handle: str, code: str) -> bool:
    """Return whether a job waits for a reason of Slurm's, in our words."""
    status = backend.status(handle)
    return status.state is State.QUEUED and status.reason == reasons.describe(code)


def test_a_job_waits_for_its_licence_and_for_its_reservation(cluster: Cluster):  # noqa: F811
    slurm = cluster.slurm
    holder = slurm.ask("sbatch", "--parsable", "-L", "solver:1", "-o", "/dev/null", "--wrap", "sleep 600").strip()
    backend, handle = cluster.submit("print(1)", options={"directives": ["--licenses=solver:1"]})
    wait_for(lambda: waits(backend, handle, "Licenses"), "its reason")
    slurm.ask("scancel", holder)
    assert final(backend, handle).state is State.SUCCEEDED
    slurm.ask("scontrol", "create", "reservation", "reservationname=later", "starttime=now+1hour", "duration=60",
              "users=root", "nodes=ALL", "flags=ignore_jobs")  # fmt: skip
    try:
        backend, handle = cluster.submit("print(1)", options={"reservation": "later"})
        wait_for(lambda: waits(backend, handle, "Reservation"), "its reason")
        backend.cancel(handle)
        assert final(backend, handle).state is State.CANCELLED
    finally:
        slurm.ask("scontrol", "delete", "reservationname=later")


def test_a_job_that_an_administrator_requeues_is_started_again(cluster: Cluster):  # noqa: F811
    backend, handle = cluster.submit(PATIENT, 2, num_nodes=2, retry={"max_attempts": 2})
    wait_for(lambda: lines("start 1", backend, handle)() == 2, "both ranks")
    cluster.slurm.ask("scontrol", "requeue", job_of(handle))
    wait_for(lambda: backend.status(handle).state is State.QUEUED, "the queue again")
    status = final(backend, handle)
    assert (status.state, status.exit_code) == (State.SUCCEEDED, 0)
    assert lines("start 2", backend, handle)() == 2
    assert "Restarts=1" in cluster.slurm.ask("scontrol", "-o", "show", "job", job_of(handle))


def test_a_node_that_is_drained_ends_its_job_and_takes_no_other(cluster: Cluster):  # noqa: F811
    slurm, gate = cluster.slurm, cluster.slurm.shared / "drained"
    script = f"import os, time\nprint('up', flush=True)\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.05)\n"
    backend, handle = cluster.submit(script, num_nodes=2)
    wait_for(lambda: lines("up", backend, handle)() == 2, "both ranks")
    name = slurm.nodes[1].name
    slurm.ask("scontrol", "update", f"nodename={name}", "state=drain", "reason=disk")
    try:
        assert backend.status(handle).state is State.RUNNING
        _, waiting = cluster.submit("print(1)", num_nodes=2)
        gate.touch()
        assert final(backend, handle).state is State.SUCCEEDED
        wait_for(lambda: backend.status(waiting).reason.startswith("Slurm: ReqNodeNotAvail"), "its reason")
        assert "`sinfo -R`" in backend.status(waiting).reason
    finally:
        slurm.ask("scontrol", "update", f"nodename={name}", "state=resume")
    assert final(backend, waiting).state is State.SUCCEEDED


def test_two_jobs_share_the_processors_of_a_partition(cluster: Cluster):  # noqa: F811
    slurm = cluster.slurm
    slurm.ask("scontrol", "create", "partition=shared", "nodes=ALL", "oversubscribe=force:2")
    try:
        options = {"partition": "shared", "directives": ["--cpus-per-task=4"]}
        script = "import time; print('up', flush=True); time.sleep(600)"
        both = [cluster.submit(script, num_nodes=2, options=options) for _ in range(2)]
        for backend, handle in both:
            wait_for(lambda b=backend, h=handle: lines("up", b, h)() == 2, "both of its ranks")
        assert {backend.status(handle).state for backend, handle in both} == {State.RUNNING}
        for backend, handle in both:
            backend.cancel(handle)
            assert final(backend, handle).state is State.CANCELLED
        slurm.ready()
    finally:
        slurm.ask("scontrol", "delete", "partitionname=shared")


def test_limits_of_a_quality_of_service_are_said(accounted: Slurm, tmp_path: Path) -> None:
    """What slurmdbd limits: a job too long waits for ever and says so, a second job of a user waits for the first."""
    for name, limit in (("brief", "MaxWall=00:05:00"), ("single", "MaxJobsPerUser=1")):
        accounted.ask("sacctmgr", "-i", "add", "qos", name, limit)
    accounted.ask("sacctmgr", "-i", "modify", "user", "root", "set", "qos+=brief,single")
    site = Cluster(accounted, tmp_path)
    script = "print('up', flush=True); import time; time.sleep(600)"
    try:
        backend, first = site.submit(script, options={"qos": "single"})
        wait_for(lambda: lines("up", backend, first)(), "its start")
        _, second = site.submit("print(1)", options={"qos": "single"})
        wait_for(lambda: waits(backend, second, "QOSMaxJobsPerUserLimit"), "its reason")
        assert "it starts when other jobs end" in backend.status(second).reason
        backend.cancel(first)
        assert final(backend, first).state is State.CANCELLED
        assert final(backend, second).state is State.SUCCEEDED
        _, long = site.submit("print(1)", options={"qos": "brief"})
        wait_for(lambda: waits(backend, long, "QOSMaxWallDurationPerJobLimit"), "its reason")
        assert "it will not start by itself" in backend.status(long).reason
        with pytest.raises(BackendError, match="Slurm refuses the job"):
            site.submit("print(1)", options={"qos": "none"})
        assert accounted.ask("sacct", "-n", "-X", "-j", job_of(second), "-o", "state").strip() == "COMPLETED"
    finally:
        for each, handle in site.handles:
            each.cancel(handle)
