"""GPUs on machines that no scheduler shares out: those that are there, unless a job names others or none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.api import Plan
from cloudtrain.backends.ssh.launch import machine_count, with_gpus
from cloudtrain.cli import main
from cloudtrain.errors import BackendError, BadJob
from cloudtrain.runs.planning.plan import Planner
from cloudtrain.runs.submit import Submitter
from tests.runs.test_entries import project, submit  # noqa: F401 - a fixture

SHOW = """
import json, os
print("SEEN", json.dumps([os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("ACCELERATE_USE_CPU")]))
"""


def seen(log: str) -> list[str | None]:
    return json.loads(next(line for line in log.splitlines() if "SEEN" in line).partition("SEEN ")[2])


@pytest.mark.usefixtures("census")
@pytest.mark.parametrize(
    ("gpus", "more", "expected"),
    [
        (2, [], [None, None]),  # what is there is visible
        (2, ["--gpus", "0"], ["", None]),
        (2, ["--gpus", "A100"], ["0", None]),
        (0, [], ["", None]),
        (2, ["--set", "processes_per_node=2"], [None, None]),
        (1, ["--set", "processes_per_node=2"], ["", "true"]),  # two ranks cannot share one
    ],
)
def test_a_job_that_names_none_sees_those_that_are_there(project, machine_with, gpus: int, more: list[str], expected):  # noqa: F811
    machine_with(gpus)
    (project / "train.py").write_text(SHOW)
    code, log, said = submit(project, "train.py", *more)
    assert code == 0, said
    assert seen(log) == expected
    assert ("2 processes and only 1 GPU: the ranks run on CPU" in log) is (gpus == 1)


def notes(folder: Path, backend: str, **resources: object) -> str:
    options = {
        "ssh": {"hosts": [{"address": "10.0.0.5"}]},
        "slurm": {"folder": "/shared"},
        "kubernetes": {"image": "a:1"},
    }.get(backend, {})
    job = {"name": "x", "source": str(folder), "entrypoint": "train.py", "resources": resources}
    return "\n".join(Planner(backend, **options).plan(job).notes)


@pytest.mark.parametrize(
    ("backend", "where"), [("local", "this machine"), ("ssh", "its machine, of those that no other run holds")]
)
def test_the_plan_says_which(project, backend: str, where: str):  # noqa: F811
    (project / "train.py").write_text("import torch\n")
    assert f"the job does not request GPUs: each rank gets one GPU of {where}" in notes(project, backend)
    assert "accelerators: 0 hides all GPUs" in notes(project, backend, accelerators=0)


@pytest.mark.parametrize("backend", ["local", "ssh", "slurm", "kubernetes"])
@pytest.mark.parametrize(
    ("text", "said"),
    [("print(1)\n", False), ("import torch\n", True), ("# no GPU here\nimport json\n", False)],
)
def test_only_a_script_that_could_use_a_gpu_is_told_of_none(project, backend: str, text: str, said: bool):  # noqa: F811
    (project / "train.py").write_text(text)
    assert ("the job does not request GPUs" in notes(project, backend)) is said


def test_more_than_there_are_is_refused_before_a_submit(project, machine_with, home: Path, capsys, monkeypatch):  # noqa: F811
    (project / "train.py").write_text("")
    machine_with(0)
    monkeypatch.chdir(project)
    assert main(["plan", "train.py", "--gpus", "A100:1"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "submit would refuse this here" in printed
    assert "is A100:1, 1 GPU in all, and this machine shows no GPU (nvidia-smi)" in printed
    code, _, said = submit(project, "train.py", "--gpus", "A100:8")
    assert code == 2 and "this machine shows no GPU (nvidia-smi)" in said and not list((home / "runs").glob("*"))
    machine_with(4)
    job = {"name": "x", "source": str(project), "entrypoint": "train.py", "resources": {"accelerators": "A100:8"}}
    submitter = Submitter("local", watch=False)
    plan = submitter.plan(job)  # for any machine: what this one has is seen by submit
    for submit_it in (lambda: submitter.submit(job), lambda: submitter.submit_plan(plan)):
        with pytest.raises(BadJob, match="is A100:8, 8 GPUs in all, and this machine shows 4 GPUs"):
            submit_it()
    assert submitter.store.runs() == []
    assert "accelerators" not in notes(project, "local", accelerators="A100:4")


@pytest.mark.parametrize(("backend", "ignored"), [("local", "cpus, memory, disk_gb"), ("ssh", "cpus, memory, disk_gb"),
                                                  ("slurm", "disk_gb"), ("kubernetes", ""),
                                                  ("sagemaker-local", "cpus, memory, disk_gb")])  # fmt: skip
def test_the_plan_says_which_resources_have_no_effect(project, backend: str, ignored: str):  # noqa: F811
    (project / "train.py").write_text("")
    found = [
        note for note in notes(project, backend, cpus=8, memory="64GiB", disk_gb=200).split("\n") if "effect" in note
    ]
    keys = ", ".join(f"resources.{key}" for key in ignored.split(", ") if key)
    assert found == [f"{keys}: without effect on {backend}, which does not reserve resources"] * bool(ignored)
    assert "effect" not in notes(project, backend)


class Host:
    """A machine behind SSH that lists so many GPUs."""

    def __init__(self, label: str, count: int) -> None:
        self.label, self.agent, self._count = label, self, count

    def ask(self, operation: str, argv: list[str]):
        assert (operation, argv) == ("command", ["nvidia-smi", "-L"])
        return type("Answer", (), {"value": {"code": 0, "out": "GPU 0: x (UUID: GPU-y)\n" * self._count, "err": ""}})


def asking(each: int, fewest: int, **request: Any) -> Plan:
    manifest = {"gpus_per_node": each, "min_nodes": fewest}
    return Plan("ssh", "run", 1, request={"nodes": 3, **request}, bundle={}, manifest=manifest, job={})


def test_machines_without_them_are_not_chosen():
    hosts = [Host("a", 0), Host("b", 8), Host("c", 8)]
    assert [host.label for host in with_gpus(hosts, asking(8, 2))] == ["b", "c"]
    assert with_gpus(hosts, asking(0, 3)) == hosts
    with pytest.raises(
        BackendError, match="8 GPUs per node were requested; the machines have .nvidia-smi.: a 0, b 8, c 8"
    ):
        with_gpus(hosts, asking(8, 3))


def test_each_role_gets_machines_with_as_many_gpus_as_it_asks_for():
    hosts = [Host("a", 1), Host("b", 8), Host("c", 0), Host("d", 8)]
    assert [host.label for host in with_gpus(hosts, asking(2, 3, gpus=[2, None, 8]))] == ["d", "a", "b"]
    with pytest.raises(BackendError, match="nodes with 2, 8, 8 GPUs were requested; the machines have .*: a 1, b 8"):
        with_gpus(hosts, asking(2, 3, gpus=[2, 8, 8]))


def test_roles_that_share_machines_get_one_with_gpus_for_all_of_them():
    hosts = [Host("a", 8), Host("b", 6), Host("c", 8)]
    plan = asking(6, 0, gpus=[6, 6, 2, 2, None], machines=[0, 1, 0, 1, 2])
    assert [host.label for host in with_gpus(hosts, plan)] == ["a", "c", "b"] and machine_count(plan) == 3
    with pytest.raises(BackendError, match="nodes with 8, 8 GPUs were requested; the machines have .*: a 8, b 6"):
        with_gpus(hosts[:2], asking(6, 0, gpus=[6, 6, 2, 2], machines=[0, 1, 0, 1]))


def test_roles_on_this_machine_share_its_gpus(project, home):  # noqa: F811
    (project / "train.py").write_text("")
    roles = {"trainer": {}, "server": {"run": "serve", "num_nodes": 2, "resources": {"accelerators": "A100"}}}
    job = {"source": str(project), "entrypoint": "train.py", "resources": {"accelerators": "A100:2"}, "roles": roles}
    plan = Submitter(target="local", home=home).plan(job)
    assert [node["env"]["CLOUDTRAIN_GPUS"] for node in plan.request["nodes"]] == ["0,1", "2", "3"]
    assert plan.requested_gpus == 4
    plan = Submitter(target="ssh", home=home, hosts=[{"address": name} for name in "abc"]).plan(job)
    assert (plan.request["gpus"], plan.request["env"]["CLOUDTRAIN_GPUS"]) == ([2, 1, 1], "${node.gpus}")
    assert not any(note.startswith("roles share") for note in plan.notes)
    roles["trainer"], roles["server"]["colocate"] = {"num_nodes": 2}, "trainer"
    plan = Submitter(target="local", home=home).plan(job)
    assert [node["env"]["CLOUDTRAIN_GPUS"] for node in plan.request["nodes"]] == ["0,1", "2,3", "4", "5"]
    plan = Submitter(target="ssh", home=home, hosts=[{"address": name} for name in "ab"]).plan(job)
    assert (plan.request["gpus"], plan.request["machines"]) == ([2, 2, 1, 1], [0, 1, 0, 1])
    assert [note for note in plan.notes if note.startswith("roles share 2 machines, which need 3 GPUs each")]
    priced = {**job, "resources": {"accelerators": "A100:2", "usd_per_hour": 3}}
    plan = Submitter(target="ssh", home=home, hosts=[{"address": name} for name in "ab"]).plan(priced)
    assert (plan.machines, plan.price["usd_per_hour"]) == (2, 6), "a machine is paid once"
    plan = Submitter(target="kubernetes", home=home, image="a:1").plan(job)
    assert (plan.machines, plan.requested_gpus) == (2, 6), "containers of the same pods"
    with pytest.raises(BadJob) as refused:
        Submitter(target="akash", home=home, image="a:1").plan(job)
    assert (
        "roles.server.colocate",
        "remove it: the role then has nodes of its own; or choose another target (-t)",
    ) in {(problem.path, problem.hint) for problem in refused.value.problems}
    roles["trainer"] = {}
    del roles["server"]["colocate"]
    with pytest.raises(BadJob) as refused:
        Submitter(target="local", home=home).plan({**job, "resources": {}})
    assert [problem.path for problem in refused.value.problems] == ["roles.server.resources.accelerators"]
    assert "of which trainer takes all" in refused.value.problems[0].message
    roles["server"]["resources"] = {"instance_type": "a2"}
    with pytest.raises(BadJob) as refused:
        Submitter(target="local", home=home).plan(job)
    assert [problem.path for problem in refused.value.problems] == ["roles.server.resources.instance_type"]
    with pytest.raises(BadJob) as refused:
        Submitter(target="slurm", home=home, folder="/shared").plan(job)
    assert [problem.path for problem in refused.value.problems] == ["roles.server.resources.instance_type"]
