"""What `cloudtrain eval RUN` must do on each target: the model is read where it lies, the numbers are those of the model."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.runs.run import Run
from tests.conftest import WAIT_S
from tests.entrypoints.test_evaluate_model import SCRIPT, TEXTS, language_model, results

COMMAND = [sys.executable, "-m", "cloudtrain.cli"]
TRAINS = """\
import os, shutil
shutil.copytree("made", os.environ["CLOUDTRAIN_MODEL_DIR"], dirs_exist_ok=True)
print("trained", flush=True)
"""


def check_evaluation(folder: Path, home: Path, target: str, where: str, *sets: str) -> Run:
    """Run a script that leaves a model, evaluate it on the same target, and compare with an evaluation of its folder here.

    `where` is a pattern of the place at which the evaluation must read the model; RUN stands for the run's id. Nothing may
    have been copied to this machine. Returns the evaluation.
    """
    source = folder / "trains"
    source.mkdir()
    (source / "train.py").write_text(TRAINS)
    language_model(source / "made")
    data = folder / "test.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    options = [word for pair in ("environment.requirements=none", *sets) for word in ("--set", pair)]
    sent = _call("submit", "train.py", "-t", target, *options, "--wait", "--json", folder=source)
    trained = Run.find(json.loads(sent.splitlines()[-1])["run_id"])
    printed = _call("eval", trained.run_id, "--data", str(data), "--prompt", "One plus", "--wait", folder=folder)
    assert re.search(r"eval/test/loss +\d", printed), printed
    evaluation = next(run for run in Store(home).runs() if run.job["labels"].get("evaluates") == trained.run_id)
    made = Run.find(evaluation.run_id)
    assert made.state is State.SUCCEEDED and evaluation.target == target
    place = evaluation.job["inputs"]["model"]
    assert re.fullmatch(where.replace("RUN", trained.run_id), place["uri"]), place
    assert not (home / "inputs").exists(), "nothing is copied to this machine"
    here = _evaluated_here((source / "made" / "model.safetensors").read_bytes(), data.read_text())
    assert set(here) == {"eval/test/loss", "eval/test/perplexity"}
    for name, value in here.items():
        assert [row.value for row in trained.metrics(name)] == pytest.approx([value], rel=1e-5)
    shutil.rmtree(source)
    return made


@cache
def _evaluated_here(weights: bytes, data: str) -> dict[str, float]:
    """Evaluate the model on this machine, once for all targets: it is drawn with a seed, so that its weights are the same."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        language_model(folder / "made")
        assert (folder / "made" / "model.safetensors").read_bytes() == weights
        (folder / "test.jsonl").write_text(data)
        command = [sys.executable, str(SCRIPT), "--model", "made", "--data", "test.jsonl"]
        return results(subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=5 * WAIT_S))[0]


def _call(*words: str, folder: Path) -> str:
    done = subprocess.run([*COMMAND, *words], cwd=folder, capture_output=True, text=True, timeout=5 * WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
