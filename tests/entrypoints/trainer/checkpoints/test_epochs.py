"""Two attempts of a run alive at once: each start has a number of its own, and only the newest one's history counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from launcher.output import epochs as claims
from launcher.output.store import Store

from cloudtrain.simulators.vertex.server import Simulator
from tests.entrypoints.launcher.output.test_sync import PLACE, arrived, s3, said, sync_of, write
from tests.entrypoints.launching import Attempt
from tests.entrypoints.trainer.checkpoints.test_files import write as commit
from tests.entrypoints.trainer.checkpoints.test_state import manager, steps, training
from tests.entrypoints.training import ENTRYPOINTS
from tests.stores import AZ, S3, running

from trainer.checkpoints import files  # isort: skip
from trainer.checkpoints import epochs  # isort: skip
from trainer.errors import Unsupported  # isort: skip

assert s3  # a fixture


def record(folder: Path, epoch: int, begun: str | None) -> None:
    (folder / "epochs").mkdir(parents=True, exist_ok=True)
    said = {"epoch": epoch, **({} if begun is None else {"from": begun})}
    (folder / "epochs" / f"{epoch:08d}.json").write_text(json.dumps(said))


CHAINS = {
    "the second was killed before it held what it began from": ([(9, 1), (6, 1)], {1: "", 2: "3.1"}, "9.1 6.1"),
    "the second holds what it began from": ([(9, 1), (3, 2)], {1: "", 2: "3.1"}, "3.2"),
    "the third holds what the second held": ([(9, 1), (3, 3)], {1: "", 2: "3.1", 3: "3.2"}, "3.3"),
    "no records: a later start is newer": ([(3, 1), (20, 1), (9, 2)], {}, "9.2 20.1 3.1"),
    "one start": ([(3, 1), (6, 1)], {1: ""}, "6.1 3.1"),
    "what the first writes after the second began": ([(3, 1), (6, 1)], {1: "", 2: "3.1"}, "3.1"),
    "the second has written": ([(3, 1), (6, 1), (5, 2)], {1: "", 2: "3.1"}, "5.2 3.1"),
    "the third went on from the second": ([(3, 1), (6, 1), (5, 2), (7, 2)], {1: "", 2: "3.1", 3: "5.2"}, "5.2 3.1"),
    "the third passed the second over": ([(3, 1), (6, 1), (5, 2)], {1: "", 2: "3.1", 3: "3.1"}, "3.1"),
    "the second found nothing": ([(3, 1)], {1: "", 2: ""}, ""),
    "the second found damaged ones only": ([(3, 1)], {1: "", 2: None}, "3.1"),
    "a record that is torn": ([(3, 1), (4, 2)], {2: "torn"}, "4.2 3.1"),
    "older ones without records": ([(3, 1), (8, 1), (4, 2)], {3: "4.2"}, "4.2 8.1 3.1"),
    "a record that points at itself": ([(3, 2)], {2: "3.2"}, "3.2"),
}


@pytest.mark.parametrize("name", CHAINS)
def test_what_counts(tmp_path: Path, name: str):
    written, begun, expected = CHAINS[name]

    def full(short: str) -> str:
        return files.folder_of(tmp_path, *map(int, short.split("."))).name

    for step, epoch in written:
        files.folder_of(tmp_path, step, epoch).mkdir()
        (files.folder_of(tmp_path, step, epoch) / "COMPLETE").touch()
    for epoch, short in begun.items():
        record(tmp_path, epoch, full(short) if short and short != "torn" else short)
        if short == "torn":
            (tmp_path / "epochs" / f"{epoch:08d}.json").write_text('{"from": "st')
    found = files.find(tmp_path)
    chain = epochs.Chain(tmp_path, found)
    assert " ".join(f"{each.step}.{each.attempt}" for each in found if chain.has(each)) == expected


def test_each_start_gets_a_number_of_its_own(tmp_path: Path):
    """Eight processes at once, three times each."""
    script = (
        f"import sys; sys.path.append({str(ENTRYPOINTS)!r})\n"
        "import pathlib; from trainer.checkpoints import epochs\n"
        "sys.stdin.read()\n"
        "for _ in range(3):\n"
        f"    print(epochs.claim(pathlib.Path({str(tmp_path)!r}), 1, 0, lambda: None)[0])\n"
    )
    command = [sys.executable, "-c", script]
    started = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    for process in started:
        process.stdin.close()  # now
    numbers = [int(line) for process in started for line in process.stdout.read().split()]
    assert [process.wait(60) for process in started] == [0] * 8
    assert sorted(numbers) == list(range(1, 25))
    assert sorted(os.listdir(tmp_path / "epochs")) == [f"{number:08d}.json" for number in range(1, 25)]


@pytest.fixture(params=["s3", "az", "gs through gcsfs", "gs through our own client"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with ExitStack() as stack:
        if request.param == "s3":
            environ, scheme = stack.enter_context(running(S3)).environ, "s3"
        elif request.param == "az":
            environ, scheme = stack.enter_context(running(AZ)).environ, "az"
        else:
            simulator = stack.enter_context(Simulator(tmp_path / "simulator", bucket="bucket"))
            environ, scheme = {"STORAGE_EMULATOR_HOST": simulator.url}, "gs"
            if "our own" in request.param:
                environ |= {"CLUSTER_SPEC": "{}"}
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        yield Store(f"{scheme}://bucket/home/run", "the output")


def test_of_several_claims_of_an_output_one_succeeds(store: Store):
    numbers, gate = [], threading.Barrier(4)

    def claim() -> None:
        gate.wait(60)
        numbers.append(claims.claim(store, 1, 0))

    threads = [threading.Thread(target=claim) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == [1, 2, 3, 4] and claims.newest(store) == 4
    assert claims.claim(store, 9, 0) == 9 and claims.claim(store, 1, 20) == 21
    assert store.create("epochs/x", b"mine") and not store.create("epochs/x", b"yours")
    assert store.create("epochs/x", b"mine"), "a request whose answer was lost"
    assert store.read("epochs/x") == b"mine"


# -- the trainer's side -----------------------------------------------------------------------------------------------


def test_what_a_stale_attempt_commits_is_never_chosen(tmp_path: Path):
    stale, _, _ = manager(tmp_path, keep=1)
    run = training(1)
    assert stale.resume(run) is None and stale.epoch == 1
    stale.save(3, run, {"step": 3}, {})
    stale.wait()
    second, _, _ = manager(tmp_path, attempt=2)
    loop, _ = second.resume(training(2))
    assert loop == {"step": 3} and second.epoch == 2
    steps(run, 1)
    stale.save(6, run, {"step": 6}, {})  # it lives on behind a partition that has healed
    replaced = "start 2 of this run has started: this one, 1, ends"
    with pytest.raises(Unsupported, match=replaced):
        stale.wait()
    assert {each.path.name for each in files.find(tmp_path)} == {"step-00000003.a1", "step-00000003.a2"}
    commit(tmp_path, 9)  # it was writing that when the second began

    files.folder_of(tmp_path, 3, 2).joinpath("COMPLETE").unlink()
    third, _, told = manager(tmp_path, attempt=3)  # the second died before it saved
    loop, _ = third.resume(training(3))
    assert loop == {"step": 3}, "the stale attempt has not pruned it, though it keeps one only"
    assert (
        told[1]
        == "checkpoint step-00000009.a1 is skipped: it was written by a start of this run that a later start replaced"
    )
    third.save(4, run, {"step": 4}, {})
    third.wait()
    commit(tmp_path, 12)
    fourth, _, _ = manager(tmp_path, attempt=3)  # a platform started it again by itself: the same attempt's number
    loop, _ = fourth.resume(training(4))
    assert loop == {"step": 4} and fourth.epoch == 4


def test_a_third_start_from_the_same_place_is_refused(tmp_path: Path):
    """A platform starts an attempt again by itself; without a newer checkpoint it would do so for ever."""
    for number in (1, 2):
        keep, _, _ = manager(tmp_path)
        assert keep.resume(training(number)) is None and keep.epoch == number
    with pytest.raises(Unsupported, match="the third start of attempt 1 from the same place: .*cloudtrain resume"):
        manager(tmp_path)[0].resume(training(3))
    keep, _, _ = manager(tmp_path, attempt=2)  # a person resumes
    assert keep.resume(training(4)) is None
    keep.save(5, training(4), {"step": 5}, {})
    keep.wait()
    for _ in range(2):  # what was saved counts
        assert manager(tmp_path, attempt=2)[0].resume(training(5))[0] == {"step": 5}
    with pytest.raises(Unsupported, match="the third start of attempt 2"):
        manager(tmp_path, attempt=2)[0].resume(training(6))


def test_restarts_in_place_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Who asked for retry.restarts: 5, or torchrun --max-restarts, has said how often it may begin from one place."""
    for count in range(6):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))
        assert manager(tmp_path)[0].resume(training(count)) is None
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    assert manager(tmp_path)[0].resume(training(7)) is None
    with pytest.raises(Unsupported, match="the third start of attempt 1"):
        manager(tmp_path)[0].resume(training(8))


def test_one_attempt_started_twice_at_once_does_not_write_into_one_folder(tmp_path: Path):
    one, other = (manager(tmp_path)[0] for _ in range(2))
    assert (one.resume(training(1)), other.resume(training(2))) == (None, None)
    for each, seed in ((other, 2), (one, 1)):
        each.save(5, training(seed), {"step": 5, "by": seed}, {})
    other.wait()
    with pytest.raises(Unsupported, match="start 2 of this run has started"):
        one.wait()
    assert [found.path.name for found in files.find(tmp_path)] == ["step-00000005.a2"]
    loop, _ = manager(tmp_path)[0].resume(training(3))
    assert loop == {"step": 5, "by": 2}


def test_a_start_that_cannot_be_recorded_trains_all_the_same(tmp_path: Path):
    (tmp_path / "epochs").write_text("a file where the folder belongs")
    keep, events, _ = manager(tmp_path)
    assert keep.resume(training(1)) is None
    assert events[0][0] == "alarm" and "could not be recorded" in events[0][1]["reason"]
    keep.save(1, training(1), {"step": 1}, {})
    keep.wait()
    assert manager(tmp_path)[0].resume(training(2))[0] == {"step": 1}


# -- the launcher's side ----------------------------------------------------------------------------------------------


def test_a_replaced_start_uploads_and_removes_nothing(s3: S3, tmp_path: Path):
    old = sync_of(tmp_path / "old")
    old.open(0)
    old.start()
    first = write(tmp_path / "old", 1)
    arrived(tmp_path / "old", 1)
    new = sync_of(tmp_path / "new", attempt=2)
    new.open(0)
    assert (old.epoch, new.epoch) == (1, 2)
    assert files.damage(tmp_path / "new" / "checkpoints" / first.name) is None
    new.start()
    before = s3.objects()
    write(tmp_path / "old", 2)
    files.prune(tmp_path / "old" / "checkpoints", 1)
    word = "start 2 of this run writes to s3://bucket/home/run, so this start (1) uploads nothing more there"
    assert old.finish(lambda: False, True) == word
    assert s3.objects() == before and f"{PLACE}{first.name}/COMPLETE" in before
    assert any(word in text for text in said(tmp_path / "old"))
    write(tmp_path / "new", 2, attempt=2)
    assert new.finish(lambda: False, True) == ""
    marks = [key for key in s3.objects() if key.endswith("COMPLETE")]
    assert marks == [f"{PLACE}step-00000001.a1/COMPLETE", f"{PLACE}step-00000002.a2/COMPLETE"]


def test_ranks_hear_which_start_they_are(s3: S3, tmp_path: Path):
    script = "import cloudtrain_runtime; print('start', cloudtrain_runtime.context().epoch)"
    for number, output in enumerate(["s3://bucket/home", "s3://bucket/home", None]):
        with Attempt(tmp_path / str(number), script, output=output, environ=s3.environ) as attempt:
            assert attempt.run() == [0], attempt.texts(-1)
            assert attempt.texts(0) == [f"start {number + 1 if output else 0}"]
    assert [key for key in s3.objects() if "/epochs/" in key] == [
        f"home/run/epochs/0000000{number}.json" for number in (1, 2)
    ]
