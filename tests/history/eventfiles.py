"""Event files as TensorBoard and W&B write them, with what these tools themselves would not put into one."""

from __future__ import annotations

import struct
from pathlib import Path

NAME = "events.out.tfevents.{}"
HOSTILE = ["name", "step", "step of 70 bits", "nested", "long number", "endless step"]


def varint(value: int) -> bytes:
    word = bytearray()
    while value > 0x7F:
        word.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*word, value])


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def board(path: Path, *points: tuple[int, str, float]) -> None:
    """Write TensorBoard's file of some (step, name, value)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        for step, name, value in points:
            scalar = field(1, name.encode()) + varint(2 << 3 | 5) + struct.pack("<f", value)
            record = field(2, step) + field(5, field(1, scalar))
            stream.write(struct.pack("<QI", len(record), 0) + record + bytes(4))


def wandb(path: Path, *rows: dict[str, str]) -> None:
    """Write W&B's file of some rows: names and the JSON of their values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        stream.write(b":W&B\xe1\xbe\x00")
        for row in rows:
            items = (field(1, field(1, name.encode()) + field(16, text.encode())) for name, text in row.items())
            record = field(2, b"".join(items))
            stream.write(struct.pack("<IHB", 0, len(record), 1) + record)


def hostile(kind: str, outputs: Path) -> None:
    """Write a file that was an end of all hearing, and one behind it that tells `told`, 7 steps on."""
    run = outputs / "wandb" / "offline-run-20261122_101500-a" / "run-a.wandb"
    if kind == "name":
        board(Path(str(outputs), "caf\udce9", NAME.format(1700000002)), (1, "odd", 1.0))
    elif kind == "step":
        board(outputs / "tb" / NAME.format(1700000000), (1 << 69, "odd", 1.0))
    elif kind == "step of 70 bits":
        board(outputs / "tb" / NAME.format(1700000000), ((1 << 70) - 1, "odd", 1.0))
    elif kind == "nested":
        wandb(run, {"odd": "[" * 20_000})
    elif kind == "long number":
        wandb(run, {"odd": "1" + "0" * 400})
    else:
        wandb(run, {"_step": "Infinity", "odd": "1"})
    board(outputs / "tb" / NAME.format(1700000001), (7, "told", 1.5))
