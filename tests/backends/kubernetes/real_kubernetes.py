"""The backend kubernetes on a real cluster: make test-kubernetes. Not part of the ordinary tests, which have no cluster.

    KUBECONFIG                    the cluster: its current context (there is no default, so that none is hit by accident)
    CLOUDTRAIN_TEST_IMAGE         an image with Python and torch that its nodes can pull (images/build.sh makes one)
    CLOUDTRAIN_TEST_OUTPUT        gs:// or s3:// below which runs may write, with credentials here and in the pods;
    CLOUDTRAIN_TEST_CLAIM         or a claim (ReadWriteMany where there is more than one machine)
    CLOUDTRAIN_TEST_NAMESPACE     where the jobs go; default: default

What is absent is an error, never a test that is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.kubernetes.admission import build_policy
from cloudtrain.backends.kubernetes.backend import KubernetesBackend
from cloudtrain.backends.kubernetes.client import KubeApi, KubeError
from cloudtrain.backends.kubernetes.jobs import PATHS
from cloudtrain.backends.kubernetes.kinds import KINDS, RUNTIMES
from cloudtrain.errors import BackendError
from cloudtrain.events import State
from cloudtrain.policy.enforce import requirements
from cloudtrain.policy.files import read
from cloudtrain.testing.contract import WAIT_S, BackendContract
from tests.backends.kubernetes.kubeconfigs import IMPERSONATED, KUBECTL, V1
from tests.backends.kubernetes.locked_down import LockedDown, documented_rules
from tests.backends.kubernetes.test_recipes import RECIPES, RUNTIME, request_of
from tests.backends.kubernetes.test_request import CASES, made
from tests.backends.kubernetes.test_scale import LARGE
from tests.conftest import wait_for

SPACE = os.environ.get("CLOUDTRAIN_TEST_NAMESPACE", "default")
MOUNT = "/cloudtrain-test"
USER = "cloudtrain-test"


def needed(name: str, what: str) -> str:
    found = os.environ.get(name, "")
    assert found, f"${name} is not set: {what} (README.md beside this file)"
    return found


def options() -> dict[str, Any]:
    config = needed("KUBECONFIG", "it names the cluster that the tests may use")
    image = needed("CLOUDTRAIN_TEST_IMAGE", "an image with Python and torch")
    claim = os.environ.get("CLOUDTRAIN_TEST_CLAIM")
    volumes = {"volumes": [{"claim": claim, "path": MOUNT}]} if claim else {}
    return {"kubeconfig": config, "namespace": SPACE, "image": image, "poll_s": 1.0, "ttl": "1h", **volumes}


def output() -> str:
    if os.environ.get("CLOUDTRAIN_TEST_CLAIM"):
        return f"{MOUNT}/runs"
    return needed("CLOUDTRAIN_TEST_OUTPUT", "or $CLOUDTRAIN_TEST_CLAIM: where results go")


@pytest.fixture
def backend(tmp_path: Path) -> KubernetesBackend:
    return KubernetesBackend(options(), tmp_path / "runs")


def test_doctor_finds_nothing(backend: KubernetesBackend):
    assert backend.check() == [] and backend.capacity()


def send_dry(backend: KubernetesBackend, manifest: dict[str, Any], place: str = "") -> int:
    """Send an object that is not kept, strictly: what the server does not know, or may not be, is an error."""
    sent = json.loads(json.dumps(manifest).replace("${bundle.bytes}", "cGFja2Vk").replace("${job.uid}", "0-1"))
    if not place:
        sent["metadata"]["namespace"], place = SPACE, PATHS[manifest["kind"]].format(SPACE)
    query = {"dryRun": "All", "fieldValidation": "Strict"}
    return backend._api.call("POST", place, manifest["kind"], query=query, body=sent).status


@pytest.mark.parametrize("case", CASES)
def test_the_server_takes_every_golden_manifest(backend: KubernetesBackend, case: str):
    """Those of operators by their CRDs."""
    assert [send_dry(backend, each) for each in made(*CASES[case]).to_dict()["manifests"]]


@pytest.mark.parametrize("kind", KINDS)
def test_256_nodes_are_one_object(backend: KubernetesBackend, kind: str):
    assert [send_dry(backend, each) for each in made(*LARGE[kind]).to_dict()["manifests"]]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_server_takes_every_recipe(backend: KubernetesBackend, recipe: str):
    assert [send_dry(backend, each) for each in request_of(RECIPES[recipe]).to_dict()["manifests"]]


def test_the_server_takes_the_runtime_of_the_recipes_and_no_typo_in_it(backend: KubernetesBackend):
    assert send_dry(backend, RUNTIME, RUNTIMES) == 201
    with pytest.raises(KubeError, match='unknown field "spec.mlPolicies"'):
        send_dry(backend, {**RUNTIME, "spec": {**RUNTIME["spec"], "mlPolicies": {}}}, RUNTIMES)
    trainjob = made(*CASES["trainjob"]).main
    with pytest.raises(KubeError, match='unknown field "spec.trainer.nodes"'):
        send_dry(backend, {**trainjob, "spec": {**trainjob["spec"], "trainer": {"nodes": 2}}})


def test_the_server_refuses_what_the_admission_policy_refuses(backend: KubernetesBackend, tmp_path: Path):
    """The generated policy, bound to this namespace; the server takes it some seconds after it was created."""
    (tmp_path / "policy.toml").write_text('[rules.digest]\nimage_by_digest = true\nlabels = {team = "nlp"}\n')
    objects, _ = build_policy(
        list(requirements([read(tmp_path / "policy.toml")], "", "kubernetes")), {"namespace": SPACE}
    )
    base = "/apis/admissionregistration.k8s.io/v1"
    places = [f"{base}/validatingadmissionpolicies", f"{base}/validatingadmissionpolicybindings"]
    query = {"dryRun": "All", "fieldValidation": "Strict"}
    job = made(*CASES["one_node"]).to_dict()["manifests"][0]
    job["metadata"]["namespace"] = SPACE
    good = json.loads(json.dumps(job))
    good["metadata"]["labels"]["team"] = "nlp"
    pod = good["spec"]["template"]["spec"]
    for container in (*pod["initContainers"], *pod["containers"]):
        container["image"] = f"any@sha256:{'0' * 64}"

    def send(manifest: dict[str, Any]) -> str:
        try:
            backend._api.call("POST", PATHS["Job"].format(SPACE), "job", query=query, body=manifest)
        except KubeError as error:
            return error.message
        return ""

    try:
        for place, each in zip(places, objects, strict=True):
            backend._api.call("POST", place, place, query={"fieldValidation": "Strict"}, body=each)
        refusal = wait_for(lambda: send(job), "the refusal")
        assert "rule digest: label team must be nlp" in refusal or "images must be name@sha256" in refusal
        assert send(good) == ""
    finally:
        for place, each in zip(places, objects, strict=True):
            path = f"{place}/{each['metadata']['name']}"
            backend._api.call("DELETE", path, path, body={}, accept=(404,))


USERS: dict[str, dict[str, Any]] = {
    "token": {"token": "$token"},
    "token file": {"tokenFile": "token"},
    "plugin": {"exec": {"apiVersion": V1, "command": "./login", "interactiveMode": "Never", "provideClusterInfo": True}},
    "as": {"token": "$token", **IMPERSONATED},
    "plugin: as": {"exec": {"apiVersion": V1, "command": "./login", "interactiveMode": "Never"}, "as": "boss"},
    "a wrong token": {"token": "none"},
}  # fmt: skip


@pytest.mark.parametrize("user", USERS)
def test_the_server_takes_us_for_whom_it_takes_kubectl(backend: KubernetesBackend, tmp_path: Path, user: str):
    """An account that may impersonate anybody asks who it is, with kubectl and with us."""
    api, access, named = backend._api, backend._api.access, {"metadata": {"name": USER, "namespace": SPACE}}
    rbac, accounts = "rbac.authorization.k8s.io", f"/api/v1/namespaces/{SPACE}/serviceaccounts"
    roles = f"/apis/{rbac}/v1/clusterrolebindings"
    subject = {"kind": "ServiceAccount", "name": USER, "namespace": SPACE}
    role = {"apiGroup": rbac, "kind": "ClusterRole", "name": "cluster-admin"}
    try:
        api.call("POST", accounts, USER, body={"apiVersion": "v1", "kind": "ServiceAccount", **named})
        api.call("POST", roles, USER, body={"apiVersion": f"{rbac}/v1", "kind": "ClusterRoleBinding",
                                            "metadata": {"name": USER}, "roleRef": role, "subjects": [subject]})  # fmt: skip
        about = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
        token = str(api.call("POST", f"{accounts}/{USER}/token", USER, body=about).json["status"]["token"])
        (tmp_path / "token").write_text(token)
        answer = json.dumps({"apiVersion": V1, "kind": "ExecCredential", "status": {"token": token}})
        (tmp_path / "login").write_text(f"#!/bin/sh\necho '{answer}'\n")
        (tmp_path / "login").chmod(0o700)
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "x",
            "clusters": [{"name": "x", "cluster": dict(access.cluster)}],
            "users": [{"name": "x", "user": json.loads(json.dumps(USERS[user]).replace("$token", token))}],
            "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        }  # fmt: skip
        (tmp_path / "config").write_text(json.dumps(config))
        words = [str(KUBECTL), "auth", "whoami", "-o", "json", "--kubeconfig", str(tmp_path / "config")]
        asked = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        path, ours = "/apis/authentication.k8s.io/v1/selfsubjectreviews", KubeApi(str(tmp_path / "config"), None)
        if user == "a wrong token":
            with pytest.raises(BackendError, match="does not accept the credentials"):
                ours.call("POST", path, "who am I", body=review)
            assert asked.returncode != 0
            return
        found = dict(ours.call("POST", path, "who am I", body=review).json["status"]["userInfo"])
        assert asked.returncode == 0 and found == json.loads(asked.stdout)["status"]["userInfo"], asked.stderr
        assert found["username"] == ("boss" if "as" in USERS[user] else f"system:serviceaccount:{SPACE}:{USER}")
    finally:
        for place in (f"{roles}/{USER}", f"{accounts}/{USER}"):
            api.call("DELETE", place, place, body={}, accept=(404,))


class TestLockedDown(LockedDown):
    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {name: value for name, value in options().items() if name not in ("namespace", "volumes", "ttl")}

    def list_jobs(self, space: str) -> list[Any]:
        return list(self._api.get(f"/apis/batch/v1/namespaces/{space}/jobs", "Jobs")["items"])

    def create_user(self, space: str, without: str, verb: str = "") -> str:
        """A service account with the page's Role, and a token of it."""
        group, named = "rbac.authorization.k8s.io", {"metadata": {"name": USER, "namespace": space}}
        core, roles = f"/api/v1/namespaces/{space}/serviceaccounts", f"/apis/{group}/v1/namespaces/{space}"
        subject = {"kind": "ServiceAccount", "name": USER, "namespace": space}
        role = {"apiGroup": group, "kind": "Role", "name": USER}
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": 3600},
        }
        self._create(core, {"apiVersion": "v1", "kind": "ServiceAccount", **named})
        rules = documented_rules(without, verb)
        self._create(f"{roles}/roles", {"apiVersion": f"{group}/v1", "kind": "Role", **named, "rules": rules})
        binding = {"apiVersion": f"{group}/v1", "kind": "RoleBinding", **named}
        self._create(f"{roles}/rolebindings", {**binding, "roleRef": role, "subjects": [subject]})
        token = self._create(f"{core}/{USER}/token", request)["status"]["token"]
        access, name = self._api.access, {"name": USER}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": USER,
            "clusters": [{**name, "cluster": dict(access.cluster)}],
            "users": [{**name, "user": {"token": token}}],
            "contexts": [{**name, "context": {"cluster": USER, "user": USER}}],
        }
        kubeconfig = self._tmp / "limited.kubeconfig"
        kubeconfig.touch(mode=0o600)
        kubeconfig.write_text(json.dumps(config))
        return str(kubeconfig)

    @contextmanager
    def end_token(self, space: str) -> Iterator[None]:
        """A token's shortest life is 10 minutes: without its account it ends as soon as the server's cache has."""
        self._api.call("DELETE", f"/api/v1/namespaces/{space}/serviceaccounts/{USER}", "account", body={})
        yield

    def _create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return dict(self._api.call("POST", path, path, body=body).json)


class TestKubernetes(BackendContract):
    @pytest.fixture
    def connect(self, tmp_path: Path):
        self.made = KubernetesBackend(options(), tmp_path / "runs")
        return lambda: KubernetesBackend(options(), tmp_path / "runs")

    def job_changes(self) -> dict[str, Any]:
        return {"output": output()}

    def leftovers(self, handle: str) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.made.pods(handle) if pod["status"]["phase"] == "Running"]

    def test_an_evicted_pod_is_started_anew_by_the_cluster(self, backend: KubernetesBackend, start: Any):
        script = "import os, pathlib, time; f = pathlib.Path(os.environ['CLOUDTRAIN_CHECKPOINT_DIR'], 'once')\n"
        script += "again = f.exists(); f.touch(); print('again' if again else 'first', flush=True)\n"
        script += "again or time.sleep(900)\n"
        handle = start(script, retry={"max_attempts": 2})
        self.until_line(backend, handle, "first")
        (pod,) = backend.pods(handle)
        name = pod["metadata"]["name"]
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": SPACE}}
        backend._api.call("POST", f"/api/v1/namespaces/{SPACE}/pods/{name}/eviction", "eviction", body=body)
        status = self.until_final(backend, handle)
        assert status.state is State.SUCCEEDED, self.text(backend, handle)
        assert [line.text for line in self.script_lines(backend, handle)][-1] == "again"

    def test_what_no_node_can_take_says_so(self, backend: KubernetesBackend, start: Any, tmp_path: Path):
        handle = start("print(1)", resources={"cpus": 100_000})
        deadline = time.monotonic() + WAIT_S
        while "Unschedulable" not in (said := backend.status(handle).reason):
            assert time.monotonic() < deadline, said
            time.sleep(1)
