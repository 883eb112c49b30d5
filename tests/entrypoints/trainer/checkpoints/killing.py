"""Saves checkpoints in child processes that are killed at every point of it, one child a point; prints what was chosen.

    python killing.py FOLDER calls      killed before each call that changes the disk, by SIGKILL
    python killing.py FOLDER bytes      killed at a size that a file reaches, by SIGXFSZ (RLIMIT_FSIZE)
    python killing.py FOLDER behind     as `calls`, by the trainer's own keeper, whose thread writes while steps are done

FOLDER has a whole checkpoint of step 1. Each line: the point, the signal, the step that is chosen afterwards, and the
checkpoints there that pass for whole.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[4] / "entrypoints"))

from trainer.checkpoints import files

CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def save(folder: Path, step: int) -> None:
    """Save as the trainer does, with `keep` 1: the one of step 1 goes when the new one is there."""
    path = files.folder_of(folder, step, 1)
    files.begin(path)
    (path / "state").mkdir()
    (path / "state" / "part").write_bytes(b"w" * 3000)
    (path / "loop.pt").write_bytes(b"l" * 40)
    files.commit(path, step=step)
    files.prune(folder, 1)


def child(act: Callable[[], None]) -> int:
    """Do it in a child and return the signal that ended it, 0 where it came to its end."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(0)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


def save_behind(folder: Path, step: int) -> None:
    """Save with the keeper of the shared trainer, and do steps until all is written."""
    from trainer.checkpoints.manager import CheckpointManager

    keep = CheckpointManager(folder, 1, 1, lambda *_, **__: None, lambda _: None)
    run = training()
    keep.save(step, run, {"step": step}, {})
    while keep.busy:
        run.model(torch.ones(1, 4)).sum().backward()
        run.optimizer.step()
    keep.wait()


def training() -> Any:
    import torch
    from trainer.checkpoints import state

    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    return state.TrainingState(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))


def at_call(number: int, folder: Path, save: Callable[[Path, int], None] = save) -> None:
    """Die before the call of that number that may change the disk; fsync and write are told apart by patches."""
    left = number

    def counted(*_: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sync = files._sync
    files._sync = lambda path: (counted(), sync(path))[1]
    files.THREADS = 1  # one order, so that no point is passed over
    there = str(folder)  # torch reads and writes elsewhere too
    sys.addaudithook(
        lambda event, on: counted() if event in CHANGES and any(str(each).startswith(there) for each in on) else None
    )
    save(folder, 2)


def at_byte(size: int, folder: Path) -> None:
    """Die when a file is about to grow beyond a size."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    save(folder, 2)


def main(top: Path, what: str) -> None:
    kill, step = {
        "calls": (at_call, 1),
        "bytes": (at_byte, 61),
        "behind": (lambda number, folder: at_call(number, folder, save_behind), 1),
    }[what]
    if what == "behind":
        global torch
        import torch

        save_behind(top / "warm", 1)  # what is imported on the way is none of the points
    point, ended = 0, 1
    while ended:
        folder = top / str(point)
        shutil.copytree(top / "whole", folder)
        ended = child(lambda: kill(point, folder))  # noqa: B023 - it is done before the next turn
        found = files.newest(folder, lambda _: None)
        good = sorted(each.step for each in files.find(folder) if files.damage(each.path) is None)
        print(point, ended, found.step if found else None, *good)
        if ended:
            save(folder, 3)  # the next attempt is in nobody's way
            assert [each.step for each in files.find(folder)] == [3], point
        point += step


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
