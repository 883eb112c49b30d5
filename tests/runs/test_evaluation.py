"""`cloudtrain eval`: the job that it makes, what it refuses, and where the results are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloudtrain.errors import BadJob, BadRequest
from cloudtrain.events import Event, State, Status
from cloudtrain.history.evaluations import store_results
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import Process
from cloudtrain.runs.planning.plan import Planner
from cloudtrain.runs.run import Run
from cloudtrain.runs.sending import handover
from cloudtrain.runs.sending.exactly_once import ExactlyOnce, Submitted
from cloudtrain.runs.submit import Submitter
from cloudtrain.source.bundle import Bundle
from tests.runs.platform import Platform, look
from tests.runs.steps import newest
from tests.runs.test_run_inputs import ended

FILES = {"config.json": "{}", "tokenizer.json": "{}"}


@pytest.fixture
def store(home: Path) -> Store:
    return Store(home)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "test.jsonl"
    file.write_text('{"text": "one"}\n')
    return file


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list:
    """The plans and bundles of evaluations, which are not started: intents without a process."""
    plans: list = []

    def send(self, plan, bundle, *, key=None, parent=None):
        self.store.intend(plan, identity="", owner=Process.here(), key=key, parent=parent)
        plans.append((plan, bundle))
        return Submitted(plan.run_id)

    monkeypatch.setattr(ExactlyOnce, "send_once", send)
    return plans


def trained(store: Store, job, state=State.SUCCEEDED, files=FILES) -> Run:
    return Run(ended(store, job, state, **files), store, watch=False)


def metrics(store: Store, run: Run, **curves: list[tuple[int, float]]) -> None:
    """Add the metrics of a training."""
    from cloudtrain.events import Point, rows

    attempt_id, seq = run.attempts[-1].attempt_id, 0
    for name, points in curves.items():
        for step, value in points:
            seq += 1
            event = Event(attempt_id, 0, seq, "2026-01-01T00:00:00Z", "metric")
            store.record(attempt_id, metrics=rows(event, [Point(step, name, value)]))


def test_the_job_reads_the_model_and_brings_the_data(store, job, data, sent, home, tmp_path, monkeypatch):
    run = trained(store, job.replace(env={"A": "b"}))
    metrics(store, run, loss=[(10, 2.0), (20, 1.0)])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "tasks").mkdir(parents=True)
    (tmp_path / "own" / "tasks" / "t.yaml").write_text("task: t\n")
    made = run.evaluate(
        data, tasks=["t", "u"], include_path="own/tasks", prompts=["a b"], limit=3, every_checkpoint=False
    )
    plan, bundle = sent[0]
    assert made.record.parent == run.run_id and plan.job["labels"]["evaluates"] == run.run_id
    assert plan.job["name"] == "eval-mine" and plan.target == "local" and plan.job["env"] == {"A": "b"}
    assert plan.job["inputs"]["model"]["uri"] == str(home / "runs" / run.run_id / "model")
    assert plan.manifest["argv"] == [
        ".cloudtrain/evaluate_model.py", "--step", "20", "--data", "data/test.jsonl", "--tasks", "t", "u",
        "--include_path", "own/tasks", "--prompt", "a b", "--limit", "3",
    ]  # fmt: skip
    names = {file.path for file in bundle.files}
    assert {"data/test.jsonl", "own/tasks/t.yaml", "requirements.txt"} == {n for n in names if n[0] != "."}
    stored = Bundle.stored(home / "bundles", bundle.sha256)
    stored.extract(tmp_path / "out")
    assert (tmp_path / "out" / "requirements.txt").read_text() == "lm-eval==0.4.13\n"
    assert not list(home.glob(".eval-*")) and plan.job["environment"]["requirements"] == "requirements.txt"


def test_of_the_shared_trainer_it_reads_as_that_did_and_finds_the_base_of_an_adapter(
    store, source, data, sent, tmp_path
):
    from cloudtrain.job.job import Job

    (tmp_path / "base").mkdir()
    job = Job.from_dict({
        "name": "mine", "source": str(source), "trainer": True, "inputs": {"model": str(tmp_path / "base")},
        "hyperparameters": {"model": "input:model/small", "use_peft": True, "block_size": 64, "dataset": "x.txt"},
    })  # fmt: skip
    (source / "x.txt").write_text("x")
    run = trained(store, job, files={"adapter_config.json": "{}"})
    run.evaluate(data)
    plan = sent[0][0]
    assert plan.job["inputs"]["base"]["uri"] == str(tmp_path / "base")
    words = plan.manifest["argv"]
    assert words[words.index("--base") + 1] == "input:base/small" and words[words.index("--block_size") + 1] == "64"


def test_the_base_of_an_adapter_comes_from_the_source_of_its_training(store, source, data, sent, tmp_path):
    from cloudtrain.job.job import Job

    (source / "data" / "tiny").mkdir(parents=True)
    (source / "data" / "tiny" / "config.json").write_text("{}")
    (source / "x.jsonl").write_text('{"prompt": "2+2?", "completion": "4"}\n')
    given = {"model": "./data/tiny", "use_peft": True, "dataset": "x.jsonl", "task": "chat"}
    job = Job.from_dict({"name": "mine", "source": str(source), "trainer": True, "allow_large": ["*.safetensors"],
                         "hyperparameters": given})  # fmt: skip
    run = trained(store, job, files={"adapter_config.json": "{}"})
    (source / "data" / "tiny" / "config.json").write_text('{"changed": 1}')  # the training's source counts
    run.evaluate(data)
    plan, bundle = sent[-1]
    words = plan.manifest["argv"]
    assert words[words.index("--base") + 1] == "data/tiny" and plan.job["allow_large"] == ["*.safetensors"]
    assert words[words.index("--task") + 1] == "chat"
    assert {("data/tiny/config.json", 2), ("data/test.jsonl", 16)} == {file[:2] for file in bundle.files}
    assert not list(store.home.glob(".eval-*"))
    for more in ({"model": "org/tiny"}, {"merge_adapter": True}):  # of the hub; a whole model
        other = trained(store, job.replace(hyperparameters=given | more), files=FILES)
        other.evaluate(data)
        assert "--base" not in sent[-1][0].manifest["argv"] and len(sent[-1][1].files) == 1


def test_what_cannot_be_evaluated_is_refused_before_anything_is_sent(store, job, data, sent, tmp_path):
    good = trained(store, job)
    for keys, message in (
        ({}, "there is nothing to evaluate"),
        ({"data": tmp_path / "no.jsonl"}, "no.jsonl does not exist on this machine"),
        ({"data": tmp_path}, "does not exist on this machine"),
        ({"tasks": ["t"], "include_path": tmp_path / "no"}, "is not a folder on this machine"),
        ({"data": data, "include_path": tmp_path}, "--include-path works only together with --tasks"),
    ):
        with pytest.raises(BadRequest, match=message):
            good.evaluate(**keys)
    with pytest.raises(BadRequest, match=r"is not a folder of transformers.*it has weight\.txt"):
        trained(store, job, files={"weight.txt": "1"}).evaluate(data)
    with pytest.raises(BadRequest, match="has no tokenizer; it has config.json"):
        trained(store, job, files={"config.json": "{}"}).evaluate(data)
    for run, message in (
        (trained(store, job, files={}), "has no model"),
        (trained(store, job, State.FAILED), "has ended FAILED, so its model may be incomplete"),
    ):
        with pytest.raises(BadJob) as refused:
            run.evaluate(data)
        assert message in str(refused.value)
    with pytest.raises(BadJob) as refused:
        good.evaluate(data, every_checkpoint=True)
    assert "has no checkpoints" in str(refused.value)
    assert not sent


def test_the_model_of_a_live_run_is_awaited(store, job, data, sent):
    for files in ({}, {"weight.txt": "1"}):  # what a live run's folder has before the model is saved
        run = trained(store, job, State.RUNNING, files)
        (store.home / "runs" / run.run_id / "model").mkdir(exist_ok=True)
        run.evaluate(data)
        assert sent[-1][0].job["after"] == [run.run_id]


def evaluated(store: Store, run: Run, job, results: list[tuple[int, bool, dict[str, float]]]) -> None:
    """End an evaluation of a run with these results."""
    plan = Planner("local", home=store.home).plan(job.replace(labels={"evaluates": run.run_id}))
    store.intend(plan, identity="", owner=Process.here())
    events = [
        Event(
            plan.attempt_id, 0, at, f"2026-01-01T00:00:0{at}Z", "evaluation", {"step": s, "final": f, "values": values}
        )
        for at, (s, f, values) in enumerate(results)
    ]
    store.record(plan.attempt_id, events=events)
    for _ in range(2):  # a watcher that was killed behind it does it again
        store_results(store, store.attempts(plan.run_id)[-1])


def test_results_are_curves_of_the_evaluated_run_and_do_not_double(store, job, cli, monkeypatch):
    monkeypatch.setattr(handover, "start", lambda *_, **__: None)  # `ls` wants a watcher for runs that nothing has sent
    run, name = trained(store, job), "eval/test/loss"
    metrics(store, run, loss=[(10, 2.0), (20, 1.0)])
    evaluated(store, run, job, [(10, False, {name: 3.0}), (0, True, {name: 2.0, "loss": 99.0})])
    assert [(row.step, row.value) for row in run.metrics(name)] == [(10, 3.0), (20, 2.0)]
    evaluated(store, run, job, [(20, True, {name: 1.5})])
    assert [(row.step, row.value) for row in run.metrics(name)] == [(10, 3.0), (20, 1.5)]
    (summary,) = [each for each in store.curves.summary(run.run_id) if each.name == name]
    assert (summary.points, summary.lowest, summary.highest, summary.last, summary.step) == (2, 1.5, 3.0, 1.5, 20)
    assert [(point.step, point.value) for point in store.curves.points(run.run_id, name)] == [(10, 3.0), (20, 1.5)]
    assert [(row.step, row.value) for row in run.metrics("loss")] == [(10, 2.0), (20, 1.0)]
    listed = json.loads(cli("ls", f"metric.{name}<1.6", "--columns", f"metric.{name}", "--json")[1])
    assert [row["run_id"] for row in listed] == [run.run_id]
    assert " 1.5" in cli("ls", "--columns", f"metric.{name}")[1]
    other = trained(store, job)
    evaluated(store, other, job, [(0, True, {name: 4.0})])
    assert [(row.step, row.value) for row in other.metrics(name)] == [(0, 4.0)]
    compared = cli("diff", run.run_id, other.run_id)[1]
    assert next(line.split() for line in compared.splitlines() if name in line) == [name, "1.5", "4"]


def test_the_end_of_an_evaluation_names_the_file_of_its_samples(store, job, data, sent, capsys):
    from cloudtrain.cli.view.summary import print_end

    made = trained(store, job).evaluate(data)
    attempt = made.attempts[-1].attempt_id
    for at, name in enumerate(("other", "samples")):
        shown = {"name": name, "file": f"logged/{name}-00000024-1.json"}
        store.record(attempt, events=[Event(attempt, 0, at, "2026-01-01T00:00:00Z", "media", shown)])
    print_end(made, Status(State.SUCCEEDED), [])
    assert "outputs/logged/samples-00000024-1.json, of what cloudtrain fetch copies" in capsys.readouterr().out
    file = store.home / "runs" / made.run_id / "outputs" / "logged" / "samples-00000024-1.json"
    file.parent.mkdir(parents=True)
    file.write_text("[]")
    print_end(made, Status(State.SUCCEEDED), [])
    assert str(file) in capsys.readouterr().out


def test_of_an_evaluation_that_failed_no_rerun_with_a_source_is_proposed(store, job, data, sent, cli):
    run = trained(store, job)
    made = run.evaluate(data)
    store.set_status(made.run_id, Status(State.FAILED, 78))
    shown = cli("show", made.run_id)[1]
    assert f"cloudtrain eval {run.run_id} ..." in shown and "rerun" not in shown


def test_an_evaluation_waits_for_a_run_that_has_not_ended(platform, job, data):
    run = Submitter("platform", watch=False).submit(job)
    run.acknowledge()
    made = run.evaluate(data, target="local")
    assert made.record.job["after"] == [run.run_id] and made.record.status.reason.startswith(f"waits for {run.run_id}")
    assert any("has not ended yet" in note for note in made.notes)
    assert newest(made) not in platform.attempts
    Platform.finish(newest(run), State.FAILED, 1)
    look(run)
    look(made, 3)
    assert made.record.status == Status(State.CANCELLED, None, f"skipped: {run.run_id} failed",
                                        ended_at=made.record.status.ended_at)  # fmt: skip
