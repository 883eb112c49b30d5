"""The writer of what arrives: names, hard links, and what stands in the way. Sequences: tests/backends/test_hostile_trees.py."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest
from launcher.folder_writer import FolderWriter, Unsafe, unpack


def put(folder: Path, name: str, data: bytes = b"new", **about: int) -> None:
    with FolderWriter(folder) as writer, writer.write(name, **about) as file:
        file.write(data)


@pytest.mark.parametrize("name", ["", ".", "..", "/x", "../x", "a/../x", "a/..", "a//x", "a/", "./x", "x\0", "\ud800"])
def test_a_name_that_is_no_path_below_the_folder_is_refused(tmp_path: Path, name: str):
    with pytest.raises(Unsafe, match="leads out of the folder"):
        put(tmp_path / "into", name)
    with pytest.raises(Unsafe), FolderWriter(tmp_path / "into") as writer:
        writer.link(name, "a")
    assert list(tmp_path.rglob("*")) == [tmp_path / "into"]


@pytest.mark.parametrize("name", ["new\nline", "späße", "-rf", "\\", "C:", "\udcff", "n" * 255, " "])
def test_any_name_that_a_file_system_takes_is_one(tmp_path: Path, name: str):
    put(tmp_path, f"{name}/{name}")
    assert (tmp_path / name / name).read_bytes() == b"new"


def test_the_folder_itself_may_be_a_link(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "into").symlink_to("disk")
    put(tmp_path / "into", "a/b")
    assert (tmp_path / "disk/a/b").read_bytes() == b"new"


def test_what_stands_in_the_way(tmp_path: Path):
    (tmp_path / "into").mkdir()
    os.mkfifo(tmp_path / "into/pipe")
    (tmp_path / "into/empty").mkdir()
    (tmp_path / "into/full/inner").mkdir(parents=True)
    (tmp_path / "into/file").write_bytes(b"old")
    for name in ("pipe", "empty", "file/inner"):
        put(tmp_path / "into", name)
        assert (tmp_path / "into" / name).read_bytes() == b"new"
    with pytest.raises(OSError, match="Directory not empty"):
        put(tmp_path / "into", "full")
    assert sorted(path.name for path in (tmp_path / "into").iterdir()) == ["empty", "file", "full", "pipe"]


def test_a_file_that_has_another_name_too_is_not_written_in_its_place(tmp_path: Path):
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / "into").mkdir()
    (tmp_path / "into/.x.part").hardlink_to(tmp_path / "mine")
    with FolderWriter(tmp_path / "into") as writer, open(".x.part", "a+b", opener=writer.opener) as file:
        file.write(b"theirs")
    assert (tmp_path / "mine").read_bytes() == b"mine" and (tmp_path / "into/.x.part").read_bytes() == b"theirs"


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path):
    put(tmp_path, "a", b"old", mode=0o6777, mtime_ns=5)
    with pytest.raises(ZeroDivisionError), FolderWriter(tmp_path) as writer, writer.write("a") as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]
    about = (tmp_path / "a").stat()
    assert (about.st_mode & 0o7777, about.st_mtime_ns) == (0o775, 5)


def archive(*members: tuple[str, bytes, str]) -> tarfile.TarFile:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as packed:
        for name, kind, target in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, target, len(name) * (kind == tarfile.REGTYPE)
            packed.addfile(member, io.BytesIO(name.encode()))
    return tarfile.open(fileobj=io.BytesIO(raw.getvalue()))


def test_hard_links_of_an_archive_are_copies(tmp_path: Path):
    members = archive(("./a/b", tarfile.REGTYPE, ""), ("c", tarfile.LNKTYPE, "./a/b"))
    with FolderWriter(tmp_path / "into") as writer:
        unpack(members, writer)
    assert (tmp_path / "into/c").read_bytes() == b"./a/b" and (tmp_path / "into/c").stat().st_nlink == 1


@pytest.mark.parametrize("target", ["../mine", "/etc/passwd", "link", "none", "pipe"])
def test_a_hard_link_names_a_file_of_the_archive(tmp_path: Path, target: str):
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / "into").mkdir()
    (tmp_path / "into/link").symlink_to("../mine")
    os.mkfifo(tmp_path / "into/pipe")
    with pytest.raises(Unsafe), FolderWriter(tmp_path / "into") as writer:
        unpack(archive(("x", tarfile.LNKTYPE, target)), writer)
    assert not (tmp_path / "into/x").exists()


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_devices_and_pipes_are_refused(tmp_path: Path, kind: bytes):
    with pytest.raises(Unsafe, match="'x' is neither file, folder nor link"), FolderWriter(tmp_path) as writer:
        unpack(archive(("x", kind, "")), writer)
    assert list(tmp_path.iterdir()) == []
