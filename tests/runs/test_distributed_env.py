"""One process is one process: it runs as under plain python, unless its script needs the variables of a rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloudtrain.errors import BadJob
from cloudtrain.job.job import Job
from cloudtrain.runs.planning.plan import Planner
from cloudtrain.source.node_code import module
from tests.conftest import TORCH_AT_EXIT
from tests.runs.test_entries import env, project, submit  # noqa: F401 - a fixture

pytestmark = [pytest.mark.usefixtures("census"), pytest.mark.timeout(900)]  # torch is imported, slowly
WORLD = module("launcher.environment").WORLD
SHOW = f"""
import json, os
print("SEEN", json.dumps({{k: v for k, v in os.environ.items() if k in {(*WORLD, "ACCELERATE_USE_CPU")}}}))
"""
# The head of nanoGPT's train.py (https://github.com/karpathy/nanoGPT, 2026-11-23), as it is started on a CPU.
NANOGPT = """
import os
import torch
from torch.distributed import destroy_process_group, init_process_group
backend = 'nccl' # 'nccl', 'gloo', etc.
device = 'cpu'
ddp = int(os.environ.get('RANK', -1)) != -1 # is this a ddp run?
if ddp:
    init_process_group(backend=backend)
    ddp_rank = int(os.environ['RANK'])
    ddp_local_rank = int(os.environ['LOCAL_RANK'])
    device = f'cuda:{ddp_local_rank}'
    torch.cuda.set_device(device)
    master_process = ddp_rank == 0
else:
    master_process = True
layer = torch.nn.Linear(2, 2).to(device)
print("TRAINED", master_process, tuple(layer(torch.ones(1, 2)).shape))
if ddp:
    destroy_process_group()
"""
PLAIN_TORCH = """
import torch.distributed as dist
dist.init_process_group("gloo")
print("WORLD", dist.get_world_size())
dist.destroy_process_group()
"""


def seen(log: str) -> dict[str, str]:
    return json.loads(next(line for line in log.splitlines() if "SEEN" in line).partition("SEEN ")[2])


def notes(folder: Path, **changes: object) -> list[str]:
    job = {"name": "x", "source": str(folder), "entrypoint": "train.py", **changes}
    return [note for note in Planner().plan(job).notes if "RANK" in note]


def test_one_process_sees_none_of_a_ranks_variables(project: Path):  # noqa: F811
    (project / "train.py").write_text(SHOW)
    code, log, _ = submit(project, "train.py")
    assert (code, seen(log)) == (0, {})
    code, log, _ = submit(project, "train.py", "--set", "distributed_env=always")
    assert code == 0 and set(seen(log)) == {*WORLD, "ACCELERATE_USE_CPU"}
    code, log, _ = submit(project, "train.py", "--set", "processes_per_node=2")
    assert code == 0 and seen(log)["WORLD_SIZE"] == "2" and set(seen(log)) == {*WORLD, "ACCELERATE_USE_CPU"}


def test_the_plan_says_which_it_chose_and_why(project: Path):  # noqa: F811
    (project / "train.py").write_text(SHOW)
    assert notes(project) == notes(project, distributed_env="always") == notes(project, num_nodes=2) == []
    (project / "train.py").write_text(PLAIN_TORCH)
    [note] = notes(project)
    assert note.endswith("because train.py:3 calls init_process_group (distributed_env)")
    (project / "leaf.py").write_text(PLAIN_TORCH)
    (project / "train.py").write_text(SHOW)
    assert notes(project) == []
    assert (
        "leaf.py:3 calls init_process_group, but train.py does not load that file"
        in Planner().plan({"name": "x", "source": str(project), "entrypoint": "train.py"}).notes
    )


def test_the_plan_names_the_framework_whose_variables_ranks_get(project: Path):  # noqa: F811
    (project / "train.py").write_text("import jax\n")
    job = {"name": "x", "source": str(project), "entrypoint": "train.py"}

    def notes_and_manifest(**changes: object) -> tuple[list[str], str]:
        plan = Planner().plan({**job, **changes})
        return [note for note in plan.notes if "distributed_env" in note], plan.manifest.get("framework", "")

    chosen = "train.py imports jax: JAX_COORDINATOR_ADDRESS and OMPI_COMM_WORLD_* are set (distributed_env)"
    assert notes_and_manifest(num_nodes=2) == ([chosen], "jax")
    assert notes_and_manifest(num_nodes=2, distributed_env="tensorflow") == ([], "tensorflow")
    assert notes_and_manifest()[1] == ""
    (project / "train.py").write_text("import jax\njax.distributed.initialize()\n")
    assert notes_and_manifest()[1] == "jax"


@pytest.mark.parametrize(
    ("changes", "has"),
    [
        ({}, False),
        ({"parallelism": {"strategy": "ddp"}}, False),
        ({"parallelism": {"strategy": "fsdp"}}, True),
        ({"parallelism": {"strategy": "zero2"}}, True),
        ({"parallelism": {"accelerate_config": "a.yaml"}}, True),
        ({"distributed_env": "always"}, True),
        ({"num_nodes": 2, "min_nodes": 1}, True),
        ({"resources": {"accelerators": "A100:2"}}, True),
        ({"entrypoint": ["bash", "run.sh"]}, True),  # a command: it never has a rank's own, and keeps MASTER_ADDR
    ],
)
def test_which_jobs_have_the_variables(changes: dict, has: bool):
    assert Job(**{"entrypoint": "train.py", **changes}).has_rank_env is has


def test_what_runs_once_per_node_has_no_such_choice():
    with pytest.raises(BadJob, match="distributed_env"):
        Job(run="python train.py", distributed_env="always")


def test_scripts_of_both_kinds_run(project: Path):  # noqa: F811
    (project / "train.py").write_text(NANOGPT)
    code, log, _ = submit(project, "train.py")
    assert code == 0 and "TRAINED True (1, 2)" in log, log
    (project / "train.py").write_text(PLAIN_TORCH)
    code, log, _ = submit(project, "train.py")
    assert code == 0 and "WORLD 1" in log, log


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    "script",
    [
        "test_sync",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("test_ops", "test_script")),
    ],
)
def test_accelerates_own_tests_pass(
    project: Path,  # noqa: F811
    script: str,
    processes: int,
    monkeypatch: pytest.MonkeyPatch,
):
    """They pass under `accelerate launch` of the same number of processes."""
    monkeypatch.setenv("PYTHONPATH", TORCH_AT_EXIT)
    entry = f"-m accelerate.test_utils.scripts.{script}"
    code, log, _ = submit(
        project, job=f"entrypoint: {entry}\nprocesses_per_node: {processes}\nenv: {{OMP_NUM_THREADS: 1}}\n"
    )
    assert code == 0, log
