"""Patterns of `keep`, and the files that they bring home."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.entrypoints.training import ENTRYPOINTS

from launcher.clock import Clock  # isort: skip
from launcher.log import Log  # isort: skip
from launcher.output import keep, keep_report, script_files  # isort: skip
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


def made(
    folder: Path,
    patterns: list[str] | None,
    rank: int = 0,
    safe: Path | None = None,
    limit: int = keep.LIMIT,
    has_one_source: bool = False,
) -> tuple[keep.Keeper, Path]:
    (folder / "source" / ".cloudtrain").mkdir(parents=True, exist_ok=True)
    (folder / "log").touch()
    log = Log(os.open(folder / "log", os.O_WRONLY | os.O_APPEND))
    outputs = folder / "outputs"
    given = str(safe) if safe else None
    records = str(folder / "kept-files")
    source = str(folder / "source")
    return keep.Keeper(patterns, source, str(outputs), rank, log, given, (), records, limit, has_one_source), outputs


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
    monkeypatch.setattr(keep, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
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
    write(outputs / "out" / script_files.PART, "half")
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
    assert keep_report.results_option(str(tmp_path), argv) == option


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


# -- keep: auto -----------------------------------------------------------------------------------------------------------

TRAINER = ("config.json", "model.safetensors", "training_args.bin", "optimizer.pt", "trainer_state.json")


def looked(keeper: keep.Keeper, times: int = 2) -> None:
    """Look as often as a file needs to be seen unchanged; nothing sleeps."""
    for _ in range(times):
        assert keeper._look() == ""


def fresh(folder: Path, old: Path) -> tuple[keep.Keeper, Path]:
    """Return the keeper of the next attempt: a fresh copy of the source, and what the run's folder holds."""
    folder.mkdir()
    for name in ("outputs", "kept-files"):
        if (old / name).exists():
            (old / name).rename(folder / name)
    return made(folder, None)


def test_all_that_the_script_makes_or_changes_is_kept_but_no_cache_and_no_credentials(tmp_path: Path):
    keeper, outputs = made(tmp_path, None)
    source = tmp_path / "source"
    write(source / "train.py")
    write(source / "changed.txt", "old")
    keeper._log.masks.hide("a-secret-of-the-job")
    keeper.begin()
    results = ["out/model.safetensors", "log.txt", "runs/events.out.tfevents.1", "table.csv"]
    others = ["__pycache__/a.pyc", ".git/x", "env/pyvenv.cfg", "env/lib/y", ".cache/x", "hub/CACHEDIR.TAG", "hub/blob",
              "data/cache-0123456789abcdef.arrow", ".netrc", ".env", ".aws/credentials", "id_rsa", "models--gpt2/x"]  # fmt: skip
    for name in (*results, *others):
        write(source / name)
    write(source / "notes.txt", "token=hf_" + "a" * 34)
    write(source / "config.yaml", "password: a-secret-of-the-job")
    write(source / "changed.txt", "new")
    os.mkfifo(source / "pipe")
    assert keeper.finish() == ""
    assert sorted(files(outputs)) == sorted([*results, "changed.txt"])
    text = (tmp_path / "log").read_text()
    assert "notes.txt looks like a credential and is not kept" in text and "config.yaml looks like" in text
    again, _ = fresh(tmp_path / "b", tmp_path)
    write(tmp_path / "b/source/changed.txt", "old")
    assert again.restore() == 5 and (tmp_path / "b/source/changed.txt").read_text() == "new"


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


def test_a_file_is_taken_when_it_rests_and_nobody_writes_and_a_log_at_the_end(tmp_path: Path):
    keeper, outputs = made(tmp_path, None)
    source = tmp_path / "source"
    keeper.begin()
    write(source / "ckpt.pt", "half")
    assert keeper._look() == "" and files(outputs) == []
    write(source / "ckpt.pt", "all of it")
    assert keeper._look() == "" and files(outputs) == []
    with (source / "log.txt").open("w") as log:
        log.write("1\n")
        log.flush()
        looked(keeper, 3)
        assert files(outputs) == ["ckpt.pt"], "the log is open"
        write(source / "ckpt.pt", "the next one, half")
        assert keeper._look() == "" and (outputs / "ckpt.pt").read_text() == "all of it"
        assert keeper.finish() == ""
    assert sorted(files(outputs)) == ["ckpt.pt", "log.txt"]


@pytest.mark.parametrize(
    ("folder", "first", "last"),
    [
        ("out/checkpoint-5", TRAINER[:-1], "trainer_state.json"),
        ("out/checkpoint-5", ("optimizer.pt", "global_step5/mp_rank_00_model_states.pt"), "trainer_state.json"),
        ("checkpoints/checkpoint_0", ("model.safetensors", "optimizer.bin", "scheduler.bin"), "random_states_0.pkl"),
        ("out/step_10", ("pytorch_model.bin", "optimizer.bin"), "random_states_0.pkl"),
        ("logs/epoch=1-step=2.ckpt", ("__0_0.distcp", "__1_0.distcp"), ".metadata"),
        ("ckpt-3", ("__0_0.distcp",), ".metadata"),
        ("ds/global_step5", ("mp_rank_00_model_states.pt",), "../latest"),
    ],
)
def test_a_checkpoint_is_taken_when_its_last_file_is_there(tmp_path: Path, folder: str, first, last: str):
    keeper, outputs = made(tmp_path, None)
    at = tmp_path / "source" / folder
    keeper.begin()
    for name in first:
        write(at / name)
    looked(keeper, 10)
    assert files(outputs) == []
    write(at / last)
    looked(keeper)
    assert len(files(outputs)) == len(first) + 1


def test_a_checkpoint_of_an_unknown_kind_is_taken_when_it_rests_for_longer(tmp_path: Path):
    keeper, outputs = made(tmp_path, None)
    keeper.begin()
    write(tmp_path / "source/out/step-5/model.pt")
    looked(keeper, 3)
    assert files(outputs) == []
    looked(keeper, 4)
    assert files(outputs) == ["out/step-5/model.pt"]


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


def test_over_the_limit_the_newest_are_kept_and_the_largest_folders_are_named(tmp_path: Path):
    size = 2 << 20
    keeper, outputs = made(tmp_path, None, limit=2 * size + 100)
    keeper.begin()
    for step in (1, 2, 3):
        write(tmp_path / f"source/out/model-{step}.bin", "x" * size)
        os.utime(tmp_path / f"source/out/model-{step}.bin", (step, step))
        looked(keeper)
    write(tmp_path / "source/log.txt", "small")
    assert keeper.finish() == ""
    assert sorted(files(outputs)) == ["log.txt", "out/model-2.bin", "out/model-3.bin"]
    assert keeper.not_kept.startswith("2.1 MB in out/ are over keep_limit (4.2 MB), so they are not kept: set a larger")


def test_complete_checkpoints_go_first_and_the_newest_before_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    keeper, _ = made(tmp_path, None)
    keeper.begin()
    order: list[str] = []
    replace = keep.replace
    monkeypatch.setattr(
        keep, "replace", lambda path, folder, name, *more: order.append(name) or replace(path, folder, name, *more)
    )
    for step in (5, 10):
        for name in TRAINER:
            write(tmp_path / f"source/out/checkpoint-{step}/{name}")
            os.utime(tmp_path / f"source/out/checkpoint-{step}/{name}", (step, step))
    write(tmp_path / "source/a.csv")
    assert keeper.finish() == ""
    assert [name.split("/")[1] if "/" in name else name for name in order] == ["checkpoint-10"] * 5 + [
        "checkpoint-5"
    ] * 5 + ["a.csv"]


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


def test_a_file_that_cannot_be_read_fails_no_run_and_holds_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    keeper, outputs = made(tmp_path, None)
    source, holds = tmp_path / "source", keep.holds_credentials

    def hold(path: str, masks) -> bool:  # who runs the tests may be root, who reads every file
        if path.endswith("locked.bin"):
            raise PermissionError(13, "Permission denied")
        return holds(path, masks)

    monkeypatch.setattr(keep, "holds_credentials", hold)
    keeper.begin()
    write(source / "locked.bin")
    for name in TRAINER:
        write(source / "out/checkpoint-5" / name)
    looked(keeper)
    assert len(files(outputs)) == len(TRAINER)
    shutil.rmtree(source / "out/checkpoint-5")  # as save_total_limit does
    looked(keeper)
    assert files(outputs) == []
    assert keeper.finish() == ""
    assert "keep: locked.bin cannot be read and is not kept" in (tmp_path / "log").read_text()


def test_a_checkpoint_with_a_credential_comes_back_without_it(tmp_path: Path):
    keeper, outputs = made(tmp_path, None)
    keeper.begin()
    for name in TRAINER:
        write(tmp_path / "source/checkpoint-5" / name)
    write(tmp_path / "source/checkpoint-5/wandb.yaml", "key: hf_" + "a" * 34)
    assert keeper.finish() == "" and len(files(outputs)) == len(TRAINER)
    again, _ = fresh(tmp_path / "b", tmp_path)
    assert again.restore() == len(TRAINER)


def test_a_folder_of_many_files_that_is_named_as_a_checkpoint_is_judged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    judged: list[str] = []
    is_whole = keep.is_whole
    monkeypatch.setattr(keep, "is_whole", lambda unit, *rest: (judged.append(unit), is_whole(unit, *rest))[1])
    keeper, outputs = made(tmp_path, None)
    keeper.begin()
    for number in range(50):
        write(tmp_path / f"source/samples/step_1000/{number}.png")
    assert keeper.finish() == "" and len(files(outputs)) == 50
    again, _ = fresh(tmp_path / "b", tmp_path)
    assert again.restore() == 50
    assert len(judged) < 5, "or 50,000 pictures take half an hour"


def test_copies_leave_room_on_the_disk_while_the_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keeper, outputs = made(tmp_path, None)
    keeper.begin()
    free = keep.ROOM // 4096
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


def test_a_state_that_is_saved_more_often_than_looks_see_is_copied_at_every_fourth_look(tmp_path: Path):
    keeper, outputs = made(tmp_path, None)
    state = tmp_path / "source/weights/last.pt"
    keeper.begin()
    for step in range(3):
        write(state, f"step {step}")
        os.utime(state, (step, step))
        looked(keeper, 1)
    assert files(outputs) == []
    write(state, "step 3")
    looked(keeper, 1)
    assert (outputs / "weights/last.pt").read_text() == "step 3"
    with state.open("w") as stream:
        for step in range(4, 9):
            stream.write(f"half of step {step}")
            stream.flush()
            looked(keeper, 1)
    assert (outputs / "weights/last.pt").read_text() == "step 3", "it is open for writing"


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


def test_small_files_leave_no_checkpoint_out(tmp_path: Path):
    size = 1 << 20
    keeper, outputs = made(tmp_path, None, limit=10 * size)
    keeper.begin()
    for name in TRAINER:
        write(tmp_path / "source/out/checkpoint-5" / name, "x" * size)
    for number in range(12):  # newer than the checkpoint, and more than the limit
        write(tmp_path / f"source/data/{number}.png", "x" * (size // 2))
        os.utime(tmp_path / f"source/data/{number}.png", (number, number))
    assert keeper.finish() == ""
    assert {f"out/checkpoint-5/{name}" for name in TRAINER} < set(files(outputs))
    assert "in data/ are over keep_limit" in keeper.not_kept


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


def test_names_that_no_store_takes_fail_no_run(tmp_path: Path):
    keeper, outputs = made(tmp_path, None)
    keeper.begin()
    for name in ("caf\udce9.txt", "two\nlines", "good"):
        write(tmp_path / "source" / name)
    assert keeper.finish() == "" and files(outputs) == ["good"]
    text = (tmp_path / "log").read_text()
    assert "keep: 'two\\nlines' has a name that no store takes and is not kept" in text


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
