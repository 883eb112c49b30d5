"""A backend that is a package of its own: found by its entry point, passes the contract suite, is used by its name."""

from __future__ import annotations

import subprocess
import sys
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


def test_it_passes_the_contract(python: Path, tmp_path: Path):
    suite = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(tmp_path)]
    ended = subprocess.run(
        [*suite, "--basetemp", str(tmp_path / "t"), str(PLUGIN / "attic_contract.py")],
        cwd=tmp_path, capture_output=True, text=True, timeout=280,
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
