"""What is said of names that no run has, of runs that have ended, and of roles: silence would look like an answer."""

from __future__ import annotations

import json

import pytest

from cloudtrain.cli import main
from cloudtrain.errors import BadRequest
from cloudtrain.events import State
from cloudtrain.history import filters
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from cloudtrain.testing.memory import MemoryBackend
from tests.runs.steps import newest, watch


@pytest.fixture
def run(memory, job):
    made = Submitter("memory", watch=False).submit(job.replace(labels={"team": "nlp"}, hyperparameters={"lr": 0.1}))
    MemoryBackend.finish(newest(made), State.SUCCEEDED, 0)
    watch(made)
    return made


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hp.lrr>1"], "no run has hp.lrr: did you mean hp.lr?"),
        (["--", "-label.tam:x"], "no run has label.tam: did you mean label.team?"),
        (["metric.los<0.5"], "no run has metric.los"),
        (["target:memry"], "no run has target:memry: did you mean memory?"),
        (["backend:memory,slurm"], "no run has backend:slurm"),
        (["--name", "nobody"], "no run has name:nobody"),
        (["--columns", "hp.lrr"], "no run has hp.lrr: did you mean hp.lr?"),
        (["--sort", "-hp.lrr"], "no run has hp.lrr: did you mean hp.lr?"),
        (["--group", "label.tam"], "no run has label.tam: did you mean label.team?"),
    ],
)
def test_a_name_that_no_run_has_is_reported(run, words: list[str], said: str, capsys):
    capsys.readouterr()
    assert main(["ls", *words]) == 0
    assert f"note: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["hp.lr>1"],
        ["label.team:nlp"],
        ["target:mem*"],
        ["--", "-target:memory"],
        ["state:failed"],
        ["--columns", "cost,took,user"],
        ["some words"],
    ],
)
def test_a_name_that_is_known_is_not(run, words: list[str], capsys):
    capsys.readouterr()
    assert main(["ls", *words]) == 0
    assert "note:" not in capsys.readouterr().err


def test_terms_are_read_as_the_filter_reads_them():
    text = 'words "two words" -hp.lr>=1e-3 label."a b":x,"y z" state:failed'
    assert filters.fields_of(text) == ["hp.lr", "label.a b", "state"]
    assert filters.values_of(text, ("label.a b",)) == [("label.a b", "x"), ("label.a b", "y z")]


def test_the_use_of_a_run_that_has_ended_is_not_waited_for(run, capsys):
    capsys.readouterr()
    assert main(["top", run.run_id]) == 0
    note = f"{run.run_id} has ended (SUCCEEDED), and no node has reported what it used"
    assert capsys.readouterr().err == f"{note}\n"
    assert main(["top", run.run_id, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"run_id": run.run_id, "state": "SUCCEEDED", "note": note}


def test_a_submit_of_what_has_ended_says_so(memory, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("name: x\ntarget: memory\nrun: echo 1\n")
    made = Submitter("memory", watch=False).submit("job.yaml", key="k")
    made.acknowledge()
    MemoryBackend.finish(newest(made), State.SUCCEEDED, 0)
    watch(made)
    capsys.readouterr()
    assert main(["submit", "--key", "k"]) == 0
    printed = capsys.readouterr().out
    assert f"{made.run_id}  was already submitted to memory, and has ended: SUCCEEDED\n" in printed
    assert f"cloudtrain fetch {made.run_id}" in printed and "cancel" not in printed


def test_show_has_the_program_of_each_role(memory, source, capsys):
    roles = {"trainer": {"entrypoint": "train.py"}, "judge": {"run": "python serve.py"}}
    made = Submitter("memory", watch=False).submit({"name": "x", "source": str(source), "roles": roles})
    MemoryBackend.finish(newest(made), State.SUCCEEDED, 0)
    watch(made)
    capsys.readouterr()
    assert main(["show", made.run_id]) == 0
    shown = [
        line.split(None, 1) for line in capsys.readouterr().out.splitlines() if "train.py" in line or "serve.py" in line
    ]
    assert shown == [["runs", "trainer: train.py"], ["runs", "judge: python serve.py  (run, once per node)"]]


def test_a_run_is_named_by_a_text(run):
    with pytest.raises(BadRequest, match="a run's id is a text, not 3"):
        Run.find(3)
