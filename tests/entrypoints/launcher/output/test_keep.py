"""Patterns of `keep`, and copies that follow what the script does."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.entrypoints.launcher.output.keepers import TRAINER, files, looked, made, wait, write
from tests.entrypoints.training import ENTRYPOINTS

from launcher.clock import Clock  # isort: skip
from launcher.output import keep, keep_mirrors, script_files  # isort: skip
from launcher.prepare import node  # isort: skip
from launcher.world import cluster  # isort: skip

assert ENTRYPOINTS
NAMES = [
    "out/a.pt",
    "out/deep/b.pt",
    "runs/1/best.pt",
    "runs/1/last.pt",
    "runs/2/x/best.pt",
    "a.txt",
    "out.txt",
    "x/y/z.json",
]


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        ("out", ["out/a.pt", "out/deep/b.pt"]),
        ("out/", ["out/a.pt", "out/deep/b.pt"]),
        ("runs/*/best.pt", ["runs/1/best.pt"]),
        ("runs/**/best.pt", ["runs/1/best.pt", "runs/2/x/best.pt"]),
        ("*.txt", ["a.txt", "out.txt"]),
        ("**/*.pt", ["out/a.pt", "out/deep/b.pt", "runs/1/best.pt", "runs/1/last.pt", "runs/2/x/best.pt"]),
        ("runs/[!2]/l?st.pt", ["runs/1/last.pt"]),
        ("**", NAMES),
        ("x", ["x/y/z.json"]),
        ("(out|x", []),
    ],
)
def test_patterns(tmp_path: Path, pattern: str, kept: list[str]):
    keeper, outputs = made(tmp_path, [pattern])
    keeper.begin()
    for name in NAMES:
        write(tmp_path / "source" / name)
    assert keeper.finish() == ""
    assert sorted(files(outputs)) == sorted(kept)


def test_what_is_removed_or_changed_follows_while_the_ranks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(keep, "EVERY_S", 0.01)
    keeper, outputs = made(tmp_path, ["out"])
    write(tmp_path / "source/out/of-the-source")
    keeper.begin()
    write(tmp_path / "source/out/checkpoint-1/model", "one")
    wait(lambda: (outputs / "out/checkpoint-1/model").exists())
    write(tmp_path / "source/out/checkpoint-2/model", "two")
    os.unlink(tmp_path / "source/out/checkpoint-1/model")
    wait(lambda: not (outputs / "out/checkpoint-1/model").exists() and (outputs / "out/checkpoint-2/model").exists())
    write(tmp_path / "source/out/of-the-source", "changed")
    assert keeper.finish() == "" and sorted(files(outputs)) == ["out/checkpoint-2/model", "out/of-the-source"]


def test_a_file_that_is_renamed_is_never_without_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A look that falls into the moment of the renaming finds neither name."""
    keeper, outputs = made(tmp_path, ["out"])
    source = tmp_path / "source" / "out"
    keeper.begin()
    write(source / "old/model", "weights")
    assert keeper._look() == "" and files(outputs) == ["out/old/model"]
    (source / "old/model").rename(tmp_path / "elsewhere")
    assert keeper._look() == "" and files(outputs) == ["out/old/model"]
    (source / "new").mkdir()
    (tmp_path / "elsewhere").rename(source / "new/model")
    monkeypatch.setattr(
        keep_mirrors, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    assert "No space left" in keeper._look() and files(outputs) == ["out/old/model"]  # it has no other copy yet
    monkeypatch.undo()
    assert keeper._look() == "" and files(outputs) == ["out/new/model"]


def test_a_folder_that_cannot_be_read_for_now_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keeper, outputs = made(tmp_path, ["out"])
    keeper.begin()
    write(tmp_path / "source/out/deep/x")
    assert keeper._look() == ""
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda top: (step for step in walk(top) if not step[0].endswith("/deep")))
    assert keeper._look() == "" and keeper._look() == "" and files(outputs) == ["out/deep/x"]


def test_a_file_becomes_a_folder_and_a_folder_a_file(tmp_path: Path):
    keeper, outputs = made(tmp_path, ["out"])
    source = tmp_path / "source" / "out"
    keeper.begin()
    write(source / "a")
    write(source / "b/c")
    assert keeper._look() == ""
    (source / "a").unlink()
    (source / "b/c").unlink()
    (source / "b").rmdir()
    write(source / "a/d")
    write(source / "b")
    assert keeper._look() == "" and keeper.finish() == "" and sorted(files(outputs)) == ["out/a/d", "out/b"]


def test_a_copy_that_was_cut_off_is_no_result(tmp_path: Path):
    first, outputs = made(tmp_path / "a", ["out"])
    write(outputs / "out" / script_files.PART, "half")
    assert first.restore() == 0 and not first.folders  # nothing is there to resume from


def test_what_is_not_kept_is_counted_without_caches_and_environments(tmp_path: Path):
    keeper, _ = made(tmp_path, [])
    keeper.begin()
    for name in ("__pycache__/a.pyc", ".git/x", "env/pyvenv.cfg", "env/lib/y", "big/one", "big/two", "small"):
        write(tmp_path / "source" / name, "x" * 600)
    assert keeper.finish() == ""
    text = (tmp_path / "log").read_text()
    advice = "set keep: [big, small] in the job file, or add --set 'keep=[big, small]' to submit"
    assert f"1.2 KB in big/, 600 bytes in small are not kept, and the next attempt will not find them: {advice}" in text


def test_a_disk_that_takes_nothing_is_a_problem(tmp_path: Path):
    keeper, outputs = made(tmp_path, ["out"])
    outputs.write_text("a file where a folder should be")
    keeper.begin()
    write(tmp_path / "source/out/x")
    assert "out/x cannot be copied to the output" in keeper.finish()


def test_a_complete_checkpoint_shares_its_content_with_its_copy_and_a_file_that_may_grow_does_not(tmp_path: Path):
    keeper, outputs = made(tmp_path, None)
    source = tmp_path / "source"
    keeper.begin()
    for name in TRAINER:
        write(source / "out/checkpoint-5" / name)
    write(source / "out/log.txt", "1")
    looked(keeper)
    assert (outputs / "out/checkpoint-5/optimizer.pt").stat().st_ino == (
        source / "out/checkpoint-5/optimizer.pt"
    ).stat().st_ino
    with (source / "out/log.txt").open("a") as log:
        log.write("2")
    assert (outputs / "out/log.txt").read_text() == "1"
    shutil.rmtree(source / "out/checkpoint-5")  # as save_total_limit does
    looked(keeper)
    assert files(outputs) == ["out/log.txt"]
    assert keeper.finish() == ""


def test_copies_leave_room_on_the_disk_while_the_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keeper, outputs = made(tmp_path, None)
    keeper.begin()
    free = keep_mirrors.ROOM // 4096
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((4096, 4096, 2 * free, free, free, 0, 0, 0, 0, 255)))
    write(tmp_path / "source/log.txt")
    write(tmp_path / "source/model.pt", "x" * (2 << 20))
    looked(keeper)
    assert files(outputs) == ["log.txt"]
    assert "too little room for a copy of model.pt" in (tmp_path / "log").read_text()
    assert keeper.finish() == "" and sorted(files(outputs)) == ["log.txt", "model.pt"]


def test_after_a_slow_search_the_next_one_waits_for_longer(tmp_path: Path):
    class SlowDisk(Clock):
        at = 0.0

        def monotonic(self) -> float:
            self.at += 100.0
            return self.at

        def wait(self, event, seconds=None) -> bool:
            waits.append(seconds)
            return len(waits) > 1

    waits: list[float | None] = []
    keeper, _ = made(tmp_path, ["out"])
    keeper._log.clock = SlowDisk()
    keeper._run()
    assert waits == [keep.EVERY_S, keep.REST * 100.0]


def test_a_file_that_changes_while_it_is_copied_replaces_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keeper, outputs = made(tmp_path, None)
    state = tmp_path / "source/last.pt"
    keeper.begin()
    write(state, "step 1")
    looked(keeper)
    write(state, "step 2 is whole")
    looked(keeper, 1)
    copy = shutil.copy2
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copy2", lambda path, to: (copy(path, to), write(state, "st")))
        looked(keeper, 1)
    assert (outputs / "last.pt").read_text() == "step 1" and files(outputs) == ["last.pt"]
    assert keeper.finish() == "" and (outputs / "last.pt").read_text() == "st"


@pytest.mark.parametrize(("rank", "said"), [("0", True), ("1", False)])
def test_that_nothing_is_kept_beside_another_launcher_is_logged_once_a_node(tmp_path: Path, rank: str, said: bool):
    environ = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
    there, log = cluster.Cluster("launched", None, 0)._replace(launched=True), made(tmp_path, None)[0]._log
    assert node.kept_patterns(SimpleNamespace(keep=None), there, environ, log) == ()
    assert ("files of the script's folder are not kept" in (tmp_path / "log").read_text()) is said
    assert node.kept_patterns(SimpleNamespace(keep=["out"]), there, environ, log) == ["out"]
    assert node.kept_patterns(SimpleNamespace(keep=None), there._replace(launched=False), {}, log) is None


@pytest.mark.parametrize("stopped", [True, False])
def test_the_copy_of_a_large_file_takes_a_stopped_attempt_no_time(tmp_path: Path, stopped: bool):
    """A platform kills it soon, and its end must be reported before."""
    keeper, outputs = made(tmp_path, None)
    keeper.begin()
    write(tmp_path / "source" / "state.pt", "x" * (2 << 20))
    write(tmp_path / "source" / "log.txt")
    assert keeper.finish(stopped=stopped) == "" and sorted(files(outputs)) == ["log.txt", "state.pt"]
    assert (outputs / "state.pt").samefile(tmp_path / "source" / "state.pt") is stopped
    assert not (outputs / "log.txt").samefile(tmp_path / "source" / "log.txt")


@pytest.mark.parametrize("can_link", [True, False])
def test_a_full_disk_at_the_end_takes_links_or_the_end_names_what_is_lost(tmp_path: Path, monkeypatch, can_link: bool):
    keeper, outputs = made(tmp_path, None)
    keeper.begin()
    write(tmp_path / "source/out/model.pt", "m" * 2000)
    write(tmp_path / "source/log.txt")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copy2", full)
    if not can_link:
        monkeypatch.setattr(os, "link", full)
    problem = keeper.finish(succeeded=True)
    assert sorted(files(outputs)) == (["log.txt", "out/model.pt"] if can_link else [])
    assert bool(problem) is not can_link
    assert can_link or "not copied are 2.0 KB in out/, 1 bytes in log.txt, 2 files" in problem
