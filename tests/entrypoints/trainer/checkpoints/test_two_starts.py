"""Two live starts of a run on one shared folder: the older one ends without a success, and costs the newer one nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.entrypoints.trainer.checkpoints.test_files import write
from tests.entrypoints.trainer.checkpoints.test_state import manager, training
from tests.entrypoints.training import ENTRYPOINTS, TINY, WAIT_S, Trainer, texts, train
from tests.seed import first_seed

from trainer import publish  # isort: skip
from trainer.checkpoints import epochs  # isort: skip
from trainer.checkpoints import files  # isort: skip
from trainer.errors import EXIT_REFUSED, Unsupported  # isort: skip

KILLED = -signal.SIGKILL


def interleavings(folder: Path, count: int, figure: Callable[[str, object], None]) -> None:
    seed = first_seed()
    script = Path(__file__).with_name("interleaving.py")
    command = [sys.executable, str(script), str(folder), str(seed), str(count)]
    ran = subprocess.run(
        command, check=False, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    assert ran.returncode == 0 and len(rows) == count, ran.stderr
    ends = [start["code"] for row in rows for start in row["starts"]]
    for row in rows:
        starts, last = row["starts"], row["starts"][-1]
        for start in starts:
            assert start["code"] in (0, EXIT_REFUSED, KILLED), (row, ran.stderr)
            if start["code"] == 0:
                assert start["newest_at_end"] == start["epoch"], row
        if last["code"] != 0:  # the first one was replaced or killed, the second came after it
            pytest.fail(f"the newest start did not succeed: {row}")
        assert row["model"] == [str(len(starts))], row
        assert row["chosen"] == [last["epoch"], 4], row
        for saved, start in zip(row["before"], starts[1:], strict=True):
            assert start["code"] == KILLED or start["from"] >= max(saved, default=0), row
    figure("interleavings of two starts", count)
    figure("starts that were replaced and ended with 78", ends.count(EXIT_REFUSED))
    figure("starts that were killed", ends.count(KILLED))


@pytest.mark.parametrize("count", [20, pytest.param(300, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
def test_drawn_interleavings(tmp_path: Path, figure: Callable[[str, object], None], count: int):
    """Each stands still at drawn calls that read or change the folder while the other goes on; a third are killed there."""
    interleavings(tmp_path, count, figure)


def test_a_save_is_kept_though_another_start_removes_what_this_one_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    keep, events, _ = manager(tmp_path, keep=1)
    run, rmtree = training(1), shutil.rmtree
    keep.save(1, run, {"step": 1}, {})
    keep.wait()
    monkeypatch.setattr(
        shutil, "rmtree", lambda path, **how: (rmtree(path), rmtree(path, **how))
    )  # the other was faster
    keep.save(2, run, {"step": 2}, {})
    keep.wait()
    assert [kind for kind, _ in events] == ["checkpoint", "checkpoint"]
    assert [each.step for each in files.find(tmp_path)] == [2] and files.damage(files.find(tmp_path)[0].path) is None


def test_what_cannot_be_removed_costs_no_new_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keep, events, _ = manager(tmp_path, keep=1)
    run = training(1)
    keep.save(1, run, {"step": 1}, {})
    keep.wait()

    def refuse(path: Path) -> None:
        raise PermissionError(f"{path.name}: not permitted")

    monkeypatch.setattr(files, "discard", refuse)
    keep.save(2, run, {"step": 2}, {})
    keep.wait()
    assert keep.saved_step == 2 and [kind for kind, _ in events] == ["checkpoint", "checkpoint", "alarm"]
    assert events[-1][1]["reason"] == "older checkpoints could not be removed: step-00000001.a1: not permitted"


def test_an_older_attempt_does_not_begin_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CLOUDTRAIN_RUN_ID", "run")
    epochs.claim(tmp_path, 2, 0, lambda: None)
    with pytest.raises(Unsupported, match="attempt 2 of this run has started: attempt 1 does not start"):
        epochs.claim(tmp_path, 1, 0, lambda: None)
    assert epochs.claim(tmp_path, 2, 0, lambda: None)[0] == 3


@pytest.mark.parametrize("links", [True, False])
def test_what_a_start_resumes_from_outlives_the_other_ones_pruning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
):
    """Without links the start that finds it gone takes the newer one, for which it was removed."""

    def refuse(*_: object) -> None:
        raise PermissionError

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    write(tmp_path, 3)
    write(tmp_path, 6)
    found = files.find(tmp_path)
    held = files.hold(found[1], 2)
    assert held.path.name == ("step-00000003.a2" if links else "step-00000003.a1")
    files.prune(tmp_path, 1, epoch=1)
    assert (files.damage(held.path) is None) == links
    assert (files.hold(found[1], 3) is None) and not list(tmp_path.glob(".step*"))


def test_a_start_looks_again_when_the_older_one_stands_still_between_two_removals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The folders are the same before and after: a torn one was completed, and of the older one COMPLETE is gone."""
    damage, looked_at = files.damage, []

    def completed_meanwhile(path: Path) -> str | None:
        looked_at.append(path.name)
        if looked_at == ["step-00000006.a1", "step-00000003.a1"]:
            write(tmp_path, 6)
            (path / files.MARKER).unlink()
        return damage(path)

    write(tmp_path, 3)
    (tmp_path / "step-00000006.a1").mkdir()
    monkeypatch.setattr(files, "damage", completed_meanwhile)
    epoch, chosen, _ = manager(tmp_path, attempt=2)[0]._begin(None)
    assert (epoch, chosen and chosen.path.name) == (2, "step-00000006.a1")


def test_a_start_looks_again_when_all_that_it_listed_was_removed_for_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    damage = files.damage

    def removed_meanwhile(path: Path) -> str | None:
        if path.name == "step-00000003.a1" and path.exists():
            write(tmp_path, 6)
            files.discard(path)
        return damage(path)

    write(tmp_path, 3)
    monkeypatch.setattr(files, "damage", removed_meanwhile)
    epoch, chosen, held = manager(tmp_path, attempt=2)[0]._begin(None)
    assert (epoch, chosen.path.name, held.path.name) == (2, "step-00000006.a1", "step-00000006.a2")


def test_what_an_older_start_is_removing_is_no_place_to_resume_from(tmp_path: Path):
    """The second has chosen step 3; the first stands still while it removes that, for step 6."""
    write(tmp_path, 3)
    epochs.claim(tmp_path, 2, 0, lambda: files.find(tmp_path)[0])
    write(tmp_path, 6)
    (files.folder_of(tmp_path, 3, 1) / "COMPLETE").unlink()
    epoch, chosen, _ = manager(tmp_path, attempt=2)[0]._begin(None)
    assert (epoch, chosen.path.name) == (3, "step-00000006.a1")


def test_the_best_one_is_held_too(tmp_path: Path):
    write(tmp_path, 3)
    keep, _, _ = manager(tmp_path, attempt=2)
    keep.epoch = 2
    assert keep.hold_best("step-00000003.a1") == keep.best == "step-00000003.a2"
    assert keep.hold_best("step-00000004.a1") == "step-00000004.a1" and keep.hold_best("") == ""


def test_what_a_replaced_start_has_written_is_withdrawn(tmp_path: Path):
    """It stands still before it publishes; the newer start begins, and takes its files away."""

    class Model:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "config.json").write_text("old")

    def stands_still() -> None:
        if not called:
            publish.withdraw(tmp_path / "model", 2)
        called.append(1)
        if len(called) > 1:
            raise Unsupported("replaced")

    called: list[int] = []
    with pytest.raises(Unsupported, match="replaced"):
        publish.save(Model(), None, tmp_path / "model", 1, stands_still)
    assert not list(tmp_path.rglob("config.json"))


@pytest.mark.long
@pytest.mark.train
@pytest.mark.timeout(7200)
def test_a_hundred_pairs_of_whole_trainers(tmp_path: Path, figure: Callable[[str, object], None]):
    """Two real trainers at once, at drawn times, one of them killed in half of the draws."""
    draw = random.Random(first_seed())
    data = ["--dataset", str(texts(tmp_path / "texts")), "--max_train_samples", "35", "--max_eval_samples", "5"]
    args = [*TINY, *data, "--max_steps", "40", "--per_device_train_batch_size", "2"]
    reference = load_file(train(tmp_path / "unbroken", args).run / "model" / "model.safetensors")
    ends = []
    for number in range(100):
        ends += pair(tmp_path / str(number), args, draw, reference)
        shutil.rmtree(tmp_path / str(number))
    figure("pairs of whole trainers", 100)
    figure("trainers that were replaced and ended with 78", ends.count(EXIT_REFUSED))
    figure("trainers that were killed", ends.count(KILLED))
    assert ends.count(EXIT_REFUSED) > 20 and ends.count(KILLED) > 20


def pair(run: Path, args: list[str], draw: random.Random, reference: dict) -> list[int]:
    """Let two trainers meet, and a third follow where the second is killed; return their exit codes."""
    env = {"CLOUDTRAIN_CHECKPOINT_EVERY_STEPS": 2, "CLOUDTRAIN_CHECKPOINT_KEEP": draw.choice([1, 2])}
    doomed = draw.choice([None, None, 0, 1])
    with Trainer(run, args, 1, env) as first:
        reached(first, draw.randrange(30), draw)
        stands = draw.random() < 0.7
        if stands:
            first.processes[0].send_signal(signal.SIGSTOP)
        with Trainer(run, args, 1, env, attempt=2) as second:
            both = [first, second]
            reached(second, draw.choice([0, 0, 10, 39]), draw)
            first.processes[0].send_signal(signal.SIGCONT)
            time.sleep(draw.uniform(0, 0.2))
            if doomed is not None:
                both[doomed].processes[0].send_signal(signal.SIGKILL)
            codes = [trainer.codes()[0] for trainer in both]
    claimed = run / "checkpoints" / "epochs" / "00000002.json"
    if codes[0] == 0:  # it had ended before the other one began
        assert not claimed.exists() or claimed.stat().st_ctime_ns >= first.logs[0].stat().st_mtime_ns, (
            first.everything()
        )
    else:
        assert codes[0] in (EXIT_REFUSED, KILLED), first.everything()
    if codes[1] == KILLED:
        codes += [
            train(run, args, attempt=3, **{name: str(value) for name, value in env.items()}).processes[0].returncode
        ]
    assert codes[-1] == 0, second.everything()
    model = load_file(run / "model" / "model.safetensors")
    assert all((model[name] == reference[name]).all() for name in model | reference)
    there = run / "checkpoints"
    chosen = files.newest(there, lambda _: None, epochs.Chain(there, files.find(there)).has)
    assert chosen and (chosen.step, chosen.attempt) == (40, epochs.newest(there))
    return codes


def reached(trainer: Trainer, step: int, draw: random.Random) -> None:
    """Wait until a trainer has reported a step, or has ended."""
    deadline = time.monotonic() + WAIT_S
    while max(trainer.losses(), default=0) < step and trainer.processes[0].poll() is None:
        assert time.monotonic() < deadline, trainer.everything()
        time.sleep(0.005)
    time.sleep(draw.uniform(0, 0.1))


assert ENTRYPOINTS
