"""Law 7 on Vertex's own restarts: machines are taken away at random steps, and the losses are those of the unbroken run."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloudtrain import events
from cloudtrain.backends.vertex.backend import VertexBackend
from cloudtrain.events import State
from cloudtrain.job.job import Job
from cloudtrain.simulators.vertex.server import Simulator
from cloudtrain.source.bundle import Bundle
from tests.conftest import wait_for
from tests.entrypoints.training import TINY, texts
from tests.seed import first_seed

STEPS = 40

pytestmark = [pytest.mark.train, pytest.mark.timeout(900)]


@pytest.fixture
def simulator(tmp_path: Path) -> Iterator[Simulator]:
    with Simulator(tmp_path / "simulator") as made:
        yield made


def losses(backend: VertexBackend, handle: str) -> dict[int, float]:
    loss_of_step: dict[int, float] = {}
    for line in backend.logs(handle):
        parsed = events.parse(line.text)
        if parsed and parsed[0] == "metric" and "loss" in parsed[1]:
            step = int(parsed[1]["step"])
            assert loss_of_step.get(step, parsed[1]["loss"]) == parsed[1]["loss"], (
                f"step {step} was learned twice, differently"
            )
            loss_of_step[step] = parsed[1]["loss"]
    return loss_of_step


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_spot_losses_at_random_steps_change_no_loss(simulator: Simulator, tmp_path: Path, strategy: str):
    source = tmp_path / "source"
    texts(source / "texts")
    place = {"project": "local", "bucket": "local", "endpoint": simulator.url, "image": "any:1", "client": "rest"}
    backend = VertexBackend({**place, "settle_s": 1.0}, tmp_path / "runs")
    data = ["--dataset", "texts/*.txt", "--max_train_samples", "35", "--max_eval_samples", "5"]
    job = Job.from_dict(
        {
            "name": "spot",
            "source": str(source),
            "args": [*data, *TINY, "--max_steps", str(STEPS), "--per_device_train_batch_size", "2", "--dropout", "0.1"],
            "num_nodes": 2,
            "parallelism": {"strategy": strategy},
            "resources": {"use_spot": True},
            "checkpoint": {"every": "7 steps"},
            "env": {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        }
    )
    bundle = Bundle.make(source, tmp_path / "bundles")

    def started(run_id: str) -> str:
        return backend.submit(backend.plan(job, bundle, run_id), bundle)

    def final(handle: str):
        status = backend.status(handle)
        return status if status.state.final else None

    unbroken = started("unbroken")
    status = wait_for(lambda: final(unbroken), "the unbroken run", 280)
    assert status.state is State.SUCCEEDED, status
    wanted = losses(backend, unbroken)
    assert sorted(wanted) == list(range(1, STEPS + 1))

    broken = started("broken")
    number = broken.rpartition("/")[2]
    draw = random.Random(first_seed())
    for least, notice in ((draw.randint(3, 8), True), (draw.randint(18, 24), False)):
        wait_for(lambda least=least: max(losses(backend, broken), default=0) >= least, f"step {least}", 200)
        simulator.jobs.preempt(number, draw.choice(["workerpool0-0", "workerpool1-0"]), notice=notice)
    status = wait_for(lambda: final(broken), "the broken run", 280)
    assert status.state is State.SUCCEEDED, status
    world_events = [
        event[1] for line in backend.logs(broken) if (event := events.parse(line.text)) and event[0] == "world"
    ]
    worlds = [world for world in world_events if "platform" in world]
    assert len(worlds) == 6 and all(world["world_size"] == 2 and world["platform"] == "vertex" for world in worlds)
    assert losses(backend, broken) == wanted
    assert any("resumed from" in line.text for line in backend.logs(broken))
    if strategy == "fsdp":  # each replica has brought its own part
        names = simulator.storage.names("local", "cloudtrain/broken/checkpoints/step-")
        newest = max(name for name in names if name.endswith("/COMPLETE")).removesuffix("COMPLETE")
        marked = json.loads(simulator.storage.read("local", f"{newest}COMPLETE"))["files"]
        assert {f"{newest}{name}" for name in marked} <= set(names)
        assert {entry.get("node", 0) for entry in marked.values()} == {0, 1}
    # Every start, the platform's own too, has claimed the run by a write that only one can do.
    claims = simulator.storage.names("local", "cloudtrain/broken/epochs/")
    records = [json.loads(simulator.storage.read("local", name)) for name in claims]
    assert [(record["epoch"], record["attempt"]) for record in records] == [(1, 1), (2, 1), (3, 1)]
