"""train.py, which also prints how much memory each rank took, above what it held before, while it wrote its checkpoint,
read it back, and wrote the trained model; what test_memory.py lets ranks do."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
LIBC = ctypes.CDLL(None)
LIBC.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back to the system at once

import train  # noqa: E402
from starting import Peak  # noqa: E402
from trainer import trackers  # noqa: E402
from trainer.checkpoints.manager import CheckpointManager  # noqa: E402
from trainer.loop import Loop  # noqa: E402


def begin() -> Peak:
    gc.collect()
    LIBC.malloc_trim(0)
    peak = Peak()
    peak.start()
    return peak


def main() -> int:
    found: dict[str, Any] = {}
    state: dict[str, Any] = {}
    save, run, finish = CheckpointManager.save, Loop.run, trackers.finish

    def measured(name: str, act: Callable[[], Any]) -> None:
        peak = begin()
        act()
        found[name] = peak.stop()

    def measured_save(self: CheckpointManager, step: int, training: Any, *rest: Any) -> None:
        if step == self.saved_step:
            return
        state["training"] = training
        measured("checkpoint", lambda: (save(self, step, training, *rest), self.wait()))

    def measured_run(self: Loop, **given: Any) -> bool:
        stopped = run(self, **given)
        [checkpoint] = self.manager.folder.glob("step-*")
        measured("load", lambda: self.manager.go_back(checkpoint.name, state["training"]))
        found["held"] = sum(held for _, _, held in self.strategy.parts()) * 4
        state["peak"] = begin()
        return stopped

    def measured_finish(accelerator: Any) -> None:
        print("FOUND", json.dumps({**found, "model": state["peak"].stop()}), flush=True)
        finish(accelerator)

    CheckpointManager.save, Loop.run, trackers.finish = measured_save, measured_run, measured_finish
    return train.main()


if __name__ == "__main__":
    sys.exit(main())
