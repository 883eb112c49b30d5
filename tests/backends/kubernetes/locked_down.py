"""Namespaces that a platform team has locked down: the same tests on the simulated cluster and on a real one."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.kubernetes.backend import KubernetesBackend
from cloudtrain.events import State
from cloudtrain.job.job import Job
from cloudtrain.source.bundle import Bundle
from tests.conftest import wait_for

ENFORCE = {"pod-security.kubernetes.io/enforce": "restricted"}
SMALL = {"cpus": 1, "memory": "512MiB"}


class LockedDown:
    """Inherit it and give a fixture `options`: of the backend, without a namespace."""

    @pytest.fixture
    def space(self, options: dict[str, Any], tmp_path: Path) -> Iterator[str]:
        """A namespace of its own that enforces the standard `restricted`."""
        name = f"locked-{secrets.token_hex(4)}"
        self._tmp, self._options = tmp_path, {**options, "namespace": name}
        self._api = KubernetesBackend(self._options, tmp_path)._api
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": ENFORCE}}
        self._api.call("POST", "/api/v1/namespaces", "namespace", body=namespace)
        yield name
        self._api.call("DELETE", f"/api/v1/namespaces/{name}", "namespace", body={})

    def submit(self, script: str = "print('done')", options: dict | None = None, **changes: Any) -> tuple[Any, str]:
        source = self._tmp / f"source-{secrets.token_hex(4)}"
        source.mkdir()
        (source / "script.py").write_text(script)
        job = {"name": "locked", "source": str(source), "entrypoint": "script.py", "resources": SMALL}
        job["environment"] = {"requirements": "none"}
        bundle = Bundle.make(source, self._tmp / "bundles")
        backend = KubernetesBackend({**self._options, **(options or {})}, self._tmp / "runs")
        run_id = f"locked-{secrets.token_hex(4)}"
        return backend, backend.submit(backend.plan(Job.from_dict({**job, **changes}), bundle, run_id), bundle)

    def create_quota(self, space: str, **hard: str) -> None:
        quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}, "spec": {"hard": hard}}
        self._api.call("POST", f"/api/v1/namespaces/{space}/resourcequotas", "quota", body=quota)

    def test_a_restricted_namespace_takes_restricted_pods_and_says_why_it_takes_no_others(self, space: str) -> None:
        backend, handle = self.submit()
        wait_for(lambda: 'violates PodSecurity "restricted' in backend.status(handle).reason, "the refusal")
        assert backend.status(handle).state is State.STARTING and "FailedCreate" in backend.status(handle).reason
        backend.cancel(handle)
        script = (
            "import os, pathlib; pathlib.Path.home().joinpath('x').write_text('written'); print(os.environ['USER'])"
        )
        locked = {"security": "restricted", "network_policy": True}
        backend, handle = self.submit(script, locked, num_nodes=2)
        status = wait_for(lambda: s if (s := backend.status(handle)).state.final else None, "its end", 200)
        lines = [line.text for line in backend.logs(handle) if line.rank >= 0]
        assert status.state is State.SUCCEEDED and "cloudtrain" in lines, (status, lines)
        policies = f"/apis/networking.k8s.io/v1/namespaces/{space}/networkpolicies"
        assert len(self._api.get(policies, "policies")["items"]) == 1
        backend.remove(handle)
        wait_for(lambda: self._api.get(policies, "policies")["items"] == [], "the policy goes with its Job")

    def test_a_quota_says_why_nothing_starts(self, space: str) -> None:
        self.create_quota(space, **{"limits.cpu": "2"})
        locked = {"security": "restricted"}
        backend, handle = self.submit(options=locked)
        wait_for(lambda: "must specify limits.cpu" in backend.status(handle).reason, "the refusal")
        backend.cancel(handle)
        locked["cpu_limits"] = True
        backend, handle = self.submit(options=locked, resources={**SMALL, "cpus": 3})
        wait_for(lambda: "exceeded quota: small" in backend.status(handle).reason, "the refusal")
        backend.cancel(handle)
        backend, handle = self.submit(options=locked)
        wait_for(lambda: backend.status(handle).state is State.SUCCEEDED, "its end", 200)

    def test_an_ended_job_is_deleted_after_its_ttl_and_a_suspended_one_is_not(self, space: str) -> None:
        locked = {"security": "restricted", "ttl": "1s"}
        _, queued = self.submit(options={**locked, "queue": "none"})
        backend, handle = self.submit(options=locked)
        wait_for(lambda: backend.status(handle).state is State.LOST, "its end and its deletion", 200)
        assert backend.status(queued).state is State.QUEUED
