"""The order of a node's pods, whatever the clocks say: every line once, from pods that are there and from what is kept."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cloudtrain.backends import http
from cloudtrain.backends.http import Answer
from cloudtrain.backends.kubernetes import log_merge
from cloudtrain.backends.kubernetes.client import KubeApi, KubeError
from cloudtrain.backends.kubernetes.jobs import KubeJobs
from cloudtrain.backends.kubernetes.kubeconfig import ClusterAccess
from cloudtrain.backends.kubernetes.logs import KubeLogs
from cloudtrain.backends.kubernetes.names import ATTEMPT, CONTAINER, OUTPUT
from cloudtrain.backends.kubernetes.status import INDEX
from cloudtrain.clock import Clock
from cloudtrain.testing.clock import VirtualClock
from tests.backends.test_http import send, serving

HANDLE = "cluster/default/run-a1/job-uid"
NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)


@dataclass
class Pod:
    """One start of node 0: its uid, when it was made, and how far its machine's clock is ahead of the server's, in seconds."""

    uid: str
    made: float
    ahead: float = 0.0
    phase: str = "Running"
    there: bool = True
    kept: bool = True  # its log is in the output once it has ended or is gone

    @property
    def lines(self) -> list[str]:
        return [f"{self.uid} one", f"{self.uid} two"]

    @property
    def log(self) -> str:
        return "".join(f"{n} 0 2026-11-22T12:00:00.0{n}Z {line}\n" for n, line in enumerate(self.lines))

    @property
    def folder(self) -> str:
        began = NOON + timedelta(seconds=self.made + 3 + self.ahead)
        return f"{began:%Y%m%dT%H%M%SZ}-{self.uid}"

    def seen(self) -> dict[str, Any]:
        made = f"{NOON + timedelta(seconds=self.made):%Y-%m-%dT%H:%M:%SZ}"
        state = {"startedAt": made} if self.phase == "Running" else {"startedAt": made, "exitCode": 0}
        kind = "running" if self.phase == "Running" else "terminated"
        status = {"phase": self.phase, "containerStatuses": [{"name": CONTAINER, "state": {kind: state}}]}
        return {
            "metadata": {
                "name": self.uid,
                "namespace": "default",
                "uid": self.uid,
                "creationTimestamp": made,
                "labels": {INDEX: "0", ATTEMPT: "run-a1"},
                "ownerReferences": [{"uid": "job-uid"}],
            },
            "status": {"phase": "Pending"} if self.phase == "Pending" else status,
        }


@dataclass
class Place:
    """A cluster with one Job of one node, and its output; what stands for KubeApi and the store too."""

    pods: list[Pod] = field(default_factory=list)
    output: str = "gs://bucket/out"
    over: bool = False
    identity: str = "cluster"
    clock: Clock = field(default_factory=VirtualClock)

    @property
    def access(self) -> Place:
        return self

    def get(self, path: str, what: str, query: object = None) -> dict[str, Any]:
        if path.endswith("/pods"):
            return {"items": [pod.seen() for pod in self.pods if pod.there]}
        over = [{"type": "Complete", "status": "True"}] if self.over else []
        return {
            "metadata": {"name": "run-a1", "uid": "job-uid", "annotations": {OUTPUT: self.output}},
            "spec": {"completions": 1},
            "status": {"conditions": over},
        }

    def stream(self, path: str, what: str, query: object) -> Iterator[bytes]:
        uid = path.split("/")[-2]
        found = [pod for pod in self.pods if pod.uid == uid and pod.there]
        if not found:
            raise KubeError(Answer(404, {}, b""), what)
        data = found[0].log.encode()
        yield from (data[at : at + 7] for at in range(0, len(data), 7))

    def bucket(self, uri: str) -> Place:
        return replace(self, output=uri)

    def folders(self) -> list[str]:
        return [pod.folder for pod in self.pods if pod.kept and pod.phase not in ("Pending", "Running")]

    def sizes(self, _: str) -> dict[str, int]:
        return {"0": 1}

    def read(self, _: str, most: int) -> bytes:
        (pod,) = [pod for pod in self.pods if self.output.rstrip("/").endswith(pod.folder)]
        return pod.log.encode()

    def look(self, after: str | None = None) -> tuple[list[str], str | None]:
        """Return what a new reader is told behind a cursor, and its own."""
        logs = KubeLogs(self, KubeJobs(self), self, None, 0.0)  # type: ignore[arg-type]
        lines = list(logs.follow(HANDLE, follow=False, after=after))
        return [line.text for line in lines], lines[-1].cursor if lines else after


def both(*pods: Pod) -> list[str]:
    return [line for pod in pods for line in pod.lines]


def test_a_known_pod_that_is_gone_hides_none_behind_its_machines_clock():
    first, second = Pod("first", 0, ahead=600), Pod("second", 300, phase="Failed")
    place = Place([first])
    told, cursor = place.look()
    assert told == both(first)
    first.phase, first.there = "Failed", False
    place.pods.append(second)
    told, cursor = place.look(cursor)
    assert told == both(second) and place.look(cursor) == ([], cursor)
    second.kept = False
    assert place.look(cursor) == ([], cursor)


def test_a_pod_that_is_gone_since_the_status_was_asked_for_is_read_from_what_is_kept():
    pod = Pod("only", 0, phase="Failed")
    place = Place([pod], over=True)
    jobs = KubeJobs(place, poll_s=60.0)  # type: ignore[arg-type]
    assert jobs.status(HANDLE).state.final
    pod.there = False
    logs = KubeLogs(place, jobs, place, None, 0.0)  # type: ignore[arg-type]
    assert [line.text for line in logs.follow(HANDLE, follow=False, after=None)] == both(pod)


def test_pods_that_are_all_there_are_in_the_servers_order():
    first, second = Pod("first", 0, ahead=600, phase="Failed"), Pod("second", 300, phase="Succeeded")
    place = Place([second, first], over=True)
    told, cursor = place.look()
    assert told == both(first, second) and place.look(cursor) == ([], cursor)


def test_one_that_came_and_went_between_two_that_are_there_is_told():
    first, second, third = Pod("first", 0), Pod("second", 300), Pod("third", 600)
    place = Place([first])
    told, cursor = place.look()
    first.phase = second.phase = "Failed"
    second.there = False
    place.pods += [second, third]
    told, cursor = place.look(cursor)
    assert told == both(second, third) and place.look(cursor) == ([], cursor)


@pytest.mark.parametrize("output", ["gs://bucket/out", ""])
@pytest.mark.parametrize("uids", ["ab", "ba"])
def test_two_of_one_second(uids: str, output: str):
    first, second = (Pod(uid, 0) for uid in uids)
    place = Place([first], output)
    told, cursor = place.look()
    first.phase, first.there = "Failed", False
    place.pods.append(second)
    told, cursor = place.look(cursor)
    assert told == both(second) and place.look(cursor) == ([], cursor)


def test_what_succeeded_was_the_last_whatever_clock_is_ahead():
    first, second = Pod("first", 0, ahead=3600, phase="Failed", there=False), Pod("second", 300, phase="Succeeded")
    place = Place([first, second], over=True)
    told, cursor = place.look()
    assert told == both(first, second) and place.look(cursor) == ([], cursor)


def test_a_log_may_be_longer_than_an_answer_that_is_kept_in_memory(monkeypatch):
    monkeypatch.setattr(http, "ANSWER_BYTES", 1000)
    lines = [f"{n} 0 2026-11-22T12:00:00Z {n:0>60}" for n in range(100)]
    with serving(lambda handler: send(handler, 200, "\n".join([*lines, "100 0 half of"]).encode())) as (url, _):
        api = KubeApi(None, None, clock=VirtualClock())
        api._access = ClusterAccess(url, {"token": "t"}, {})
        place = Place([Pod("only", 0)])
        place.stream = api.stream  # type: ignore[method-assign]
        read, _ = place.look()
    assert read == [line.rpartition(" ")[2] for line in lines]


def test_a_line_without_an_end_does_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(log_merge, "LONGEST_LINE", 10)
    assert list(log_merge.split_lines([b"a\nb", b"c" * 12, b"d\ne"])) == ["a", "b" + "c" * 12, "d", "e"]
    assert list(log_merge.split_lines([b"a\nb"], all_of_it=False)) == ["a"]


@pytest.mark.parametrize("seed", range(100))
def test_readers_that_hand_on_a_cursor_are_told_every_line_once(seed: int):
    """Pods that are evicted, stay as Failed or are deleted; machines whose clocks differ by less than a pod lives."""
    chance = random.Random(seed)
    place, told = Place(), []
    cursor: str | None = None
    moment = 0.0
    for number in range(chance.randint(2, 6)):
        uid = f"{chance.randrange(1 << 32):08x}"
        newest = Pod(uid, moment, ahead=chance.uniform(-250, 250))
        place.pods.append(newest)
        if chance.random() < 0.3:
            newest.phase = "Pending"  # it is there, and has nothing to say
            more, cursor = place.look(cursor)
            told += more
            newest.phase = "Running"
        if chance.random() < 0.6:
            more, cursor = place.look(cursor)
            told += more
        moment += 600
        newest.phase = "Failed"
        for pod in place.pods:
            if chance.random() < 0.4:
                pod.there = False
        if chance.random() < 0.3:
            more, cursor = place.look(cursor)
            told += more
    last = Pod("last", moment, ahead=chance.uniform(-250, 250), phase="Succeeded")
    place.pods.append(last)
    place.over = True
    more, cursor = place.look(cursor)
    told += more
    assert told == both(*place.pods), json.dumps([pod.__dict__ for pod in place.pods], indent=1)
    assert place.look(cursor) == ([], cursor) and place.look()[0] == both(*place.pods)
