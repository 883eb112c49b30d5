"""The reader of untrusted files: what it opens, what it refuses, and where a listing ends."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from cloudtrain.source import untrusted


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../x", "a//x", "./x", "a\0b", "a/"])
def test_a_name_is_below_the_root(tmp_path: Path, name: str):
    (tmp_path / "x").write_text("x")
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError, match="the name leads out of the folder"):
        untrusted.open_file(tmp_path, name)


def test_no_link_is_followed_below_the_root_and_those_of_the_root_are(tmp_path: Path):
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "real" / "deep" / "file").write_bytes(b"12345")
    (tmp_path / "root").symlink_to("real")
    (tmp_path / "real" / "inner").symlink_to("deep")
    (tmp_path / "real" / "last").symlink_to("deep/file")
    assert untrusted.read_file(tmp_path / "root", "deep/file", 3, offset=1) == b"234"
    for name in ("inner/file", "last"):
        with pytest.raises(OSError, match="is a link, not a"):
            untrusted.read_file(tmp_path / "root", name, 3)
    with pytest.raises(NotADirectoryError, match="inner is a link, not a folder"):
        list(untrusted.walk(tmp_path / "root", "inner"))
    assert sorted(name for name, _ in untrusted.walk(tmp_path / "root")) == ["deep/file", "inner", "last"]


def test_a_device_is_not_opened():
    with pytest.raises(OSError, match="zero is a device, not a regular file"):
        untrusted.read_file("/dev", "zero", 1)


def test_a_name_that_changes_between_the_look_and_the_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What was opened counts, not what was listed."""
    for name in ("plain", "target"):
        (tmp_path / name).write_bytes(b"x")
    real = os.open

    def swap(path, flags, *rest, dir_fd=None):
        if path == "plain":
            os.unlink(path, dir_fd=dir_fd)
            os.symlink("target", path, dir_fd=dir_fd) if linked else os.mkfifo(path, dir_fd=dir_fd)
        return real(path, flags, *rest, dir_fd=dir_fd)

    monkeypatch.setattr(untrusted.os, "open", swap)
    for linked in (False, True):
        with pytest.raises(OSError) as caught:
            untrusted.open_file(tmp_path, "plain")
        assert caught.value.errno == (errno.ELOOP if linked else errno.ENXIO)
        (tmp_path / "plain").unlink()
        (tmp_path / "plain").write_bytes(b"x")


def test_a_file_that_grows_is_read_to_the_bound(tmp_path: Path):
    path, done = tmp_path / "file", threading.Event()
    path.write_bytes(b"x" * 1000)

    def grow() -> None:
        with path.open("ab", buffering=0) as file:
            while not done.is_set() and file.tell() < 1 << 30:
                file.write(b"x" * 100_000)

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        assert len(untrusted.read_file(tmp_path, "file", 5000)) in range(1000, 5001)
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("count", [300, pytest.param(1_000_000, marks=[pytest.mark.long, pytest.mark.timeout(1200)])])
def test_a_listing_ends_at_its_bound(tmp_path: Path, count: int):
    folder = tmp_path / "many"
    folder.mkdir()
    (folder / "first").write_bytes(b"")
    for number in range(count - 1):
        os.symlink("first", folder / str(number))
    found = untrusted.walk(tmp_path, "many", count // 2)
    names = []
    with pytest.raises(OSError, match=f"there are more than {count // 2:,} entries"):
        for name, _ in found:
            names.append(name)  # noqa: PERF402 - those before the error count
    assert len(names) == count // 2


def test_folders_count_and_lie_in_one_another_only_so_deep(tmp_path: Path):
    descriptor = os.open(tmp_path, os.O_RDONLY)
    for _ in range(150):
        os.mkdir("d", dir_fd=descriptor)
        inner = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)
    with pytest.raises(OSError, match=f"there are folders deeper than {untrusted.MOST_DEPTH}"):
        list(untrusted.walk(tmp_path))
    with pytest.raises(OSError, match="there are more than 10 entries"):
        list(untrusted.walk(tmp_path, most=10))
