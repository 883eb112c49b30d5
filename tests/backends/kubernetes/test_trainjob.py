"""kind: trainjob: the manifest against the CRD's schema, one read as a Job, runtimes that are refused, runs on the simulator."""

from __future__ import annotations

import copy
import json

import pytest

from cloudtrain.backends.kubernetes.kinds import as_job, runtime_problems
from cloudtrain.backends.kubernetes.overlay import merge_manifest
from cloudtrain.backends.kubernetes.permissions import build_role
from cloudtrain.errors import BackendError, BadJob
from cloudtrain.events import State
from tests.backends.kubernetes.clusters import Ground
from tests.backends.kubernetes.test_backend import TestKubernetes as Contract
from tests.backends.kubernetes.test_backend import shared  # noqa: F401
from tests.backends.kubernetes.test_faults import ended, place, planned, started  # noqa: F401
from tests.backends.kubernetes.test_recipes import RUNTIME
from tests.backends.kubernetes.test_request import CASES, made, problems
from tests.conftest import wait_for

OPTIONS = {"kind": "trainjob", "runtime": "torch-never"}


def known_to_the_schema(trainjob: dict) -> dict:
    """What is left of a TrainJob in models that were generated from its schema: they drop fields that they do not know."""
    from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

    found = TrainerV1alpha1TrainJob.from_dict(json.loads(json.dumps(trainjob)))
    assert found is not None
    return found.to_dict()


@pytest.mark.parametrize("case", ["trainjob", "two_nodes", "gpus", "restricted", "large_source", "claims", "spot"])
def test_the_schema_has_every_field(case: str):
    changes, options, size = CASES[case]
    request = made(changes, {**options, **OPTIONS}, size)
    assert request.problems == [] and request.main["kind"] == "TrainJob"
    assert known_to_the_schema(request.main) == request.main


def test_the_schema_is_not_blind():
    trainjob = made({}, OPTIONS).main
    assert known_to_the_schema(merge_manifest(trainjob, {"spec": {"trainer": {"nodes": 3}}})) == trainjob


def test_a_trainjob_is_the_same_job():
    changes, options, size = CASES["gpus"]
    job, request = made(changes, options, size).job, made(changes, {**options, **OPTIONS}, size)
    read = as_job(request.main)
    (ours,), (node,) = (each["spec"]["template"]["spec"]["containers"] for each in (job, read))
    assert node["image"] == ours["image"] and node["resources"] == ours["resources"]
    env = {each["name"]: each.get("value") for each in node["env"]}
    assert env["MASTER_ADDR"] == "golden-run-a1-node-0-0.golden-run-a1"
    assert {each["name"] for each in ours["env"]} < env.keys() and "CLOUDTRAIN_SOURCE" in env
    for field in ("nodeSelector", "tolerations", "affinity"):
        assert read["spec"]["template"]["spec"].get(field) == job["spec"]["template"]["spec"].get(field)
    assert read["spec"]["completions"] == job["spec"]["completions"] == 4
    assert [other["kind"] for other in request.others] == ["ConfigMap"], "its JobSet makes the Service"


def test_what_a_trainjob_cannot_say_is_refused_and_not_dropped():
    assert problems({}, {"kind": "trainjob"}) == ["options.kubernetes.runtime"]
    assert problems({}, {**OPTIONS, "priority_class": "high"}) == ["options.kubernetes.priority_class"]
    overlay = {"spec": {"template": {"spec": {"hostNetwork": True}}}}
    path = "options.kubernetes.overlay.spec.template.spec.hostNetwork"
    assert problems({}, {**OPTIONS, "overlay": overlay}) == [path]
    sidecar = {"spec": {"template": {"spec": {"containers": [{"name": "side", "image": "i"}]}}}}
    assert problems({}, {**OPTIONS, "overlay": sidecar}) == [
        "options.kubernetes.overlay.spec.template.spec.containers[1].name"
    ]
    assert problems({"retry": {"max_attempts": 2, "by": "cluster"}}, OPTIONS) == ["retry.by"]


@pytest.mark.parametrize(
    "change, lacking",
    [
        ({"template": {"spec": {"failurePolicy": {"maxRestarts": 3}}}}, "maxRestarts: 0"),
        ({"template": {"spec": {"network": {"subdomain": "x"}}}}, "no network.subdomain"),
        (
            {"template": {"spec": {"replicatedJobs": [{"name": "launcher", "template": {}}]}}},
            "a replicated job named node",
        ),
    ],
)
def test_a_runtime_that_starts_single_nodes_again_is_told_from_one_that_fits(change: dict, lacking: str):
    assert runtime_problems(RUNTIME) == []
    other = copy.deepcopy(RUNTIME)
    if "replicatedJobs" in change["template"]["spec"]:
        other["spec"]["template"]["spec"]["replicatedJobs"] = []
    (found,) = runtime_problems({**other, "spec": merge_manifest(other["spec"], change)})
    assert lacking in found
    job = copy.deepcopy(RUNTIME)["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    stock = copy.deepcopy(RUNTIME)
    del job["backoffLimit"], job["template"]["spec"]["restartPolicy"]
    del job["template"]["spec"]["containers"][0]["terminationMessagePolicy"]
    stock["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"] = job
    assert len(runtime_problems(stock)) == 3


def test_the_role_reads_the_runtimes_of_the_cluster():
    kinds = [each["kind"] for each in build_role({"kind": "trainjob"})]
    assert kinds == ["Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"]
    granted = {(verb, resource) for rule in build_role({"kind": "trainjob"})[0]["rules"] for resource in rule["resources"]
               for verb in rule["verbs"]}  # fmt: skip
    assert ("create", "trainjobs") in granted and ("create", "jobs") not in granted and ("get", "jobs") in granted


@pytest.fixture
def runtime(place: Ground) -> dict:  # noqa: F811
    made = copy.deepcopy(RUNTIME)
    return place.cluster.objects.add("clustertrainingruntimes", "", made)


def test_a_trainjob_of_two_nodes_in_every_call(place: Ground, runtime: dict):  # noqa: F811
    backend, handle = started(
        place, "import os; print(os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])", OPTIONS, num_nodes=2
    )
    status = ended(backend, handle)
    (trainjob,) = place.cluster.objects.all("trainjobs")
    name = trainjob["metadata"]["name"]
    assert status.state is State.SUCCEEDED and "/trainjob:" in handle
    assert backend.statuses([handle]) == {handle: status} == place.backend(**OPTIONS).statuses([handle])
    assert {line.text for line in backend.logs(handle) if line.rank >= 0} == {"0 of 2", "1 of 2"}
    assert backend.find(name) == handle and set(backend.images(handle)) == {0, 1}
    pod = place.cluster.objects.all("pods")[0]
    assert pod["spec"]["schedulerName"] == "gang", "the runtime's own fields apply"
    assert backend.remains(handle) == {f"TrainJob default/{name}": None}
    backend.remove(handle)
    own = ("trainjobs", "jobsets", "jobs", "pods", "services", "configmaps")
    wait_for(lambda: not any(map(place.cluster.objects.all, own)), "all that it owned is deleted")


def test_the_image_is_the_runtimes_where_the_job_names_none(place: Ground, runtime: dict):  # noqa: F811
    _, plan, _ = planned(place, "print(1)", {**OPTIONS, "image": None})
    assert "image" not in plan.request["manifests"][0]["spec"]["trainer"]
    backend, handle = started(place, "print(1)", {**OPTIONS, "image": None})
    assert ended(backend, handle).state is State.SUCCEEDED
    assert place.cluster.objects.all("pods")[0]["spec"]["containers"][0]["image"] == "registry.example/torch:2"


def test_a_failing_script_has_its_code_and_a_cancelled_trainjob_its_state(place: Ground, runtime: dict):  # noqa: F811
    backend, handle = started(place, "raise SystemExit(3)", OPTIONS)
    status = ended(backend, handle)
    assert (status.state, status.exit_code) == (State.FAILED, 3)
    place.cluster.objects.remove("trainjobs", place.cluster.objects.all("trainjobs")[0])
    wait_for(lambda: not place.cluster.objects.all("configmaps"), "all that it owned is deleted")
    backend, handle = started(place, "import time; time.sleep(600)", OPTIONS, num_nodes=2)
    wait_for(lambda: backend.status(handle).state is State.RUNNING, "the start")
    backend.cancel(handle)
    wait_for(lambda: backend.status(handle).state is State.CANCELLED, "the end")


def test_nothing_is_created_where_the_runtime_does_not_fit(place: Ground):  # noqa: F811
    backend, plan, bundle = planned(place, "print(1)", OPTIONS)
    with pytest.raises(BackendError, match="no ClusterTrainingRuntime torch-never"):
        backend.submit(plan, bundle)
    stock = copy.deepcopy(RUNTIME)
    del stock["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["backoffLimit"]
    place.cluster.objects.add("clustertrainingruntimes", "", stock)
    with pytest.raises(BackendError, match="backoffLimit: 0"):
        backend.submit(plan, bundle)
    place.cluster.resources.denied.add(("get", "clustertrainingruntimes"))
    with pytest.raises(BackendError, match="cannot be read"):
        backend.submit(plan, bundle)
    assert place.cluster.objects.all("trainjobs") == [] == place.cluster.objects.all("configmaps")


@pytest.mark.long
class TestTrainJobs(Contract):
    """The contract suite, whose attempts are TrainJobs."""

    @pytest.fixture
    def connect(self, shared: Ground, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", shared.store.url)
        self.shared = shared
        if not shared.cluster.objects.all("clustertrainingruntimes"):
            shared.cluster.objects.add("clustertrainingruntimes", "", copy.deepcopy(RUNTIME))
        return lambda: shared.backend(**OPTIONS)

    def test_a_killed_service_on_the_node_of_the_main_role_is_started_again_there(self, backend, start):  # type: ignore[no-untyped-def]
        """Its container has no place in a TrainJob: it is refused before anything is created."""
        roles = {"trainer": {}, "server": {"entrypoint": "script.py", "colocate": "trainer"}}
        before = len(self.shared.cluster.objects.all("trainjobs"))
        with pytest.raises(BadJob, match="a TrainJob sets one"):
            start("print(1)", roles=roles)
        assert len(self.shared.cluster.objects.all("trainjobs")) == before
