"""Law 3: one submission makes one job, whatever answers are lost: drawn sequences on SageMaker and Vertex AI."""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from cloudtrain import aws, customjobs, googleapi
from cloudtrain.simulators import sagemaker, server, vertex
from cloudtrain.simulators.life import Pace
from tests.laws.outcomes import LONG, NORMAL, Platform, drive, recorded

Figure = Callable[[str, object], None]


class Sagemaker:
    """SageMaker's simulator; its jobs wait for machines for ever."""

    backend = "sagemaker"
    calls = ("CreateTrainingJob", "DescribeTrainingJob", "ListTags", "StopTrainingJob", "PutObject", "HeadObject")
    answers = ((400, "ThrottlingException"), (429, "TooManyRequestsException"), (500, "InternalFailure"),
               (503, "ServiceUnavailable"), (0, "closed"))  # fmt: skip

    def __init__(self, folder: Path) -> None:
        self.simulator = sagemaker.Simulator(folder)
        self.simulator.habits.pending_s = 600.0
        with urlopen(Request(f"{self.simulator.url}/moto-api/reset", method="POST"), timeout=60):
            pass
        self.simulator.make_bucket("training")
        place = {"role": sagemaker.ROLE, "bucket": "training", "region": sagemaker.REGION, "image": "any"}
        self.options = {**place, "endpoint": self.simulator.url, "client": "boto3"}

    def lose(self, choose: random.Random) -> None:
        self._fault("CreateTrainingJob", choose)

    def fail(self, choose: random.Random) -> None:
        self._fault(choose.choice(self.calls), choose)

    def _fault(self, action: str, choose: random.Random) -> None:
        status, code = choose.choice(
            self.answers[1:] if action.endswith("Object") else self.answers
        )  # S3 throttles by 503
        times, committed = choose.randint(1, 3), choose.random() < 0.6
        self.simulator.faults.append(sagemaker.Fault(action, status, code, times, committed))

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
        self.simulator = vertex.Simulator(folder, pace=Pace(execute=False))
        place = {"project": "local", "bucket": "local", "endpoint": self.simulator.url, "image": "any:1"}
        self.options = {**place, "client": client, "settle_s": 1.0}
        self.made: list[str] = []

    def lose(self, choose: random.Random) -> None:
        self._fault(*self.calls[0], choose)

    def fail(self, choose: random.Random) -> None:
        self._fault(*choose.choice(self.calls), choose)

    def _fault(self, method: str, path: str, choose: random.Random) -> None:
        status, times = choose.choice((429, 500, 503, 0)), choose.randint(1, 3)
        fault = server.Fault(method, path, status, times=times, after=choose.random() < 0.6)
        self.simulator.faults.append(fault)

    def heal(self) -> None:
        self.simulator.faults.clear()

    def jobs(self) -> list[str]:
        return [job["labels"]["cloudtrain_attempt"] for job in self._jobs()]

    def live(self) -> list[str]:
        return [
            job["labels"]["cloudtrain_attempt"]
            for job in self._jobs()
            if customjobs.STATES[job["state"]].final is False
        ]

    def _jobs(self) -> list[dict[str, Any]]:
        return list(self.simulator.jobs._jobs.values())

    def check(self) -> None:
        """Between two creates of an attempt a list has answered, with the jobs that there were."""
        answered = True
        for method, path, status in self.simulator.server.answered:
            if method == "POST" and re.search(self.calls[0][1], path):
                assert answered, self.simulator.server.answered
                answered = status == 200
            elif method == "GET" and re.search(self.calls[1][1], path) and status == 200:
                answered = True
        self.simulator.server.answered.clear()
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
    """Clients do not wait, and try each call twice."""
    from botocore.retries import standard

    for name, value in sagemaker.KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(standard.ExponentialBackoff, "delay_amount", lambda *_: 0.0)
    monkeypatch.setattr(aws, "TRIES", 2)
    clients: dict[tuple[str, str | None], Any] = {}  # to make one takes longer than all its calls
    client = aws.Aws.client

    def kept(its: aws.Aws, service: str) -> Any:
        place = service, its.endpoint
        if place not in clients:
            clients[place] = client(its, service)
        return clients[place]

    monkeypatch.setattr(aws.Aws, "client", kept)
    monkeypatch.setattr(googleapi, "PAUSE_S", 0.0)
    monkeypatch.setattr("cloudtrain.backends.vertex.SIMULATED_S", 0.001)
    call = googleapi.Api.call

    def twice(*given: Any, **more: Any) -> Any:
        return call(*given, **{**more, "tries": min(more.get("tries", 2), 2)})

    monkeypatch.setattr(googleapi.Api, "call", twice)


@pytest.fixture(params=KINDS)
def platform(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Platform]:
    made = KINDS[request.param](tmp_path / "platform")
    yield made
    made.close()


def sequences(platform: Platform, folder: Path, count: int, monkeypatch: pytest.MonkeyPatch, figure: Figure) -> None:
    first = int(os.environ.get("CLOUDTRAIN_SEED") or random.randrange(1 << 32))
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
