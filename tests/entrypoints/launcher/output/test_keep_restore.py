"""What the next attempt finds of the files that earlier ones wrote."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.entrypoints.launcher.output.keepers import TRAINER, files, fresh, looked, made, write
from tests.entrypoints.training import ENTRYPOINTS

from launcher.log import Log  # isort: skip
from launcher.output import keep  # isort: skip

assert ENTRYPOINTS


def test_the_next_attempt_finds_them_and_what_a_platform_brought_back(tmp_path: Path):
    first, outputs = made(tmp_path / "a", ["out"], 1, tmp_path / "safe")
    first.begin()
    write(tmp_path / "a/source/out/x", "1")
    assert first.finish() == "" and files(outputs) == ["node-1/out/x"] and files(tmp_path / "safe") == ["node-1/out/x"]
    again, outputs = made(tmp_path / "b", ["out"], 1, tmp_path / "safe")  # the outputs are gone
    assert again.restore() == 1 and (tmp_path / "b/source/out/x").read_text() == "1"
    assert again.wants("node-1/out/x") and not again.wants("out/x") and not again.wants("node-2/out/x")
    again.begin()
    assert again.finish() == "" and files(outputs) == ["node-1/out/x"]
    last, outputs = made(tmp_path / "b", ["out"], 1)
    assert last.restore() == 0  # it is there
    os.unlink(tmp_path / "b/source/out/x")
    assert last.restore() == 1
    last.begin()
    os.unlink(tmp_path / "b/source/out/x")
    assert last.finish() == "" and files(outputs) == []  # removed by the script, so removed there


def test_a_file_of_the_source_that_was_changed_comes_back_as_it_was_left(tmp_path: Path):
    for attempt in ("1", "2"):
        keeper, _ = made(tmp_path / attempt, ["log.txt"], 1, tmp_path / "safe")
        write(tmp_path / attempt / "source/log.txt", "of the source")
        assert keeper.restore() == int(attempt) - 1
        keeper.begin()
        with (tmp_path / attempt / "source/log.txt").open("a") as file:
            file.write(attempt)
        assert keeper.finish() == ""
    assert (tmp_path / "2/source/log.txt").read_text() == "of the source12"


def test_the_first_node_takes_no_files_of_others(tmp_path: Path):
    keeper, outputs = made(tmp_path, ["**"])
    write(outputs / "node-1/x")
    write(outputs / "y")
    assert keeper.restore() == 1 and (tmp_path / "source/y").exists() and keeper.folders


def test_what_only_the_first_node_wrote_comes_to_the_others_too(tmp_path: Path):
    write(tmp_path / "outputs/out/checkpoint.pt", "first node")
    write(tmp_path / "outputs/out/log.txt", "first node")
    write(tmp_path / "outputs/node-1/out/log.txt", "second node")
    write(tmp_path / "outputs/node-2/out/third.txt", "third node")
    keeper, outputs = made(tmp_path, ["out"], rank=1)
    assert keeper.restore() == 2 and keeper.folders
    source = tmp_path / "source" / "out"
    assert {path.name: path.read_text() for path in source.iterdir()} == {
        "checkpoint.pt": "first node",
        "log.txt": "second node",
    }
    keeper.begin()
    assert keeper.finish() == ""
    assert sorted(files(outputs / "node-1")) == ["out/log.txt"]  # what it got from the first node is not its own


def test_what_the_script_wrote_into_the_outputs_itself_is_not_copied_to_the_working_directory(tmp_path: Path):
    keeper, outputs = made(tmp_path, None)
    keeper.begin()
    write(outputs / "own.json")
    write(tmp_path / "source/out/x")
    assert keeper.finish() == ""
    again, _ = fresh(tmp_path / "b", tmp_path)
    assert (
        again.restore() == 1
        and files(tmp_path / "b/source/out") == ["x"]
        and not (tmp_path / "b/source/own.json").exists()
    )


def test_a_checkpoint_that_was_cut_off_comes_home_and_is_not_put_back(tmp_path: Path):
    keeper, outputs = made(tmp_path, None)
    keeper.begin()
    for step, names in ((5, TRAINER), (10, TRAINER[:-1])):
        for name in names:
            write(tmp_path / f"source/out/checkpoint-{step}/{name}")
    assert keeper.finish() == "" and len(files(outputs)) == 9
    again, outputs = fresh(tmp_path / "b", tmp_path)
    (outputs / "out/checkpoint-5/extra").touch()  # not in the list
    assert again.restore() == 5 and sorted(os.listdir(tmp_path / "b/source/out/checkpoint-5")) == sorted(TRAINER)
    assert not (tmp_path / "b/source/out/checkpoint-10").exists()
    assert "out/checkpoint-10 is not complete" in (tmp_path / "b/log").read_text()
    assert again.folders == [str(tmp_path / "b/source/out")]
    last, outputs = fresh(tmp_path / "c", tmp_path / "b")
    (outputs / "out/checkpoint-5/config.json").unlink()  # the node was lost in the middle of its copies
    assert last.restore() == 0


def test_every_node_finds_its_own_files_and_what_only_the_first_one_wrote(tmp_path: Path):
    for rank, names in ((0, ["out/model", "log"]), (1, ["log"])):
        keeper, _ = made(tmp_path, None, rank)
        keeper.begin()
        for name in names:
            write(tmp_path / "source" / name, str(rank))
        assert keeper.finish() == ""
        shutil.rmtree(tmp_path / "source")
    assert sorted(files(tmp_path / "outputs")) == ["log", "node-1/log", "out/model"]
    keeper, outputs = made(tmp_path, None, 1)
    assert keeper.restore() == 2
    assert (tmp_path / "source/log").read_text() == "1" and (tmp_path / "source/out/model").read_text() == "0"
    keeper.begin()
    assert keeper.finish() == "" and files(outputs / "node-1") == ["log"]


def test_a_checkpoint_with_a_credential_comes_back_without_it(tmp_path: Path):
    keeper, outputs = made(tmp_path, None)
    keeper.begin()
    for name in TRAINER:
        write(tmp_path / "source/checkpoint-5" / name)
    write(tmp_path / "source/checkpoint-5/wandb.yaml", "key: hf_" + "a" * 34)
    assert keeper.finish() == "" and len(files(outputs)) == len(TRAINER)
    again, _ = fresh(tmp_path / "b", tmp_path)
    assert again.restore() == len(TRAINER)


@pytest.mark.parametrize("patterns", [None, ["out"]])
def test_of_a_working_directory_that_all_nodes_share_there_is_one_copy(tmp_path: Path, patterns):
    def nodes(folder: Path) -> list[keep.Keeper]:
        return [made(folder, patterns, rank, has_one_source=True)[0] for rank in (0, 1)]

    keepers = nodes(tmp_path)
    for keeper in keepers:
        keeper.begin()
    for name in TRAINER:
        write(tmp_path / "source/out/checkpoint-5" / name)
    assert [keeper.finish() for keeper in keepers] == ["", ""]
    assert sorted(files(tmp_path / "outputs")) == [f"out/checkpoint-5/{name}" for name in sorted(TRAINER)]
    fresh(tmp_path / "b", tmp_path)
    first, second = nodes(tmp_path / "b")
    assert second.restore() == 0 and files(tmp_path / "b/source") == [], "two nodes would write the same file"
    assert first.restore() == len(TRAINER)
    assert second.has_restored and second.folders == first.folders, "all ranks get the same resume_args"
    for keeper in (first, second):
        keeper.begin()
    assert [first.finish(), second.finish()] == ["", ""] and len(files(tmp_path / "b/outputs")) == len(TRAINER)


def test_a_file_that_the_source_has_changed_since_wins_over_a_kept_one(tmp_path: Path):
    keeper, _ = made(tmp_path, None)
    source = tmp_path / "source"
    for name in ("config.json", "same.json"):
        write(source / name, "of the source")
    keeper.begin()
    keeper._end.set()
    assert keeper._thread is not None
    keeper._thread.join()
    keeper._end.clear()
    keeper._survey()
    for name in ("config.json", "same.json", "new.json", "out/model.bin"):
        write(source / name, "of the script")
    assert keeper.finish() == ""
    again, outputs = fresh(tmp_path / "b", tmp_path)
    later = tmp_path / "b/source"
    write(later / "config.json", "OF the source")
    write(later / "same.json", "of the source")
    write(later / "new.json", "of the source too")
    write(later / "out", "a file where the script had a folder")
    assert again.restore() == 1
    assert {path.name: path.read_text() for path in later.iterdir() if path.is_file()} == {
        "config.json": "OF the source",
        "same.json": "of the script",
        "new.json": "of the source too",
        "out": "a file where the script had a folder",
    }
    text = (tmp_path / "b/log").read_text()
    assert (
        "keep: config.json, new.json, out/model.bin: the source's new files are used; what earlier attempts wrote"
        in text
    )
    assert (outputs / "config.json").read_text() == "of the script", "it stays a result"


def test_an_early_end_of_the_survey_lets_kept_files_win(tmp_path: Path):
    keeper, _ = made(tmp_path, None)
    write(tmp_path / "source/config.json", "of the source")
    keeper.begin()
    keeper._end.set()
    write(tmp_path / "source/config.json", "of the script")
    keeper._survey()
    assert keeper.finish() == ""
    again, _ = fresh(tmp_path / "b", tmp_path)
    write(tmp_path / "b/source/config.json", "another")
    assert again.restore() == 1 and (tmp_path / "b/source/config.json").read_text() == "of the script"


def test_a_start_in_the_same_folder_keeps_what_the_one_before_wrote(tmp_path: Path):
    """A container that its platform starts again has its files still."""
    first, outputs = made(tmp_path, None)
    first.begin()
    for name in TRAINER:
        write(tmp_path / "source/out/checkpoint-5" / name)
    looked(first)
    write(tmp_path / "source/late.txt")  # no look has seen it
    second, _ = made(tmp_path, None)
    assert second.restore() == 0 and second.has_restored  # all is there
    second.begin()
    write(tmp_path / "source/out/model.bin")
    assert second.finish() == "" and len(files(outputs)) == 7
    third, _ = fresh(tmp_path / "b", tmp_path)
    assert third.restore() == 7


def test_a_checkpoint_that_was_put_back_is_not_reported_again(tmp_path: Path):
    keeper, _ = made(tmp_path / "a", None, safe=tmp_path / "safe")
    keeper.begin()
    for name in TRAINER:
        write(tmp_path / "a/source/out/checkpoint-5" / name)
    assert keeper.finish() == "" and '"kept":' in (tmp_path / "a/log").read_text().replace('": ', '":')
    (tmp_path / "b").mkdir()
    (tmp_path / "a/kept-files").rename(tmp_path / "b/kept-files")
    again, outputs = made(tmp_path / "b", None, safe=tmp_path / "safe")  # the outputs are gone, as on SageMaker
    assert again.restore() == 5
    again.begin()
    assert again.finish() == "" and len(files(outputs)) == 5
    assert '"kept":' not in (tmp_path / "b/log").read_text().replace('": ', '":')


def test_a_folder_that_the_platform_does_not_bring_back_has_a_copy_until_the_run_succeeds(tmp_path: Path):
    """As {model_dir} and {output_dir} on SageMaker: what the working directory's keeper brings there has its copy already."""

    def start(number: int) -> keep.Keeper:
        log = Log(os.open(os.devnull, os.O_WRONLY))
        node, safe = tmp_path / f"machine-{number}", tmp_path / "safe"
        (node / "source").mkdir(parents=True)
        (node / "outputs").mkdir()
        folder = keep.Keeper(
            None, str(node / "outputs"), str(safe / "outputs"), 0, log, records=str(safe / "outputs-files"),
            skips=lambda name: keeper.is_kept_output(name),
        )  # fmt: skip
        keeper = keep.Keeper(
            None, str(node / "source"), str(node / "outputs"), 0, log, str(safe / "kept"),
            records=str(safe / "kept-files"), beside=[folder],
        )  # fmt: skip
        return keeper

    safe = tmp_path / "safe"
    first = start(1)
    assert first.restore() == 0 and not first.has_restored
    first.begin()
    write(tmp_path / "machine-1/source/out/a")
    write(tmp_path / "machine-1/outputs/checkpoint-2/trainer_state.json")
    assert first.finish(stopped=True) == ""
    kept = ["kept-files/node-0", "kept/node-0/out/a", "outputs-files/node-0", "outputs/checkpoint-2/trainer_state.json"]
    assert [name.removesuffix(".json") if "files" in name else name for name in sorted(files(safe))] == kept
    second = start(2)
    assert second.restore() == 2 and second.has_restored
    found = ["outputs/checkpoint-2/trainer_state.json", "source/out/a"]
    assert [name for name in sorted(files(tmp_path / "machine-2")) if name in found] == found
    second.begin()
    assert second.finish(succeeded=True) == ""
    assert [name for name in files(safe) if name.startswith("outputs/")] == []
