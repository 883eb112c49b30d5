"""Which role starts when, and with whose end an attempt of several programs ends; no process, no socket."""

from __future__ import annotations

import pytest
from launcher import environment
from launcher.manifest import Manifest
from launcher.world.channel import World
from launcher.world.cluster import Cluster, with_own_gpus
from launcher.world.outcome import SETTLE_S, ClusterState, Outcome, Start
from launcher.world.roles import RoleStarts, placeholders, variables

from cloudtrain.backends.manifest import Manifest as Sent
from cloudtrain.job.job import Job

FOLDERS = ("outputs", "checkpoints", "model", "logs")
ROLES = {
    "trainer": {"num_nodes": 2, "after": ["server"]},
    "server": {"run": "serve", "num_nodes": 2, "ready": "tcp://:8000", "after": ["weights"], "secrets": ["TOKEN"]},
    "weights": {"run": "copy", "processes_per_node": 1},
}


def manifest(**keys) -> Manifest:
    job = Job(
        entrypoint="train.py", processes_per_node=3, roles=ROLES, secrets={"TOKEN": "env:T", "KEY": "env:K"}, **keys
    )
    return Manifest(Sent.of(job, "r", 1).to_dict())


def attempt() -> ClusterState:
    made = ClusterState(manifest(), 10, 10)
    for node in range(5):
        assert made.join(node, f"host{node}", 3 if node < 2 else 1) is None
        made.ready(node)
    assert made.decide(0.0) == Start((0, 1, 2, 3, 4))
    return made


def test_a_role_starts_when_all_nodes_of_those_before_it_are_ready():
    roles = RoleStarts(manifest().roles)
    assert roles.due() == [[4], [2, 3]], "weights has no `ready`: it is ready at its start"
    assert roles.due() == [] and roles.waiting == {"trainer": ["server"]}
    assert roles.up(3) == "" and roles.due() == []
    assert roles.up(2) == "server" and roles.due() == [[0, 1]]
    assert roles.waiting == {} and roles.due() == []


def test_each_role_finds_the_others():
    addresses = RoleStarts(manifest().roles).addresses({node: f"10.0.0.{node}" for node in range(5)})
    assert placeholders(addresses)["role.server.addresses"] == "10.0.0.2,10.0.0.3"
    assert variables({"vllm-server": ["a", "b"]}) == {
        "CLOUDTRAIN_ROLE_VLLM_SERVER_HOST": "a",
        "CLOUDTRAIN_ROLE_VLLM_SERVER_ADDRESSES": "a,b",
    }


def test_a_node_has_the_program_and_the_secrets_of_its_role():
    main, server = manifest(), manifest()
    main.take_role(1)
    server.take_role(3)
    assert (main.argv, main.world_size, main.role_rank, main.is_service) == (["train.py"], 6, 1, False)
    assert (server.argv, server.world_size, server.role_rank, server.is_service) == (["serve"], 2, 1, True)
    assert (sorted(main.secrets), sorted(server.secrets)) == (["KEY", "TOKEN"], ["TOKEN"])
    assert (main.outputs("/o"), server.outputs("/o")) == ("/o", "/o/server")


def test_a_service_has_its_own_grace_requirements_and_gpus_and_else_the_jobs():
    own, other = manifest(), manifest()
    own.roles[1].update(grace_s=4, requirements=None, gpus_per_node=1)
    for each in (own, other):
        each.gpus_per_node = each.fields["gpus_per_node"] = 8
    assert [own.gpus_of(node) for node in range(5)] == [8, 8, 1, 1, 8]
    for each in (own, other):
        each.grace_s, each.requirements = 30, "requirements.txt"
        each.take_role(3)
    assert (own.grace_s, own.requirements, own.gpus_per_node) == (4, None, 1)
    assert (other.grace_s, other.requirements, other.gpus_per_node) == (30, "requirements.txt", 8)


def test_roles_on_one_machine_divide_its_gpus():
    own = sharing()
    assert [own.shared_gpus(node) for node in range(7)] == [
        (0, 8, 0), (0, 8, 1), (5, 8, 0), (5, 8, 1), (7, 8, 0), (7, 8, 1), (0, 3, 6),
    ]  # fmt: skip
    own.fields["gpus_per_node"] = 0
    assert [own.shared_gpus(node) for node in range(6)] == [
        (0, 3, 2), (0, 3, 3), (0, 3, 2), (0, 3, 3), (2, 3, 2), (2, 3, 3),
    ], "the first that asks for some takes those of the others, too"  # fmt: skip


def sharing() -> Manifest:
    """Nodes 0 and 1 are the trainer's; the server and the judge are on them too, and the last role is alone."""
    program = {"argv": ["true"], "form": "command", "rank_env": True, "env": {}, "setup": "", "secrets": []}
    roles = [{"name": "trainer", "nodes": 2, "after": []}] + [
        {"name": name, "nodes": nodes, "after": [], "gpus_per_node": gpus, "processes_per_node": 1, **program, **where}
        for name, nodes, gpus, where in (
            ("server", 2, 2, {"colocate": "trainer"}),
            ("judge", 2, 1, {"colocate": "trainer"}),
            ("alone", 1, 3, {}),
        )
    ]
    own = manifest()
    own.roles = roles
    own.fields["gpus_per_node"] = own.gpus_per_node = 5
    return own


@pytest.mark.parametrize(
    ("platform", "visible", "seen"),
    [
        ("slurm", "", ["0,1,2,3,4", "5,6", "7", None]),
        ("slurm", "8,9,10,11,12,13,14,15", ["8,9,10,11,12", "13,14", "15", None]),
        ("kubernetes", "", [None, None, None, None]),
    ],
)
def test_each_role_sees_its_own_gpus_of_one_machine(platform: str, visible: str, seen: list):
    environ = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    for node, gpus in zip((0, 2, 4, 6), seen, strict=True):
        own = sharing()
        own.take_role(node)
        assert with_own_gpus(Cluster(platform, 7, node), own, environ).gpus == gpus
    own = sharing()
    own.roles[1]["gpus_per_node"] = 0
    own.take_role(2)
    found = with_own_gpus(Cluster(platform, 7, 2), own, environ)
    assert found.gpus == "", "its image may show all of the machine's to a container that asks for none"


def test_roles_on_one_machine_divide_its_processors():
    own = sharing()
    own.fields["processes_per_node"] = 6
    own.take_role(2)
    assert [own.processes_beside(node, False) for node in range(7)] == [8] * 6 + [1]
    assert {own.processes_beside(node, True) for node in range(7)} == {17}, "simulated nodes"


def test_the_threads_of_a_rank_are_its_part_of_the_processors_that_all_roles_of_its_machine_have(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "_processors", lambda: 64)
    own = sharing()
    own.fields["processes_per_node"] = 6
    for node, control, threads in (
        (0, "10.0.0.1", "8"),
        (2, "10.0.0.1", "8"),
        (6, "10.0.0.1", "64"),
        (6, "127.0.0.1", "3"),
    ):
        cluster = Cluster("local", 7, node, control_host=control)
        prepared = environment.Prepared("python", {}, {}, dict.fromkeys(FOLDERS, ""), {}, "", None, {}, None, None)
        world = World(1, 0, "127.0.0.1", 1, ["a"], {}, [[]], 0)
        made = environment.rank_environment({}, own, cluster, world, prepared, 0, str(tmp_path))
        assert made["OMP_NUM_THREADS"] == threads


def test_a_node_with_other_processes_than_its_role_has_is_refused():
    state = ClusterState(manifest(), 10, 10)
    assert state.join(2, "host", 3) == "node 2 would start 3 processes, not 1"


def test_the_run_ends_with_the_main_role():
    state = attempt()
    state.end(0)
    assert state.decide(1.0) is None
    state.end(1)
    assert state.decide(1.0) == Outcome("SUCCEEDED", 0, "script"), "the services run still"


def test_a_service_that_ends_too_often_ends_the_run():
    state = attempt()
    state.fail(3, -1, 9, 5.0, "role server exited with code 9")
    assert state.decide(1.0) is None
    assert state.decide(1.0 + SETTLE_S) == Outcome(
        "FAILED", 9, "script", None, "node 3: role server exited with code 9"
    )


def test_a_stop_waits_for_the_main_role_alone():
    state = attempt()
    state.stop("CANCELLED", 1.0)
    state.end(0)
    assert state.decide(1.0) is None
    state.end(1)
    assert state.decide(1.0).state == "CANCELLED"


def test_the_limits_of_a_hang_are_those_of_the_main_role():
    state = ClusterState(manifest(limits={"stall": "10m"}), 10, 10)
    for node in range(5):
        state.join(node, "host", 3 if node < 2 else 1)
        state.ready(node)
    state.decide(0.0)
    state.idle(0, 700, 700, 0)
    assert state.hung is None
    state.idle(1, 700, 700, 0)
    assert state.hung == "STALLED"
