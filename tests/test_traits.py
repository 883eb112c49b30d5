"""What is true of a backend stands with it: no other module knows one by its name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from cloudtrain.backends import registry
from cloudtrain.errors import BadJob
from cloudtrain.job.job import Job
from cloudtrain.runs.planning.plan import Planner
from cloudtrain.testing.memory import MemoryBackend

ROOT = Path(__file__).resolve().parent.parent / "cloudtrain"
PROVIDERS = {path.parent.name for path in (ROOT / "backends").glob("*/backend.py")}
# A name here means something else than a backend: the default of `target`, the program ssh, extras of pip, AWS's services.
OTHERS = {
    ("job/model.py", "local"),
    ("job/targets.py", "local"),
    ("nodes/ssh.py", "ssh"),
    ("nodes/ssh_config.py", "ssh"),
    ("nodes/ssh_command.py", "ssh"),
    ("cli/__init__.py", "ssh"),  # a command of others
    ("cli/init.py", "sagemaker"),  # --from FILE converts a call of its SDK
    ("cli/init.py", "slurm"),  # and a batch script
    ("job/sbatch.py", "slurm"),
    ("backends/google.py", "vertex"),  # extras of pip
    ("backends/store/open.py", "sagemaker"),
    # Lists of prices are named so; their readers are still here and not with their providers.
    *(
        (f"forecast/{name}.py", provider)
        for name in ("network", "offers", "prices", "refresh")
        for provider in ("sagemaker", "vertex")
    ),
    ("forecast/price_lists.py", "vertex"),
}


def literals(path: Path) -> set[str]:
    """Return the names of backends that are literals of a file; its docstrings are no code."""
    tree = ast.parse(path.read_text("utf-8"))
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
            and node.value in registry.BUILT_IN}  # fmt: skip


def test_no_module_outside_of_its_package_names_a_backend():
    found = set()
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        package = name.split("/")[1] if name.startswith("backends/") else ""
        if package not in PROVIDERS and name != "backends/registry.py" and not name.startswith("simulators/"):
            found |= {(name, literal) for literal in literals(path)}
    assert found - OTHERS == set()
    assert found >= OTHERS, "it is gone: remove it here"


def test_a_path_is_not_taken_for_one_of_this_machine_on_a_backend_that_does_not_say_so(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(registry, "BUILT_IN", dict(registry.BUILT_IN))
    MemoryBackend.install()
    (tmp_path / "train.py").write_text("")
    job = Job(
        name="mine", source=str(tmp_path), entrypoint="train.py", target="memory", audit=True, output="/data/runs"
    )
    Planner().plan(job)
    monkeypatch.delattr(MemoryBackend, "output_is_here")
    with pytest.raises(BadJob, match="is on the machines of memory"):
        Planner().plan(job)
