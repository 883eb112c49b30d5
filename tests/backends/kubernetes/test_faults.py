"""The backend kubernetes against the simulated cluster: exactly once, what waits, how it ends, secrets, claims, doctor."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloudtrain.backends.api import Plan
from cloudtrain.backends.kubernetes import request
from cloudtrain.backends.kubernetes.backend import KubernetesBackend
from cloudtrain.errors import BackendError, Unreachable
from cloudtrain.events import MARK, State
from cloudtrain.job.job import Job
from cloudtrain.simulators.http import Fault
from cloudtrain.source.bundle import Bundle
from cloudtrain.testing.clock import VirtualClock
from tests.backends.kubernetes.clusters import Ground, ground
from tests.conftest import wait_for

JOBS = r"/jobs$"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    monkeypatch.setattr("cloudtrain.backends.http.PAUSE_S", 0.001)
    monkeypatch.setattr("cloudtrain.backends.http.PAUSE_S", 0.001)
    with ground(tmp_path / "ground") as made:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", made.store.url)
        yield made


def planned(
    place: Ground, script: str, options: dict | None = None, **changes
) -> tuple[KubernetesBackend, Plan, Bundle]:
    source = place.folder / f"source-{len(list(place.folder.glob('source-*')))}"
    source.mkdir()
    (source / "script.py").write_text(script)
    data = {
        "name": "cluster",
        "source": str(source),
        "entrypoint": "script.py",
        "environment": {"requirements": "none"},
    }
    backend = place.backend(**(options or {}))
    bundle = Bundle.make(source, place.folder / "bundles")
    plan = backend.plan(Job.from_dict({**data, **changes}), bundle, "a-run")
    return backend, plan, bundle


def started(place: Ground, script: str, options: dict | None = None, **changes) -> tuple[KubernetesBackend, str]:
    backend, plan, bundle = planned(place, script, options, **changes)
    return backend, backend.submit(plan, bundle)


def ended(backend: KubernetesBackend, handle: str):
    def final():
        status = backend.status(handle)
        return status if status.state.final else None

    return wait_for(final, "the end", 200)


def said(backend: KubernetesBackend, handle: str) -> list[str]:
    return [line.text for line in backend.logs(handle) if line.rank >= 0 and not line.text.startswith(MARK)]


# -- the plan is what is sent, once -----------------------------------------------------------------------------------


def test_a_server_receives_what_the_plan_printed_in_four_calls_after_one_for_permissions(place: Ground):
    backend, plan, bundle = planned(place, "print(1)", num_nodes=2)
    plan = Plan.from_json(plan.to_json())
    handle = backend.submit(plan, bundle)
    seen = list(place.cluster.server.requests)
    assert seen.pop(0) == ("POST", "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews")
    assert [method for method, _ in seen] == ["POST", "POST", "POST", "PATCH"]
    bodies = [json.loads(body) for _, _, body in place.cluster.server.request_bodies][1:]
    uid = handle.rpartition("/")[2]
    packed = bodies[2]["binaryData"]["source.tar.gz"]
    known = {request.UID: uid, request.BYTES: packed}
    assert bodies == [
        *(request.fill_placeholders(manifest, known) for manifest in plan.request["manifests"]),
        plan.request["start"],
    ]
    assert ended(backend, handle).state is State.SUCCEEDED


@pytest.mark.parametrize("status", [503, 0])
@pytest.mark.parametrize("after", [True, False], ids=["after", "before"])
@pytest.mark.parametrize(("method", "path"), [("POST", JOBS), ("POST", "configmaps"), ("PATCH", "/jobs/")])
def test_an_answer_that_got_lost_makes_no_second_job(place: Ground, method: str, path: str, status: int, after: bool):
    backend, plan, bundle = planned(place, "print('once')")
    place.cluster.faults.append(Fault(method, path, status, after=after))
    handle = backend.submit(plan, bundle)
    assert backend.find(plan.attempt_id) == handle == place.backend().submit(plan, bundle)
    assert ended(backend, handle).state is State.SUCCEEDED and said(backend, handle) == ["once"]
    assert len(place.cluster.objects.all("jobs")) == 1


@pytest.mark.parametrize(("method", "path"), [("POST", "configmaps"), ("PATCH", "/jobs/")])
def test_a_submit_that_broke_off_is_completed(place: Ground, method: str, path: str):
    backend, plan, bundle = planned(place, "print('once')")
    place.cluster.faults.append(Fault(method, path, 403, "forbidden for now"))
    with pytest.raises(BackendError, match="forbidden for now"):
        backend.submit(plan, bundle)
    assert place.cluster.objects.all("pods") == [], "nothing runs"
    assert backend.find(plan.attempt_id) is None, "and so nobody takes it for submitted"
    wait_for(lambda: not place.cluster.objects.all("configmaps"), "what that Job owned is deleted")
    handle = place.backend().submit(plan, bundle)
    assert ended(backend, handle).state is State.SUCCEEDED and said(backend, handle) == ["once"]


def test_another_job_of_that_name_is_not_ours(place: Ground):
    backend, plan, bundle = planned(place, "print(1)")
    backend.submit(plan, bundle)
    _, other, other_bundle = planned(place, "print(2)", args=["--else"])
    with pytest.raises(BackendError, match="different"):
        backend.submit(other, other_bundle)


def test_a_target_is_pinned_to_its_server(place: Ground):
    _, plan, bundle = planned(place, "print(1)")
    with pytest.raises(BackendError, match="the target allows only the cluster https://prod"):
        place.backend(server="https://prod").submit(plan, bundle)
    assert place.cluster.objects.all("jobs") == []


def test_a_server_that_does_not_answer(place: Ground, tmp_path: Path):
    config = json.loads(place.cluster.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:9"
    (tmp_path / "dead").write_text(json.dumps(config))
    backend = place.backend(kubeconfig=str(tmp_path / "dead"))
    with pytest.raises(Unreachable, match="cannot be reached"):
        backend.find("a-run-a1")
    (problem,) = backend.check()
    assert "cannot be reached" in problem.message


# -- what waits says why ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "changes", "words"),
    [
        (
            {},
            {"resources": {"accelerators": "A100:8"}},
            "Unschedulable: 0/1 nodes are available: 1 Insufficient nvidia.com",
        ),
        ({"node_selector": {"rack": "x"}}, {}, "didn't match Pod's node affinity/selector"),
        ({"image": "absent:1"}, {}, 'ImagePullBackOff: Back-off pulling image "absent:1"'),
        ({"volumes": [{"claim": "none", "path": "/data"}]}, {}, "FailedMount: MountVolume.SetUp failed"),
    ],
)
def test_a_run_that_waits_says_why(place: Ground, options: dict, changes: dict, words: str):
    place.cluster.kubelet.absent_images.add("absent:1")
    backend, handle = started(place, "print(1)", options, **changes)
    wait_for(lambda: words in backend.status(handle).reason, words)
    assert backend.status(handle).state is State.STARTING
    backend.cancel(handle)
    assert ended(backend, handle).state is State.CANCELLED


def test_kueue_admits_it(place: Ground):
    backend, handle = started(place, "print('admitted')", {"queue": "research"})
    assert backend.status(handle).state is State.QUEUED and "research" in backend.status(handle).reason
    job = place.cluster.objects.get("jobs", "default", handle.split("/")[-2])
    with place.cluster.objects.lock:
        job["spec"]["suspend"] = False  # what Kueue does
    assert ended(backend, handle).state is State.SUCCEEDED and said(backend, handle) == ["admitted"]


# -- how it ends ------------------------------------------------------------------------------------------------------

WAITING = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"


def pod_of(place: Ground, handle: str) -> dict:
    name = handle.split("/")[-2]
    return next(pod for pod in place.cluster.objects.all("pods") if pod["metadata"]["name"].startswith(f"{name}-0-"))


@pytest.mark.parametrize("grace_s", [None, 0], ids=["evicted", "node lost"])
def test_a_pod_that_is_taken_away_is_preempted(place: Ground, grace_s: float | None):
    backend, handle = started(place, WAITING, output="gs://local/out")
    wait_for(lambda: "up" in said(backend, handle), "its first line")
    with place.cluster.objects.lock:
        place.cluster.kubelet.disrupt(pod_of(place, handle), "DeletionByTaintManager", grace_s=grace_s)
    status = ended(backend, handle)
    assert (status.state, status.exit_code) == (State.PREEMPTED, 75)
    if grace_s is None:
        assert said(backend, handle) == ["up"], "its log is in the output"


def test_out_of_memory_is_told_apart(place: Ground):
    backend, handle = started(place, WAITING)
    wait_for(lambda: "up" in said(backend, handle), "its first line")
    with place.cluster.objects.lock:
        place.cluster.kubelet.oom.add(pod_of(place, handle)["metadata"]["name"])
    status = ended(backend, handle)
    assert (status.state, status.exit_code) == (State.FAILED, 137) and "out of memory" in status.reason


def test_the_jobs_own_deadline(place: Ground):
    overlay = {"spec": {"activeDeadlineSeconds": 2}}
    backend, handle = started(place, WAITING, {"overlay": overlay})
    assert ended(backend, handle).state is State.TIMED_OUT


def test_a_source_that_is_not_there_is_no_failure_of_the_script(place: Ground):
    backend, plan, bundle = planned(place, "print(1)")
    plan = Plan.from_json(plan.to_json().replace(bundle.sha256, "0" * 64))
    status = ended(backend, handle := backend.submit(plan, bundle))
    assert (status.state, status.exit_code) == (State.FAILED, 78)
    assert "its content is not what its name says" in status.reason
    assert ["its content is not" in line.text for line in backend.logs(handle)] == [True]


def test_what_a_server_and_others_add_to_a_job_is_no_difference(place: Ground):
    """A second submit is taken for the first although the server has filled in fields, and a hook a container."""
    backend, plan, bundle = planned(place, "print('once')", num_nodes=2, env={"EMPTY": ""})
    handle = backend.submit(plan, bundle)
    job = place.cluster.objects.get("jobs", "default", handle.split("/")[-2])
    assert job is not None
    with place.cluster.objects.lock:
        pod = job["spec"]["template"]["spec"]
        references = [item["valueFrom"]["fieldRef"] for item in pod["containers"][0]["env"] if "valueFrom" in item]
        assert {reference["apiVersion"] for reference in references} == {"v1"}, "the simulated server does so too"
        pod["containers"].append({"name": "mesh", "image": "mesh:1", "env": [{"name": "MESH", "value": "1"}]})
    assert place.backend().submit(plan, bundle) == handle
    assert ended(backend, handle).state is State.SUCCEEDED and said(backend, handle) == ["once"] * 2


@pytest.mark.parametrize(("status", "header"), [(429, "1"), (503, None)])
def test_a_server_that_is_busy_is_asked_again(place: Ground, status: int, header: str | None):
    backend, handle = started(place, "print('done')")
    place.cluster.faults.append(
        Fault("GET", "/jobs/", status, times=2, headers={"Retry-After": header} if header else {})
    )
    clock = VirtualClock()
    assert place.backend(clock=clock).status(handle).state in State
    assert sum(pause >= 1.0 for pause in clock.slept) == (2 if header else 0), "its own word counts"
    assert ended(backend, handle).state is State.SUCCEEDED


def test_a_patch_that_met_another_one_is_sent_again(place: Ground):
    backend, plan, bundle = planned(place, "print('done')")
    place.cluster.faults.append(Fault("PATCH", "/jobs/", 409, "the object has been modified", times=2))
    assert ended(backend, backend.submit(plan, bundle)).state is State.SUCCEEDED


def test_a_clock_that_went_back_hides_no_line(place: Ground):
    script = "import time, pathlib\nprint('one', flush=True)\nwhile not pathlib.Path(%r).exists(): time.sleep(0.05)\nprint('two')"
    backend, handle = started(place, script % str(place.folder / "gate"))
    wait_for(lambda: "one" in said(backend, handle), "its first line")
    (cursor,) = [line.cursor for line in backend.logs(handle) if line.text == "one"]
    (place.folder / "gate").touch()
    assert ended(backend, handle).state is State.SUCCEEDED
    kubelet, uid = place.cluster.kubelet, pod_of(place, handle)["metadata"]["uid"]
    with place.cluster.objects.lock:
        lines = kubelet._logs[uid, "node"]
        lines[:] = [("2001-01-01T00:00:00.000000Z", text) for _, text in lines]
    assert [line.text for line in backend.logs(handle, after=cursor) if line.rank == 0] == ["two"]


def test_a_command_that_is_not_in_the_image(place: Ground):
    backend, handle = started(place, "print(1)", {"python": "python9"})
    status = ended(backend, handle)
    assert status.state is State.FAILED and "python9" in status.reason


def test_a_deleted_job_is_lost(place: Ground):
    backend, handle = started(place, WAITING)
    space, name = handle.split("/")[-3:-1]
    backend._api.call("DELETE", f"/apis/batch/v1/namespaces/{space}/jobs/{name}", "x", body={})
    assert backend.status(handle).state is State.LOST and list(backend.logs(handle, follow=True)) == []
    wait_for(
        lambda: not place.cluster.objects.all("pods") and not place.cluster.objects.all("configmaps"), "all is gone"
    )
    backend.cancel(handle)


# -- secrets, claims, large sources, doctor ---------------------------------------------------------------------------


def test_secrets_go_from_the_cluster_to_the_script_and_nowhere_else(place: Ground):
    held = {"metadata": {"name": "hf"}, "stringData": {"token": "s3cr3t-of-the-cluster"}}
    place.cluster.objects.add("secrets", "default", held)
    script = "import os; t = os.environ['HF_TOKEN']; print(len(t), t); print([k for k in os.environ if '_hf' in k])"
    backend, plan, bundle = planned(place, script, secrets={"HF_TOKEN": ["k8s:none/x", "k8s:hf/token"]})
    handle = backend.submit(plan, bundle)
    assert ended(backend, handle).state is State.SUCCEEDED
    assert said(backend, handle) == ["21 ***", "[]"]
    assert not any("secrets" in path for _, path in place.cluster.server.requests), "cloudtrain never reads them"


def test_a_secret_that_is_not_there(place: Ground):
    backend, handle = started(place, "print(1)", secrets={"HF_TOKEN": "k8s:none/x"})
    status = ended(backend, handle)
    assert (status.state, status.exit_code) == (
        State.FAILED,
        78,
    ) and "does not have this secret or key" in status.reason


def test_results_on_a_claim(place: Ground, tmp_path: Path):
    place.cluster.objects.add("persistentvolumeclaims", "default", {"metadata": {"name": "shared"}, "spec": {}})
    script = """
import os, pathlib
pathlib.Path(os.environ["CLOUDTRAIN_MODEL_DIR"], "m").write_text("whole")
outputs = pathlib.Path(os.environ["CLOUDTRAIN_OUTPUT_DIR"])
(outputs / "large").write_bytes(bytes(range(256)) * 8192)
(outputs / "with space").mkdir()
(outputs / "with space" / "a+b&c%").touch()
(outputs / "link").symlink_to("/etc/passwd")
"""
    options = {"volumes": [{"claim": "shared", "path": "/data"}]}
    backend, handle = started(place, script, options, output="/data/out")
    assert ended(backend, handle).state is State.SUCCEEDED
    claim = place.cluster.kubeconfig.parent / "claims" / "default" / "shared"
    assert (claim / "out" / "a-run" / "model" / "m").read_text() == "whole"
    for _ in range(2):  # what is here is not read again
        assert backend.fetch(handle, tmp_path / "out") == tmp_path / "out"
    found = {
        str(path.relative_to(tmp_path / "out")): path.read_bytes()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert found == {"model/m": b"whole", "outputs/large": bytes(range(256)) * 8192, "outputs/with space/a+b&c%": b""}
    assert [path for _, path in place.cluster.server.requests if "/file?" in path and "name=model" in path] != []
    assert sum("/file?" in path for _, path in place.cluster.server.requests) == 2, "an empty file needs none"
    wait_for(
        lambda: [pod for pod in place.cluster.objects.all("pods") if "-fetch-" in pod["metadata"]["name"]] == [],
        "its pod goes",
    )


def test_a_claim_whose_answer_breaks_off_is_read_on(place: Ground, tmp_path: Path):
    place.cluster.objects.add("persistentvolumeclaims", "default", {"metadata": {"name": "shared"}, "spec": {}})
    options = {"volumes": [{"claim": "shared", "path": "/data"}]}
    script = "import os, pathlib; pathlib.Path(os.environ['CLOUDTRAIN_MODEL_DIR'], 'm').write_text('whole')"
    backend, handle = started(place, script, options, output="/data/out")
    assert ended(backend, handle).state is State.SUCCEEDED
    place.cluster.faults += [Fault("GET", "/proxy/file", status) for status in (503, 0, 429)]
    backend.fetch(handle, tmp_path / "out", ("model",))
    assert (tmp_path / "out" / "model" / "m").read_text() == "whole"
    place.cluster.resources.denied.add(("get", "pods/proxy"))
    with pytest.raises(BackendError, match="permission denied"):
        backend.fetch(handle, tmp_path / "other")
    wait_for(
        lambda: not [p for p in place.cluster.objects.all("pods") if "-fetch-" in p["metadata"]["name"]], "no pod stays"
    )


def test_a_large_source_goes_through_the_store_once(place: Ground, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(request, "MAX_INLINE_BYTES", 1000)
    backend, plan, bundle = planned(place, "print('large')", output="gs://local/out")
    assert place.cluster.objects.all("configmaps") == []
    handle = backend.submit(plan, bundle)
    assert ended(backend, handle).state is State.SUCCEEDED and said(backend, handle) == ["large"]
    assert place.storage.names("local", "out/src/") == [f"out/src/{bundle.sha256}.tar.gz"]


def test_doctor_names_what_is_not_allowed(place: Ground):
    assert place.backend().check() == []
    place.cluster.resources.denied |= {("create", "jobs"), ("get", "pods/log")}
    messages = [problem.message for problem in place.backend().check()]
    assert len(messages) == 2 and "no permission to create jobs in default" in messages[0] and "pods/log" in messages[1]


def test_doctor_counts_the_gpus_that_a_target_may_have(place: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    machine = place.cluster.kubelet.node
    machine["status"]["allocatable"]["nvidia.com/gpu"] = "8"
    machine["metadata"]["labels"]["rack"] = "a"
    assert place.backend().capacity().startswith("8 of nvidia.com/gpu on 1 node, at most 8 on one")
    assert place.backend(node_selector={"rack": "b"}).capacity().startswith("0 of nvidia.com/gpu on 0 nodes that")
    assert place.backend(gpu_resource="amd.com/gpu").capacity().startswith("0 of amd.com/gpu on 1 node;")
    place.cluster.resources.denied.add(("list", "nodes"))
    assert place.backend().capacity() == "unknown: you have no permission to list nodes"
    place.cluster.resources.denied.clear()
    (tmp_path / "cloudtrain.toml").write_text(
        f'[targets.there]\nbackend = "kubernetes"\nkubeconfig = {json.dumps(str(place.cluster.kubeconfig))}\n'
    )
    command = [sys.executable, "-m", "cloudtrain.cli", "doctor", "there", "--json"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    found = {finding["what"]: finding for finding in json.loads(shown.stdout)}
    assert found["target there"]["ok"] is True and found["GPUs there"]["said"].startswith("8 of nvidia.com/gpu")


def test_planned_manifests_are_what_kubectl_takes(place: Ground, tmp_path: Path):
    """The official client sends them, and they run."""
    import yaml
    from kubernetes import client, config, utils

    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("import os; print('world', os.environ['WORLD_SIZE'])")
    (project / "cloudtrain.toml").write_text('[targets.there]\nbackend = "kubernetes"\nimage = "any:1"\n')
    command = [
        sys.executable,
        "-m",
        "cloudtrain.cli",
        "plan",
        "train.py",
        "-t",
        "there",
        "--set",
        "num_nodes=2",
        "--manifests",
    ]
    shown = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=200)
    assert shown.returncode == 0, shown.stderr
    found = list(yaml.safe_load_all(shown.stdout))
    assert [item["kind"] for item in found] == ["Job", "Service", "ConfigMap"]
    config.load_kube_config(str(place.cluster.kubeconfig))
    utils.create_from_yaml(client.ApiClient(), yaml_objects=found)
    name = found[0]["metadata"]["name"]
    handle = place.backend().find(name)
    assert handle is not None and ended(place.backend(), handle).state is State.SUCCEEDED
    assert said(place.backend(), handle) == ["world 2", "world 2"]
    refused = subprocess.run(
        [*command[:6], "local", "--manifests"], cwd=project, capture_output=True, text=True, timeout=200
    )
    assert refused.returncode == 2 and "has no manifests" in refused.stderr
