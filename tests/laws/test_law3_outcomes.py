"""Law 3: one submission makes one job, whatever answers are lost: drawn sequences on SageMaker and Vertex AI."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from cloudtrain.backends import aws, google
from cloudtrain.backends.vertex import jobs
from cloudtrain.cli import main
from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.job import targets
from cloudtrain.nodes.process import Process
from cloudtrain.runs.run import Run
from cloudtrain.runs.sending import retry
from cloudtrain.runs.submit import Submitter
from cloudtrain.runs.watching.watch import Watcher
from cloudtrain.simulators import http
from cloudtrain.simulators.sagemaker import server
from cloudtrain.simulators.vertex import server as vertex
from cloudtrain.simulators.vertex.lifecycle import Behavior
from tests.conftest import WAIT_S, processes_of, wait_for
from tests.laws.outcomes import LONG, NORMAL, Platform, drive, recorded
from tests.seed import first_seed

CLIENT = aws.Aws.client
Figure = Callable[[str, object], None]


class Sagemaker:
    """SageMaker's simulator; its jobs wait for machines for ever."""

    backend = "sagemaker"
    calls = ("CreateTrainingJob", "DescribeTrainingJob", "ListTags", "StopTrainingJob", "PutObject", "HeadObject")
    answers = ((400, "ThrottlingException"), (429, "TooManyRequestsException"), (500, "InternalFailure"),
               (503, "ServiceUnavailable"), (0, "closed"))  # fmt: skip

    def __init__(self, folder: Path, client: str = "boto3") -> None:
        self.simulator = server.Simulator(folder)
        self.simulator.behavior.pending_s = 600.0
        with urlopen(Request(f"{self.simulator.url}/moto-api/reset", method="POST"), timeout=60):
            pass
        self.simulator.make_bucket("training")
        place = {"role": server.ROLE, "bucket": "training", "region": server.REGION, "image": "any"}
        self.options = {**place, "endpoint": self.simulator.url, "client": client}

    def lose(self, choose: random.Random) -> None:
        self._fault("CreateTrainingJob", choose)

    def fail(self, choose: random.Random) -> None:
        self._fault(choose.choice(self.calls), choose)

    def _fault(self, action: str, choose: random.Random) -> None:
        status, code = choose.choice(
            self.answers[1:] if action.endswith("Object") else self.answers
        )  # S3 throttles by 503
        times, committed = choose.randint(1, 3), choose.random() < 0.6
        self.simulator.faults.append(server.Fault(action, status, code, times, committed))

    def answer(self, kind: str, times: int = 1) -> None:
        """Let the next creates get an answer of a kind: quota, denied, busy."""
        codes = {"quota": (400, "ResourceLimitExceeded"), "denied": (400, "AccessDeniedException")}
        status, code = codes.get(kind, (400, "ThrottlingException"))
        self.simulator.faults.append(server.Fault("CreateTrainingJob", status, code, times))

    def away(self) -> None:
        """The next create is carried out, and from then on nothing about jobs is answered."""
        self.simulator.faults.append(server.Fault("CreateTrainingJob", 0, times=10**6, committed=True))
        self.simulator.faults.append(server.Fault("DescribeTrainingJob", 0, times=10**6))

    def creates(self) -> int:
        return self.simulator.calls.count("sagemaker:CreateTrainingJob")

    def heal(self) -> None:
        self.simulator.faults.clear()

    def jobs(self) -> list[str]:
        return list(self.simulator.jobs)  # a name is taken once

    def live(self) -> list[str]:
        return [job.name for job in list(self.simulator.jobs.values()) if job.status in ("InProgress", "Stopping")]

    def check(self) -> None:
        self.simulator.jobs.clear()

    def close(self) -> None:
        self.simulator.close()


class Vertex:
    """Vertex AI's simulator; its jobs are never executed. A create is not idempotent: its record is looked at, too."""

    backend = "vertex"
    calls = (("POST", r"/customJobs(\?|$)"), ("GET", r"/customJobs\?"), ("GET", r"/customJobs/\d+"),
             ("POST", r":cancel"), ("GET", r"/o/"), ("POST", r"^/upload/"))  # fmt: skip

    def __init__(self, folder: Path, client: str) -> None:
        self.simulator = vertex.Simulator(folder, behavior=Behavior(execute=False))
        place = {"project": "local", "bucket": "local", "endpoint": self.simulator.url, "image": "any:1"}
        self.options = {**place, "client": client, "settle_s": 1.0}
        self.made: list[str] = []

    def lose(self, choose: random.Random) -> None:
        self._fault(*self.calls[0], choose)

    def fail(self, choose: random.Random) -> None:
        self._fault(*choose.choice(self.calls), choose)

    def _fault(self, method: str, path: str, choose: random.Random) -> None:
        status, times = choose.choice((429, 500, 503, 0)), choose.randint(1, 3)
        fault = http.Fault(method, path, status, times=times, after=choose.random() < 0.6)
        self.simulator.faults.append(fault)

    def answer(self, kind: str, times: int = 1) -> None:
        """Let the next creates get an answer of a kind: quota, denied, busy."""
        metric = "quota metrics exceed quota limits: aiplatform.googleapis.com/custom_model_training_nvidia_l4_gpus"
        rate = "Quota exceeded for quota metric 'Create requests' and limit 'Create requests per minute per region'"
        denied = "Permission 'aiplatform.customJobs.create' denied"
        status, said = {"quota": (429, metric), "denied": (403, denied)}.get(kind, (429, rate))
        self.simulator.faults.append(http.Fault(*self.calls[0], status, said, times))

    def away(self) -> None:
        """The next create is carried out, and from then on nothing about jobs is answered."""
        then = [http.Fault(*self.calls[1], 0, times=10**6)]
        self.simulator.faults.append(http.Fault(*self.calls[0], 0, times=10**6, after=True, then=then))

    def creates(self) -> int:
        return self.simulator.server.count_requests(*self.calls[0])

    def heal(self) -> None:
        self.simulator.faults.clear()

    def jobs(self) -> list[str]:
        return [job["labels"]["cloudtrain_attempt"] for job in self._jobs()]

    def live(self) -> list[str]:
        return [job["labels"]["cloudtrain_attempt"] for job in self._jobs() if jobs.STATES[job["state"]].final is False]

    def _jobs(self) -> list[dict[str, Any]]:
        return list(self.simulator.jobs._jobs.values())

    def check_asked(self) -> None:
        """Between two creates of an attempt a list has answered, with the jobs that the attempt had."""
        unknown: set[str] = set()
        for request, status in list(self.simulator.server.responses):
            if request.method == "POST" and re.search(self.calls[0][1], request.path):
                attempt = request.json["labels"]["cloudtrain_attempt"]
                assert attempt not in unknown, f"{attempt} was sent again before a list had answered"
                unknown.update([attempt] if status != 200 else [])
            elif request.method == "GET" and re.search(self.calls[1][1], request.path) and status == 200:
                unknown.discard(request.query.get("filter", "").partition("=")[2])

    def check(self) -> None:
        self.check_asked()
        self.simulator.server.responses.clear()
        self.simulator.jobs._jobs.clear()

    def close(self) -> None:
        self.simulator.close()


KINDS: dict[str, Callable[[Path], Any]] = {
    "sagemaker": Sagemaker,
    "vertex-rest": lambda folder: Vertex(folder, "rest"),
    "vertex-sdk": lambda folder: Vertex(folder, "sdk"),
}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients not wait, and try each call twice."""
    from botocore.retries import standard

    for name, value in server.KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(standard.ExponentialBackoff, "delay_amount", lambda *_: 0.0)
    monkeypatch.setattr(aws, "TRIES", 2)
    clients: dict[tuple[str, str | None], Any] = {}  # to make one takes longer than all its calls

    def kept(its: aws.Aws, service: str) -> Any:
        place = service, its.endpoint
        if place not in clients:
            clients[place] = CLIENT(its, service)
        return clients[place]

    monkeypatch.setattr(aws.Aws, "client", kept)
    monkeypatch.setattr("cloudtrain.backends.http.PAUSE_S", 0.0)
    monkeypatch.setattr("cloudtrain.backends.vertex.backend.SIMULATED_S", 0.001)
    call = google.GoogleApi.call

    def twice(*given: Any, **more: Any) -> Any:
        return call(*given, **{**more, "tries": min(more.get("tries", 2), 2)})

    monkeypatch.setattr(google.GoogleApi, "call", twice)


@pytest.fixture(params=KINDS)
def platform(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Platform]:
    made = KINDS[request.param](tmp_path / "platform")
    yield made
    made.close()


def sequences(platform: Platform, folder: Path, count: int, monkeypatch: pytest.MonkeyPatch, figure: Figure) -> None:
    first = first_seed()
    done: Counter[str] = Counter()
    with recorded(platform.backend, monkeypatch):
        for seed in range(first, first + count):
            done += drive(platform, folder / str(seed), seed)
    figure("sequences of lost answers, one job for each submission", count)
    for action, times in sorted(done.items()):
        figure(f"actions in them: {action}", times)


def test_lost_answers_make_one_job(platform, tmp_path, monkeypatch, figure):
    sequences(platform, tmp_path, NORMAL, monkeypatch, figure)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_more_lost_answers_make_one_job(platform, tmp_path, monkeypatch, figure):
    sequences(platform, tmp_path, LONG, monkeypatch, figure)


# -- one story each ----------------------------------------------------------------------------------------------------

BOTH = pytest.mark.parametrize("platform", ["sagemaker", "vertex-rest"], indirect=True)


class User:
    """Somebody with a folder, a target of their configuration, and the command line in this process."""

    def __init__(self, platform: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.platform, self._capsys = platform, capsys
        self.source = folder / "source"
        self.source.mkdir()
        (self.source / "train.py").write_text("print(1)\n")
        (self.source / "job.yaml").write_text("name: story\nentrypoint: train.py\nenvironment: {requirements: none}\n")
        config = folder / "config" / "cloudtrain"
        config.mkdir(parents=True)
        lines = ["[targets.prod]", f'backend = "{platform.backend}"']
        lines += [f"{name} = {json.dumps(value)}" for name, value in platform.options.items()]
        (config / "cloudtrain.toml").write_text("\n".join(lines))

    def run(self, *words: str) -> tuple[int, Any, str]:
        """Return exit code, the JSON of standard output, and standard error."""
        self._capsys.readouterr()
        code = main(list(words))
        out, err = self._capsys.readouterr()
        return code, json.loads(out) if out.startswith("{") else out, err

    def submit(self, *words: str) -> tuple[int, Any, str]:
        return self.run("submit", str(self.source / "job.yaml"), "-t", "prod", "--json", *words)

    def the_run(self) -> Run:
        (record,) = Store(targets.home()).runs()
        return Run(record.run_id, Store(targets.home()), watch=False)


@pytest.fixture
def user(platform: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> User:
    monkeypatch.setattr("cloudtrain.runs.sending.handover.start", lambda *_, **__: None)
    monkeypatch.setattr("cloudtrain.cli.view.follow.cancel.__defaults__", (0.0,))  # it need not wait for the end
    monkeypatch.setattr(retry, "OUTAGE_S", 0.0)
    return User(platform, tmp_path, capsys)


def look(run: Run, times: int = 1) -> None:
    for _ in range(times):
        Watcher(run.store, run.run_id, complain=lambda _: None).refresh()


@BOTH
@pytest.mark.parametrize("watched", [False, True], ids=["", "watched"])
def test_a_network_that_stays_away_fails_no_run_and_the_same_submit_takes_it_up(user: User, watched: bool) -> None:
    user.platform.away()
    code, said, err = user.submit()
    run = user.the_run()
    assert code == 5 and "unknown since" in err, err
    assert run.record.status.state is State.QUEUED and "unknown since" in run.record.status.reason
    assert user.submit()[0] == 5 and user.run("show", "--json")[1]["attempts"][0]["tries"] >= 2
    user.platform.heal()
    if watched:
        look(run)
        assert run.attempts[0].handle
    code, again, _ = user.submit()
    assert (code, again["run_id"], again["reused"]) == (0, said["run_id"], True)
    assert user.platform.jobs() == user.platform.live() == [f"{run.run_id}-a1"]
    assert user.submit()[1]["run_id"] != run.run_id, "the person knows that it was accepted"


@BOTH
def test_a_cancel_reaches_it_when_the_platform_answers(user: User) -> None:
    user.platform.away()
    assert user.submit()[0] == 5
    code, _, err = user.run("cancel", user.the_run().run_id)
    assert code == 5 and "did not answer whether" in err, err
    assert user.platform.live() and not user.the_run().record.status.state.final
    user.platform.heal()
    look(user.the_run(), 3)
    wait_for(lambda: look(user.the_run()) or user.the_run().record.status.state is State.CANCELLED, "the end")
    assert user.platform.live() == []


@BOTH
def test_a_run_that_the_platform_never_answers_for_can_be_removed_here_by_force(user: User) -> None:
    user.platform.away()
    assert user.submit()[0] == 5
    run_id = user.the_run().run_id
    code, _, err = user.run("cancel", run_id)
    assert code == 5 and f"cloudtrain rm --here --force {run_id}" in err, err
    code, _, err = user.run("rm", "--here", "--yes", run_id)
    assert code == 2 and f"cloudtrain rm --here --force {run_id}" in err, err
    code, _, err = user.run("rm", "--force", "--yes", run_id)
    assert code == 2 and "--here" in err, "files and jobs of a platform are not deleted by force"
    code, out, err = user.run("rm", "--here", "--force", "--yes", run_id)
    assert code == 0 and f"deleted {run_id}" in out, err
    assert f"a job {run_id}-a1 may exist" in err and "ends it" not in err, err
    assert Store(targets.home()).runs() == []
    user.platform.heal()
    assert user.platform.live() == [f"{run_id}-a1"], "the job that the warning names"
    code, said, _ = user.submit()
    assert code == 0 and not said["reused"] and len(user.platform.jobs()) == 2, "the person has asked for two"
    code, _, err = user.run("rm", "--here", "--force", "--yes", said["run_id"])
    assert code == 2 and "cancel" in err and "--force" not in err, "a platform that answers ends it"


@pytest.mark.parametrize("platform", ["sagemaker"], indirect=True)
def test_what_never_reached_the_platform_is_not_sent_and_ends(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is refused before the job was sent: no outcome is open."""
    user.platform.close()
    code, _, err = user.submit()
    run = user.the_run()
    assert code == 5 and "nothing was sent" in err and "unknown" not in err, err
    assert run.record.status.state is State.FAILED and "nothing was sent" in run.record.status.reason
    assert user.run("rm", "--here", "--yes", run.run_id)[0] == 0
    code, _, err = user.submit("--set", "limits.max_wait=1h")
    run = user.the_run()
    assert code == 0 and "not sent yet" in err and run.record.status.state is State.QUEUED, err
    look(run)
    assert "not sent yet, tried 2 times" in run.record.status.reason
    user.run("cancel", run.run_id)
    look(run)  # as the watcher does, without an answer
    assert run.record.status.state is State.CANCELLED


@BOTH
def test_a_used_up_quota_is_waited_for_where_the_job_says_so(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    user.platform.answer("quota")
    code, _, err = user.submit()
    assert code == 5 and "quota" in err and user.the_run().record.status.state is State.FAILED
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(targets.home().with_name("another")))
    user.platform.answer("quota")
    capacity = ("--set", "retry.on_events=[capacity]", "--set", "retry.max_attempts=2")
    code, _, err = user.submit(*capacity)
    run = user.the_run()
    assert code == 0 and run.record.status.state is State.QUEUED and "another attempt in" in run.record.status.reason
    look(run, 2)
    assert len(run.attempts) == 1 and user.platform.jobs() == []
    monkeypatch.setattr(retry, "CAPACITY_S", 0.0)
    look(run)
    assert [bool(attempt.handle) for attempt in run.attempts] == [False, True]
    assert user.platform.live() == [f"{run.run_id}-a2"]


@BOTH
def test_a_busy_platform_is_asked_less_and_less_often(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    user.platform.answer("busy", times=10**6)
    assert user.submit()[0] == 5
    run, once = user.the_run(), user.platform.creates()
    monkeypatch.setattr(retry, "OUTAGE_S", 1000.0)
    look(run, 5)
    assert run.attempts[0].tries == 1 and user.platform.creates() == once
    monkeypatch.setattr(retry, "OUTAGE_S", 0.0)
    look(run, 3)
    assert run.attempts[0].tries == 4 and user.platform.creates() <= 4 * once
    assert run.record.status.state is State.QUEUED and "tried 4 times" in run.record.status.reason


@BOTH
def test_a_refused_retry_is_the_end_and_nothing_begins_by_itself(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    user.platform.answer("quota")
    user.platform.answer("denied", times=10**6)
    user.submit("--set", "retry.on_events=[capacity]", "--set", "retry.max_attempts=5")
    run = user.the_run()
    monkeypatch.setattr(retry, "CAPACITY_S", 0.0)
    look(run, 2)
    status = run.record.status
    assert status.state is State.FAILED and status.reason.startswith("attempt 2 was refused:"), status
    assert len(run.attempts) == 2
    asked = user.platform.creates()
    user.platform.heal()
    look(run, 3)
    user.run("show", run.run_id)
    user.run("ls")
    assert user.platform.creates() == asked and user.platform.jobs() == []


@pytest.mark.parametrize("platform", ["sagemaker"], indirect=True)
def test_a_dead_intent_without_credentials_is_in_nobodys_way(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    submitter = Submitter("prod", watch=False)
    resolved = submitter.resolve(str(user.source / "job.yaml"))
    plan = submitter.plan_of(resolved, submitter.package(resolved))
    dead = replace(Process.here(), started="0")
    assert submitter.store.intend(plan, identity=plan.identity, owner=dead)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setattr(aws.Aws, "client", CLIENT)  # the kept one has its credentials
    code, _, err = user.run("submit", str(user.source / "job.yaml"), "-t", "local", "--json")
    assert code == 0 and err.count(plan.run_id) == 1, err
    code, _, err = user.run("cancel", plan.run_id)
    assert code == 5 and "did not answer whether" in err and "no AWS credentials" in err, err
    assert submitter.store.find(plan.run_id).cancel_requested


@BOTH
def test_a_key_names_the_same_job_from_an_empty_history_too(user: User, tmp_path: Path) -> None:
    def command(home: str, *words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "cloudtrain.cli", "submit", "job.yaml", "-t", "prod", "--json", "--key=k", *words]
        env = os.environ | {"CLOUDTRAIN_HOME": str(tmp_path / home)}
        return subprocess.run(line, cwd=user.source, env=env, capture_output=True, text=True, timeout=WAIT_S)

    first, again = command("first"), command("second")
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    one, other = json.loads(first.stdout), json.loads(again.stdout)
    assert (one["reused"], other["reused"]) == (False, True) and one["run_id"] == other["run_id"]
    refused = command("third", "--set", "hyperparameters.lr=2")
    assert refused.returncode == 2 and "the job's digest (" in refused.stderr and "source" not in refused.stderr
    (user.source / "train.py").write_text("print(2)\n")
    refused = command("fourth")
    assert refused.returncode == 2 and "the source's digest (" in refused.stderr, refused.stderr
    assert "whose job differs in the source" in command("first").stderr
    assert len(user.platform.jobs()) == 1 and not Store(tmp_path / "fourth").runs()
    Run.find(one["run_id"], home=tmp_path / "first").cancel()
    wait_for(lambda: not processes_of(tmp_path), "the end of all watchers")
