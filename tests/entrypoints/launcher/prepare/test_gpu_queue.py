"""The GPUs of a shared host: drawn arrivals of three users, and what other users could leave where the locks are."""

from __future__ import annotations

import os
import random
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from launcher.prepare.gpu_queue import GpuQueue, find_folder, open_lock

GPUS = ["GPU-aa", "GPU-bb"]


@pytest.fixture
def locks() -> Iterator[str]:
    """A folder that all users may write, as /tmp; pytest makes its own folders root's alone again and again."""
    mask = os.umask(0o077)  # the launcher's
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        os.chmod(made, 0o1777)
        yield made
    os.umask(mask)


@contextmanager
def user(number: int) -> Iterator[None]:
    """Be one of several users, where this process may."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(60000 + number)
    try:
        yield
    finally:
        os.seteuid(0)


class Job:
    """A supervisor: it waits, then holds GPUs; its end closes what it has open and removes nothing."""

    def __init__(self, folder: str, count: int, owner: int) -> None:
        self.queue, self.count, self.owner, self.gpus = GpuQueue(folder), count, owner, []

    def look(self, gpus: list[str] = GPUS, filled: dict[str, str] | None = None) -> None:
        if not self.gpus:
            with user(self.owner):
                self.gpus = self.queue.advance(self.count, gpus, lambda: filled or {}) or []

    def die(self) -> None:
        if self.queue._ticket is not None:
            os.close(self.queue._ticket[1])
            self.queue._ticket = None
        self.queue.release()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 20))])
def test_drawn_arrivals_of_three_users(locks: str, seed: int) -> None:
    """200 jobs on four GPUs: never two on one, never a free GPU while the first of the queue could start, in order."""
    draw = random.Random(seed)
    gpus = [f"GPU-{number}" for number in range(4)]
    arriving = [draw.choice((1, 1, 1, 2, 2, 3, 4)) for _ in range(200)]
    waiting: list[Job] = []  # in the order of their first look, which is that of the queue
    running: list[Job] = []
    began, waits = 0, 0
    while arriving or waiting or running:
        filled = {gpu: "in use" for gpu in gpus if arriving and draw.random() < 0.1}
        for _ in range(draw.choice((0, 0, 0, 1, 2))):
            if arriving:
                waiting.append(Job(locks, arriving.pop(), draw.randrange(3)))
                waiting[-1].look(gpus, filled)
        if waiting and arriving and draw.random() < 0.05:  # killed while it waits, the first one too
            waiting.pop(draw.choice((0, -1))).die()
        if running and draw.random() < 0.6:
            running.pop(draw.randrange(len(running))).die()
        for job in draw.sample(waiting, len(waiting)):
            job.look(gpus, filled)
        for job in list(waiting):
            job.look(gpus, filled)  # in order: each one that becomes the first has its look
        started = [job for job in waiting if job.gpus]
        assert started == waiting[: len(started)], "first come, first served"
        waiting, running, began = waiting[len(started) :], running + started, began + len(started)
        held = [gpu for job in running for gpu in job.gpus]
        assert len(held) == len(set(held)), "no GPU has two jobs"
        if waiting:
            waits += 1
            assert len(set(gpus) - set(held) - set(filled)) < waiting[0].count, "the first of the queue could start"
            assert [job.queue.place for job in waiting] == list(range(1, len(waiting) + 1))
    assert began > 150 and waits > 50


def test_two_jobs_of_two_users_have_one_each(locks: str) -> None:
    first, second, third = Job(locks, 1, 0), Job(locks, 1, 1), Job(locks, 1, 0)
    for job in (first, second, third):
        job.look()
    assert (first.gpus, second.gpus, third.gpus, third.queue.place) == (["GPU-aa"], ["GPU-bb"], [], 1)
    second.die()
    third.look()
    assert third.gpus == ["GPU-bb"]
    assert not [name for name in os.listdir(locks) if "queue-" in name], "no place is left"


def test_gpus_that_one_process_of_an_attempt_has_taken_for_another_are_free_when_both_have_ended(locks: str) -> None:
    first, second, other = GpuQueue(locks), GpuQueue(locks), GpuQueue(locks)
    assert first.advance(2, ["a", "b"], dict, shared=True) == ["a", "b"]
    assert second.join_in(["b"]) == ["b"]
    first.release()
    assert other.advance(2, ["a", "b"], dict) is None
    second.release()
    assert other.advance(2, ["a", "b"], dict) == ["a", "b"]
    with pytest.raises(OSError):
        second.join_in(["a"])


def test_a_gpu_that_other_programs_fill_is_not_free(locks: str) -> None:
    job = Job(locks, 1, 0)
    job.look(filled=dict.fromkeys(GPUS, "40,000 MiB in use"))
    assert not job.gpus and job.queue.free == []
    job.look(filled={"GPU-aa": "40,000 MiB in use"})
    assert job.gpus == ["GPU-bb"]


def test_a_lock_is_held_as_long_as_a_rank_lives(locks: str) -> None:
    job, other = Job(locks, 2, 0), Job(locks, 1, 1)
    job.look()
    inherited = [os.dup(descriptor) for descriptor in job.queue.locks]  # as a child's
    job.die()
    other.look()
    assert not other.gpus
    for descriptor in inherited:
        os.close(descriptor)
    other.look()
    assert other.gpus == ["GPU-aa"]


def test_a_job_that_names_none_takes_what_is_left_and_never_overtakes(locks: str) -> None:
    named, waits = Job(locks, 1, 0), Job(locks, 2, 1)
    named.look()
    rest = GpuQueue(locks)
    assert rest.take_rest(2, GPUS) == [] and rest.locks == []
    assert rest.take_rest(1, GPUS) == ["GPU-bb"]
    rest.release()
    waits.look()
    assert rest.take_rest(1, GPUS) == [], "another waits for it"


def test_what_other_users_leave_there_does_no_harm(locks: str) -> None:
    precious = Path(locks, "precious")  # what another program locks
    precious.touch()
    precious.chmod(0o644)
    with user(1):
        os.symlink(precious, f"{locks}/cloudtrain-gpu-lock-GPU-aa")
        os.symlink(precious, f"{locks}/cloudtrain-gpu-queue-{0:020d}-00000000")
        os.mkfifo(f"{locks}/cloudtrain-gpu-queue-{1:020d}-00000000")  # opened without waiting for a writer
    job = Job(locks, 1, 0)
    job.look()
    assert job.gpus == ["GPU-bb"], "the lock that is a link keeps its GPU from all, and nothing else"
    os.unlink(f"{locks}/cloudtrain-gpu-queue")
    os.symlink(precious, f"{locks}/cloudtrain-gpu-queue")
    with pytest.raises(OSError, match="cloudtrain-gpu-queue"):
        job.queue.take_rest(1, GPUS)
    precious.write_text("a file that holds something")
    with pytest.raises(OSError, match="its owner or root must remove it"):
        open_lock(str(precious))


def test_all_users_may_read_a_lock_and_none_may_write_it(locks: str) -> None:
    Job(locks, 1, 1).look()
    for name in os.listdir(locks):
        assert stat.S_IMODE(os.lstat(f"{locks}/{name}").st_mode) == 0o444


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes folders of another owner")
def test_the_folder_is_one_that_only_root_may_clear(tmp_path: Path) -> None:
    for name, mode, owner in (("a", 0o1777, 60001), ("b", 0o777, 0), ("c", 0o1777, 0)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
        os.chown(tmp_path / name, owner, owner)
    assert find_folder([str(tmp_path / name) for name in "abc"]) == str(tmp_path / "c")
    with pytest.raises(OSError, match="root must own"):
        find_folder([str(tmp_path / name) for name in "ab"])
