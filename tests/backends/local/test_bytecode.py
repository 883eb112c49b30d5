"""Bytecode that is lent to extracted sources."""

from __future__ import annotations

import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cloudtrain.backends.local import backend as local
from cloudtrain.nodes import bundles
from cloudtrain.source.bundle import Bundle
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
    local.link_bytecode(source, cache)
    (place,) = cache.iterdir()
    before = {file: file.stat().st_mtime_ns for file in place.rglob("*.pyc")}
    assert len(before) == 3
    other = make(tmp_path / "other")
    local.link_bytecode(other, cache)
    assert {file: file.stat().st_mtime_ns for file in place.rglob("*.pyc")} == before
    done = launch(other, "-v")
    assert done.stdout.startswith("1 ")
    assert f"code object from '{other}/.cloudtrain/node/__pycache__/" in done.stderr


def test_a_changed_module_is_never_run_from_old_bytecode(tmp_path, source):
    local.link_bytecode(source, tmp_path / "cache")
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
        local, "runtime_files", lambda: [(f".cloudtrain/{name}", installed / ".cloudtrain" / name) for name in names]
    )
    compiled = Path(py_compile.compile(str(installed / ".cloudtrain" / "node" / "part.py")))
    asked: list[str] = []
    compile_file = py_compile.compile
    monkeypatch.setattr(
        py_compile,
        "compile",
        lambda file, *more, **named: asked.append(Path(file).name) or compile_file(file, *more, **named),
    )
    local.link_bytecode(source, tmp_path / "cache")
    assert asked == ["launch.py", "__init__.py"]
    done = launch(source, "-v")
    assert done.stdout.startswith("1 ") and f"matches {source}/.cloudtrain/node/part.py" in done.stderr
    local.link_bytecode(other := make(tmp_path / "other", "VALUE = 3\n"), tmp_path / "cache")
    assert "part.py" in asked[2:] and launch(other).stdout.startswith("3 ")
    asked.clear()
    os.utime(installed / ".cloudtrain" / "node" / "part.py", (1, 1))
    assert compiled.exists()
    local.link_bytecode(make(tmp_path / "later"), tmp_path / "cache-2")
    assert "part.py" in asked


def test_what_travels_beside_the_source_is_not_compiled_again(tmp_path, source, monkeypatch):
    beside = tmp_path / "beside.py"
    beside.write_text((source / ".cloudtrain" / "node" / "part.py").read_text())
    py_compile.compile(str(beside))
    asked: list[str] = []
    compile_file = py_compile.compile
    monkeypatch.setattr(
        py_compile,
        "compile",
        lambda file, *more, **named: asked.append(Path(file).name) or compile_file(file, *more, **named),
    )
    local.link_bytecode(source, tmp_path / "cache", "bundle", {".cloudtrain/node/part.py": beside})
    assert asked == ["launch.py", "__init__.py"]
    assert launch(source).stdout.startswith("1 ")


def test_another_text_has_another_place(tmp_path, source):
    local.link_bytecode(source, tmp_path / "cache")
    local.link_bytecode(make(tmp_path / "other", "VALUE = 3\n"), tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 2
    assert launch(tmp_path / "other").stdout.startswith("3 ")


def test_without_room_or_with_a_broken_module_the_source_is_left_as_it_is(tmp_path, source):
    blocked = tmp_path / "file"
    blocked.write_text("")
    local.link_bytecode(source, blocked / "cache")
    assert not list(source.rglob("__pycache__"))
    broken = make(tmp_path / "broken", "VALUE = (\n")
    local.link_bytecode(broken, tmp_path / "cache")
    assert not list(broken.rglob("__pycache__"))
    assert not [file for file in (tmp_path / "cache").iterdir() if file.name.endswith(".tmp")]


def test_the_files_of_a_bundle_are_compared_once_and_a_cache_that_is_gone_is_made_again(tmp_path, source, monkeypatch):
    cache, read = tmp_path / "cache", []
    digest = local._digest
    monkeypatch.setattr(local, "_digest", lambda *given: read.append(given) or digest(*given))
    local.link_bytecode(source, cache, "bundle")
    local.link_bytecode(make(tmp_path / "same"), cache, "bundle")
    assert len(read) == 1
    local.link_bytecode(make(tmp_path / "other", "VALUE = 2\n"), cache, "another")
    assert len(read) == 2 and len([*cache.iterdir()]) == 2
    shutil.rmtree(cache)
    local.link_bytecode(later := make(tmp_path / "later"), cache, "bundle")
    assert len(read) == 3 and launch(later).stdout.startswith("1 ")


def test_a_node_compiles_our_own_files_once_for_all_attempts_of_a_bundle(tmp_path, monkeypatch):
    """Also where a file of another bundle has the same size: their time says nothing."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text("1")
    root, written = tmp_path / "root", []
    for value in ("1", "2"):
        part = tmp_path / f"part{value}.py"
        part.write_text(f"VALUE = {value}")
        bundle = Bundle.make(
            tmp_path / "project", tmp_path / "bundles", {".cloudtrain/more/part.py": part}, trainer=False
        )
        given = bundle.path.read_bytes()
        bundles.store_piece(root, bundle.sha256, 0, len(given), given)
        for attempt in ("a1", "a2"):
            source = root / attempt / value / "source"
            bundles.extract_bundle(root, bundle.sha256, source)
            words = [sys.executable, "-c", "import part; print(part.VALUE)"]
            done = subprocess.run(
                words, cwd=source / ".cloudtrain" / "more", capture_output=True, text=True, check=True
            )
            assert done.stdout.strip() == value
            written.append([path.stat().st_mtime_ns for path in (root / "src").rglob("part*.pyc")])
    assert [len(times) for times in written] == [1, 1, 2, 2] and written[0] == written[1] and written[2] == written[3]
