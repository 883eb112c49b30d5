"""Inputs of a node: archives of runs are unpacked, whatever is in them, and ~ is the node's home."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from launcher.errors import Refused
from launcher.prepare import inputs

LOG = SimpleNamespace(say=lambda text: None)


def archive(path: Path, *members: tarfile.TarInfo) -> dict[str, dict[str, str]]:
    """Write an archive and return the input of a job that names it and a run; a file holds its own name."""
    with tarfile.open(path, "w:gz") as packed:
        for member in members:
            data = member.name.encode() if member.isreg() else b""
            member.size = len(data)
            packed.addfile(member, io.BytesIO(data))
    return {"model": {"uri": str(path), "run": "first"}}


def member(name: str, link: str = "", kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = (tarfile.SYMTYPE, link) if link and kind == tarfile.REGTYPE else (kind, link)
    return made


def test_the_archive_of_a_run_is_unpacked_once(tmp_path: Path):
    made = archive(tmp_path / "model.tar.gz", member("./config.json"), member("a/b"), member("a/c", "b"))
    for _ in range(2):
        found = inputs.resolve(made, str(tmp_path / "inputs"), LOG)["model"]
        assert sorted(str(path.relative_to(found)) for path in Path(found).rglob("*")) == [
            "a",
            "a/b",
            "a/c",
            "config.json",
        ]
        assert (Path(found) / "a" / "c").read_text() == "a/b"
        (tmp_path / "model.tar.gz").unlink(missing_ok=True)  # the folder is what the second one finds
        made["model"]["uri"] = str(archive_again(tmp_path))
    own = {"model": {"uri": str(archive_again(tmp_path))}}
    assert inputs.resolve(own, str(tmp_path / "inputs"), LOG)["model"].endswith(".tar.gz"), "it names no run"


def archive_again(folder: Path) -> Path:
    (folder / "again.tar.gz").write_bytes(b"this is no archive")
    return folder / "again.tar.gz"


@pytest.mark.parametrize(
    "members",
    [
        [member("../out")],
        [member("/out")],
        [member("a/../../out")],
        [member("link", "..")],
        [member("link", "/etc")],
        [member("chain", "a/b/../../out"), member("a/b", "../c"), member("c/d")],
        [member("chain", "here/.."), member("here", ".")],
        [member("a/b/here", "../.."), member("a/b/here/up", "../../.."), member("up/out")],
        [member("here", "."), member("here/out")],
        [member("hard", "config.json", tarfile.LNKTYPE)],
        [member("pipe", kind=tarfile.FIFOTYPE)],
    ],
)
def test_an_archive_that_leads_out_of_its_folder_is_refused(tmp_path: Path, members: list[tarfile.TarInfo]):
    made = archive(tmp_path / "model.tar.gz", *members)
    with pytest.raises(Refused, match="the input model cannot be unpacked: .*"):
        inputs.resolve(made, str(tmp_path / "inputs"), LOG)
    assert not (tmp_path / "out").exists() and not (tmp_path / "inputs" / ".unpacked" / "model").exists()


def test_an_archive_that_is_cut_is_refused(tmp_path: Path):
    made = archive(tmp_path / "model.tar.gz", *(member(f"{number}") for number in range(2000)))
    whole = (tmp_path / "model.tar.gz").read_bytes()
    (tmp_path / "model.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Refused, match="the input model cannot be unpacked"):
        inputs.resolve(made, str(tmp_path / "inputs"), LOG)


def test_a_home_is_that_of_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "there").mkdir()
    found = inputs.resolve({"model": {"uri": "~/there"}}, str(tmp_path / "inputs"), LOG)
    assert found == {"model": str(tmp_path / "there")}
