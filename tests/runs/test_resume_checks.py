"""A next attempt that is laid out anew, and a rerun, are checked as a first plan is: by the files of their bundle."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudtrain import events
from cloudtrain.backends import registry
from cloudtrain.backends.api import Plan
from cloudtrain.backends.checkpoints import FOLDERS
from cloudtrain.cli.resume import command
from cloudtrain.errors import BadJob, BadRequest, CloudtrainError
from cloudtrain.events import State, Status
from cloudtrain.forecast import fit
from cloudtrain.job.job import Job
from cloudtrain.nodes.process import Process
from cloudtrain.runs.sending import resume, retry
from cloudtrain.runs.sending.resume import CHANGES, can_change, describe_start, plan_next, send_copy
from cloudtrain.runs.submit import Submitter
from cloudtrain.testing.memory import MemoryBackend
from tests.runs.steps import newest, watch

LARGE = {"model": "meta-llama/Llama-3.1-8B", "dataset": "python-stdlib", "bf16": True, "block_size": 4096,
         "per_device_train_batch_size": 1}  # fmt: skip
TRAINER = {"trainer": True, "hyperparameters": LARGE, "parallelism": {"strategy": "fsdp"}}


def test_the_start_of_an_attempt_names_its_newest_checkpoint(memory, submitter, job):
    run = submitter.submit(job)
    plan = replace(run.attempts[-1].plan, attempt=2)
    assert describe_start(run.store, plan) == "attempt 2 begins from the start: no checkpoint was saved"
    for said in ({"other": 1}, {"step": 20}, {"step": 40, "written": "step-40.pt"}):
        MemoryBackend.say(newest(run), events.format("checkpoint", said))
    watch(run)
    assert describe_start(run.store, plan).startswith(
        "attempt 2 resumes from step 40, the newest checkpoint that was reported, in the run's folder on memory: step-40.pt"
    )


@pytest.mark.parametrize(
    ("event", "start"),
    [
        ({"kept": "last.pt"}, "finds last.pt in the script's folder"),
        ({"kept": "{output_dir}/a/last.pt"}, "finds a/last.pt in {output_dir}"),
        ({"kept": "{output_dir}/a/last.pt", "step": 7}, "finds step 7 in {output_dir}: a/last.pt"),
        ({"written": "x.pt"}, "resumes from the newest checkpoint in the run's folder on memory: x.pt"),
        ({"step": 3}, "resumes from step 3, the newest checkpoint that was reported, in the run's folder on memory"),
    ],
)
def test_the_start_of_an_attempt_says_where_its_checkpoint_is(
    memory, submitter, job, event: dict[str, Any], start: str
):
    run = submitter.submit(job)
    run.store.add_event(newest(run), "checkpoint", event)
    plan = replace(run.attempts[-1].plan, attempt=2)
    assert describe_start(run.store, plan) == f"attempt 2 {start}"


def test_a_checkpoint_counts_when_it_is_stored_where_the_launcher_uploads_it(memory, submitter, job):
    run = submitter.submit(job.replace(output="s3://bucket/runs"))
    plan = replace(run.attempts[-1].plan, attempt=2)
    rank = {"step": 10, "path": "/job/run/checkpoints/step-00000010.a1"}
    run.store.add_event(newest(run), "checkpoint", rank)
    run.store.add_event(newest(run), "checkpoint", {"stored": "checkpoints/step-00000005.a1"})
    assert describe_start(run.store, plan) == "attempt 2 begins from the start: no checkpoint was uploaded"
    assert retry.saved(run.store, run.run_id) == set(), "the next attempt must not be refused for want of it"
    run.store.add_event(newest(run), "checkpoint", {"stored": "checkpoints/step-00000010.a1", "seconds": 1.0})
    assert describe_start(run.store, plan) == (
        "attempt 2 resumes from step 10, the newest checkpoint that was reported, in s3://bucket/runs/" + run.run_id
    )
    assert retry.saved(run.store, run.run_id) == {newest(run)}


def test_a_next_attempt_keeps_to_the_policy_of_the_folder(memory, submitter, job, tmp_path: Path, monkeypatch):
    """Of the one where it is typed, though the first attempt knew none."""
    run = submitter.submit(job)
    MemoryBackend.finish(newest(run), State.FAILED, 1)
    watch(run)
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "policy.toml").write_text("[rules.short]\nmax_runtime = '1h'\n")
    monkeypatch.chdir(folder)
    with pytest.raises(BadRequest, match="limits.max_runtime"):
        run.resume(sets=["limits.max_runtime=2h"])
    assert len(run.attempts) == 1


@pytest.fixture
def failed(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch):
    """Store a run on Kubernetes whose first attempt has failed, and whose source is gone since; return its submitter and id."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))

    def make(script: str, **changes: Any) -> tuple[Submitter, str]:
        source = tmp_path / "source"
        source.mkdir()
        (source / "train.py").write_text(script)
        job = {"name": "checked", "source": str(source), "image": "img:1", "output": "s3://b/x", **changes}
        submitter = Submitter("kubernetes", home=home, watch=False)
        plan = submitter.plan(job)
        assert submitter.store.intend(plan, identity="checked", owner=Process.here())
        ended = Status(State.FAILED, 1, "the script failed")
        submitter.store.record(plan.attempt_id, status=ended)
        submitter.store.set_status(plan.run_id, ended)
        shutil.rmtree(source)
        return submitter, plan.run_id

    return make


def test_the_next_attempt_is_refused_what_does_not_fit_unless_forced(failed):
    submitter, run_id = failed("", **TRAINER, resources={"accelerators": "H100:8"})
    earlier, sets = submitter.store.attempts(run_id), ["resources.accelerators=L4:8"]
    with pytest.raises(BadJob, match="does not fit"):
        plan_next(submitter.store, earlier, sets)
    plan, _, _ = plan_next(submitter.store, earlier, sets, force=True)
    assert (plan.attempt_id, (plan.fit or {})["answer"]) == (f"{run_id}-a2", fit.NOT)


def test_a_rerun_is_refused_what_does_not_fit(failed):
    submitter, run_id = failed("", **TRAINER, resources={"accelerators": "H100:8"})
    given = {"sets": ["resources.accelerators=L4:8"], "source": None, "key": None, "watch": False}
    with pytest.raises(BadJob, match="does not fit"):
        send_copy(submitter.store, run_id, **given)
    with pytest.raises(CloudtrainError, match="there is no kubeconfig"):
        send_copy(submitter.store, run_id, **given, force=True)


def test_a_rerun_has_the_options_of_its_run(memory, job, monkeypatch):
    from pydantic import BaseModel

    class Options(BaseModel):
        queue: str = "short"

    monkeypatch.setattr(MemoryBackend, "options", classmethod(lambda _: Options))
    run = Submitter("memory", watch=False, queue="long").submit(job)
    run.acknowledge()
    again = run.rerun()
    assert again.run_id != run.run_id and again.record.job["options"] == {"memory": {"queue": "long"}}


@pytest.mark.parametrize("declared", [False, True])
def test_the_next_attempt_is_refused_a_layout_that_its_script_does_not_have(failed, declared: bool):
    script = "# cloudtrain: tp_size\n" if declared else "print(1)\n"
    submitter, run_id = failed(script, entrypoint="train.py", resources={"accelerators": "H100:2"})
    earlier, sets = submitter.store.attempts(run_id), ["parallelism.tp_size=2"]
    if declared:
        assert plan_next(submitter.store, earlier, sets)[0].manifest["parallelism"]["tp_size"] == 2
    else:
        with pytest.raises(BadJob, match="no code splits the model in train.py"):
            plan_next(submitter.store, earlier, sets)


def test_the_next_attempt_is_refused_a_strategy_that_nothing_carries_out(failed):
    submitter, run_id = failed("print(1)\n", entrypoint="train.py", resources={"accelerators": "H100:2"})
    with pytest.raises(BadJob, match="no file and no requirement mentions accelerate"):
        plan_next(submitter.store, submitter.store.attempts(run_id), ["parallelism.strategy=fsdp"])


@pytest.mark.parametrize("fixed", ["", "global_batch_size", "global_batch_tokens"])
def test_a_resume_on_more_nodes_says_what_becomes_of_the_batch(memory, submitter, job, fixed: str):
    run = submitter.submit(job.replace(hyperparameters={fixed: 8} if fixed else {}))
    MemoryBackend.finish(newest(run), State.FAILED, 1)
    watch(run)
    effect = "the effective batch size changes with it, unless the script divides the batch"
    _, _, notes = plan_next(run.store, run.attempts, ["num_nodes=2"])
    assert f"the world size was 1 and is 2: {'the global batch stays' if fixed else effect}" in notes
    _, _, notes = plan_next(run.store, run.attempts, ["env.A=b"])
    assert not any("world size" in note for note in notes)


@pytest.fixture
def moved(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that plans the next attempt of a failed run on another target: the plan, and its notes."""
    options = {"project": "p", "bucket": "bucket"}
    targets = {"here": {"backend": "local"}, "pods": {"backend": "kubernetes", "image": "img:2"},
               "one": {"backend": "vertex", **options, "prefix": "walks", "usd_per_hour": 3},
               "two": {"backend": "vertex", **options, "usd_per_hour": 7}}  # fmt: skip
    lines = [f"{name}.{key} = {json.dumps(value)}" for name, keys in targets.items() for key, value in keys.items()]
    (tmp_path / "cloudtrain.toml").write_text("\n".join(["[targets]", *lines]) + "\n")
    (tmp_path / "train.py").write_text("print(1)\n")
    monkeypatch.chdir(tmp_path)

    def make(first: str, target: str, saved: bool = True, **changes: Any) -> tuple[Plan, list[str]]:
        given = {"name": "left", "source": ".", "entrypoint": "train.py", "output": "gs://b/x", **changes}
        submitter = Submitter(first, watch=False)
        plan = submitter.plan(given)
        assert submitter.store.intend(plan, identity="left", owner=Process.here())
        submitter.package(submitter.resolve(Job.from_dict(given)))
        if saved:
            submitter.store.add_event(plan.attempt_id, "checkpoint", {"written": "x.pt"})
        submitter.store.record(plan.attempt_id, status=Status(State.FAILED, 1))
        next_plan, _, notes = plan_next(submitter.store, submitter.store.attempts(plan.run_id), target=target)
        return next_plan, notes

    return make


MACHINE = {"instance_type": "g2-standard-4"}
IGNORED = "g2-standard-4 is a machine type of one: it is ignored on pods"


@pytest.mark.parametrize(
    ("first", "target", "changes", "said"),
    [
        ("pods", "here", {"image": "img:1"}, "target here uses no containers: the image img:1 is ignored there"),
        (
            "one",
            "pods",
            {"image": "img:1", "resources": MACHINE},
            "g2-standard-4 is a machine type of one: it is ignored on pods",
        ),
        ("one", "two", {"image": "img:1"}, "options.vertex.prefix of one are not used on two"),
        ("one", "pods", {"image": "img:1"}, ""),
        ("one", "two", {"image": "img:1", "resources": MACHINE}, "options.vertex.prefix of one are not used on two"),
    ],
)
def test_what_does_not_go_along_to_another_target_is_said(moved, first, target, changes: dict[str, Any], said: str):
    _, notes = moved(first, target, **changes)
    found = [note for note in notes if "is ignored" in note or "are not used" in note]
    assert found == ([said] if said else [])


@pytest.mark.parametrize(("target", "price"), [("two", 7), ("pods", None), ("here", None)])
def test_the_price_of_a_machine_is_that_of_the_new_target(moved, target: str, price: float | None):
    plan, _ = moved("one", target, image="img:1")
    assert plan.job["resources"].get("usd_per_hour") == price


@pytest.mark.parametrize(
    ("keep", "saved", "packs", "said"),
    [
        (["*.pt"], True, True, True),
        (["*.pt"], True, False, False),
        (["*.pt"], False, True, False),
        ("none", True, True, False),
    ],
)
def test_kept_files_that_a_platform_packs_are_said_to_stay(moved, monkeypatch, keep, saved, packs, said: bool):
    """Its checkpoints are in another folder of the output; where one was saved the next attempt has to find it."""
    kind = registry.backend_class("vertex")
    monkeypatch.setattr(kind, "traits", replace(kind.traits, packs=packs))
    plan, notes = moved("one", "pods", saved, image="img:1", keep=keep)
    text = "files that `keep` names are not copied to pods; only checkpoints are"
    assert (text in notes) is said and not [note for note in notes if "keep" in note and note != text]
    checkpoint = plan.job["checkpoint"]
    assert (checkpoint["required"], checkpoint["folder"]) == (saved, FOLDERS[True] if packs else None)


def test_limits_alone_change_nothing_else_of_the_plan(memory, submitter, job, monkeypatch):
    """The configuration may have changed since: it counts where the next attempt is planned anew."""
    run = submitter.submit(job)
    MemoryBackend.finish(newest(run), State.FAILED, 1)
    watch(run)

    def refuse(*_: Any, **__: Any) -> None:
        raise BadRequest("the configuration is read again")

    monkeypatch.setattr(resume, "Planner", refuse)
    earlier = run.attempts
    for sets, target in (([], None), (["limits.max_runtime=2h"], None), ([], earlier[-1].plan.target)):
        plan, _, _ = plan_next(run.store, earlier, sets, target)
        assert plan.attempt == 2 and plan.job["limits"]["max_runtime"] == (
            "2h" if sets else earlier[-1].plan.job["limits"]["max_runtime"]
        )
    for sets, target in ((["env.A=b"], None), (["limits.max_runtime=2h", "env.A=b"], None), ([], "local")):
        with pytest.raises(BadRequest, match="read again"):
            plan_next(run.store, earlier, sets, target)


def test_the_help_of_resume_names_the_keys_that_it_can_change():
    listed = " ".join(str(command.help).split()).partition("can change these keys: ")[2].partition(".")[0]
    assert listed.split(", ") == list(CHANGES) and all(map(can_change, listed.split(", ")))


def test_resume_can_change_how_many_nodes_a_role_has_and_not_what_it_runs():
    assert all(map(can_change, ("num_nodes", "limits.stall", "roles.server.num_nodes", "roles.server.restart")))
    assert not any(map(can_change, ("args", "roles", "roles.server", "roles.server.run", "roles.server.num_nodes.x")))
