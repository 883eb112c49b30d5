"""Roles of a job: what a file says, what the launcher gets, what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cloudtrain.backends.manifest import Manifest, gpus_of_nodes
from cloudtrain.backends.plan import Plan
from cloudtrain.errors import BadJob, BadRequest
from cloudtrain.job import rules, targets
from cloudtrain.job.job import Job
from cloudtrain.job.model import RAY
from cloudtrain.job.roles import find_shared_ports, machines, on_own_machines, services
from cloudtrain.job.rules import find_keys
from cloudtrain.nodes.paths import check_shared_output
from cloudtrain.runs.inside import Inside

FILE = """\
source: .
roles:
  trainer:
    entrypoint: train.py
    hyperparameters: {lr: 3.0e-4}
    args: ["--server", "http://{role.server.host}:8000"]
    num_nodes: 2
    after: [server]
  server:
    run: python serve.py
    num_nodes: 3
    env: {VERSION: 1.10}
    restart: 0
    ready: http://:8000/health
"""


def problems(text: str) -> list[str]:
    with pytest.raises(BadJob) as raised:
        Job.load(text)
    return [f"{each.line}: {each.path} {each.message}" for each in raised.value.problems]


def test_the_main_roles_program_is_the_jobs():
    job = Job.load(FILE)
    assert job.argv() == ["train.py", "--lr", "3.0e-4", "--server", "http://{role.server.host}:8000"]
    assert (job.num_nodes, job.main_nodes, job.world_size, job.form) == (5, 2, 2, "script")
    assert Job.from_dict(job.to_dict()) == Job.from_dict(job.to_dict(given=True)) == job.replace() == job
    assert Job.from_dict({"source": ".", "roles": {"trainer": {"entrypoint": "train.py"}}}).trainer is False
    at_top = {key: value for key, value in job.to_dict(given=True).items() if key != "roles"}
    assert Job(**at_top, roles={"trainer": {"num_nodes": 2, "after": ["server"]}, "server": job.roles["server"]}) == job


@pytest.mark.parametrize("key", ["hyperparameters.lr", "roles.trainer.hyperparameters.lr"])
def test_a_value_of_the_main_role_is_set_from_outside_wherever_it_stands(tmp_path, key: str):
    file = tmp_path / "job.yaml"
    file.write_text(FILE)
    more = f"{key.removesuffix('lr')}steps=3"
    job = Job.load(file, [f"{key}=1e-5", more, "roles.trainer.num_nodes=1", "roles.server.env.VERSION=2.0"])
    assert job.argv()[:5] == ["train.py", "--lr", "1e-5", "--steps", "3"]
    assert (job.main_nodes, job.roles["server"].env) == (1, {"VERSION": "2.0"})
    assert Job.load(file, ["roles.trainer.entrypoint=other.py"]).entrypoint == "other.py"


def test_the_launcher_gets_the_main_role_first_and_the_services_programs():
    before = FILE.index("  server:")
    job = Job.load(FILE[: FILE.index("  trainer:")] + FILE[before:] + FILE[FILE.index("  trainer:") : before])
    main, server = Manifest.of(job, "r", 1).to_dict()["roles"]
    assert main == {"name": "trainer", "nodes": 2, "after": ["server"], "ports": []}
    assert {name: server[name] for name in ("name", "nodes", "argv", "form", "env", "ports", "ready_s", "restart")} == {
        "name": "server", "nodes": 3, "argv": ["python serve.py"], "form": "shell", "env": {"VERSION": "1.10"},
        "ports": [8000], "ready_s": 1800, "restart": 0,
    }  # fmt: skip
    assert Manifest.of(job, "r", 1).world_size == 2


def test_each_role_may_have_its_own_hardware():
    gpus = "    num_nodes: 2\n    resources: {accelerators: A100:2}"
    job = Job.load(FILE.replace("    num_nodes: 2", gpus))
    assert (gpus_of_nodes(job), job.processes) == ([2, 2, 0, 0, 0], 2)
    assert Job.from_dict(job.to_dict()) == Job.from_dict(job.to_dict(given=True)) == job.replace() == job
    same = Job.load(FILE.replace("source: .", "source: .\nresources: {accelerators: A100:2}"))
    assert (gpus_of_nodes(same), "roles.resources" in rules.keys_in_use(same)) == ([2] * 5, False)
    more = Job.load(FILE.replace("    num_nodes: 3", "    num_nodes: 3\n    resources: {accelerators: L4}"))
    assert (gpus_of_nodes(more), gpus_of_nodes(Job.load(FILE))) == ([None, None, 1, 1, 1], [None] * 5)
    assert "roles.resources" in rules.keys_in_use(more) and "roles.resources" in rules.keys_in_use(job)
    assert [role.get("gpus_per_node") for role in Manifest.of(more, "r", 1).to_dict()["roles"]] == [None, 1]


def test_a_price_of_the_target_is_no_hardware_of_all_roles(tmp_path):
    (tmp_path / "cloudtrain.toml").write_text(
        '[targets.lab]\nbackend = "ssh"\nusd_per_hour = 2\nhosts = [{address = "10.0.0.5"}]\n'
    )
    gpus = "    num_nodes: 2\n    resources: {accelerators: A100:2}"
    (tmp_path / "job.yaml").write_text(FILE.replace("    num_nodes: 2", gpus))
    job = targets.resolve(tmp_path / "job.yaml", target="lab").job
    assert (gpus_of_nodes(job), job.resources.usd_per_hour) == ([2, 2, 0, 0, 0], 2)


def test_a_service_may_install_other_packages_and_have_less_grace():
    job = Job.load(FILE.replace("    restart: 0", "    requirements: serve.txt\n    grace: 10s"))
    _, server = Manifest.of(job, "r", 1).to_dict()["roles"]
    assert (server["requirements"], server["grace_s"]) == ("serve.txt", 10)
    none = Job.load(FILE.replace("    restart: 0", "    requirements: none"))
    _, server = Manifest.of(none, "r", 1).to_dict()["roles"]
    assert server["requirements"] is None and "grace_s" not in server


def test_how_values_and_ranks_are_written_at_the_top_is_for_services_too():
    server = {"run": "serve"}
    roles = {
        "trainer": {"entrypoint": "t.py"},
        "server": server,
        "judge": {"entrypoint": "judge.py", "hyperparameters": {"lr": 1}},
    }
    job = Job(source=".", roles=roles, arg_style="hydra", distributed_env="always")
    _, _, judge = Manifest.of(job, "r", 1).to_dict()["roles"]
    assert (judge["argv"], judge["rank_env"]) == (["judge.py", "lr=1"], True)


def test_checkpoints_of_one_main_node_need_no_shared_output():
    job = Job(entrypoint="t.py", roles={"trainer": {}, "server": {"run": "serve"}}, parallelism={"strategy": "fsdp"})
    assert check_shared_output(job) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "  server:\n",
            "  server:\n    main: true\n  judge:\n    main: true\n",
            "2: roles server and judge are main roles",
        ),
        ("trainer", "learner", "2: roles has no main role"),
        ("{role.server", "{role.judge", "6: args uses a placeholder of the role judge"),
        ("[server]", "[judge]", "8: roles.trainer.after names judge, no role of this job"),
        ("    num_nodes: 3", "    after: [trainer]", "8: roles.trainer.after waits in a circle: trainer after server"),
        ("source: .", "source: .\nnum_nodes: 2", "2: num_nodes is the number of nodes of each role"),
        ("source: .", "source: .\nmin_nodes: 2", "2: min_nodes cannot be combined with roles"),
        ("source: .", "source: .\nentrypoint: a.py", "5: roles.trainer.entrypoint is at the top of the job too"),
        ("run: python serve.py", "entrypoint: ../serve.py", "10: roles.server.entrypoint must be a path inside"),
        ("    run: python serve.py\n", "", "9: roles.server.entrypoint is missing: the job does not say what to run"),
        ("http://:8000/health", "8000", "14: roles.server.ready must be text"),
        ("http://:8000/health", "udp://:8000", "14: roles.server.ready is not known"),
        ("http://:8000/health", "http://:0/health", "14: roles.server.ready is not known"),
        ("http://:8000/health", "tcp://:65536", "14: roles.server.ready is not known"),
        ("http://:8000/health", "tcp://:\u0668\u0660", "14: roles.server.ready is not known"),
        (
            "    num_nodes: 3",
            "    resources: {use_spot: true}",
            "11: roles.server.resources may have accelerators, cpus",
        ),
        (
            "    num_nodes: 3",
            "    resources: {accelerators: [A, B]}",
            "11: roles.server.resources.accelerators names sev",
        ),
        (
            "    num_nodes: 3",
            "    secrets: [TOKEN]",
            "11: roles.server.secrets names TOKEN, which the job does not have",
        ),
        ("    num_nodes: 2", "    min_nodes: 1", "7: roles.trainer.min_nodes is not there for roles: all nodes of"),
        ("    after: [server]", "    ready: tcp://:1", "8: roles.trainer.ready is for services"),
        ("    after: [server]", "    grace: 5s", "8: roles.trainer.grace is for services"),
        ("    restart: 0", "    grace: 1m", "13: roles.server.grace is longer than limits.grace (30s)"),
        ("{VERSION: 1.10}", "{RANK: 1}", "12: roles.server.env.RANK is set by cloudtrain"),
        ("  server:\n", "  Server:\n", "9: roles.Server is not a valid name of a role"),
    ],
)
def test_what_is_wrong_is_refused_with_its_line(old: str, new: str, said: str):
    assert old in FILE
    assert any(each.startswith(said) for each in problems(FILE.replace(old, new, 1))), problems(
        FILE.replace(old, new, 1)
    )


SHARED = FILE.replace("    num_nodes: 3\n", "    colocate: trainer\n")


def test_a_role_on_the_nodes_of_another_follows_it_and_has_the_gpus_that_it_names():
    gpus = "    num_nodes: 2\n    resources: {accelerators: A100:6, cpus: 16, memory: 16GiB}"
    own = "    colocate: trainer\n    resources: {accelerators: A100:2, cpus: 4, memory: 8GiB}"
    job = Job.load(
        SHARED.replace("    num_nodes: 2", gpus)
        .replace("    colocate: trainer", own)
        .replace("  trainer:", "  judge: {run: judge}\n  trainer:")
    )
    assert services(job) == ["server", "judge"] and job.num_nodes == 5
    assert (machines(job), gpus_of_nodes(job)) == ([0, 1, 0, 1, 2], [6, 6, 2, 2, 0])
    parts = [(one.resources, nodes, roles) for one, nodes, roles in on_own_machines(job)]
    assert [(each.gpus, each.cpus, each.memory_bytes, nodes, roles) for each, nodes, roles in parts] == [
        (8, 20, 24 << 30, 2, 2),
        (0, None, None, 1, 1),
    ]
    part = job.replace(resources={"accelerators": "A100:6"})
    assert [(one.resources.cpus, one.resources.memory) for one, *_ in on_own_machines(part)][0] == (None, None)
    made = [(role["name"], role.get("colocate")) for role in Manifest.of(job, "r", 1).to_dict()["roles"]]
    assert made == [("trainer", None), ("server", "trainer"), ("judge", None)]
    assert Job.from_dict(job.to_dict()) == Job.from_dict(job.to_dict(given=True)) == job.replace() == job
    fewer = Job.from_dict(job.to_dict(given=True) | {"roles": {**job.to_dict(given=True)["roles"], "trainer": {}}})
    assert (fewer.roles["server"].num_nodes, job.roles["server"].num_nodes) == (1, 2)


def test_a_role_on_the_nodes_of_another_has_no_gpus_where_it_names_none():
    job = Job.load(SHARED.replace("source: .", "source: .\nresources: {accelerators: A100:6}"))
    assert gpus_of_nodes(job) == [6, 6, 0, 0]
    assert (machines(Job.load(SHARED)), gpus_of_nodes(Job.load(SHARED))) == ([0, 1, 0, 1], [None, None, 0, 0])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("colocate: trainer", "colocate: learner", "11: roles.server.colocate names learner, no role of this job"),
        ("colocate: trainer", "colocate: server", "11: roles.server.colocate names server, which has no nodes of its own"),
        ("source: .", "source: .\nresources: {accelerators: A100:6}", ""),
        (
            "source: .",
            "source: .\nresources: {accelerators: H100:6}",
            "13: roles.server.resources.accelerators is A100, and the nodes of trainer, which it shares, have H100",
        ),
        ("num_nodes: 2", "colocate: server", "7: roles.trainer.colocate is for services, and this is the main role"),
        ("colocate: trainer", "colocate: trainer\n    num_nodes: 3", "12: roles.server.num_nodes is 3, and trainer, whose"),
        ("    num_nodes: 2", "    num_nodes: 2\n    ports: [8000]", "10: roles.server.ports uses port 8000 as trainer does"),
        ("colocate: trainer", "colocate: trainer\n  judge:\n    run: judge\n    colocate: server",
         "14: roles.judge.colocate names server, which has no nodes of its own"),
        ("accelerators: A100:2", "disk_gb: 100", "12: roles.server.resources.disk_gb is that of the nodes of trainer"),
        ("source: .", "source: .", "12: roles.server.resources.accelerators asks for GPUs of nodes of which trainer takes"),
    ],
)  # fmt: skip
def test_what_cannot_share_nodes_is_refused_with_its_line(old: str, new: str, said: str):
    text = SHARED.replace("colocate: trainer", "colocate: trainer\n    resources: {accelerators: A100:2}")
    text = text.replace(old, new, 1)
    if not said:
        Job.load(text)
        return
    found = problems(text)
    assert any(each.startswith(said) for each in found), found


def test_a_value_that_may_be_a_secret_is_not_repeated():
    assert "hunter2" not in str(problems(FILE.replace("{VERSION: 1.10}", "{PASSWORD: [hunter2]}")))
    job = Job.load(FILE.replace("VERSION: 1.10", "HF_TOKEN: hf_" + "aB3dE5gH7j" * 3 + "aBcD"))
    assert [each.path for each in find_keys(job)] == ["roles.server.env.HF_TOKEN"]


def test_two_nodes_of_one_machine_share_no_port():
    job = Job.load(FILE)
    assert [each.path for each in find_shared_ports(job)] == ["roles.server.ports"]
    single = FILE.replace("num_nodes: 3", "num_nodes: 1")
    assert not list(find_shared_ports(Job.load(single)))
    both = Job.load(single.replace("    num_nodes: 2", "    ports: [8000]"))
    assert "uses port 8000 as trainer does" in next(find_shared_ports(both)).message


def test_a_rank_is_one_of_its_role():
    roles = {"trainer": {"num_nodes": 2}, "server": {"run": "serve", "num_nodes": 2}}
    job = Job(entrypoint="train.py", processes_per_node=3, roles=roles)
    plan = object.__new__(Plan)
    object.__setattr__(plan, "manifest", Manifest.of(job, "r", 1).to_dict())
    inside = Inside(None, SimpleNamespace(plan=plan), None)
    assert (inside.node_of(None, 5), inside.node_of(3, None), inside.node_of(None, None)) == (1, 3, 0)
    with pytest.raises(BadRequest, match="there is no rank 6: they are counted from 0, and the last is 5"):
        inside.node_of(None, 6)
    assert (inside.node_of(None, None, "server"), inside.node_of(None, 1, "server")) == (2, 3)
    with pytest.raises(BadRequest, match="there is no rank 2: "):
        inside.node_of(None, 2, "server")
    with pytest.raises(BadRequest, match="the run has no role jury"):
        inside.node_of(None, None, "jury")


@pytest.mark.parametrize(("own", "started"), [({}, 1), ({"processes_per_node": 8}, 8)])
def test_a_service_is_one_process_of_a_node_whatever_gpus_it_has(own, started):
    server = {"entrypoint": "serve.py", "ready": "tcp://:8000", **own}
    roles = {"trainer": {"entrypoint": "train.py"}, "server": server}
    made = Manifest.of(Job(resources={"accelerators": "A100:8"}, roles=roles), "r", 1)
    assert made.processes_per_node == 8 and made.roles[1]["processes_per_node"] == started


def test_ray_starts_around_the_program_of_a_role_and_refuses_what_starts_processes_itself(tmp_path):
    roles = {"trainer": {"entrypoint": ["python", "app.py"], "ray": True, "num_nodes": 2}, "server": {"run": "serve"}}
    job = Job.from_dict({"source": str(tmp_path), "roles": roles})
    assert (job.form, job.argv(), job.processes) == ("command", ["python", "app.py"], 1)
    made = Manifest.of(job, "r", 1)
    assert (made.form, made.argv) == ("script", (RAY, "--", "python", "app.py")) and made.processes_per_node == 1
    service = {"trainer": {"entrypoint": "a.py"}, "server": {"entrypoint": "serve.py", "ray": True}}
    main, server = Manifest.of(Job.from_dict({"source": str(tmp_path), "roles": service}), "r", 1).roles
    assert "argv" not in main and (server["form"], server["argv"]) == ("script", [RAY, "serve.py"])
    for keys, path in (
        ({"run": "app"}, "run"),
        ({"entrypoint": "a.py", "processes_per_node": 2}, "processes_per_node"),
    ):
        with pytest.raises(BadJob) as refused:
            Job.from_dict({"source": str(tmp_path), "ray": True, **keys})
        assert [problem.path for problem in refused.value.problems] == [path]
