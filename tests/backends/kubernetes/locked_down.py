"""Namespaces that a platform team has locked down: the same tests on the simulated cluster and on a real one."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import yaml

from cloudtrain.backends.kubernetes.backend import KubernetesBackend
from cloudtrain.backends.kubernetes.client import KubeError
from cloudtrain.backends.kubernetes.permissions import build_role
from cloudtrain.backends.plan import Plan
from cloudtrain.errors import BackendError, LogDenied, Unreachable
from cloudtrain.events import State
from cloudtrain.job.job import Job
from cloudtrain.source.bundle import Bundle
from tests.conftest import wait_for

ENFORCE = {"pod-security.kubernetes.io/enforce": "restricted"}
SMALL = {"cpus": 1, "memory": "512MiB"}
PAGE = Path(__file__).parents[3] / "docs" / "kubernetes.md"


# What the Role of a plain job has, and what a run does without each: CLOUDTRAIN_RECORD=1 make test-kubernetes writes it
PERMISSIONS = sorted((each["resources"][0], verb) for each in build_role({})[0]["rules"] for verb in each["verbs"])
TABLE = Path(__file__).parents[2] / "golden" / "kubernetes_verbs.json"


def documented_rules(without: str, verb: str = "") -> list[dict[str, Any]]:
    """Return the rules of the page's Role, but for one resource, or for one verb of it."""
    role = yaml.safe_load(PAGE.read_text().partition("```yaml\n")[2].partition("```")[0])
    assert role["kind"] == "Role" and any(without in rule["resources"] for rule in role["rules"])
    rules = [{**rule, "resources": [name]} for rule in role["rules"] for name in rule["resources"]]
    for rule in rules:
        if rule["resources"] == [without]:
            rule["verbs"] = [each for each in rule["verbs"] if verb and each != verb]
    return [rule for rule in rules if rule["verbs"]]


class LockedDown:
    """Inherit it, and give the options of the backend without a namespace, and the accounts of a limited user."""

    def create_user(self, space: str, without: str, verb: str = "") -> str:
        """Return the kubeconfig of a user who has the page's Role, but not what it has for the resource `without`.

        Args:
            verb: what alone is left out of it, "" for all.
        """
        raise AssertionError("of each cluster")

    def list_jobs(self, space: str) -> list[Any]:
        """Return the Jobs there, as an administrator sees them."""
        raise AssertionError("of each cluster")

    def end_token(self, space: str) -> AbstractContextManager[None]:
        """Within it the server does not accept the user's token."""
        raise AssertionError("of each cluster")

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
        backend, plan, bundle = self.plan(script, options, **changes)
        return backend, backend.submit(plan, bundle)

    def plan(self, script: str, options: dict | None = None, **changes: Any) -> tuple[KubernetesBackend, Plan, Bundle]:
        source = self._tmp / f"source-{secrets.token_hex(4)}"
        source.mkdir()
        (source / "script.py").write_text(script)
        job = {"name": "locked", "source": str(source), "entrypoint": "script.py", "resources": SMALL}
        job["environment"] = {"requirements": "none"}
        bundle = Bundle.make(source, self._tmp / "bundles")
        backend = KubernetesBackend({**self._options, **(options or {})}, self._tmp / "runs")
        run_id = f"locked-{secrets.token_hex(4)}"
        return backend, backend.plan(Job.from_dict({**job, **changes}), bundle, run_id), bundle

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

    def test_a_job_ends_at_its_deadline_and_a_suspended_one_does_not(self, space: str) -> None:
        locked = {"security": "restricted", "overlay": {"spec": {"activeDeadlineSeconds": 2}}}
        _, queued = self.submit(options={**locked, "queue": "none"})
        backend, handle = self.submit("import time; time.sleep(900)", locked)
        wait_for(lambda: backend.status(handle).state is State.TIMED_OUT, "its deadline", 200)
        assert backend.status(queued).state is State.QUEUED

    def test_a_node_that_comes_late_is_waited_for_and_named_where_it_does_not_come(self, space: str) -> None:
        """A quota holds the second pod back."""
        self.create_quota(space, pods="1")
        locked, script = {"security": "restricted"}, "print('together')"
        backend, handle = self.submit(script, locked, num_nodes=2, limits={"max_wait": "3s"})
        status = wait_for(lambda: s if (s := backend.status(handle)).state.final else None, "its end", 200)
        assert status.state is State.PREEMPTED, status
        assert "1 of 2 nodes joined within 3 s; missing: 1" in status.reason
        backend.remove(handle)
        backend, handle = self.submit(script, locked, num_nodes=2)
        wait_for(
            lambda: (
                (said := backend.status(handle).reason).startswith("node 1: FailedCreate: ")
                and "exceeded quota: small" in said
            ),
            "why it waits",
        )
        self._api.call("DELETE", f"/api/v1/namespaces/{space}/resourcequotas/small", "quota", body={})
        wait_for(lambda: backend.status(handle).state is State.SUCCEEDED, "its end", 200)
        assert sorted(line.rank for line in backend.logs(handle) if line.text == "together") == [0, 1]

    def test_a_user_may_do_what_the_page_says_and_a_missing_rule_is_named(self, space: str) -> None:
        user = {"security": "restricted", "kubeconfig": self.create_user(space, "pods/log")}
        backend, handle = self.submit(options=user)
        problems = [problem.message for problem in backend.check()]
        assert len(problems) == 1 and "no permission to get pods/log" in problems[0], problems
        wait_for(lambda: backend.status(handle).state is State.SUCCEEDED, "its end", 200)
        with pytest.raises(LogDenied, match="your account may not get pods/log"):
            list(backend.logs(handle))
        backend.remove(handle)

    @pytest.mark.parametrize(("resource", "verb"), PERMISSIONS)
    def test_without_any_verb_of_the_role_a_run_ends_right_or_is_refused_before_it_is_created(
        self, space: str, resource: str, verb: str
    ) -> None:
        found = self.describe_without(space, resource, verb)
        recorded = json.loads(TABLE.read_text("utf-8"))
        if os.environ.get("CLOUDTRAIN_RECORD"):
            version = str(self._api.get("/version", "the version")["gitVersion"])
            recorded |= {"kubernetes": version.partition("+")[0], f"{verb} {resource}": found}
            TABLE.write_text(json.dumps(dict(sorted(recorded.items())), indent=1) + "\n")
        assert found == recorded[f"{verb} {resource}"]
        assert recorded.keys() == {"kubernetes", *(f"{each} {of}" for of, each in PERMISSIONS)}

    def describe_without(self, space: str, resource: str, verb: str) -> dict[str, Any]:
        """Return what becomes of runs of a user who lacks one verb: how they are submitted, end, print and are cancelled."""
        user = {"security": "restricted", "kubeconfig": self.create_user(space, resource, verb)}
        script = (
            "import sys, time; print('here', flush=True); time.sleep(float(sys.argv[1])); sys.exit(int(sys.argv[2]))"
        )
        try:
            backend, handle = self.submit(script, user, num_nodes=2, args=["0", "0"])
        except BackendError as error:
            assert self.list_jobs(space) == [], "nothing was created"
            return {"submit": error.message.replace(space, "NAMESPACE")}

        def end(handle: str) -> list[Any]:
            status = wait_for(lambda: s if (s := backend.status(handle)).state.final else None, "its end", 200)
            return [str(status.state), status.exit_code]

        found: dict[str, Any] = {"submit": "accepted", "ends": [end(handle)]}
        assert {each.state for each in backend.statuses([handle]).values()} <= {State.SUCCEEDED}
        try:
            found["log"] = sorted(line.text for line in backend.logs(handle) if line.rank >= 0)
        except LogDenied as error:
            found["log"] = error.message
        _, failing = self.submit(script, user, args=["0", "3"])
        found["ends"].append(end(failing))
        _, long = self.submit(script, user, args=["900", "0"])
        wait_for(lambda: backend.status(long).state is State.RUNNING, "its start", 200)
        backend.cancel(long)
        found["ends"].append(end(long)[:1])
        return found

    def test_a_submit_that_was_cut_off_is_repeated_with_the_permissions_of_the_page(
        self, space: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All objects are there but for the start of the Job: the second submit reads each of them."""
        user = {"security": "restricted", "network_policy": True, "kubeconfig": self.create_user(space, "pods/log")}
        backend, plan, bundle = self.plan("print('done')", user, num_nodes=2)

        def cut_off(*_: object) -> None:
            raise Unreachable("no answer")

        with monkeypatch.context() as patched, pytest.raises(Unreachable):
            patched.setattr(backend, "_patch", cut_off)
            backend.submit(plan, bundle)
        assert backend.find(plan.attempt_id) is None
        handle = backend.submit(plan, bundle)
        assert backend.find(plan.attempt_id) == handle
        wait_for(lambda: backend.status(handle).state is State.SUCCEEDED, "its end", 200)

    def test_a_token_that_has_ended_is_said_and_the_run_is_not_lost(self, space: str) -> None:
        user = {"security": "restricted", "kubeconfig": self.create_user(space, "pods/log")}
        backend, handle = self.submit(options=user)

        def refusal() -> str:
            try:
                return f"no refusal: {backend.status(handle)}"
            except BackendError as error:
                return error.message

        with self.end_token(space):
            wait_for(lambda: "does not accept the credentials" in refusal(), "the refusal")
        other = KubernetesBackend(self._options, self._tmp / "runs")
        wait_for(lambda: other.status(handle).state is State.SUCCEEDED, "its end", 200)

    def test_a_kubeconfig_without_credentials_is_said(self, space: str) -> None:
        config = yaml.safe_load(Path(self._options["kubeconfig"]).read_text())
        for user in config["users"]:
            user["user"] = {}
        anonymous = self._tmp / "anonymous.kubeconfig"
        anonymous.write_text(json.dumps(config))
        with pytest.raises(BackendError, match="the kubeconfig has no credentials"):
            self.submit(options={"kubeconfig": str(anonymous)})

    def test_unknown_fields_are_dropped_with_a_warning_and_refused_where_that_is_asked(self, space: str) -> None:
        # Dry runs in `default`: the namespace `space` warns of Pod Security too, and the client keeps one warning.
        container = {"name": "node", "image": "any:1", "imge": "x"}
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": f"typo-{secrets.token_hex(4)}"}}
        job["spec"] = {"suspend": True, "template": {"spec": {"restartPolicy": "Never", "containers": [container]}}}

        def send(validation: str) -> Any:
            query = {"dryRun": "All", "fieldValidation": validation}
            return self._api.call("POST", "/apis/batch/v1/namespaces/default/jobs", "the Job", query=query, body=job)

        unknown, taken = 'unknown field "spec.template.spec.containers[0].imge"', send("Warn")
        assert "imge" not in str(taken.json["spec"]) and json.dumps(unknown) in taken.headers["warning"]
        assert "warning" not in send("Ignore").headers
        with pytest.raises(KubeError, match=re.escape(f"strict decoding error: {unknown}")) as caught:
            send("Strict")
        assert caught.value.status == 400
        typo = {"spec": {"template": {"spec": {"tolerationz": []}}}}
        with pytest.raises(KubeError, match=r'unknown field "spec.template.spec.tolerationz"'):
            self.submit(options={"security": "restricted", "overlay": typo})
        assert self._api.get(f"/apis/batch/v1/namespaces/{space}/jobs", "Jobs")["items"] == []
