"""kind: jobset: the manifest against the CRD's schema, a set read as a Job, and runs of sets on the simulated cluster."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cloudtrain.backends.kubernetes.backend import KubernetesBackend
from cloudtrain.backends.kubernetes.kinds import as_job, count_nodes, templates_of
from cloudtrain.backends.kubernetes.names import FIRST_NODE
from cloudtrain.backends.kubernetes.overlay import merge_manifest
from cloudtrain.backends.kubernetes.rules import check_set_name
from cloudtrain.backends.kubernetes.status import status_of
from cloudtrain.backends.shell import call
from cloudtrain.errors import BackendError
from cloudtrain.events import State
from tests.backends.kubernetes.clusters import Ground
from tests.backends.kubernetes.test_backend import TestKubernetes as Contract
from tests.backends.kubernetes.test_backend import shared  # noqa: F401
from tests.backends.kubernetes.test_faults import ended, place, started  # noqa: F401
from tests.backends.kubernetes.test_request import CASES, made, problems
from tests.conftest import wait_for

AT = "2026-11-23T12:00:00Z"


def known_to_the_schema(jobset: dict) -> dict:
    """What is left of a JobSet in models that were generated from its schema: they drop fields that they do not know."""
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    found = JobsetV1alpha2JobSet.from_dict(json.loads(json.dumps(jobset)))
    assert found is not None
    return found.to_dict()


@pytest.mark.parametrize("case", [case for case in CASES if case != "trainjob"])
def test_the_schema_has_every_field(case: str):
    changes, options, size = CASES[case]
    request = made(changes, {**options, "kind": "jobset"}, size)
    assert request.problems == [] and request.main["kind"] == "JobSet"
    assert known_to_the_schema(request.main) == request.main


def test_the_schema_is_not_blind():
    jobset = made({}, {"kind": "jobset"}).main
    assert known_to_the_schema(merge_manifest(jobset, {"spec": {"maxRestarts": 3}})) == jobset
    with pytest.raises(ValueError, match="maxRestarts"):
        known_to_the_schema(merge_manifest(jobset, {"spec": {"failurePolicy": {"maxRestarts": "three"}}}))


def test_a_set_is_the_same_job():
    job, jobset = made({"num_nodes": 2}, {}).job, made({"num_nodes": 2}, {"kind": "jobset"})
    read = as_job(jobset.main)
    env = read["spec"]["template"]["spec"]["containers"][0]["env"]
    (master,) = (each for each in env if each["name"] == "MASTER_ADDR")
    assert master["value"] == "golden-run-a1-n-0-0.golden-run-a1"
    ttl = job["spec"].pop("ttlSecondsAfterFinished")
    assert jobset.main["spec"]["ttlSecondsAfterFinished"] == ttl and "ttlSecondsAfterFinished" not in read["spec"]
    master["value"] = "golden-run-a1-0.golden-run-a1"
    assert (read["metadata"], read["spec"]) == (job["metadata"], job["spec"])
    assert [other["kind"] for other in jobset.others] == ["ConfigMap"], "a set makes its Service itself"


def test_a_name_that_makes_no_names_of_pods_is_refused():
    assert problems({"name": "n", "num_nodes": 2}, {"kind": "jobset"}) == []
    attempt = 10**40  # a Job's name may be so long, that of a set may not
    assert problems({}, {}, 1000, attempt) == [] and problems({}, {"kind": "jobset"}, 1000, attempt) == ["name"]
    long = made({"num_nodes": 1000}, {"kind": "jobset"})
    long.main["metadata"]["name"] = "n" * 50
    assert "at most 63" in check_set_name(long.main).message
    long.main["metadata"]["name"] = "n" * 49
    assert check_set_name(long.main) is None


def condition(kind: str, **more: str) -> dict:
    return {"type": kind, "status": "True", "lastTransitionTime": AT, **more}


def test_the_end_of_a_set_is_that_of_its_job():
    jobset = {**made({}, {"kind": "jobset"}).main, "status": {}}
    jobset["spec"] = {**jobset["spec"], "suspend": False}
    jobset["metadata"] = {**jobset["metadata"], "uid": "set"}
    child = {"metadata": {"uid": "job"}, "status": {}}
    assert status_of(as_job(jobset), []).state is State.STARTING
    assert status_of(as_job(jobset, [child]), []).state is State.STARTING
    late = condition("Failed", reason="DeadlineExceeded", message="too long")
    jobset["status"] = {"conditions": [condition("Failed", reason="FailedJobs", message="a job failed")]}
    child["status"] = {"conditions": [late]}
    assert status_of(as_job(jobset, [child]), []).state is State.TIMED_OUT
    assert status_of(as_job(jobset), []).reason == "a job failed", "its Job was deleted"
    jobset["status"] = {"conditions": [condition("Completed")]}
    assert status_of(as_job(jobset), []).state is State.SUCCEEDED


SERVER = {"run": "serve", "image": "vllm:1", "resources": {"accelerators": "L4"}, "secrets": ["HF_TOKEN"]}
OF_ROLES = {
    "entrypoint": None,
    "roles": {"trainer": {"entrypoint": "train.py", "num_nodes": 2}, "server": SERVER, "judge": {"run": "judge"}},
    "resources": {"accelerators": "H100:8"},
    "secrets": {"HF_TOKEN": ["k8s:hub/token"], "WANDB": ["k8s:wandb/key"]},
}


def test_roles_have_pods_of_their_own_in_one_set():
    request = made(OF_ROLES, {"kind": "jobset"})
    assert request.problems == [] and known_to_the_schema(request.main) == request.main
    pods = [job["template"]["spec"]["containers"][0] for job in templates_of(request.main)]
    assert [pod["image"] for pod in pods] == ["img:1", "vllm:1", "img:1"]
    assert [pod["resources"]["limits"]["nvidia.com/gpu"] for pod in pods] == ["8", "1", "8"]
    env = [{each["name"]: each.get("value", "") for each in pod["env"]} for pod in pods]
    assert [each.get("CLOUDTRAIN_FIRST_NODE") for each in env] == [None, "2", "3"]
    assert {each["MASTER_ADDR"] for each in env} == {"golden-run-a1-n-0-0.golden-run-a1"}
    assert [sum(name.startswith("CLOUDTRAIN_SECRET_") for name in each) for each in env] == [2, 1, 0]
    assert as_job(request.main)["spec"]["completions"] == request.manifest.nodes == 4


SHARED = {
    **OF_ROLES,
    "roles": {
        "trainer": {"entrypoint": "train.py", "num_nodes": 2, "resources": {"accelerators": "H100:6"}},
        "alone": {"run": "eval", "resources": {"accelerators": "0"}},
        "server": {**SERVER, "resources": {"accelerators": "H100:2"}, "colocate": "trainer"},
        "judge": {"run": "judge", "colocate": "trainer"},
    },
    "resources": {},
}


def test_roles_that_share_nodes_are_containers_of_one_pod():
    request = made(SHARED, {"kind": "jobset"})
    assert request.problems == [] and known_to_the_schema(request.main) == request.main
    first, second = (job["template"] for job in templates_of(request.main))
    containers = first["spec"]["containers"]
    assert [each["name"] for each in containers] == ["node", "node-server", "node-judge"]
    assert [each["image"] for each in containers] == ["img:1", "vllm:1", "img:1"]
    assert [each["resources"].get("limits") for each in containers] == [
        {"nvidia.com/gpu": "6"}, {"nvidia.com/gpu": "2"}, None,
    ]  # fmt: skip
    env = [{each["name"]: each.get("value", "") for each in container["env"]} for container in containers]
    assert [each.get("CLOUDTRAIN_FIRST_NODE") for each in env] == [None, "2", "4"]
    assert [sum(name.startswith("CLOUDTRAIN_SECRET_") for name in each) for each in env] == [2, 1, 0]
    work = [
        {m["mountPath"]: m["name"] for m in container["volumeMounts"]}["/cloudtrain/work"] for container in containers
    ]
    assert work == ["work", "work-server", "work-judge"], "each has a working directory of its own"
    assert len(second["spec"]["containers"]) == 1 and second["metadata"]["labels"][FIRST_NODE] == "6"
    read = as_job(request.main)
    assert (read["spec"]["completions"], count_nodes(read), request.manifest.nodes) == (3, 7, 7)
    assert problems(SHARED, {}) == ["roles"], "pods of two kinds"
    trainjob = {"kind": "trainjob", "runtime": "torch-distributed"}
    assert problems(SHARED, trainjob) == ["roles.server.colocate"]
    assert problems(SHARED, {"kind": "jobset", "cpu_limits": True}) == ["options.kubernetes.cpu_limits"] * 3
    assert problems({**SHARED, "image": None, "roles": {**SHARED["roles"]}}, {"kind": "jobset"}) == ["image"]


def test_one_pod_of_all_roles_needs_no_service():
    """Its nodes find the first one by the address that they share, before the cluster's DNS knows any name."""
    roles = {"trainer": {"entrypoint": "train.py"}, "server": {"run": "serve", "colocate": "trainer"}}
    request = made({"entrypoint": None, "roles": roles}, {})
    assert request.problems == [] and [each["kind"] for each in request.others] == ["ConfigMap"]
    pod = request.main["spec"]["template"]["spec"]
    masters = [each for container in pod["containers"] for each in container["env"] if each["name"] == "MASTER_ADDR"]
    assert [each["valueFrom"]["fieldRef"]["fieldPath"] for each in masters] == ["status.podIP"] * 2
    assert "subdomain" not in pod


def test_a_machine_type_of_a_role_has_its_gpus_in_the_manifest():
    server = {"run": "serve", "resources": {"instance_type": "g6.12xlarge"}}
    changes = {"entrypoint": None, "roles": {"trainer": {"entrypoint": "train.py"}, "server": server}}
    request = made(changes, {"kind": "jobset"})
    assert request.problems == [] and request.manifest.roles[1]["gpus_per_node"] == 4
    container = templates_of(request.main)[1]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}


@pytest.mark.parametrize("own", [{"image": "vllm:1"}, {"resources": {"cpus": 2}}])
def test_other_pods_for_a_role_need_a_set(own: dict):
    changes = {"entrypoint": None, "roles": {"trainer": {"entrypoint": "train.py"}, "server": {"run": "serve", **own}}}
    assert problems(changes, {}) == ["roles"] and problems(changes, {"kind": "jobset"}) == []


def test_a_set_of_several_jobs_is_complete_with_the_last_and_fails_with_the_first():
    jobset = {**made(OF_ROLES, {"kind": "jobset"}).main, "status": {}}
    jobset["spec"], jobset["metadata"] = {**jobset["spec"], "suspend": False}, {**jobset["metadata"], "uid": "set"}
    done = {"metadata": {"uid": "main"}, "status": {"conditions": [condition("Complete")], "ready": 0}}
    rest = {"metadata": {"uid": "server"}, "status": {"ready": 2}}
    both = as_job(jobset, [done, rest])
    assert status_of(both, []).state is State.STARTING and both["status"]["ready"] == 2
    rest["status"] = {"conditions": [condition("Failed", reason="PodFailurePolicy", message="its pod failed")]}
    assert status_of(as_job(jobset, [done, rest]), []).reason == "its pod failed"
    jobset["status"], rest["status"] = {"conditions": [condition("Completed")]}, {"conditions": [condition("Complete")]}
    assert status_of(as_job(jobset, [done, rest]), []).state is State.SUCCEEDED


@pytest.fixture
def sets(place: Ground) -> Callable[..., tuple[KubernetesBackend, str]]:  # noqa: F811
    return lambda script, **options: started(place, script, {"kind": "jobset", **options}, num_nodes=2)


def test_a_set_of_two_nodes_in_every_call(place: Ground, sets):  # noqa: F811
    backend, handle = sets("import os; print(os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")
    status = ended(backend, handle)
    (jobset,) = place.cluster.objects.all("jobsets")
    name, other = jobset["metadata"]["name"], place.backend()
    assert status.state is State.SUCCEEDED
    assert backend.statuses([handle]) == {handle: status} == other.statuses([handle])
    assert {line.text for line in backend.logs(handle) if line.rank >= 0} == {"0 of 2", "1 of 2"}
    assert backend.find(name) == handle and other.find(name) is None
    assert set(backend.images(handle)) == {0, 1}
    wait_for(lambda: "terminalState" in jobset["status"], "the set's own end")
    assert jobset["status"]["terminalState"] == "Completed"
    assert backend.remains(handle) == {f"JobSet default/{name}": None}
    backend.remove(handle)
    own = ("jobsets", "jobs", "pods", "services", "configmaps")
    wait_for(lambda: not any(map(place.cluster.objects.all, own)), "all that it owned is deleted")
    assert backend.status(handle).state is State.LOST


def in_roles(place: Ground, server: dict, script: str, **more):  # noqa: F811
    """Submit a trainer on one node that waits for a server with less memory on another."""
    service = {"ready": "line:up", "resources": {"cpus": 1, "memory": "64MiB"}, **server}
    roles = {"trainer": {"entrypoint": "script.py", "after": ["server"]}, "server": service}
    return started(place, script, {"kind": "jobset"}, entrypoint=None, roles=roles, **more)


def test_roles_with_other_pods_find_each_other_and_end_together(place: Ground):  # noqa: F811
    script = "import os; print('at', os.environ['CLOUDTRAIN_ROLE_SERVER_HOST'])"
    backend, handle = in_roles(place, {"run": "echo up; exec sleep 600"}, script)
    status = ended(backend, handle)
    lines = sorted((line.node, line.text) for line in backend.logs(handle) if line.rank >= 0)
    assert (status.state, lines) == (State.SUCCEEDED, [(0, "at 127.0.0.1"), (1, "up")])
    assert backend.statuses([handle]) == {handle: status} and set(backend.images(handle)) == {0, 1}
    assert len(place.cluster.objects.all("jobs")) == 2


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_roles_on_the_same_pods_have_logs_results_and_secrets_of_their_own(
    place: Ground,  # noqa: F811
    tmp_path: Path,
    kind: str,
):
    place.cluster.objects.add("secrets", "default", {"metadata": {"name": "hub"}, "stringData": {"token": "hf-1"}})
    save = "echo $CLOUDTRAIN_ROLE $RANK of $WORLD_SIZE $PWD >> $CLOUDTRAIN_OUTPUT_DIR/note; "
    roles = {
        "trainer": {
            "run": save + "echo at $CLOUDTRAIN_ROLE_SERVER_ADDRESSES $TOKEN",
            "num_nodes": 2,
            "after": ["server"],
        },
        "server": {"run": save + "echo up $TOKEN; exec sleep 600", "colocate": "trainer", "ready": "line:up"},
    }
    more = {"entrypoint": None, "roles": roles, "secrets": {"TOKEN": ["k8s:hub/token"]}, "output": "gs://local/out"}
    backend, handle = started(place, "", {"kind": kind}, **more)
    status = ended(backend, handle)
    lines = sorted((line.node, line.text) for line in backend.logs(handle) if line.rank >= 0)
    assert status.state is State.SUCCEEDED, (status, lines)
    assert [node for node, _ in lines] == [0, 1, 2, 3], lines
    assert lines[0][1] == lines[1][1] and lines[0][1].endswith(" ***")
    assert [text for _, text in lines[2:]] == ["up", "up"], "the secret is the trainer's"
    pods = [pod for pod in place.cluster.objects.all("pods") if pod["status"]["phase"] == "Succeeded"]
    assert len(pods) == 2 and set(backend.images(handle)) == {0, 1, 2, 3}
    assert backend.statuses([handle]) == {handle: status}
    own = backend.fetch(handle, tmp_path / kind)
    found = {str(path.relative_to(own)): path.read_text() for path in own.rglob("note")}
    assert sorted(found) == ["outputs/note", "outputs/server/note"], found
    assert {text.split()[0] for text in found.values()} == {"trainer", "server"}
    wait_for(lambda: not place.left(handle), "its processes end")


def test_a_command_runs_in_the_container_of_its_role(place: Ground):  # noqa: F811
    roles = {
        "trainer": {"entrypoint": "script.py"},
        "server": {"run": "exec sleep 600", "colocate": "trainer", "image": "vllm:1"},
    }
    script = "import time\nwhile True: time.sleep(0.1)"
    backend, handle = started(place, script, {"python": sys.executable}, entrypoint=None, roles=roles)
    wait_for(lambda: backend.status(handle).state is State.RUNNING, "its start")
    for node in (0, 1):
        words = ("-c", "import os; print(os.environ.get('CLOUDTRAIN_FIRST_NODE', '0'))")
        done = call(backend.shell(handle, node, words, stdin=False, terminal=False))
        assert done.out.split() == [str(node).encode()], done
    (pod,) = place.cluster.objects.all("pods")
    place.cluster.kubelet.oom.add(pod["metadata"]["name"])
    status = ended(backend, handle)
    assert (status.state, status.exit_code) == (State.FAILED, 137) and status.reason.startswith(
        "node 0 ran out of memory"
    )
    wait_for(lambda: not place.left(handle), "its processes end")


def test_a_role_that_waits_for_its_node_says_so_and_ends_with_the_set(place: Ground):  # noqa: F811
    backend, handle = in_roles(place, {"run": "true", "resources": {"instance_type": "none"}}, "print(1)")
    reason = wait_for(lambda: backend.status(handle).reason, "its reason")
    assert reason.startswith("node 1: Unschedulable") and backend.statuses([handle])[handle].reason == reason
    backend.cancel(handle)
    wait_for(lambda: backend.status(handle).state is State.CANCELLED, "its end")
    wait_for(lambda: not place.left(), "its processes end")


def test_a_service_that_ends_ends_a_set(place: Ground):  # noqa: F811
    backend, handle = in_roles(place, {"run": "echo bad; exit 3", "restart": 0}, "print(1)")
    status = ended(backend, handle)
    assert (status.state, status.exit_code) == (State.FAILED, 3) and "role server" in status.reason
    wait_for(lambda: not place.left(), "its processes end")


def test_a_waiting_set_says_why_and_is_cancelled(sets):
    backend, handle = sets("print(1)", node_selector={"rack": "none"})
    reason = wait_for(lambda: backend.status(handle).reason, "its reason")
    assert reason.startswith("node 0, 1: Unschedulable: 0/1 nodes are available")
    assert backend.statuses([handle])[handle].reason == reason
    backend.cancel(handle)
    wait_for(lambda: backend.status(handle).state is State.CANCELLED, "its end")
    backend.delete_cancelled(handle)
    assert backend.remains(handle) == {}


def test_a_set_in_a_queue_is_deleted_when_it_is_cancelled(place: Ground, sets):  # noqa: F811
    backend, handle = sets("print(1)", queue="research")
    assert backend.status(handle).state is State.QUEUED and "research" in backend.status(handle).reason
    backend.cancel(handle)
    assert place.cluster.objects.all("jobsets") == []


def test_a_handle_of_another_kind_is_refused(place: Ground):  # noqa: F811
    with pytest.raises(BackendError, match="not the handle of a Job"):
        place.backend().status("cluster/default/pod:name/uid")


def test_while_a_set_may_begin_again_only_its_own_end_is_one():
    jobset = made({"num_nodes": 2, "retry": {"max_attempts": 3, "by": "cluster"}}, {"kind": "jobset"}).main
    jobset = {**jobset, "spec": {**jobset["spec"], "suspend": False}, "status": {}}
    jobset["metadata"] = {**jobset["metadata"], "uid": "set"}
    lost = "Pod default/x has condition DisruptionTarget matching FailJob rule at index 0"
    failed = condition("Failed", reason="PodFailurePolicy", message=lost)
    child = {"metadata": {"uid": "job"}, "status": {"conditions": [failed]}}
    assert status_of(as_job(jobset, [child]), []).state is State.STARTING
    assert status_of(as_job(jobset), []).state is State.STARTING, "its Job was deleted"
    jobset["status"] = {"conditions": [condition("Failed", reason="ReachedMaxRestarts", message="too often")]}
    assert status_of(as_job(jobset, [child]), []).state is State.PREEMPTED


def test_only_what_begins_on_all_nodes_again_may_be_left_to_the_cluster():
    by_cluster = {"num_nodes": 2, "retry": {"max_attempts": 3, "by": "cluster"}}
    assert problems(by_cluster, {"kind": "jobset"}) == []
    assert problems(by_cluster, {}) == ["retry.by"]
    assert problems({**by_cluster, "num_nodes": 1}, {}) == [], "a single node has no peers"
    capped = {**by_cluster, "limits": {"max_cost": "10 USD"}, "resources": {"usd_per_hour": 1}}
    assert problems(capped, {"kind": "jobset"}) == ["retry.by"], "each start begins its deadline anew"


def test_a_set_that_lost_a_pod_begins_again_on_all_nodes(place: Ground):  # noqa: F811
    """No watcher takes part: both nodes get new pods once the old ones are gone, and the run ends with the second start.

    Each start claims a number in the output, as any start does: an earlier one that still lives uploads nothing more.
    """
    script = """import os, time
print('start', os.environ['RANK'], flush=True)
time.sleep(600 if not os.path.exists(PATH) else 0)
""".replace("PATH", repr(str(place.folder / "again")))
    retry = {"max_attempts": 2, "by": "cluster"}
    backend, handle = started(place, script, {"kind": "jobset"}, num_nodes=2, retry=retry, output="gs://local/sets")
    wait_for(lambda: backend.status(handle).state is State.RUNNING, "the first start")
    wait_for(lambda: sum(line.text.startswith("start") for line in backend.logs(handle)) == 2, "its lines")
    first = {pod["metadata"]["uid"] for pod in place.cluster.objects.all("pods")}
    (place.folder / "again").touch()
    place.cluster.kubelet.disrupt(place.cluster.objects.all("pods")[0], "EvictionByEvictionAPI", grace_s=0)
    states = set()

    def final():
        states.add((status := backend.status(handle)).state)
        return status if status.state.final else None

    assert wait_for(final, "the end of the second start", 200).state is State.SUCCEEDED
    assert not any(state.final for state in states - {State.SUCCEEDED})
    (jobset,) = place.cluster.objects.all("jobsets")
    second = {pod["metadata"]["uid"] for pod in place.cluster.objects.all("pods")}
    assert jobset["status"]["restarts"] == 1 and len(second) == 2 and not first & second
    claims = sorted(name for name in place.storage.names("local") if "/epochs/" in name)
    assert [json.loads(place.storage.read("local", name))["epoch"] for name in claims] == [1, 2]
    attempts = {json.loads(place.storage.read("local", name))["attempt"] for name in claims}
    assert attempts == {1}, "one attempt, begun twice by the cluster"


def test_a_script_that_fails_ends_a_set_that_may_begin_again(place: Ground):  # noqa: F811
    retry = {"max_attempts": 3, "by": "cluster"}
    backend, handle = started(place, "raise SystemExit(3)", {"kind": "jobset"}, num_nodes=2, retry=retry)
    status = ended(backend, handle)
    assert (status.state, status.exit_code) == (State.FAILED, 3)
    assert "restarts" not in place.cluster.objects.all("jobsets")[0]["status"]


@pytest.mark.long
class TestJobSets(Contract):
    """The contract suite, whose attempts are JobSets."""

    @pytest.fixture
    def connect(self, shared: Ground, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", shared.store.url)
        self.shared = shared
        return lambda: shared.backend(kind="jobset")
