"""Nodes whose hardware ended an attempt: listed for a week, avoided by later attempts, cleared by hand."""

from __future__ import annotations

import json

import pytest

from cloudtrain.backends.api import Plan
from cloudtrain.backends.kubernetes.backend import KubernetesBackend
from cloudtrain.backends.sagemaker.backend import SagemakerBackend
from cloudtrain.backends.slurm.backend import SlurmBackend
from cloudtrain.backends.ssh.backend import SshBackend
from cloudtrain.events import Event, State, Status
from cloudtrain.history.store import Store
from cloudtrain.job.units import now
from cloudtrain.nodes.process import Process
from cloudtrain.runs.planning import bad_nodes
from cloudtrain.runs.planning.plan import Planner

ROW = "GPU 2: a memory row waits to be remapped (nvidia-smi): it needs a reset"


@pytest.fixture
def store(home) -> Store:
    return Store(home)


def add(
    store: Store, run: str, reason: str = "", state: State = State.LOST, at: str = "", target: str = "mine"
) -> Plan:
    """Add a run of one attempt that has ended so."""
    job = {"name": "tiny", "hyperparameters": {}}
    plan = Plan("slurm", run, 1, {"sbatch": ["sbatch", "job.sh"]}, {"sha256": "0"}, {"nodes": 2}, job, target)
    assert store.intend(plan, identity="i", owner=Process.here())
    store.record(f"{run}-a1", status=Status(state, None, reason, ended_at=at or now()))
    return plan


def failed(node: int, name: str) -> str:
    return f"node {node} ({name}) failed the health check: {ROW}"


def test_the_list_has_each_node_once_with_its_newest_failure(store):
    add(store, "old-1", failed(0, "node-old"), at="2020-01-01T00:00:00Z")
    add(store, "one-1", failed(1, "node-7"), at=now())
    add(store, "two-1", failed(0, "node-7"))
    add(store, "three-1", "node 1 (node-8) was lost: no message arrived for 10 s")
    add(store, "four-1", failed(0, "node-7; rm -rf /"))
    [node] = bad_nodes.bad_nodes(store)
    assert (node.target, node.name, node.why, node.attempt_id) == ("mine", "node-7", ROW, "two-1-a1")
    assert bad_nodes.clear(store, "node-9") == 0
    assert bad_nodes.clear(store, "node-7") == 1 and bad_nodes.bad_nodes(store) == []
    add(store, "five-1", failed(0, "node-7"))
    assert [each.attempt_id for each in bad_nodes.bad_nodes(store)] == ["five-1-a1"]


def test_a_rank_that_dies_of_its_gpu_names_its_node(store):
    add(store, "gpu-1", "rank 3 exited with code 1", State.FAILED)
    verdict = {"label": "gpu-hardware", "what": "", "deciding": "CUDA error: uncorrectable ECC error", "node": 1}
    store.record(
        "gpu-1-a1",
        events=[
            Event("gpu-1-a1", -1, 0, now(), "verdict", verdict),
            Event("gpu-1-a1", 1, 5, now(), "world", {"hostname": "h", "name": "node-3"}),
        ],
    )
    [node] = bad_nodes.bad_nodes(store)
    assert (node.name, node.why) == ("node-3", "CUDA error: uncorrectable ECC error")


def of(kind: type):
    return object.__new__(kind)


def test_slurm_excludes_them_on_its_target_alone(store):
    plan = add(store, "one-1", failed(1, "node-7"))
    add(store, "two-1", failed(1, "node-8"), target="other")
    add(store, "three-1", failed(1, "node[1-9]"))
    made = bad_nodes.avoid(store, of(SlurmBackend), plan)
    assert made.request["sbatch"] == ["sbatch", "--exclude=node-7", "job.sh"]
    own = of(SlurmBackend).avoid(
        Plan("slurm", "r", 2, {"sbatch": ["sbatch", "--exclude=a[1-2]", "x"]}, {}, {}, {}), ["b"]
    )
    assert own.request["sbatch"] == ["sbatch", "--exclude=a[1-2],b", "x"]


def test_ssh_takes_other_hosts_first():
    hosts = [{"address": "10.0.0.1"}, {"address": "10.0.0.2", "user": "me"}, {"address": "10.0.0.3"}]
    plan = Plan("ssh", "r", 2, {"hosts": hosts, "nodes": 2}, {}, {}, {})
    made = of(SshBackend).avoid(plan, ["10.0.0.1", "me@10.0.0.2"])
    assert [host["address"] for host in made.request["hosts"]] == ["10.0.0.3", "10.0.0.1", "10.0.0.2"]
    all_used = Plan("ssh", "r", 2, {"hosts": hosts, "nodes": 3}, {}, {}, {})
    assert of(SshBackend).avoid(all_used, ["10.0.0.1"]) is all_used


OPTIONS = {
    "slurm": {"folder": "/shared/ml"},
    "ssh": {"hosts": [{"address": "node-7"}, {"address": "node-8"}]},
    "kubernetes": {"kubeconfig": "/none", "image": "any:1"},
    "sagemaker": {"role": "arn:aws:iam::123456789012:role/r", "region": "eu-west-1", "bucket": "bucket"},
}


@pytest.mark.parametrize("backend", OPTIONS)
def test_the_first_attempt_of_a_new_run_avoids_them_too(backend, store, home, tmp_path):
    (tmp_path / "train.py").write_text("print(1)\n")
    job = {"name": "new", "source": str(tmp_path), "entrypoint": "train.py"}
    job |= {"image": "r/x:1", "output": "s3://bucket/out"} if backend in ("kubernetes", "sagemaker") else {}

    def plan() -> Plan:
        return Planner(backend, home=home, **OPTIONS[backend]).plan(job)

    assert not any("hardware" in note for note in plan().notes)
    add(store, "week-1", failed(1, "node-7"), target=backend, at="2020-01-01T00:00:00Z")
    add(store, "other-1", failed(1, "node-7"), target="other")
    assert not any("hardware" in note for note in plan().notes)
    add(store, "one-1", failed(1, "node-7"), target=backend)
    made = plan()
    [note] = [note for note in made.notes if "hardware" in note]
    text = json.dumps(made.request)
    if backend == "sagemaker":
        assert note.startswith("the target has 1 node whose hardware failed") and "node-7" not in text
        return
    assert note.startswith("avoids 1 node whose hardware failed in the last 7 days (node-7)")
    if backend == "ssh":
        assert [host["address"] for host in made.request["hosts"]] == ["node-8", "node-7"]
    else:
        assert ("--exclude=node-7" if backend == "slurm" else '"values": ["node-7"]') in text
    assert bad_nodes.clear(store, "node-7") == 2 and "node-7" not in "".join(plan().notes)


def test_a_node_that_failed_an_earlier_start_of_an_attempt_is_listed(store):
    """Slurm starts a job again itself: what the launcher said of the first start is an event of the same attempt."""
    add(store, "again-1", "", State.SUCCEEDED)
    result = {"state": "LOST", "reason": failed(1, "node-7")}
    store.record("again-1-a1", events=[Event("again-1-a1", node, 7, now(), "result", result) for node in range(2)])
    [node] = bad_nodes.bad_nodes(store)
    assert (node.name, node.why, node.attempt_id) == ("node-7", ROW, "again-1-a1")
    assert bad_nodes.clear(store, "node-7") == 1 and bad_nodes.bad_nodes(store) == []


@pytest.mark.parametrize("affinity", [None, {"key": "pool", "operator": "In", "values": ["gpu"]}])
def test_kubernetes_chooses_other_nodes(affinity):
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    pod = {"containers": []}
    if affinity:
        pod["affinity"] = {"nodeAffinity": {required: {"nodeSelectorTerms": [{"matchExpressions": [affinity]}]}}}
    job = {"kind": "Job", "spec": {"template": {"spec": pod}}}
    plan = Plan("kubernetes", "r", 2, {"manifests": [job]}, {}, {}, {})
    made = of(KubernetesBackend).avoid(plan, ["gke-1", "gke-2"])
    [term] = made.request["manifests"][0]["spec"]["template"]["spec"]["affinity"]["nodeAffinity"][required][
        "nodeSelectorTerms"
    ]
    assert [each["values"] for each in term["matchFields"]] == [["gke-1"], ["gke-2"]]
    assert {each["operator"] for each in term["matchFields"]} == {"NotIn"}
    assert term.get("matchExpressions") == ([affinity] if affinity else None)
    assert plan.request["manifests"][0] is job and "matchFields" not in str(job)


def test_sagemaker_gives_no_choice():
    plan = Plan("sagemaker", "r", 2, {}, {}, {}, {})
    assert of(SagemakerBackend).avoid(plan, ["algo-2"]) is plan


def test_the_command_lists_and_clears(store, cli):
    assert cli("doctor", "--nodes") == (0, "", "no node has failed in the last 7 days\n")
    add(store, "one-1", failed(1, "node-7"))
    code, out, err = cli("doctor", "--nodes")
    assert code == 0 and "node-7" in out and "one-1-a1" in out and "give no choice of machines" in err
    assert '"name": "node-7"' in cli("doctor", "--nodes", "--json")[1]
    assert cli("doctor", "--nodes", "--clear", "node-1")[0] == 1
    assert cli("doctor", "--nodes", "--clear", "node-7")[:2] == (0, "")
    assert bad_nodes.bad_nodes(store) == []


def test_show_prints_the_figures_of_each_node_beside_the_median(store, cli):
    add(store, "one-1", failed(1, "node-7"))
    assert cli("show", "one-1", "--health")[0] == 1
    figures = [(620.0, 45.2), (600.0, 44.0)]
    events = [
        Event("one-1-a1", node, 3, now(), "health", {
            "name": f"node-{6 + node}", "faults": [[True, "GPU 0: Xid 79"]] * node, "gpus": [{"index": 0, "pending": True}],
            "devices": [{"name": "H100", "tflops": tflops, "wrong": False}], "link": {"pair": pair}})
        for node, (tflops, pair) in enumerate(figures)
    ]  # fmt: skip
    events.append(Event("one-1-a1", 0, 9, now(), "alarm", {"reason": "straggler: node 1 (node-7): GPU clock at 61 %"}))
    store.record("one-1-a1", events=events)
    code, out, _ = cli("show", "one-1", "--health")
    assert "straggler: node 1 (node-7): GPU clock at 61 %" in out.splitlines()
    rows = [line.split() for line in out.splitlines()]
    assert code == 0 and rows[0] == ["node", "host", "device", "TFLOP/s", "pair", "GB/s"]
    assert ["0", "node-6", "H100", "620.0", "45.2"] in rows and ["median", "610", "44.6"] in rows
    assert "node 1: GPU 0: Xid 79" in out
    assert '"tflops": 620.0' in cli("show", "one-1", "--health", "--json")[1]
    store.record(
        "one-1-a1", events=[Event("one-1-a1", 0, 99, now(), "health", {"devices": [3], "link": [], "gpus": "x"})]
    )
    assert cli("show", "one-1", "--health")[0] == 0, "what a job prints is shown, whatever it is"
