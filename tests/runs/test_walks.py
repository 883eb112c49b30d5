"""A run that moves between targets: each attempt's request is that of a first plan there, wherever the run was before."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends import registry
from cloudtrain.events import State, Status
from cloudtrain.job.job import Job
from cloudtrain.nodes.process import Process
from cloudtrain.runs.planning import attempts
from cloudtrain.runs.planning.plan import Planner
from cloudtrain.runs.sending.resume import plan_next
from cloudtrain.runs.submit import Submitter

MOVES = 3  # at most
ROLE = "arn:aws:iam::123456789012:role/train"
CONFIG = f"""
[targets.here]
backend = "local"

[targets.us]
backend = "sagemaker"
region = "us-east-1"
bucket = "bucket-us"
role = "{ROLE}"
usd_per_hour = 3

[targets.eu]
backend = "sagemaker"
region = "eu-west-1"
bucket = "bucket-eu"
role = "{ROLE}"
image = "registry/eu:2"

[targets.pods]
backend = "kubernetes"
namespace = "team"
python = "python3.11"

[targets.google]
backend = "vertex"
project = "project"
bucket = "bucket-google"
region = "europe-west4"
usd_per_hour = 7
"""
TARGETS = {"here": "local", "us": "sagemaker", "eu": "sagemaker", "pods": "kubernetes", "google": "vertex"}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "sagemaker": [{"image": "registry/job:1"}, {"prefix": "walks"}, {"image": "registry/job:1", "prefix": "others"}],
    "kubernetes": [{"shm": "2Gi"}, {"image": "registry/pods:3"}],
    "vertex": [{"image": "registry/google:4"}, {"prefix": "walks"}],
}
MACHINES = {"sagemaker": "ml.g5.xlarge", "vertex": "g2-standard-4"}


@pytest.fixture
def project(quick_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(quick_folder / "home"))
    folder = quick_folder / "project"
    folder.mkdir()
    (folder / "train.py").write_text("print(1)\n")
    (folder / "cloudtrain.toml").write_text(CONFIG)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("KUBECONFIG", str(folder / "none"))
    return folder


def drawn_job(draw: random.Random, target: str) -> dict[str, Any]:
    """Return a job as a person writes it, for a first target."""
    backend = TARGETS[target]
    options = {name: dict(draw.choice(choices)) for name, choices in OPTIONS.items() if draw.random() < 0.6}
    resources: dict[str, Any] = (
        {} if target == "here" else {"accelerators": "L4:1" if backend == "vertex" else "A10G:1"}
    )
    if backend in MACHINES and draw.random() < 0.4:
        resources = {"instance_type": MACHINES[backend], "usd_per_hour": 5}
    job = {"name": "walk", "source": ".", "entrypoint": "train.py", "environment": {"requirements": "none"},
           "output": "s3://results/x", "options": options, "resources": resources}  # fmt: skip
    return job | ({"image": "registry/any:0"} if draw.random() < 0.7 else {})


def job_for(job: Mapping[str, Any], first: str, target: str) -> dict[str, Any]:
    """Return what of a job as written counts on a target, with the accelerators that it offers."""
    kind, backend = registry.backend_class(TARGETS[target]), TARGETS[target]
    resources = dict(job["resources"])
    if backend != TARGETS[first]:
        resources.pop("instance_type", None)
    if target != first:
        resources.pop("usd_per_hour", None)
    options = {name: value for name, value in job["options"].items() if name != TARGETS[first] or target == first}
    kept = {**job, "resources": resources, "options": options}
    if target != first and "image" not in kind.traits.keys:
        kept.pop("image", None)
    return kept


@pytest.mark.parametrize(("seed", "walks"), [(57, 80), pytest.param(58, 200, marks=pytest.mark.long)])
def test_each_attempt_of_a_walk_is_planned_as_a_first_one_is_there(project, seed: int, walks: int):
    draw = random.Random(seed)
    moves = refused = back = 0
    for number in range(walks):
        first = draw.choice(list(TARGETS))
        written = drawn_job(draw, first)
        submitter = Submitter(first, watch=False)
        try:
            resolved = submitter.resolve(Job.from_dict(written))
            bundle = submitter.package(resolved)
            plan = submitter.plan_of(resolved, bundle)
        except Exception as error:
            assert "problem" in str(error), error
            continue
        store = submitter.store
        assert store.intend(plan, identity=plan.identity, owner=Process.here())
        visited = [first]
        for _ in range(draw.randint(1, MOVES)):
            store.record(plan.attempt_id, status=Status(State.FAILED, 1))
            store.set_status(plan.run_id, Status(State.FAILED, 1))
            target = draw.choice([name for name in TARGETS if name != visited[-1]])
            earlier = store.attempts(plan.run_id)
            wanted, problem = fresh(written, first, target, bundle, earlier)
            try:
                plan, _, _ = plan_next(store, earlier, target=target)
            except Exception as error:
                assert problem, f"walk {number} {visited} -> {target}: {error}"
                refused += 1
                continue
            assert not problem, f"walk {number} {visited} -> {target}: {problem}"
            assert plan.request == wanted.request, f"walk {number} {visited} -> {target}"
            assert plan.price == wanted.price
            assert store.next_attempt(plan, owner=Process.here(), resume=True)
            back += target in visited
            visited.append(target)
            moves += 1
    assert moves > 60 and back > 8 and refused > 2, (moves, back, refused)


def fresh(written: Mapping[str, Any], first: str, target: str, bundle, earlier):
    """Return the plan of a job at a target as a person would make it there, and why it is refused."""
    planner = Planner(target)
    try:
        resolved = planner.resolve(Job.from_dict(job_for(written, first, target)))
        given = resolved.job.checkpoint
        carried = attempts.carry_checkpoints(given.model_dump(), resolved.backend, earlier[-1].plan, False)
        resolved.job = resolved.job.model_copy(update={"checkpoint": given.model_copy(update=carried)})
        return planner.plan_of(resolved, bundle, earlier=earlier), ""
    except Exception as error:
        return None, str(error)
