"""The built wheel, installed into an environment of its own, works without the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "VIRTUAL_ENV"))}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=280)
    return next(out.glob("cloudtrain-*.whl"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter whose only cloudtrain is the wheel; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=280)
    python = folder / "bin" / "python"
    site = next(folder.glob("lib/python*/site-packages"))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), str(wheel)], check=True, timeout=280)
    assert (site / "cloudtrain" / "_entrypoints" / "launch.py").exists()
    return python


def test_what_is_in_it(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    assert "cloudtrain/py.typed" in names and "cloudtrain/cli/__init__.py" in names
    assert {"cloudtrain/diagnosis/classes.toml", "cloudtrain/diagnosis/patterns.toml"} <= set(names)
    ours = {path.relative_to(ROOT / "entrypoints").as_posix() for path in (ROOT / "entrypoints").rglob("*.py")}
    packed = {
        name.removeprefix("cloudtrain/_entrypoints/") for name in names if name.startswith("cloudtrain/_entrypoints/")
    }
    assert ours == packed and "launch.py" in ours
    tops = {name.split("/")[0] for name in names}
    assert len(tops) == 2, f"nothing beside the package and its metadata: {tops}"


def test_it_is_not_the_checkout(python: Path, tmp_path: Path):
    code = "import cloudtrain, sys; print(cloudtrain.__file__, sys.prefix)"
    shown = subprocess.run([python, "-c", code], cwd=tmp_path, env=CLEAN, capture_output=True, text=True, check=True)
    file, prefix = shown.stdout.split()
    assert file.startswith(prefix) and not file.startswith(str(ROOT))


def test_a_script_runs_from_submit_to_end(python: Path, tmp_path: Path, home: Path):
    (tmp_path / "hello.py").write_text(
        "import cloudtrain_runtime as runtime, sys\n"
        "runtime.log_metrics(step=1, loss=0.5)\n"
        "print('hello', sys.argv[1])\n"
        "sys.exit(3)\n"
    )
    env = {**CLEAN, "CLOUDTRAIN_HOME": str(home)}
    program = python.parent / "cloudtrain"
    submit = [program, "submit", "hello.py", "--follow", "--", "wheel"]
    ended = subprocess.run(submit, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 3, ended.stdout + ended.stderr
    assert "hello wheel" in ended.stdout
    shown = subprocess.run(
        [program, "metrics", "--json"], env=env, capture_output=True, text=True, timeout=280, check=True
    )
    assert [json.loads(line)["value"] for line in shown.stdout.splitlines()] == [0.5]
