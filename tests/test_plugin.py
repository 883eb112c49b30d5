"""A backend that is a package of its own: found by its entry point, passes the contract suite, is used by its name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parent / "plugin"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has this environment's packages, and the plugin installed."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=280)
    python = folder / "bin" / "python"
    site = next(folder.glob("lib/python*/site-packages"))
    parents = [path for path in sys.path if path.endswith("site-packages")]
    (site / "parent.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in parents))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", str(PLUGIN)], check=True, timeout=280)
    return python


@pytest.mark.parametrize("suite_file", ["attic_contract.py", "rented_contract.py"])
def test_it_passes_the_contract(python: Path, tmp_path: Path, suite_file: str):
    suite = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(tmp_path)]
    ended = subprocess.run(
        [*suite, "--basetemp", str(tmp_path / "t"), str(PLUGIN / suite_file)],
        cwd=tmp_path, capture_output=True, text=True, timeout=580, env={**os.environ, "PYTHONPATH": str(PLUGIN)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr
    passed = int(ended.stdout.split(" passed")[0].split()[-1])
    assert passed >= 30, ended.stdout


def test_it_is_used_by_its_name(python: Path, tmp_path: Path, home: Path):
    (tmp_path / "hello.py").write_text("print('up here')\n")
    submit = [python, "-m", "cloudtrain.cli", "submit", "hello.py", "-t", "attic", "--follow"]
    ended = subprocess.run(submit, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0 and "up here" in ended.stdout, ended.stdout + ended.stderr


def test_what_it_does_not_offer_is_refused(python: Path, tmp_path: Path, home: Path):
    (tmp_path / "hello.py").write_text("print('up here')\n")
    submit = [python, "-m", "cloudtrain.cli", "submit", "hello.py", "-t", "attic", "--set", "num_nodes=2"]
    ended = subprocess.run(submit, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "does not offer more than one node" in ended.stderr


SCRIPT = """
import os, pathlib, sys
folder = pathlib.Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"])
steps = folder / "step-1"
print("continued" if (steps / "state").exists() else "from the beginning")
steps.mkdir(parents=True, exist_ok=True)
(steps / "state").write_text("1")
print(f"loss: {1 / (1 + float(sys.argv[-1] if len(sys.argv) > 1 else 0)):.3f}")
sys.exit(int(os.environ.get("FAIL", "0")))
"""

SWEEP = """
job: job.yaml
method: grid
metric: {name: loss, goal: minimize}
parameters:
  rate: {values: [1, 2]}
"""
CONSOLE = """
import os, pathlib
from cloudtrain.console import runrows
from cloudtrain.history.store import Store
from cloudtrain.history.table import Query
print(runrows.to_csv(Store(pathlib.Path(os.environ["CLOUDTRAIN_HOME"])), Query("", "", "target")))
"""


class Shop:
    """A project folder, and the commands of an installation that has the plugin."""

    def __init__(self, python: Path, folder: Path, env: dict[str, str]) -> None:
        self.python, self.folder, self.env = python, folder, {**os.environ, **env}

    def run(self, *words: str, code: int = 0, **env: str) -> str:
        command = [self.python, "-m", "cloudtrain.cli", *words]
        ended = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, timeout=280, env={**self.env, **env}
        )
        assert ended.returncode == code, (words, ended.stdout + ended.stderr)
        return ended.stdout + ended.stderr


@pytest.fixture
def shop(python: Path, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    """A folder whose cloudtrain.toml `init` wrote, a service that rents machines, and a store for results."""
    monkeypatch.syspath_prepend(str(PLUGIN))
    from rented_service import KEY, Service

    from tests.stores import KEYS, S3

    store, project = S3(), tmp_path / "project"
    env = {**KEYS, "AWS_ENDPOINT_URL": store.url}
    for name, value in env.items():
        monkeypatch.setenv(name, value)  # machines have it too, as a role
    service = Service(tmp_path / "service")
    project.mkdir()
    (project / "train.py").write_text(SCRIPT)
    made = Shop(python, project, {**env, "RENTED_API_KEY": KEY, "RENTED_ADDRESS": service.url})
    made.run("init", "-t", "rented")
    config = project / "cloudtrain.toml"
    assert service.url in config.read_text()
    with config.open("a") as file:
        file.write(f'volume = "{service.volume}"\npython = "{python}"\n')
    yield made
    service.close()
    store.close()


def test_every_command_knows_it(shop: Shop):
    assert "RENTED_API_KEY is not set" in shop.run("doctor", "rented", code=1, RENTED_API_KEY="")
    shop.run("doctor", "rented")
    assert "3.2 USD an hour" in shop.run("plan", "job.yaml", "--gpus", "A100:2")
    assert "resources.cpus" in shop.run("plan", "job.yaml", "--set", "resources.cpus=4", code=2)
    assert "the machines have A10G" in shop.run("plan", "job.yaml", "--gpus", "B200", code=2)
    shop.run("init", "--ci", "github", "--wheel", "cloudtrain==1")
    assert "RENTED_API_KEY: ${{ secrets" in (shop.folder / ".github/workflows/cloudtrain.yml").read_text()
    shop.run("submit", "job.yaml", "--wait")
    assert json.loads(shop.run("ls", "--json"))[0]["state"] == "SUCCEEDED"
    assert "rented" in shop.run("costs", "--by", "target")
    (shop.folder / "policy.toml").write_text('[rules.cheap]\nmax_cost = "1 USD"\ninstance_types = ["1xA10G"]\n')
    refused = shop.run("plan", "job.yaml", "--gpus", "A100:2", code=2)
    assert "2xA100" in refused and "max_cost" in refused


def test_a_sweep_and_the_console_have_it(shop: Shop):
    (shop.folder / "sweep.yaml").write_text(SWEEP)
    shop.run("sweep", "sweep.yaml", "--wait")
    shown = shop.run("sweep", "show")
    assert shown.count("SUCCEEDED") >= 2
    rows = subprocess.run(
        [shop.python, "-c", CONSOLE], cwd=shop.folder, capture_output=True, text=True, timeout=280, env=shop.env
    )
    assert rows.returncode == 0 and rows.stdout.count("rented") == 2, rows.stdout + rows.stderr


def test_a_run_moves_to_this_machine_and_back(shop: Shop):
    """Its files are in a store, where `audit` writes too."""
    more = ["--set", "output=s3://bucket/runs", "--set", "audit=true", "--set", "checkpoint.every=1 steps"]
    shop.run("submit", "job.yaml", "--wait", *more, "--set", "env.FAIL=3", code=3)
    run = json.loads(shop.run("ls", "--json"))[0]["run_id"]
    shop.run("resume", run, "-t", "local", "--wait", code=3)
    shop.run("resume", run, "-t", "rented", "--set", "env.FAIL=0", "--wait")
    assert shop.run("logs", run).count("continued") == 2
    assert shop.run("audit", run).count("submit") == 3
