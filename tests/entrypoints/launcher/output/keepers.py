"""Keepers of a node whose files a test writes."""

from __future__ import annotations

import os
from pathlib import Path

from tests.entrypoints.training import ENTRYPOINTS

from launcher.log import Log  # isort: skip
from launcher.output import keep  # isort: skip

assert ENTRYPOINTS

TRAINER = ("config.json", "model.safetensors", "training_args.bin", "optimizer.pt", "trainer_state.json")


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
    return keep.Keeper(patterns, source, str(outputs), rank, log, given, records, limit, has_one_source), outputs


def write(path: Path, text: str = "x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def files(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def wait(true) -> None:
    import time

    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)


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
