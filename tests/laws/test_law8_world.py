"""Law 8: the world is what was asked, or nothing begins: no rank of a wrong world ever runs."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "entrypoints"))  # as tests/entrypoints/conftest.py does
from tests.entrypoints.launching import Attempt  # noqa: E402

SHOW = "import json, os\nprint(json.dumps({n: os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE')}))\n"


def refused(attempt: Attempt) -> str:
    """Run a launcher that must refuse, and return why."""
    if not attempt.launchers:
        attempt.start()
    assert attempt.wait() == [78] * len(attempt.launchers)
    status = attempt.status()
    assert (status["state"], status["exit_code"], status["by"]) == ("FAILED", 78, "launcher")
    assert all(line[1] == -1 for node in range(len(attempt.folders)) for line in attempt.lines(node))
    return status["reason"]


@pytest.mark.parametrize(("nodes", "processes"), [(1, 1), (1, 4), (2, 2), (3, 1), (4, 2)])
def test_scripts_see_the_world_that_was_asked_for(tmp_path, nodes, processes, figure):
    with Attempt(tmp_path, SHOW, nodes=nodes, processes=processes) as attempt:
        assert attempt.run() == [0] * nodes
        size = nodes * processes
        seen = [json.loads(attempt.texts(rank, rank // processes)[0]) for rank in range(size)]
        assert [int(world["RANK"]) for world in seen] == list(range(size))
        assert {(world["WORLD_SIZE"], world["LOCAL_WORLD_SIZE"]) for world in seen} == {(str(size), str(processes))}
        (told,) = attempt.events("world")
        assert (told["nodes"], told["processes"], told["world_size"]) == (nodes, processes, size)
    figure("ranks in the world that was asked for", size)


def test_ranks_that_another_launcher_started_must_be_as_many(tmp_path, figure):
    wrong = 0
    for asked, real in product((1, 2, 3), repeat=2):
        with Attempt(tmp_path / f"{asked}-{real}", SHOW, processes=asked) as attempt:
            outer = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(real), "MASTER_ADDR": "127.0.0.1"}
            env = attempt.environment(0) | outer | {"LOCAL_WORLD_SIZE": str(real), "MASTER_PORT": "1234"}
            env.pop("CLOUDTRAIN_NODE_RANK")
            attempt.environment = lambda rank, env=env: env
            if asked == real:
                assert attempt.run() == [0]
                assert json.loads(attempt.texts(0)[0])["WORLD_SIZE"] == str(asked)
            else:
                assert refused(attempt).startswith(f"{asked} processes were requested in all")
                wrong += 1
    figure("wrong worlds refused with 78", wrong)


PLATFORMS = {
    "vertex": lambda real: {
        "CLUSTER_SPEC": json.dumps(
            {
                "cluster": {"workerpool0": ["a:2222"], "workerpool1": [f"w{n}:2222" for n in range(1, real)]},
                "task": {"type": "workerpool0", "index": 0},
            }
        )
    },
    "sagemaker": lambda real: {
        "SM_HOSTS": json.dumps([f"algo-{n + 1}" for n in range(real)]),
        "SM_CURRENT_HOST": "algo-1",
    },
    "slurm": lambda real: {
        "SLURM_JOB_ID": "1",
        "SLURM_NNODES": str(real),
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": str(real),
        "SLURM_JOB_NODELIST": ",".join(f"n{n}" for n in range(real)),
    },
}


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_platform_must_give_as_many_nodes(tmp_path, platform, figure):
    wrong = 0
    for asked, real in product((1, 2, 3), repeat=2):
        if asked == real:
            continue
        with Attempt(tmp_path / f"{asked}-{real}", SHOW, nodes=asked) as attempt:
            env = {name: text for name, text in attempt.environment(0).items() if name != "CLOUDTRAIN_NODE_RANK"}
            attempt.environment = lambda rank, env=env | PLATFORMS[platform](real): env
            attempt.start(0)
            assert refused(attempt) == f"{asked} nodes were requested, but {platform} gave {real}"
            wrong += 1
    figure("wrong worlds refused with 78", wrong)


@pytest.mark.parametrize("chosen", [None, "all"])
def test_as_many_gpus_must_be_visible(tmp_path, monkeypatch, chosen, figure):
    """A driver's tool that lists so many; `chosen` is what the backend gave to the node."""
    wrong = 0
    for asked, real in product((1, 2, 4, 8), (0, 1, 2, 4, 8)):
        tools = tmp_path / f"tools-{asked}-{real}"
        tools.mkdir()
        cards = "".join(f"echo 'GPU {n}: NVIDIA H100 (UUID: GPU-{n:08x}-0000)'\n" for n in range(real))
        (tools / "nvidia-smi").write_text(f'#!/bin/sh\n[ "$1" = -L ] || exit 1\n{cards}')
        (tools / "nvidia-smi").chmod(0o755)
        with Attempt(tmp_path / f"{asked}-{real}", SHOW, gpus_per_node=asked) as attempt:
            env = attempt.environment(0)
            env["PATH"] = f"{tools}:{env['PATH']}"
            env["CLOUDTRAIN_GPUS"] = ",".join(str(n) for n in range(real))
            if chosen is None:
                del env["CLOUDTRAIN_GPUS"]
                env.pop("CUDA_VISIBLE_DEVICES", None)
            attempt.environment = lambda rank, env=env: env
            if asked == real:
                assert attempt.run() == [0]
            else:
                assert refused(attempt).startswith(f"{asked} GPUs per node were requested")
                wrong += 1
    figure("wrong numbers of GPUs refused with 78", wrong)
