# ruff: noqa: E501 - one form a line
"""Which files a script loads, as far as its text and that of the files says."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from cloudtrain.source.imports import Imports
from cloudtrain.source.literals import Literals
from cloudtrain.source.texts import Texts

MARK = "import sys\nprint('LOADED', __file__)\n"
PACKAGE = {"pkg/__init__.py": "", "pkg/sub/__init__.py": "", "pkg/sub/leaf.py": "", "pkg/other.py": ""}
# name -> entry, files, what is loaded beside the entry. Python itself is the judge: each of them runs.
FOLLOWED: dict[str, tuple[str, dict[str, str], set[str]]] = {
    "a module beside the script": ("jobs/train.py", {"jobs/train.py": "import utils", "jobs/utils.py": "", "utils.py": ""}, {"jobs/utils.py"}),
    "a package and what is above": ("train.py", {"train.py": "import pkg.sub.leaf", **PACKAGE}, {"pkg/__init__.py", "pkg/sub/__init__.py", "pkg/sub/leaf.py"}),
    "a module taken from a package": ("train.py", {"train.py": "from pkg.sub import leaf as x", **PACKAGE}, {"pkg/__init__.py", "pkg/sub/__init__.py", "pkg/sub/leaf.py"}),
    "a name taken from a module": ("train.py", {"train.py": "from pkg.other import sys", **PACKAGE}, {"pkg/__init__.py", "pkg/other.py"}),
    "relative": ("train.py", {"train.py": "import pkg.sub.leaf", **PACKAGE, "pkg/sub/leaf.py": "from ..other import sys\nfrom . import near", "pkg/sub/near.py": ""}, {*PACKAGE, "pkg/sub/near.py"}),
    "a package without __init__": ("train.py", {"train.py": "from deep.er import leaf", "deep/er/leaf.py": "", "deep/leaf.py": ""}, {"deep/er/leaf.py"}),
    "in a function": ("train.py", {"train.py": "def f():\n    import a\nf()", "a.py": "", "b.py": ""}, {"a.py"}),
    "in a circle": ("train.py", {"train.py": "import a", "a.py": "import b", "b.py": "import a"}, {"a.py", "b.py"}),
    "only for types": ("train.py", {"train.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a", "a.py": ""}, set()),
    "only of a main file": ("train.py", {"train.py": "import a", "a.py": "if __name__ == '__main__':\n    import b", "b.py": ""}, {"a.py"}),
    "of the main file": ("train.py", {"train.py": "if __name__ == '__main__':\n    import b", "b.py": ""}, {"b.py"}),
    "a module with -m": ("-m pkg.sub.leaf", {**PACKAGE, "pkg/sub/leaf.py": "import beside", "beside.py": "", "pkg/sub/beside.py": ""}, {"pkg/__init__.py", "pkg/sub/__init__.py", "beside.py"}),
    "a package with -m": ("-m pkg", {**PACKAGE, "pkg/__main__.py": "from .other import sys"}, {"pkg/__init__.py", "pkg/other.py"}),
    "a folder added": ("jobs/train.py", {"jobs/train.py": "import sys\nsys.path.insert(0, 'lib')\nimport a", "lib/a.py": "", "a.py": ""}, {"lib/a.py"}),
    "the folder above": ("jobs/train.py", {"jobs/train.py": "import os, sys\nsys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))\nimport a", "a.py": ""}, {"a.py"}),
    "a path of pathlib": ("jobs/train.py", {"jobs/train.py": "import sys\nfrom pathlib import Path\nROOT = Path(__file__).resolve().parents[1] / 'lib'\nsys.path.append(str(ROOT))\nimport a", "lib/a.py": ""}, {"lib/a.py"}),
    "joined": ("jobs/train.py", {"jobs/train.py": "import sys, os\nHERE = os.path.dirname(__file__)\nsys.path += [os.path.join(HERE, '..', 'lib')]\nimport a", "lib/a.py": ""}, {"lib/a.py"}),
    "by import_module": ("train.py", {"train.py": "import importlib\nimportlib.import_module('pkg.other')", **PACKAGE}, {"pkg/__init__.py", "pkg/other.py"}),
    "by runpy": ("train.py", {"train.py": "import runpy\nrunpy.run_path('tools/go.py', run_name='__main__')", "tools/go.py": "if __name__ == '__main__':\n    print(1)"}, {"tools/go.py"}),
    "by exec of a file": ("train.py", {"train.py": "exec(open('settings.py').read())", "settings.py": "import a", "a.py": "", "other.py": ""}, {"settings.py", "a.py"}),
    "by its path": ("train.py", {"train.py": "from importlib import util\ns = util.spec_from_file_location('a', 'lib/a.py')\nm = util.module_from_spec(s)\ns.loader.exec_module(m)", "lib/a.py": "", "a.py": ""}, {"lib/a.py"}),
    "another process": ("train.py", {"train.py": "import subprocess, sys\ncommand = [sys.executable, 'tools/go.py']\nsubprocess.run(command, check=True)", "tools/go.py": "import a", "tools/a.py": ""}, {"tools/go.py", "tools/a.py"}),
}  # fmt: skip
UNKNOWN = {
    "importlib": "import importlib, sys\nimportlib.import_module(sys.argv[1])",
    "runpy": "import runpy\nrunpy.run_path(args.script)",
    "exec": "exec(code)",
    "a folder": "import sys, os\nsys.path.append(os.environ['X'])",
    "another process": "import subprocess, sys\nsubprocess.run([sys.executable, args.script])",
    "no Python": "print 'two'",
}


def made(folder: Path, files: dict[str, str], mark: str = "") -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(mark + text + "\n")


def loaded(folder: Path, files: dict[str, str], entry: str, *folders: str) -> Imports:
    made(folder, files)
    return Imports(Texts(folder, files, entry), folders)


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_is_loaded(tmp_path: Path, name: str):
    entry, files, expected = FOLLOWED[name]
    imports = loaded(tmp_path, files, entry)
    first = Texts(tmp_path, files, entry).entry
    assert set(imports.importers) == {first, *expected} and not imports.unknown


def test_python_loads_the_same(tmp_path: Path):
    for number, (entry, files, expected) in enumerate(FOLLOWED.values()):
        folder = tmp_path / str(number)
        made(folder, files, MARK)
        ran = subprocess.run(
            [sys.executable, *entry.split()], cwd=folder, capture_output=True, text=True, timeout=120, check=False
        )
        assert ran.returncode == 0, ran.stderr
        lines = [line.partition("LOADED ")[2] for line in ran.stdout.splitlines() if line.startswith("LOADED")]
        names = {str((folder / line).resolve().relative_to(folder.resolve())) for line in lines}
        executed = {"settings.py"} & set(files)  # its __file__ is that of the script
        assert names | executed == {*expected, Texts(folder, files, entry).entry}, (entry, files)


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_only_a_run_knows(tmp_path: Path, name: str):
    imports = loaded(tmp_path, {"train.py": "import a", "a.py": UNKNOWN[name]}, "train.py")
    assert imports.unknown.startswith("a.py")


def test_a_name_that_begins_with_a_package(tmp_path: Path):
    files = {"models/a.py": "", "models/b/c.py": "", "data/d.py": ""}
    for text in ("f'models.{name}'", "'models.' + name", "'models.{}'.format(name)"):
        text = f"import importlib\nimportlib.import_module({text})"
        imports = loaded(tmp_path, {"train.py": text, **files}, "train.py")
        assert set(imports.importers) == {"train.py", "models/a.py", "models/b/c.py"} and not imports.unknown


def test_folders_of_the_job_and_of_installed_packages(tmp_path: Path):
    files = {"jobs/train.py": "import a, b", "lib/a.py": "", "src/b.py": ""}
    assert set(loaded(tmp_path, files, "jobs/train.py").importers) == {"jobs/train.py"}
    assert set(loaded(tmp_path, files, "jobs/train.py", "lib").importers) == {"jobs/train.py", "lib/a.py"}
    packaged = {**files, "pyproject.toml": ""}
    assert set(loaded(tmp_path, packaged, "jobs/train.py").importers) == {"jobs/train.py", "src/b.py"}


@pytest.mark.parametrize("build", ["pyproject.toml", "setup.py", "setup.cfg"])
def test_a_package_that_a_build_file_may_take_from_any_folder(tmp_path: Path, build: str):
    packages = {f"{at}/own/__init__.py": "" for at in ("python", "examples", "tests/lib")}
    files = {build: "", "train.py": "import own, torch, logging", "tests/torch/__init__.py": "", **packages}
    files |= {"python/logging/__init__.py": "", "tools/torch.py": ""}
    assert set(loaded(tmp_path, files, "train.py").importers) == {"train.py", "python/own/__init__.py"}
    here = {**files, "own.py": ""}
    assert set(loaded(tmp_path, here, "train.py").importers) == {"train.py", "own.py"}


def test_a_repository_of_many_packages_is_searched_once_for_each_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = {f"libs/l{at}/pyproject.toml": "" for at in range(20)}
    files |= {f"m{at}.py": f"import os, torch, m{at + 1}" for at in range(50)}
    loads: list[object] = []
    load = Imports._load
    monkeypatch.setattr(Imports, "_load", lambda *given: (loads.append(given), load(*given))[1])
    assert len(loaded(tmp_path, files, "m0.py").importers) == 50
    assert len(loads) == 49


def test_folders_of_sys_path_and_long_literals_are_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = {f"m{at}.py": f"import sys, m{at + 1}, x{at}\nsys.path.append('d{at}')" for at in range(50)}
    files["m50.py"] = f"BIG = {['x'] * 2000}\n" + "a.run(BIG)\n" * 50
    finds: list[object] = []
    find, parts = Imports._find, Literals.parts
    monkeypatch.setattr(Imports, "_find", lambda *given: (finds.append(given), find(*given))[1])
    looked: list[object] = []

    def counted(self: Literals, node: ast.AST):
        for part in parts(self, node):
            looked.append(part)
            yield part

    monkeypatch.setattr(Literals, "parts", counted)
    assert len(loaded(tmp_path, files, "m0.py").importers) == 51
    assert len(finds) == 101 and len(looked) == 50 * 1000


@pytest.mark.parametrize(
    "text",
    [
        "import hydra\nmodel = hydra.utils.instantiate(cfg.model)",
        "import hydra\nmodel = hydra.utils.call(cfg.model)",
        "from hydra.utils import instantiate as make\nmodel = make(cfg.model)",
        "from lightning.pytorch.cli import LightningCLI\nclass Cli(LightningCLI):\n    pass\nCli()",
        "from detectron2.config import instantiate\nmodel = instantiate(cfg.model)",
    ],
)
def test_classes_that_a_configuration_names(tmp_path: Path, text: str):
    files = {"conf/model.yaml": "model:\n  _target_: nets.big.Net\n", "nets/big.py": "", "nets/small.py": ""}
    assert set(loaded(tmp_path, {"train.py": text, **files}, "train.py").importers) == {"train.py", "nets/big.py"}


def test_a_shell_script_names_its_scripts(tmp_path: Path):
    files = {"train.py": "import a", "a.py": "", "b.py": ""}
    assert "a.py" in loaded(tmp_path, {"go.sh": "python -u train.py --lr 1\n", **files}, "go.sh").importers
    assert "a.py" in loaded(tmp_path, {"go.sh": "python3 -m train\n", **files}, "go.sh").importers
    assert (
        loaded(tmp_path, {"go.sh": "python $SCRIPT\n", **files}, "go.sh").unknown
        == "go.sh names no script of the source"
    )
    started = loaded(tmp_path, {"go.sh": "torchrun --nproc-per-node 2 train.py\n", **files}, "go.sh")
    assert set(started.importers) == {"go.sh"} and not started.unknown  # it sets a world itself
