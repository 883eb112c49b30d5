"""Two starts of a run on one folder: one stands still while the other goes on, at drawn points; one may be killed there.

    python interleaving.py FOLDER SEED COUNT

Only one process runs at a time, from one call that reads or changes the folder to another one, so that a seed is an order.
Prints a line of JSON for each drawing: what each start resumed from and saved, how it ended, and what is left.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from killing import CHANGES, training
from trainer import publish
from trainer.checkpoints import epochs, files
from trainer.checkpoints.manager import CheckpointManager
from trainer.errors import exit_when_unsupported

STEPS, KEEP = 4, 1
POINTS_A_SAVE = 40
POINTS = (*CHANGES, "os.link", "os.listdir", "os.scandir", "shutil.copytree")
os.environ["CLOUDTRAIN_RUN_ID"] = "run"


class Model:
    """What is published: two files that say by which attempt."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt

    def save_pretrained(self, folder: Path) -> None:
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_text(str(self.attempt))


class Start:
    """An attempt in a process of its own that stops itself at its drawn points."""

    def __init__(self, folder: Path, attempt: int, points: list[int]) -> None:
        self.folder, self.attempt, self.points = folder, attempt, points
        self.notes = folder / f"notes-{attempt}"
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                sys.addaudithook(self._stop_when_due)
                with exit_when_unsupported():
                    train(folder, attempt, self._note)
                code = 0
            except SystemExit as refusal:
                code = int(refusal.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        self.code: int | None = None
        self.newest_at_end = 0
        self._wait()

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self._wait()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._wait()

    def told(self) -> dict[str, Any]:
        """Return what is known of it: its number, the step that it resumed from and those that it saved, its end."""
        lines = [json.loads(line) for line in self.notes.read_text().splitlines()] if self.notes.exists() else []
        said = {"epoch": 0, "from": 0, "saved": [], "code": self.code, "newest_at_end": self.newest_at_end}
        for line in lines:
            said |= {"saved": [*said["saved"], line["saved"]]} if "saved" in line else line
        return said

    def _wait(self) -> None:
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            self.code = os.waitstatus_to_exitcode(status)
            self.newest_at_end = epochs.newest(self.folder / "checkpoints")

    def _note(self, **said: Any) -> None:
        with open(self.notes, "a") as file:
            file.write(json.dumps(said) + "\n")

    def _stop_when_due(self, event: str, on: tuple[Any, ...]) -> None:
        there = str(self.folder / "checkpoints"), str(self.folder / "model")
        if event in POINTS and self.points and any(str(each).startswith(there) for each in on):
            self.points[0] -= 1
            if self.points[0] < 0:
                self.points.pop(0)
                os.kill(os.getpid(), signal.SIGSTOP)


def train(folder: Path, attempt: int, note: Callable[..., None]) -> None:
    """Do what train.py does with the folder: resume, save after each step, publish."""
    manager, run = CheckpointManager(folder / "checkpoints", attempt, KEEP, note_nothing, note_nothing), training()
    resumed = manager.resume(run)
    publish.withdraw(folder / "model", manager.epoch)
    step = resumed[0]["step"] if resumed else 0
    note(**{"epoch": manager.epoch, "from": step})
    while step < STEPS:
        step += 1
        manager.save(step, run, {"step": step}, {})
        manager.wait()
        if manager.saved_step == step:
            note(saved=step)
    publish.save(Model(attempt), None, folder / "model", manager.epoch, manager.check_current)
    manager.check_ranks()


def note_nothing(*_: Any, **__: Any) -> None:
    pass


def drawn(folder: Path, draw: random.Random) -> dict[str, Any]:
    """Let two starts, or three where the second is killed, come to their ends in a drawn order."""
    folder.mkdir()
    first = Start(folder, 1, [draw.randrange(4 * POINTS_A_SAVE), *(draw.randrange(20) for _ in range(5))])
    starts, doomed = [first], draw.choice([None, None, 0, 1])
    before = [first.told()["saved"]]
    starts.append(Start(folder, 2, [draw.randrange(POINTS_A_SAVE) for _ in range(draw.randrange(4))]))
    while alive := [start for start in starts if start.code is None]:
        start = draw.choice(alive)
        if doomed is not None and start is starts[doomed]:
            start.kill()
            doomed = None
        else:
            start.go_on()
    if starts[1].code == -signal.SIGKILL:
        before.append(starts[1].told()["saved"])
        starts.append(Start(folder, 3, []))
    there = folder / "checkpoints"
    chosen = files.newest(there, lambda _: None, epochs.Chain(there, files.find(there)).has)
    return {
        "starts": [start.told() for start in starts],
        "before": before,
        "chosen": [chosen.attempt, chosen.step] if chosen else None,
        "model": sorted({path.read_text() for path in (folder / "model").glob("*")}),
    }


def main(top: Path, seed: int, count: int) -> None:
    draw = random.Random(seed)
    for attempt in (1, 2):  # what is imported on the way is imported once, and is none of the points
        train(top / "warm", attempt, note_nothing)
    for number in range(count):
        print(json.dumps(drawn(top / str(number), draw)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
