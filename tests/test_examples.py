"""Every example runs as written, on `local`."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from cloudtrain import Run
from cloudtrain.cli import main

EXAMPLES = Path(__file__).parents[1] / "examples"
BOUND_S = 280
# folder -> what its output shows when it has done what it is for
SHOWN = {
    "own-script": r"trained by 2 processes",
    "function": r"value: 2\.5\nerror: ZeroDivision(.|\n)*steps 4 to 6(.|\n)*'rank': 1, 'weight': 2\.998}(.|\n)*best: 0\.3",
    "sbatch": r"step=3 mean=0\.50",
    "train-eval": r"role evaluator is ready\n(.|\n)*step=50 eval_loss=\d(.|\n)*step=300 eval_loss=0\.00",
    "grpo": r"role rollout is ready\n(.|\n)*mean reward of 10 steps: 0\.0\d at first, 0\.[5-9]\d at last",
    "train_distributed": r"'nodes_used': 3, .*'status': 'distributed_trained'(.|\n)*accuracy 0\.9",
    "classification": r"held-out loss .* accuracy (1\.000|0\.9)",
    "ddp": r"2 x cpu, strategy ddp (.|\n)*held-out loss 6\.\d+ -> [345]\.",
    "fsdp": r"2 x cpu, strategy fsdp \(shard 2\), wrapper FSDP2(.|\n)*held-out loss 6\.\d+ -> [345]\.",
    "zero3": r"strategy zero3 \(shard 2\), wrapper DeepSpeedEngine(.|\n)*held-out loss 6\.\d+ -> [345]\.",
    "tp": r"strategy ddp \(tensor 2\), wrapper DTensor(.|\n)*held-out loss 6\.\d+ -> [345]\.",
    "pp": r"strategy ddp \(pipeline 2, 1f1b\), wrapper PipelineStage(.|\n)*held-out loss 6\.\d+ -> [345]\.",
    "lora": r"of them learn; (.|\n)*held-out loss 5\.\d+ -> [34]\.",
}
GPUS = {name: ["--gpus", "A100:8"] for name in ("prod", "gcp", "market")}
ELSEWHERE = {"quickstart", "ray"}  # make demo; its losses over machines: tests/backends


def commands(folder: Path) -> list[str]:
    """Return the commands that an example is run with, as its README or its job file writes them."""
    readme, job = folder / "README.md", folder / "job.yaml"
    if readme.exists() and (
        found := re.search(r"^```\n((?:(?:cloudtrain|python) .*\n)+)```$", readme.read_text(), re.M)
    ):
        return found[1].splitlines()
    return [line.lstrip("# ") for line in job.read_text().splitlines() if re.match(r"#\s+cloudtrain submit", line)]


def test_every_example_is_run_and_listed():
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == SHOWN.keys() | ELSEWHERE
    listed = set(re.findall(r"^\| \[([\w-]+)\]\(\1/\)", (EXAMPLES / "README.md").read_text(), re.M))
    assert listed == folders
    assert all(commands(EXAMPLES / name) for name in folders)


def test_a_plan_is_one_screen_for_every_example_and_target(tmp_path, home, monkeypatch, capsys):
    shutil.copytree(EXAMPLES, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    starts = (path.read_text() for path in sorted((EXAMPLES.parent / "docs" / "start").glob("*.md")))
    tables = (table for text in starts for table in re.findall(r"^```toml.*\n((?:.+\n)+)```$", text, re.M))
    (tmp_path / "cloudtrain.toml").write_text("".join(tables))
    targets = [*tomllib.loads((tmp_path / "cloudtrain.toml").read_text())["targets"], "local", "vertex-local"]
    jobs = [path for path in sorted(tmp_path.glob("*/*.*")) if path.name in ("job.yaml", "base.yaml", "job.sbatch")]
    shown: dict[tuple[str, str], str] = {}
    for target in targets:
        for job in jobs:
            code = main(["plan", str(job.relative_to(tmp_path)), "-t", target, *GPUS.get(target, [])])
            if code == 0:
                shown[target, str(job)] = capsys.readouterr().out
    assert len(targets) == 8 and len(jobs) == 14 and len(shown) > 85, "few jobs need what a target has not"
    lines = {words: sum(len(fold(line)) for line in text.splitlines()) for words, text in shown.items()}
    assert {words: number for words, number in lines.items() if number > 25} == {}
    assert [words for words, text in shown.items() if "  next    cloudtrain submit" not in text] == []
    notes = Counter(line for text in shown.values() for line in text.splitlines() if line.startswith("  note"))
    assert {note: number for note, number in notes.items() if number > len(shown) / 4} == {}


def fold(line: str) -> list[str]:
    """Return the lines of one on a terminal of 80 columns."""
    return textwrap.wrap(line, 80, subsequent_indent=" " * 10) or [""]


@pytest.mark.train
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.long if name in ("lora", "train_distributed", "ddp", "fsdp", "zero3", "tp", "pp") else (),
        )
        for name in SHOWN
    ],
)
def test_it_runs_as_written(name: str, tmp_path: Path, home: Path, census: Path, held: socket.socket):
    shutil.copytree(EXAMPLES / name, tmp_path / "examples" / name)  # where nobody's fetched folders lie
    port = str(held.getsockname()[1])  # the one that is written may be another test's
    for file in (tmp_path / "examples" / name).rglob("*.yaml"):
        file.write_text(file.read_text().replace("18431", port))
    folder = str(Path(sys.executable).parent)
    env = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    shown = ""
    for command in commands(tmp_path / "examples" / name):
        done = subprocess.run(
            command.split(), cwd=tmp_path, env=env, text=True, timeout=BOUND_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        shown += done.stdout
    assert re.search(SHOWN[name], shown), shown
    run = Run.find()
    worlds = {event.node: event.data["pid"] for event in run.store.events(run.run_id, "world") if "pid" in event.data}
    assert len(set(worlds.values())) == len(worlds) == run.record.job["num_nodes"]
