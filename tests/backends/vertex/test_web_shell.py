"""The address of a shell in a custom job."""

from __future__ import annotations

import pytest

from cloudtrain.backends.shell import Shell
from cloudtrain.backends.vertex.jobs import CustomJobs
from cloudtrain.errors import BackendError

NAME = "projects/p/locations/r/customJobs/1"
POOLS = [{"replicaCount": "1"}, {"replicaCount": "2"}]


def jobs(answer: dict) -> CustomJobs:
    """Custom jobs of an API that has one."""

    class Api:
        def call(self, *_, **__):
            from types import SimpleNamespace

            return SimpleNamespace(status=200, json=answer)

    return CustomJobs(Api(), "p", "r", settle_s=0, pause_s=0, look_s=0)


def shell(found: CustomJobs, node: int) -> Shell:
    return found.shell(NAME, node, (), stdin=True, terminal=True)


def test_each_replica_has_an_address():
    uris = {"workerpool0-0": "https://a.example", "workerpool1-1": "https://c.example"}
    found = jobs({"jobSpec": {"workerPoolSpecs": POOLS, "enableWebAccess": True}, "webAccessUris": uris})
    assert [shell(found, node).address for node in range(3)] == ["https://a.example", "", "https://c.example"]
    assert "no address for workerpool1-0 yet" in shell(found, 1).note
    with pytest.raises(BackendError, match="there is no node 3"):
        shell(found, 3)


def test_without_the_option_it_says_so():
    assert "options.vertex.web_access: true" in shell(jobs({"jobSpec": {"workerPoolSpecs": POOLS}}), 0).note
