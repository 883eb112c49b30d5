"""Files and folders on a node: who may read them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloudtrain.nodes import bundles, files, paths
from cloudtrain.source.bundle import Bundle


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(top: Path) -> dict[str, str]:
    return {str(path.relative_to(top)): f"{path.lstat().st_mode & 0o7777:o}" for path in [top, *top.rglob("*")]}


@pytest.mark.parametrize(
    ("share", "folder", "script", "file"), [(None, "700", "700", "600"), ("group", "750", "750", "640")]
)
def test_what_is_made_for_a_run_is_for_its_user_or_for_the_group(tmp_path, umask, share, folder, script, file):
    source = tmp_path / "project"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "train.sh").write_text("true")
    (source / "train.sh").chmod(0o755)
    (source / "deep" / "er" / "a.py").write_text("1")
    bundle = Bundle.make(source, tmp_path / "bundles")
    root, mode = tmp_path / "root", paths.folder_mode(paths.umask(share))
    files.make_folders(root / "runs" / "r" / "a1", mode)
    given = bundle.path.read_bytes()
    bundles.store_piece(root, bundle.sha256, 0, len(given), given)
    bundles.extract_bundle(root, bundle.sha256, root / "runs" / "r" / "a1" / "source", mode)
    found = modes(root)
    for name in (".", "runs", "runs/r", "runs/r/a1", "runs/r/a1/source/deep/er"):
        assert found[name] == folder, name
    assert (found["runs/r/a1/source/train.sh"], found["runs/r/a1/source/deep/er/a.py"]) == (script, file)
    assert found["src"] == "700"


def test_folders_above_a_file_are_for_who_may_read_it(tmp_path, umask):
    files.write(tmp_path / "mine" / "x" / "file", b"1")
    files.write(tmp_path / "ours" / "x" / "file", b"1", mode=0o640)
    assert modes(tmp_path / "mine")["x"] == modes(tmp_path / "mine")["."] == "700"
    assert modes(tmp_path / "ours")["x"] == modes(tmp_path / "ours")["."] == "750"
    assert (modes(tmp_path / "mine")["x/file"], modes(tmp_path / "ours")["x/file"]) == ("600", "640")


def test_the_group_of_a_folder_is_passed_on(tmp_path, umask):
    tmp_path.chmod(0o2770)
    files.make_folders(tmp_path / "runs" / "r", 0o750)
    assert modes(tmp_path)["runs"] == modes(tmp_path)["runs/r"] == "2750"
