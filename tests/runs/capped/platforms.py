"""The simulated platforms by a test's clock: what each bills comes from its own record, never from what a plan says."""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloudtrain import events
from cloudtrain.backends import registry
from cloudtrain.backends.aws import AwsError
from cloudtrain.backends.sagemaker.backend import SagemakerBackend
from cloudtrain.backends.sagemaker.listing import DescribedJobs
from cloudtrain.backends.slurm.backend import SlurmBackend
from cloudtrain.backends.ssh.backend import SshBackend
from cloudtrain.events import State, Status
from cloudtrain.job.units import format_time, unix_time
from cloudtrain.simulators.sagemaker import training_job
from cloudtrain.simulators.sagemaker.host import Behavior
from cloudtrain.simulators.vertex import lifecycle
from cloudtrain.simulators.vertex.server import Simulator
from tests.runs.capped.clock import Clock
from tests.simulators.kubernetes_cluster import job_controller, kubelet, objects
from tests.simulators.kubernetes_cluster.server import Cluster

ARN = "arn:aws:sagemaker:us-east-1:123456789012:training-job/"


class Platform(ABC):
    """What the histories need of a platform. `billed` are the seconds of all nodes together, by its own record."""

    name = ""
    options: dict[str, Any] = {}
    job: dict[str, Any] = {}
    spot = True
    backend: Any

    @abstractmethod
    def billed(self) -> float: ...

    def preempt(self) -> None:
        """Take the nodes of what runs away."""

    def close(self) -> None: ...


class Container:
    """Stands in for the process of a container: `cloudtrain.simulators.replicas.Replica`."""

    def __init__(self, clock: Clock, task: str, write_lines: Any, *, prepares: bool = False) -> None:
        self.task, self._write_lines, self._reported = task, write_lines, False
        begins_s = clock.draw.uniform(0, 900)
        self.life = clock.live(begins_s, 0) if prepares else clock.launcher()

    @property
    def code(self) -> int | None:
        if not self.life.over:
            return None
        if self.life.code == 75 and not self._reported:
            self._reported = True
            state = "PREEMPTED" if self.life.asked else "TIMED_OUT"
            result = events.format("result", {"state": state, "code": 75, "reason": ""})
            self._write_lines([f"0 -1 {format_time(self.life.ends_at)} {result}"])
        return self.life.code

    def terminate(self) -> None:
        self.life.terminate()

    def kill(self) -> None:
        self.life.kill()


class SageMaker(Platform):
    """Training jobs of the simulator, called without HTTP."""

    name = "sagemaker"
    options = {
        "region": "us-east-1",
        "role": "arn:aws:iam::123456789012:role/train",
        "bucket": "my-bucket",
        "client": "boto3",
    }
    job = {"image": "img:1", "resources": {"accelerators": "A10G:4"}}

    def __init__(self, clock: Clock, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.clock, self.folder, self.jobs = clock, folder, {}
        patch.setattr(training_job, "Host", lambda *a: SageMakerHost(clock, a[4]))
        patch.setattr(training_job.TrainingJob, "_upload", lambda _: None)
        self.backend = SagemakerBackend(self.options, folder, clock)
        self.backend.aws = SimpleNamespace(
            region="us-east-1",
            clock=clock,
            call=lambda _, operation, **values: getattr(self, operation)(**values),
            check_credentials=lambda: None,
        )
        self.backend._jobs = DescribedJobs(self.backend.aws)
        for name, result in (("_check_account", None), ("_check_account_is", None), ("images", {})):
            patch.setattr(self.backend, name, lambda *_, result=result: result)
        patch.setattr(self.backend, "logs", lambda *_, **__: iter(()))
        patch.setattr("cloudtrain.backends.sagemaker.submission.upload", lambda *_: None)

    def create_training_job(self, **request: Any) -> dict[str, str]:
        name = request["TrainingJobName"]
        if name in self.jobs:
            raise AwsError("there is one", "", "ResourceInUse")
        draw = self.clock.draw
        upload_s = 600 if self.clock.hostile else draw.uniform(0, 600)
        behavior = Behavior(pending_s=draw.uniform(0, 7200), upload_s=upload_s)
        job = training_job.TrainingJob(
            request, ARN + name, self.folder / name, 0, lambda *_, **__: {}, behavior, self.clock
        )
        self.jobs[name] = job
        self.clock.begin(job.steps())
        return {"TrainingJobArn": ARN + name}

    def describe_training_job(self, TrainingJobName: str) -> dict[str, Any]:
        if TrainingJobName not in self.jobs:
            raise AwsError("Requested resource not found.", "", "ValidationException")
        job = self.jobs[TrainingJobName].describe()
        times = {name: datetime.fromtimestamp(value, UTC) for name, value in job.items() if name.endswith("Time")}
        return {**job, **times}

    def stop_training_job(self, TrainingJobName: str) -> None:
        self.jobs[TrainingJobName].stop()

    def billed(self) -> float:
        described = [job.describe() for job in self.jobs.values()]
        return sum(job.get("BillableTimeInSeconds", 0) * job["ResourceConfig"]["InstanceCount"] for job in described)

    def preempt(self) -> None:
        for job in self.jobs.values():
            if job.status == "InProgress" and job.request.get("EnableManagedSpotTraining"):
                job.preempt()


class SageMakerHost:
    """Stands in for `cloudtrain.simulators.sagemaker.host.Host`."""

    def __init__(self, clock: Clock, number: int) -> None:
        self.number, self.base, self.synced, self.life, self._clock = number, Path("/nowhere"), {}, None, clock

    def prepare(self, *_: Any) -> None: ...
    def finish(self) -> None: ...

    def start(self, *_: Any) -> None:
        self.life = self._clock.launcher()

    def signal(self, _: int) -> None:
        self.life.terminate()

    def end(self) -> None:
        self.life.kill()

    @property
    def running(self) -> bool:
        return not self.life.over

    @property
    def code(self) -> int | None:
        return self.life.code if self.life.over else None

    @property
    def ended_at(self) -> float:
        return self.life.ends_at


class Vertex(Platform):
    """The simulator's own server."""

    name = "vertex"
    job = {"image": "img:1", "resources": {"usd_per_hour": 6.0, "instance_type": "n1-standard-8"}}

    def __init__(self, clock: Clock, folder: Path, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(lifecycle, "Replica", lambda task, _, __, ___, write: Container(clock, task, write))
        patch.setattr(lifecycle, "list_containers", lambda job, _: [(f"workerpool{n}-0", [], {}) for n in range(2)])
        patch.setattr(lifecycle.JobLifecycle, "start", lambda cycle: clock.begin(cycle.steps()))
        patch.setattr(lifecycle.JobLifecycle, "join", lambda _: None)
        self.simulator, self.clock = Simulator(folder / "vertex", clock=clock), clock
        self.options = {"project": "local", "bucket": "local", "client": "rest", "settle_s": 0.0}
        self.options["endpoint"] = self.simulator.url
        self.backend = registry.create("vertex", self.options, folder, clock)

    def billed(self) -> float:
        total = 0.0
        for job in self.simulator.jobs._jobs.values():
            if "startTime" in job:
                ended = unix_time(job["endTime"]) if "endTime" in job else self.clock.at
                nodes = sum(pool["replicaCount"] for pool in job["jobSpec"]["workerPoolSpecs"])
                total += (ended - unix_time(job["startTime"])) * nodes
        return total

    def preempt(self) -> None:
        for number, cycle in self.simulator.jobs._lifecycles.items():
            if cycle._replicas:
                self.simulator.jobs.preempt(number, notice=self.clock.draw.random() < 0.7)

    def close(self) -> None:
        self.simulator.server.close()


class Kubernetes(Platform):
    """The simulator's API server, Job controller and kubelet; every pod is billed from its start on a node."""

    name = "kubernetes"
    job = {"image": "img:1", "resources": {"usd_per_hour": 6.0}}

    def __init__(self, clock: Clock, folder: Path, patch: pytest.MonkeyPatch) -> None:
        for module in (kubelet, job_controller):
            patch.setattr(module, "now", lambda _: format_time(clock.at))
        patch.setattr(objects, "now", lambda *_: format_time(clock.at))
        patch.setattr(kubelet.Kubelet, "start", lambda _: None)
        patch.setattr(
            kubelet,
            "Replica",
            lambda task, _, __, folder, write: Container(clock, task, write, prepares=folder.name == "machine-0"),
        )
        self.cluster, self.clock = Cluster(folder / "cluster", clock=clock), clock
        self.spans: dict[str, list[float]] = {}  # pod's uid -> start, end
        self.options = {
            "kubeconfig": str(self.cluster.kubeconfig),
            "spot_selector": {"kubernetes.io/hostname": "node-1"},
        }
        self.backend = registry.create("kubernetes", self.options, folder, clock)
        clock.steppers.append(self._step)
        self._waits: dict[str, float] = {}  # pod's uid -> how long it waits for a node
        patch.setattr(self.cluster.kubelet, "_start_blocker", self._blocker)

    def _blocker(self, pod: Any) -> tuple[str, str, str] | None:
        """A pod waits for a node for a drawn time."""
        waits = self._waits.setdefault(pod["metadata"]["uid"], self.clock.draw.uniform(0, 7200))
        created = unix_time(pod["metadata"]["creationTimestamp"])
        if self.clock.at - created >= waits:
            return None
        if not any(life.ends_at == created + waits for life in self.clock.lives):
            self.clock.live(created + waits - self.clock.at, 0)
        return "schedule", "Unschedulable", "0/1 nodes are available"

    def _step(self) -> float:
        due = self.cluster.kubelet.step()
        there = {pod["metadata"]["uid"]: pod["status"] for pod in self.cluster.objects.all("pods")}
        for uid, status in there.items():
            if "startTime" in status:
                self.spans.setdefault(uid, [self.clock.at, float("inf")])
        for uid, span in self.spans.items():
            if there.get(uid, {}).get("phase", "Failed") in ("Failed", "Succeeded"):
                span[1] = min(span[1], self.clock.at)
        return due

    def billed(self) -> float:
        return sum(min(end, self.clock.at) - start for start, end in self.spans.values())

    def preempt(self) -> None:
        pods = [pod for pod in self.cluster.objects.all("pods") if pod["status"]["phase"] == "Running"]
        for pod in pods[:1]:
            grace_s = 0.0 if self.clock.draw.random() < 0.3 else None
            self.cluster.kubelet.disrupt(pod, "PreemptionByScheduler", grace_s=grace_s)

    def close(self) -> None:
        self.cluster.server.close()


class Slurm(Platform):
    """A cluster whose commands are functions: jobs wait, are set up, run, and end at --time and KillWait."""

    name = "slurm"
    job = {"resources": {"usd_per_hour": 6.0}}

    def __init__(self, clock: Clock, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.clock, self.jobs = clock, {}
        self.options = {"folder": str(folder / "shared"), "spot_partition": "cheap"}
        (folder / "shared").mkdir()
        self.backend = SlurmBackend(self.options, folder, clock)
        self.backend.__dict__["_run"] = self._run

    def _run(self, argv: list[str]) -> dict[str, Any]:
        out, job = "", next((text for text in argv if text.startswith("--jobs=")), "")[7:]
        if argv[0] == "sbatch":
            number = str(len(self.jobs) + 1)
            self.jobs[number] = SlurmJob(self.clock, number, argv)
            self.clock.begin(self.jobs[number].steps())
            out = number
        elif argv[0] == "squeue":
            name = next((text[7:] for text in argv if text.startswith("--name=")), "")
            found = [j for j in self.jobs.values() if j.number in job.split(",") or (name and j.name == name)]
            out = "".join(f"{j.number}|{j.state}|None\n" for j in found if not j.forgotten)
        elif argv[0] == "scancel":
            self.jobs[argv[1]].cancelled = True
        elif argv[0] == "readlink":
            path = Path(argv[1])
            return (
                {"code": 0, "out": os.readlink(path), "err": ""}
                if path.is_symlink()
                else {"code": 1, "out": "", "err": ""}
            )
        return {"code": 0, "out": out, "err": ""}

    def billed(self) -> float:
        return sum((min(j.ended, self.clock.at) - j.started) * j.nodes for j in self.jobs.values() if j.started)

    def preempt(self) -> None:
        for job in self.jobs.values():
            job.preempted = job.preempted or job.state == "RUNNING"


class SlurmJob:
    """A batch job: what slurmctld, the batch script and the launchers of its nodes do, as far as files show it."""

    def __init__(self, clock: Clock, number: str, argv: list[str]) -> None:
        self.clock, self.number = clock, number
        said = dict(re.match(r"--([a-z-]+)=?(.*)", text).groups() for text in argv if text.startswith("--"))
        self.name, self.folder, self.nodes = said["job-name"], Path(said["chdir"]), int(said["nodes"])
        self.limit_s, self.state = 60 * int(said["time"]), "PENDING"
        self.started, self.ended = 0.0, float("inf")
        self.preempted = self.cancelled = False

    @property
    def forgotten(self) -> bool:
        return self.clock.at > self.ended + 300  # MinJobAge

    def steps(self) -> Iterator[float]:
        clock, draw = self.clock, self.clock.draw
        starts_at = clock.at + draw.uniform(0, 7200)
        while clock.at < starts_at:
            yield starts_at
            if self.cancelled:
                self.state, self.ended = "CANCELLED", clock.at
                return
        self.started, self.state = clock.at, "RUNNING"
        (self.folder / "owner").symlink_to(self.number)
        (self.folder / "job").write_text(self.number)
        (self.folder / "begun").write_text(str(int(clock.at)))
        setup = draw.uniform(0, 1800)
        setup_at = clock.at + setup
        kill_at, lives = self.started + self.limit_s + 30, []
        asked, why = False, "COMPLETED"
        (self.folder / "state").write_text(f"STARTED 0 - {self.nodes}")
        while True:
            if not lives and not asked and clock.at >= setup_at:
                lives = [clock.launcher(begins_s=0) for _ in range(self.nodes)]
                for rank in range(self.nodes):
                    self._write(rank, state="RUNNING", started_at=format_time(clock.at))
            if not asked and (self.preempted or self.cancelled or clock.at >= self.started + self.limit_s):
                asked = True
                why = "PREEMPTED" if self.preempted else "CANCELLED" if self.cancelled else "TIMEOUT"
                kill_at = clock.at + 30
                for life in lives:
                    life.terminate()
            for rank, life in enumerate(lives):
                if life.over and life.code != 137:
                    ends = {0: "SUCCEEDED", 1: "FAILED", 75: "PREEMPTED" if asked else "TIMED_OUT"}
                    self._write(rank, state=ends[life.code], exit_code=life.code, ended_at=format_time(life.ends_at))
            if asked and clock.at >= kill_at:
                for life in lives:
                    life.kill()
            if (lives and all(life.over for life in lives)) or (asked and (not lives or clock.at >= kill_at)):
                break
            yield min(
                kill_at if asked else self.started + self.limit_s, setup_at if not lives and not asked else kill_at
            )
        script_ends = clock.at + draw.uniform(0, 20)  # srun, the last lines of the script
        while clock.at < min(script_ends, kill_at):
            yield min(script_ends, kill_at)
        failed = why == "COMPLETED" and any(life.code for life in lives)
        self.state, self.ended = "FAILED" if failed else why, clock.at
        if not asked:
            (self.folder / "state").write_text(f"ENDED 0 {max((life.code for life in lives), default=0)} RUNNING")

    def _write(self, rank: int, **fields: Any) -> None:
        path = self.folder / f"node-{rank}" / "status.json"
        path.parent.mkdir(exist_ok=True)
        old = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**old, **fields}))


class Ssh(Platform):
    """Machines of one's own: what counts is how long the ranks run, since nobody switches the machines off."""

    name = "ssh"
    options = {"hosts": [{"address": "one"}, {"address": "two"}]}
    job = {"resources": {"usd_per_hour": 6.0}}
    spot = False

    def __init__(self, clock: Clock, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.clock, self.attempts = clock, {}
        self.backend = backend = SshBackend(self.options, folder, clock)
        for name in ("submit", "find", "status", "cancel"):
            patch.setattr(backend, name, getattr(self, f"_{name}"))
        patch.setattr(backend, "discard", lambda _: None)
        patch.setattr(backend, "logs", lambda *_, **__: iter(()))

    def _submit(self, plan: Any, _: Any) -> str:
        if plan.attempt_id not in self.attempts:
            draw, limits = self.clock.draw, plan.manifest
            begun = self.clock.at + draw.uniform(0, 900)
            trains_s = min(draw.uniform(0, 2 * limits["max_runtime_s"]), limits["max_runtime_s"] + limits["grace_s"])
            uploads_s = draw.uniform(0, 600)
            self.attempts[plan.attempt_id] = [
                self.clock.at,
                begun,
                begun + trains_s,
                uploads_s,
                int(limits["nodes"]),
                "",
            ]
        return plan.attempt_id

    def _find(self, attempt_id: str) -> str | None:
        return attempt_id if attempt_id in self.attempts else None

    def _status(self, handle: str) -> Status:
        made, _, ended, uploads_s, _, why = self.attempts[handle]
        started = format_time(made)
        if self.clock.at < ended + uploads_s:
            return Status(State.RUNNING, started_at=started)
        state = State[why] if why else State.TIMED_OUT
        return Status(state, 75, "", started, format_time(ended + uploads_s))

    def _cancel(self, handle: str) -> None:
        self._end(self.attempts[handle], "CANCELLED")

    def _end(self, attempt: list[Any], why: str) -> None:
        if self.clock.at < attempt[2]:
            attempt[2], attempt[5] = max(self.clock.at, attempt[1]), why

    def preempt(self) -> None:
        for attempt in self.attempts.values():
            self._end(attempt, "PREEMPTED")

    def billed(self) -> float:
        now = self.clock.at
        return sum((min(max(a[2], a[1]), now) - min(a[1], now)) * a[4] for a in self.attempts.values())


PLATFORMS = (SageMaker, Vertex, Kubernetes, Slurm, Ssh)
