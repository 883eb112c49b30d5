"""The real command line: in this process where only words matter, as a process of its own where exits and signals do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.cli import main
from tests.conftest import WAIT_S

CLI = [sys.executable, "-m", "cloudtrain.cli"]

# Says what it got, trains for three steps, leaves a model; its arguments say how it ends.
SCRIPT = """\
import os, sys, time
args = sys.argv[1:]
print("args", args, flush=True)
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
for step in range(3):
    print('::cloudtrain::{"kind": "metric", "step": %d, "loss": %f}' % (step, 2.0 - step / 2), flush=True)
os.makedirs(os.environ["CLOUDTRAIN_MODEL_DIR"], exist_ok=True)
with open(os.path.join(os.environ["CLOUDTRAIN_MODEL_DIR"], "weights"), "w") as file:
    file.write("12345")
if "--gate" in args:
    end = time.monotonic() + 300  # a test that failed must not leave it here for ever
    while not os.path.exists(args[args.index("--gate") + 1]) and time.monotonic() < end:
        time.sleep(0.02)
    print("through the gate", flush=True)
if "--raise" in args:
    raise ValueError("boom")
if "--exit" in args:
    sys.exit(int(args[args.index("--exit") + 1]))
print("done", flush=True)
"""


@dataclass
class Result:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def rows(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


Cli = Callable[..., Result]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, where one stands."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command in this process."""

    def run(*words: str | os.PathLike[str]) -> Result:
        capsys.readouterr()
        code = main([os.fspath(word) for word in words])
        said = capsys.readouterr()
        return Result(code, said.out, said.err)

    return run


@pytest.fixture
def shell(cli: Cli) -> Cli:
    """Run a command in this process or, where it has a folder or variables of its own, as one."""

    def run(*words: str | os.PathLike[str], **settings: Any) -> Result:
        if not settings:
            return cli(*words)
        done = subprocess.run([*CLI, *words], capture_output=True, text=True, timeout=WAIT_S, **settings)
        return Result(done.returncode, done.stdout, done.stderr)

    return run


def start(*words: str | os.PathLike[str], **settings: Any) -> subprocess.Popen[str]:
    """Start a command in a process group of its own, as a shell with job control does."""
    settings = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "start_new_session": True,
    } | settings
    return subprocess.Popen([*CLI, *words], **settings)


def read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    """Read a process's output up to a line with this text; the test's own time limit bounds it."""
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if text in line:
            return lines
    raise AssertionError(f"{text!r} never came; there was {lines} and {process.stderr and process.stderr.read()}")
