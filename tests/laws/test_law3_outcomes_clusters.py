"""Law 3, submissions: drawn sequences of lost answers on Kubernetes, Slurm and SSH; what refuses, and what is not known."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloudtrain.backends import registry
from cloudtrain.backends.http import Answer
from cloudtrain.backends.kubernetes.client import error_for_answer
from cloudtrain.backends.slurm import client
from cloudtrain.cli import main
from cloudtrain.errors import BackendError, BadRequest, NoCapacity, Unreachable
from cloudtrain.events import State
from cloudtrain.runs.submit import Submitter
from cloudtrain.simulators.http import Fault
from tests.backends.kubernetes.clusters import Ground, ground
from tests.backends.ssh.test_backend import options
from tests.conftest import wait_for
from tests.lab.connections import close_all
from tests.lab.network import Lab
from tests.lab.slurm import Slurm
from tests.laws.clusters import Cluster, Kubernetes, Machines
from tests.laws.outcomes import drive, recorded

KUBERNETES, SLURM, SSH = 8, 10, 10  # sequences of a normal run
LONG = {"kubernetes": range(100, 200), "slurm": range(100, 150), "ssh": range(100, 150)}  # 200


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    with ground(tmp_path_factory.mktemp("kubernetes")) as made:
        yield made


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloudtrain.backends.http.PAUSE_S", 0.0005)
    monkeypatch.setattr("cloudtrain.nodes.ssh.PAUSE_S", 0.0)


def over_kubernetes(place: Ground, folder: Path, seeds: range, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    done: Counter[str] = Counter()
    with recorded("kubernetes", monkeypatch):
        for seed in seeds:
            platform = Kubernetes(place)
            done += drive(platform, folder / str(seed), seed)
    return done


@pytest.mark.usefixtures("quick")
def test_kubernetes_loses_answers(cluster, tmp_path, monkeypatch, figure):
    done = over_kubernetes(cluster, tmp_path, range(KUBERNETES), monkeypatch)
    figure("drawn sequences of lost answers, kubernetes", KUBERNETES)
    assert done["submit"] >= KUBERNETES


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("quick")
def test_kubernetes_loses_answers_for_long(cluster, tmp_path, monkeypatch, figure):
    over_kubernetes(cluster, tmp_path, LONG["kubernetes"], monkeypatch)
    figure("drawn sequences of lost answers, kubernetes", len(LONG["kubernetes"]))


def over_slurm(slurm: Slurm, folder: Path, seeds: range, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    done: Counter[str] = Counter()
    path = os.environ["PATH"]
    try:
        for seed in seeds:
            platform = Cluster(slurm, folder / f"{seed}-shims", runs=seed % 5 == 0)
            with monkeypatch.context() as patch, recorded("slurm", patch):
                patch.setenv("PATH", f"{platform.bin}:{path}")
                patch.setattr("cloudtrain.backends.slurm.backend.LATE_S", (0.05, 0.1))
                patch.setattr("cloudtrain.backends.slurm.backend.SlurmBackend.poll_s", 0.1)
                done += drive(platform, folder / str(seed), seed)
    finally:
        slurm.ask("scontrol", "update", "PartitionName=main", "State=UP")
    return done


def test_slurm_loses_answers(slurm, tmp_path, monkeypatch, figure):
    done = over_slurm(slurm, tmp_path, range(SLURM), monkeypatch)
    figure("drawn sequences of lost answers, slurm", SLURM)
    assert done["submit"] >= SLURM


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_slurm_loses_answers_for_long(slurm, tmp_path, monkeypatch, figure):
    over_slurm(slurm, tmp_path, LONG["slurm"], monkeypatch)
    figure("drawn sequences of lost answers, slurm", len(LONG["slurm"]))


@pytest.fixture
def machines(lab: Lab) -> Iterator[Lab]:
    """The lab's machines; connections are closed behind the test, so that no agent is left on them."""
    yield lab
    close_all()


def over_ssh(lab: Lab, folder: Path, seeds: range, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    done: Counter[str] = Counter()
    for seed in seeds:
        with monkeypatch.context() as patch, recorded("ssh", patch):
            nodes = 1 + seed % 2
            platform = Machines(lab, 2 + seed // 2 % 2, patch)
            done += drive(platform, folder / str(seed), seed, num_nodes=nodes)
        close_all()
        for host in lab.hosts:
            wait_for(lambda host=host: not host.processes(), "the end of the agents")
            host.clear()
    return done


@pytest.mark.usefixtures("quick")
def test_ssh_loses_answers(machines, tmp_path, monkeypatch, figure):
    done = over_ssh(machines, tmp_path, range(SSH), monkeypatch)
    figure("drawn sequences of lost answers, ssh", SSH)
    assert done["submit"] >= SSH


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("quick")
def test_ssh_loses_answers_for_long(machines, tmp_path, monkeypatch, figure):
    over_ssh(machines, tmp_path, LONG["ssh"], monkeypatch)
    figure("drawn sequences of lost answers, ssh", len(LONG["ssh"]))


@pytest.mark.parametrize(
    ("status", "said", "kind"),
    [
        (403, 'jobs.batch "x" is forbidden: exceeded quota: few, requested: count/jobs.batch=1', NoCapacity),
        (403, "jobs.batch is forbidden: User cannot create resource", BackendError),
        (401, "Unauthorized", BackendError),
        (404, 'namespaces "x" not found', BackendError),
        (422, "Job is invalid", BackendError),
        (409, "Operation cannot be fulfilled", Unreachable),
        (429, "too many requests", Unreachable),
        (500, "etcdserver: request timed out", Unreachable),
        (503, "unavailable", Unreachable),
        (504, "timeout", Unreachable),
    ],
)
def test_what_a_kubernetes_server_says(status, said, kind):
    error = error_for_answer(Answer(status, {}, json.dumps({"message": said}).encode()), "the Job was not accepted")
    assert _kind(error) is kind, error


SUBMIT = "Batch job submission failed: "
POLICY = SUBMIT + "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        ([SUBMIT + "Invalid partition name specified"], BackendError),
        ([SUBMIT + "Invalid account or account/partition combination specified"], BackendError),
        ([SUBMIT + "Invalid qos specification"], BackendError),
        ([SUBMIT + "Requested node configuration is not available"], BackendError),
        ([SUBMIT + "Requested time limit is invalid (missing or exceeds some limit)"], BackendError),
        ([SUBMIT + "Access/permission denied"], BackendError),
        ([SUBMIT + "Unspecified error"], BackendError),
        ([SUBMIT + "Job violates accounting/QOS policy"], NoCapacity),
        ([POLICY], NoCapacity),
        (["QOSMaxSubmitJobPerUserLimit", POLICY], NoCapacity),
        (["AssocMaxSubmitJobLimit", POLICY], NoCapacity),
        (["QOSGrpSubmitJobsLimit", POLICY], NoCapacity),
        (["QOSMaxGRESPerUser", POLICY], NoCapacity),
        (["QOSMaxCpuPerJobLimit", POLICY], BackendError),  # no other job's end makes this one smaller
        (["QOSMaxWallDurationPerJobLimit", POLICY], BackendError),
        ([SUBMIT + "Requested nodes are busy"], NoCapacity),
        ([SUBMIT + "Unable to contact slurm controller (connect failure)"], Unreachable),
        ([SUBMIT + "Socket timed out on send/recv operation"], Unreachable),
        ([SUBMIT + "Connection refused"], Unreachable),
        ([SUBMIT + "Slurm temporarily unable to accept job, sleeping and retrying"], Unreachable),
        ([SUBMIT + "Slurm backup controller in standby mode"], Unreachable),
        ([SUBMIT + "Zero Bytes were transmitted or received"], Unreachable),
    ],
)
def test_what_sbatch_says(lines, kind):
    error = client.error_for_command(
        {"code": 1, "out": "", "err": "".join(f"sbatch: error: {line}\n" for line in lines)}
    )
    assert _kind(error) is kind, error
    assert len(lines) == 1 or lines[0] in error.message, "the limit is named"


def test_an_sbatch_that_is_killed_may_have_sent_the_job():
    for said in ({"code": -9, "err": ""}, {"code": None, "err": "sbatch took more than 50 s"}):
        assert _kind(client.error_for_command({"out": "", **said})) is Unreachable
    said = {"code": None, "out": "", "err": "sbatch: No such file or directory"}
    assert _kind(client.error_for_command(said)) is BackendError


def _kind(error: BackendError) -> type[BackendError]:
    return next(kind for kind in (Unreachable, NoCapacity, BackendError) if isinstance(error, kind))


@pytest.mark.usefixtures("quick")
def test_a_start_that_was_refused_when_it_was_asked_for_again_is_not_known(cluster, job, home):
    """The first PATCH starts the Job and its answer is lost; the second try is denied: the Job runs."""
    cluster.cluster.faults += [Fault("PATCH", "/jobs/", 0, after=True), Fault("PATCH", "/jobs/", 403, "denied")]
    run = Submitter("kubernetes", watch=False, **Kubernetes(cluster).options).submit(job)
    assert run.record.status.state is State.QUEUED and "unknown since" in run.record.status.reason
    again = Submitter("kubernetes", watch=False, **Kubernetes(cluster).options).submit(job)
    assert again.run_id == run.run_id and again.attempts[-1].handle and len(again.attempts) == 1
    again.cancel(60)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("queue", [None, "team"])
def test_a_job_that_was_refused_halfway_is_taken_away(cluster, job, queue):
    platform = Kubernetes(cluster)
    submitter = Submitter("kubernetes", watch=False, **platform.options, **({"queue": queue} if queue else {}))
    cluster.cluster.faults.append(Fault("POST", "configmaps", 403, "forbidden"))
    with pytest.raises(BackendError, match="forbidden"):
        submitter.submit(job)
    assert platform.jobs() == [], "a queue would start it"
    if queue:
        cluster.cluster.faults += [Fault("POST", "configmaps", 403, "no"), Fault("DELETE", "/jobs/", 403, "no")]
        run = submitter.submit(job)
        assert "is still in the queue" in run.record.status.reason and len(platform.jobs()) == 1
        assert run.cancel(10).state is State.CANCELLED
        assert platform.jobs() == [], "what was left in the queue is gone with the run"


def test_a_machine_that_is_silent_may_hold_the_attempt(machines, job, monkeypatch):
    monkeypatch.setattr("cloudtrain.nodes.ssh.PAUSE_S", 0.0)
    backend = registry.backend_class("ssh")(options(machines, 3), Path("unused"))
    assert backend.find("nobody-a1") is None
    monkeypatch.setattr("cloudtrain.nodes.ssh.CONNECT_S", 1.0)  # the other machines are connected already
    machines.hosts[2].power_off()
    with pytest.raises(Unreachable):
        backend.find("nobody-a1")
    run = Submitter("ssh", watch=False, **options(machines, 3)).submit(job)
    attempt = run.attempts[-1]
    assert backend.find(attempt.attempt_id) == attempt.handle, "another machine proves it"
    run.cancel(60)
    machines.hosts[2].reboot()


def test_a_request_that_another_one_replaced_hides_nothing(machines, job, monkeypatch):
    """A submit chose a machine and broke off; that one was silent when the next submit chose; then it answers again."""
    monkeypatch.setattr("cloudtrain.nodes.ssh.PAUSE_S", 0.0)
    run = Submitter("ssh", watch=False, **options(machines, 2)).submit(job)
    handle = run.attempts[-1].handle
    place = machines.hosts[0].path("/root/.cloudtrain/runs") / run.run_id / "a1" / "request.json"
    stale = json.loads(place.read_text())
    other = dict(stale, hosts=[options(machines, 2)["user"] + "@" + machines.hosts[1].address])
    beside = machines.hosts[1].path("/root/.cloudtrain/runs") / run.run_id / "a1" / "request.json"
    beside.parent.mkdir(parents=True)
    beside.write_text(json.dumps(other))
    backend = registry.backend_class("ssh")(options(machines, 2), Path("unused"))
    assert backend.find(run.attempts[-1].attempt_id) == handle
    reversed_hosts = {**options(machines, 2), "hosts": options(machines, 2)["hosts"][::-1]}
    backend = registry.backend_class("ssh")(reversed_hosts, Path("unused"))
    assert backend.find(run.attempts[-1].attempt_id) == handle, "whichever answers first"
    run.cancel(60)


def test_a_job_that_ran_is_found_when_slurm_has_forgotten_it(slurm, job, monkeypatch):
    """The answer and the number are lost, the job runs and ends, and MinJobAge is over."""
    submitter = Submitter("slurm", watch=False, folder=str(slurm.shared), python=sys.executable)
    Path(job["source"], "train.py").write_text("print(1)\n")
    run = submitter.submit(job)
    handle = run.attempts[-1].handle
    wait_for(lambda: run.refresh().state.final, "the end")
    Path(handle, "job").unlink()
    monkeypatch.setattr(client, "find_job", lambda run, name: None)
    backend = registry.backend_class("slurm")({"folder": str(slurm.shared)}, Path("unused"))
    assert backend.find(run.attempts[-1].attempt_id) == handle
    assert backend.status(handle).state is State.SUCCEEDED


@pytest.fixture
def job(tmp_path: Path) -> dict:
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text("import time\ntime.sleep(600)\n")
    requirements = {"environment": {"requirements": "none"}}
    return {"name": "outcome", "source": str(source), "entrypoint": "train.py", **requirements}


@pytest.mark.parametrize("backend", ["kubernetes", "slurm", "ssh", "local"])
@pytest.mark.usefixtures("quick")
def test_a_key_is_checked_where_only_the_platform_knows_it(backend, request, job, home, tmp_path):
    if backend == "kubernetes":
        given = Kubernetes(request.getfixturevalue("cluster")).options
    elif backend == "slurm":
        given = {"folder": str(request.getfixturevalue("slurm").shared), "python": sys.executable}
    elif backend == "ssh":
        given = options(request.getfixturevalue("machines"), 2)
    else:
        given = {}
    key = f"nightly-{backend}"
    run = Submitter(backend, watch=False, **given).submit({**job, "labels": {"team": "blue"}}, key=key)
    try:
        plan, handle = run.attempts[-1].plan, run.attempts[-1].handle
        kept = registry.create(backend, {**plan.job["options"].get(backend, {})}, home).labels(handle)
        assert kept == dict(plan.job["labels"]) and kept["team"] == "blue"
        if backend == "local":
            return  # its platform is the home
        elsewhere = Submitter(backend, home=tmp_path / "elsewhere", watch=False, **given)
        with pytest.raises(BadRequest, match="the job's digest") as caught:
            elsewhere.submit({**job, "args": ["--else"]}, key=key)
        assert caught.value.exit_code == 2 and "source" not in caught.value.message.partition("differs")[0]
        train = Path(job["source"], "train.py")
        whole = train.read_text()
        train.write_text(whole + "# changed\n")
        with pytest.raises(BadRequest, match="the source's digest") as caught:
            elsewhere.submit(job, key=key)
        assert "job's digest" not in caught.value.message
        train.write_text(whole)
        same = elsewhere.submit(job, key=key)
        assert same.run_id == run.run_id and same.adopted and same.attempts[-1].handle == handle
    finally:
        run.cancel(60)


def test_ls_starts_no_attempt_and_watch_does(job, census, capfd, monkeypatch):
    Path(job["source"], "train.py").write_text(
        "import os, time\nprint('attempt', os.environ['CLOUDTRAIN_ATTEMPT'], flush=True)\n"
        "time.sleep(600 if os.environ['CLOUDTRAIN_ATTEMPT'] == '1' else 0)\n"
    )
    run = Submitter("local", watch=False).submit({**job, "retry": {"max_attempts": 2}})
    run.acknowledge()
    status = Path(run.attempts[-1].handle, "node-0", "status.json")
    wait_for(lambda: any(line.text.startswith("attempt") for line in run.logs()), "the script")
    os.kill(json.loads(status.read_text())["pid"], 15)  # what a platform does that wants its machine back
    backend = registry.create("local", {}, census)
    wait_for(lambda: backend.status(run.attempts[-1].handle).state is State.PREEMPTED, "the preemption")
    spawned: list[str] = []
    monkeypatch.setattr("cloudtrain.runs.sending.handover.start", lambda store, plan, **_: spawned.append(plan.run_id))
    for _ in range(50):
        assert main(["ls"]) == 0
    assert main(["show", run.run_id]) == 0
    assert len(run.attempts) == 1 and not run.record.status.state.final
    assert main(["wait", "--foreground", run.run_id]) == 0
    assert [attempt.number for attempt in run.attempts] == [1, 2]
    assert run.record.status.state is State.SUCCEEDED
