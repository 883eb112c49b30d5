"""Bytecode that is lent to extracted sources."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

from cloudtrain.backends.local import bytecode
from tests.conftest import WAIT_S


@pytest.fixture
def source(tmp_path):
    return make(tmp_path / "source")


def make(folder: Path, text: str = "VALUE = 1\n") -> Path:
    (folder / ".cloudtrain" / "node").mkdir(parents=True)
    (folder / ".cloudtrain" / "launch.py").write_text("import node.part as part\nprint(part.VALUE, part.__cached__)\n")
    (folder / ".cloudtrain" / "node" / "__init__.py").write_text("")
    (folder / ".cloudtrain" / "node" / "part.py").write_text(text)
    return folder


def launch(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, str(folder / ".cloudtrain" / "launch.py")]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)


def test_modules_are_compiled_once_and_found_by_every_later_source(tmp_path, source):
    cache = tmp_path / "cache"
    bytecode.link_bytecode(source, cache)
    (place,) = cache.iterdir()
    before = {file: file.stat().st_mtime_ns for file in place.rglob("*.pyc")}
    assert len(before) == 3
    other = make(tmp_path / "other")
    bytecode.link_bytecode(other, cache)
    assert {file: file.stat().st_mtime_ns for file in place.rglob("*.pyc")} == before
    done = launch(other, "-v")
    assert done.stdout.startswith("1 ")
    assert f"code object from '{other}/.cloudtrain/node/__pycache__/" in done.stderr


def test_a_changed_module_is_never_run_from_old_bytecode(tmp_path, source):
    bytecode.link_bytecode(source, tmp_path / "cache")
    part = source / ".cloudtrain" / "node" / "part.py"
    at = part.stat()
    part.write_text("VALUE = 2\n")
    os.utime(part, ns=(at.st_atime_ns, at.st_mtime_ns))  # neither time nor size tell
    assert launch(source, "-B").stdout.startswith("2 ")


def test_what_the_installation_has_compiled_is_not_compiled_again(tmp_path, source, monkeypatch):
    """Of another text, or compiled before the installed file was last changed, nothing is taken over."""
    installed = make(tmp_path / "installed")
    names = ("node/part.py", "node/__init__.py")
    monkeypatch.setattr(
        bytecode, "runtime_files", lambda: [(f".cloudtrain/{name}", installed / ".cloudtrain" / name) for name in names]
    )
    compiled = Path(py_compile.compile(str(installed / ".cloudtrain" / "node" / "part.py")))
    asked: list[str] = []
    compile_file = py_compile.compile
    monkeypatch.setattr(
        py_compile,
        "compile",
        lambda file, *more, **named: asked.append(Path(file).name) or compile_file(file, *more, **named),
    )
    bytecode.link_bytecode(source, tmp_path / "cache")
    assert asked == ["launch.py", "__init__.py"]
    done = launch(source, "-v")
    assert done.stdout.startswith("1 ") and f"matches {source}/.cloudtrain/node/part.py" in done.stderr
    bytecode.link_bytecode(other := make(tmp_path / "other", "VALUE = 3\n"), tmp_path / "cache")
    assert "part.py" in asked[2:] and launch(other).stdout.startswith("3 ")
    asked.clear()
    os.utime(installed / ".cloudtrain" / "node" / "part.py", (1, 1))
    assert compiled.exists()
    bytecode.link_bytecode(make(tmp_path / "later"), tmp_path / "cache-2")
    assert "part.py" in asked


def test_another_text_has_another_place(tmp_path, source):
    bytecode.link_bytecode(source, tmp_path / "cache")
    bytecode.link_bytecode(make(tmp_path / "other", "VALUE = 3\n"), tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 2
    assert launch(tmp_path / "other").stdout.startswith("3 ")


def test_without_room_or_with_a_broken_module_the_source_is_left_as_it_is(tmp_path, source):
    blocked = tmp_path / "file"
    blocked.write_text("")
    bytecode.link_bytecode(source, blocked / "cache")
    assert not list(source.rglob("__pycache__"))
    broken = make(tmp_path / "broken", "VALUE = (\n")
    bytecode.link_bytecode(broken, tmp_path / "cache")
    assert not list(broken.rglob("__pycache__"))
    assert not [file for file in (tmp_path / "cache").iterdir() if file.name.endswith(".tmp")]
