"""Which files `keep: auto` takes, when, and in which order."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.entrypoints.launcher.output.keepers import TRAINER, files, fresh, looked, made, wait, write
from tests.entrypoints.training import ENTRYPOINTS

from launcher.output import keep, keep_mirrors, keep_restore  # isort: skip

assert ENTRYPOINTS


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


def test_links_to_folders_are_named_at_the_end(tmp_path: Path):
    (tmp_path / "scratch").mkdir()
    keeper, outputs = made(tmp_path, None)
    source = tmp_path / "source"
    (source / "before").symlink_to(tmp_path / "scratch")
    while (tmp_path / "scratch").stat().st_ctime_ns <= (source / "before").lstat().st_ctime_ns:
        (tmp_path / "scratch").touch()  # until the clock of this file system has moved
    keeper.begin()
    write(source / "step-4/model.pt")
    (source / "latest").symlink_to("step-4")
    (source / "runs").mkdir()
    (source / "runs/out").symlink_to(tmp_path / "scratch")
    write(tmp_path / "scratch/weights.bin")
    assert keeper.finish() == "" and files(outputs) == ["step-4/model.pt"]
    hint = "write into a folder, or name the link in keep"
    assert keeper.not_kept == f"links to folders are not kept: runs/out -> {tmp_path}/scratch; {hint}"
    assert "keep: the links are not kept, only their folders: latest -> step-4" in (tmp_path / "log").read_text()


def test_what_is_over_the_limit_is_named_while_the_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(keep, "EVERY_S", 0.01)
    keeper, _ = made(tmp_path, None, limit=3 << 20)
    keeper.begin()
    for step in (1, 2):
        write(tmp_path / f"source/out/model-{step}.bin", "x" * (2 << 20))
        os.utime(tmp_path / f"source/out/model-{step}.bin", (step, step))
    wait(lambda: "are over keep_limit" in (tmp_path / "log").read_text())
    text = (tmp_path / "log").read_text()
    assert "2.1 MB in out/ are over keep_limit (3.1 MB)" in text and '"kind":"alarm"' in text
    assert keeper.finish() == ""


def test_complete_checkpoints_go_first_and_the_newest_before_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    keeper, _ = made(tmp_path, None)
    keeper.begin()
    order: list[str] = []
    replace = keep_mirrors.replace
    monkeypatch.setattr(
        keep_mirrors,
        "replace",
        lambda path, folder, name, *more: order.append(name) or replace(path, folder, name, *more),
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


def test_a_folder_of_many_files_that_is_named_as_a_checkpoint_is_judged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    judged: list[str] = []
    is_whole = keep_restore.is_whole
    monkeypatch.setattr(keep_restore, "is_whole", lambda unit, *rest: (judged.append(unit), is_whole(unit, *rest))[1])
    keeper, outputs = made(tmp_path, None)
    keeper.begin()
    for number in range(50):
        write(tmp_path / f"source/samples/step_1000/{number}.png")
    assert keeper.finish() == "" and len(files(outputs)) == 50
    again, _ = fresh(tmp_path / "b", tmp_path)
    assert again.restore() == 50
    assert len(judged) < 5, "or 50,000 pictures take half an hour"


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


def test_names_that_no_store_takes_fail_no_run(tmp_path: Path):
    keeper, outputs = made(tmp_path, None)
    keeper.begin()
    for name in ("caf\udce9.txt", "two\nlines", "good"):
        write(tmp_path / "source" / name)
    assert keeper.finish() == "" and files(outputs) == ["good"]
    text = (tmp_path / "log").read_text()
    assert "keep: 'two\\nlines' has a name that no store takes and is not kept" in text
