"""The launcher's own client of Cloud Storage, against the simulator's: large files in pieces, broken off and gone on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher.output import gcs

from cloudtrain.simulators.http import Fault
from cloudtrain.simulators.vertex.server import Simulator


@pytest.fixture
def simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
    with Simulator(tmp_path / "simulator", bucket="bucket") as made:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", made.url)
        monkeypatch.setattr(gcs, "PIECE", 256 << 10)
        yield made


@pytest.mark.parametrize("size", [0, 1, 256 << 10, (256 << 10) + 1, 1_000_000])
def test_files_there_and_back(simulator: Simulator, tmp_path: Path, size: int):
    data = bytes(n * 7 % 251 for n in range(size))
    (tmp_path / "here").write_bytes(data)
    files = gcs.Files()
    files.put_file(str(tmp_path / "here"), "bucket/a/ü #1?.bin")
    assert simulator.storage.read("bucket", "a/ü #1?.bin") == data == files.cat_file("bucket/a/ü #1?.bin")
    files.get_file("bucket/a/ü #1?.bin", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == data
    assert files.info("bucket/a/ü #1?.bin")["size"] == size
    files.rm_file("bucket/a/ü #1?.bin")
    with pytest.raises(FileNotFoundError):
        files.info("bucket/a/ü #1?.bin")


@pytest.mark.parametrize("status", [503, 0])
@pytest.mark.parametrize("after", [True, False], ids=["after", "before"])
@pytest.mark.parametrize("skip", [1, 3], ids=["within", "last"])
def test_transfers_survive_errors(simulator: Simulator, tmp_path: Path, status: int, after: bool, skip: int):
    data = bytes(n * 7 % 251 for n in range(1_000_000))
    (tmp_path / "here").write_bytes(data)
    simulator.faults += [
        Fault("PUT", "^/upload/", status, skip=skip, after=after),
        Fault("GET", "alt=media", status, skip=1),
    ]
    files = gcs.Files()
    files.put_file(str(tmp_path / "here"), "bucket/large")
    files.get_file("bucket/large", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == data == simulator.storage.read("bucket", "large")
    assert all(fault.times == 0 for fault in simulator.faults)


def test_an_object_that_changes_meanwhile_arrives_as_its_newest_version(
    simulator: Simulator, tmp_path: Path, monkeypatch
):
    simulator.storage.put("bucket", "m", b"old" * 200_000)
    ask, asked = gcs.Files._ask, []

    def change(self: gcs.Files, method: str, path: str, *more: object):
        asked.append(path)
        if len(asked) == 3:  # behind the first of three pieces
            simulator.storage.put("bucket", "m", b"new" * 150_000)
        return ask(self, method, path, *more)

    monkeypatch.setattr(gcs.Files, "_ask", change)
    gcs.Files().get_file("bucket/m", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == b"new" * 150_000


def test_a_damaged_piece_is_noticed(simulator: Simulator, tmp_path: Path, monkeypatch):
    simulator.storage.put("bucket", "m", b"x" * 1000)
    ask, damaged = gcs.Files._ask, [True, False]

    def damage(self: gcs.Files, method: str, path: str, *more: object):
        headers, body = ask(self, method, path, *more)
        return headers, body.replace(b"x", b"y", 1) if "alt=media" in path and damaged.pop(0) else body

    monkeypatch.setattr(gcs.Files, "_ask", damage)
    gcs.Files().get_file("bucket/m", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == b"x" * 1000 and damaged == []


def test_listings_of_many_pages(simulator: Simulator):
    for n in range(1203):
        simulator.storage.put("bucket", f"x/{n:04}", b"1")
    simulator.storage.put("bucket", "xy", b"1")
    found = gcs.Files().find("bucket/x/")
    assert list(found) == [f"bucket/x/{n:04}" for n in range(1203)]


def test_what_is_refused(simulator: Simulator):
    simulator.faults.append(Fault("GET", "/o", 403, "denied to you", times=9))
    with pytest.raises(PermissionError, match="denied to you"):
        gcs.Files().find("bucket/x/")
    assert simulator.faults[0].times == 8, "it is not asked again"
