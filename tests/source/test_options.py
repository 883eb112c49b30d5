"""Which options of a script want a value, and what `init` and `plan` make of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cloudtrain.cli import main
from cloudtrain.job.job import Job
from cloudtrain.runs.planning.plan import Planner
from cloudtrain.source.options import declared
from cloudtrain.source.texts import Texts

SCRIPT = """import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--fp16", type=str2bool, default=False)
parser.add_argument("--shuffle", action="store_true")
parser.add_argument("--maybe", nargs="?", const=True)
parser.add_argument("--both", action=argparse.BooleanOptionalAction)
parser.add_argument("-n", "--name", default="x")
parser.add_argument("--flag", type=lambda text: text == "true")
"""
HYDRA = "import hydra\n@hydra.main(version_base=None)\ndef main(config): ...\n"
HF = "from transformers import HfArgumentParser\nparser = HfArgumentParser((A, B))\n"


def of(folder: Path, text: str):
    (folder / "train.py").write_text(text)
    return declared(Texts(folder, ["train.py"], "train.py"))


def test_what_is_declared(tmp_path: Path):
    found = of(tmp_path, SCRIPT)
    takes = {name: (option.takes_value, option.is_boolean) for name, option in found.by_name.items()}
    assert takes == {"fp16": (True, True), "shuffle": (False, False), "name": (True, False), "flag": (True, True)}
    assert found.by_name["fp16"].place == "train.py:3" and found.wants_boolean_values
    assert of(tmp_path, HF).wants_boolean_values and of(tmp_path, HF).hf_parser == "train.py:2"
    assert not of(tmp_path, 'parser.add_argument("--x", action="store_true")\n').wants_boolean_values
    assert of(tmp_path, "add_argument(\n").by_name == {}
    for text in (HYDRA, "from hydra import main as start\n@start()\ndef main(config): ...\n"):
        assert of(tmp_path, text).hydra == "train.py:2"
    assert not of(tmp_path, "from hydra import compose\nmain()\n").hydra


@pytest.mark.parametrize(("text", "written"), [(SCRIPT, True), (HF, True), ("print('add_argument')\n", False)])
def test_init_writes_the_style(tmp_path: Path, home: Path, text: str, written: bool):
    (tmp_path / "train.py").write_text(text)
    command = [sys.executable, "-m", "cloudtrain", "init"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ("\narg_style: hf" in (tmp_path / "job.yaml").read_text()) is written


@pytest.mark.parametrize("text", [HYDRA, f"import lightning\n{HYDRA}"])
def test_a_script_of_hydra_gets_overrides(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, text: str):
    (tmp_path / "train.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    job = yaml.safe_load((tmp_path / "job.yaml").read_text())
    assert Job.from_dict({**job, "hyperparameters": {"optim.lr": 0.1}}).argv() == ["train.py", "optim.lr=0.1"]
    place = "train.py:2" if text == HYDRA else "train.py:3"
    [note] = notes(tmp_path, hyperparameters={"lr": 1})
    assert note == f"--lr is given, and {place} reads overrides of hydra: set arg_style: hydra to pass lr=..."
    assert notes(tmp_path, hyperparameters={"lr": 1}, arg_style="hydra") == notes(tmp_path, args=["lr=1"]) == []


def notes(folder: Path, backend: str = "local", **changes: object) -> list[str]:
    job = {"name": "x", "source": str(folder), "entrypoint": "train.py", **changes}
    return [note for note in Planner(backend).plan(job).notes if "--" in note]


@pytest.mark.parametrize("backend", ["local", "sagemaker-local"])
def test_the_plan_notes_a_mismatch_and_changes_nothing(tmp_path: Path, home: Path, backend: str):
    (tmp_path / "train.py").write_text(SCRIPT)
    given = {"fp16": True, "shuffle": True, "name": "y", "maybe": True, "both": True}
    [note] = notes(tmp_path, backend, hyperparameters=given)
    assert note == "--fp16 has no value, but train.py:3 needs one: set arg_style: hf to pass --fp16 true"
    [note] = notes(tmp_path, backend, hyperparameters=given, arg_style="hf")
    assert (
        note
        == "--shuffle true is given, and train.py:4 takes no value: set arg_style: argparse to pass --shuffle alone"
    )
    [note] = notes(tmp_path, backend, args=["--fp16", "--name", "y"])
    assert note.startswith("--fp16 has no value, but train.py:3 needs one")
    assert notes(tmp_path, backend, args=["--fp16", "true", "--flag=true", "--shuffle"]) == []
    plan = Planner(backend).plan(
        {"name": "x", "source": str(tmp_path), "entrypoint": "train.py", "hyperparameters": {"fp16": True}}
    )
    assert plan.manifest["argv"] == ["train.py", "--fp16"] and plan.job["arg_style"] == "argparse"


def test_a_false_that_is_left_out_is_noted_with_the_hf_parser(tmp_path: Path, home: Path):
    (tmp_path / "train.py").write_text(HF)
    [note] = notes(tmp_path, hyperparameters={"fp16": False, "bf16": True})
    assert note == "--fp16 false is left out, and train.py:2 may have another default: set arg_style: hf to pass false"
    assert notes(tmp_path, hyperparameters={"fp16": False}, arg_style="hf") == []
