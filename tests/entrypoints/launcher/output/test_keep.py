"""Patterns of `keep`, and the files that they bring home."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.entrypoints.training import ENTRYPOINTS

from launcher.log import Log  # isort: skip
from launcher.output import keep  # isort: skip

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


def made(folder: Path, patterns: list[str], rank: int = 0, safe: Path | None = None) -> tuple[keep.Keeper, Path]:
    (folder / "source" / ".cloudtrain").mkdir(parents=True, exist_ok=True)
    (folder / "log").touch()
    log = Log(os.open(folder / "log", os.O_WRONLY | os.O_APPEND))
    outputs = folder / "outputs"
    return keep.Keeper(patterns, str(folder / "source"), str(outputs), rank, log, str(safe) if safe else None), outputs


def write(path: Path, text: str = "x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def files(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


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


def test_the_next_attempt_finds_them_and_what_a_platform_brought_back(tmp_path: Path):
    first, outputs = made(tmp_path / "a", ["out"], 1, tmp_path / "safe")
    first.begin()
    write(tmp_path / "a/source/out/x", "1")
    assert first.finish() == "" and files(outputs) == ["node-1/out/x"] and files(tmp_path / "safe") == ["node-1/out/x"]
    again, outputs = made(tmp_path / "b", ["out"], 1, tmp_path / "safe")  # the outputs are gone
    assert again.restore() == 1 and (tmp_path / "b/source/out/x").read_text() == "1"
    assert again.wants("node-1/out/x") and not again.wants("out/x") and not again.wants("node-1/other")
    again.begin()
    assert again.finish() == "" and files(outputs) == ["node-1/out/x"]
    last, outputs = made(tmp_path / "b", ["out"], 1)
    assert last.restore() == 0  # it is there
    os.unlink(tmp_path / "b/source/out/x")
    assert last.restore() == 1
    last.begin()
    os.unlink(tmp_path / "b/source/out/x")
    assert last.finish() == "" and files(outputs) == []  # removed by the script, so removed there


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
    monkeypatch.setattr(keep, "_replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
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


def test_a_copy_that_was_cut_off_is_no_result(tmp_path: Path):
    first, outputs = made(tmp_path / "a", ["out"])
    write(outputs / "out" / keep.PART, "half")
    assert first.restore() == 0 and not first.folders  # nothing is there to resume from


def test_the_first_node_takes_no_files_of_others(tmp_path: Path):
    keeper, outputs = made(tmp_path, ["**"])
    write(outputs / "node-1/x")
    write(outputs / "y")
    assert keeper.restore() == 1 and (tmp_path / "source/y").exists() and keeper.folders


def test_what_is_not_kept_is_counted_without_caches_and_environments(tmp_path: Path):
    keeper, _ = made(tmp_path, [])
    keeper.begin()
    for name in ("__pycache__/a.pyc", ".git/x", "env/pyvenv.cfg", "env/lib/y", "big/one", "big/two", "small"):
        write(tmp_path / "source" / name, "x" * 600)
    assert keeper.finish() == ""
    text = (tmp_path / "log").read_text()
    advice = "set keep: [big, small] in the job file, or add --set 'keep=[big, small]' to submit"
    assert f"1.2 KB in big/, 600 bytes in small are not kept, and the next attempt will not find them: {advice}" in text
    assert "output_dir" not in text  # no script was named that has such an option


@pytest.mark.parametrize(
    ("text", "argv", "option"),
    [
        ("parser.add_argument('--lr')", ["train.py"], ""),
        ("parser.add_argument('--output_dir')", ["train.py", "--lr", "1"], "--output_dir {model_dir}"),
        ('parser.add_argument("--save-dir", default="out")', ["torchrun", "train.py"], "--save-dir {model_dir}"),
        ("parser.add_argument('--ckpt_dir')", ["-m", "train"], "--ckpt_dir {checkpoint_dir}"),
        ("HfArgumentParser(TrainingArguments)", ["cd . && python train.py"], "--output_dir {model_dir}"),
        ("parser.add_argument('--output_dir')", ["other.py"], ""),
    ],
)
def test_only_an_option_that_the_script_has_is_named(tmp_path: Path, text: str, argv: list[str], option: str):
    (tmp_path / "train.py").write_text(text)
    assert keep.results_option(str(tmp_path), argv) == option


def test_a_disk_that_takes_nothing_is_a_problem(tmp_path: Path):
    keeper, outputs = made(tmp_path, ["out"])
    outputs.write_text("a file where a folder should be")
    keeper.begin()
    write(tmp_path / "source/out/x")
    assert "out/x cannot be copied to the output" in keeper.finish()


def wait(true) -> None:
    import time

    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)


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
