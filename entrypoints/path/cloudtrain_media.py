"""Write images, texts, tables and histograms of a run: a file in its outputs, and events that the console shows.

The file comes home with the run's outputs. The events hold what is shown, of limited size: a large image is made smaller,
a long text or table is cut. Standard library only; Python 3.9 on.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import re
import struct
import zlib
from collections.abc import Sequence
from typing import Any, Callable

FOLDER = "logged"  # in the run's outputs
MOST_FILE = 8 << 20  # bytes of one file
MOST_SHOWN = 96 << 10  # bytes of an image in events
MOST_TEXT = 4000  # bytes of a text in its event, as JSON
MOST_ROWS, MOST_COLUMNS, MOST_CELL = 100, 20, 200  # of a table in its event, before it is cut to MOST_TEXT
MOST_BINS = 100
MOST_CALLS = 1000  # of one process; what comes later is left out
MOST_IN_EVENTS = 8 << 20, 1 << 20  # bytes of rank 0 and of another rank; what comes later is in its file alone
PART = 5400  # characters of an image in one event
_KINDS = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpg"}

_calls = _bytes = 0


def log(kind: str, name: str, value: Any, step: int, place: Any, emit: Callable[..., None], **more: Any) -> None:
    """Write one object of a step; `place` is the run's context, `emit` prints an event. Raises ValueError or TypeError."""
    global _calls, _bytes
    _calls += 1
    if _calls > MOST_CALLS:
        if _calls == MOST_CALLS + 1:
            emit(
                "alarm",
                reason=f"over {MOST_CALLS:,} logged images, texts, tables and histograms: later ones are not logged",
            )
        return
    suffix, content, shown = _WRITERS[kind](value, **more)
    if len(content) > MOST_FILE:
        raise ValueError(f"{name} has {len(content):,} bytes; at most {MOST_FILE:,} are allowed")
    rank, attempt = int(place.rank), int(place.attempt)
    whose = (f"-attempt-{attempt}" if attempt > 1 else "") + (f"-rank-{rank}" if rank else "")
    file = f"{_file_name(name)}-{int(step):08d}{whose}-{_calls}.{suffix}"
    folder = os.path.join(place.output_dir, FOLDER)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, file), "wb") as stream:
        stream.write(content)
    about = {"what": kind, "name": str(name)[:MOST_CELL], "step": int(step), "file": f"{FOLDER}/{file}", "_rank": rank}
    _bytes += len(json.dumps(shown))
    if _bytes > MOST_IN_EVENTS[rank > 0]:
        shown = ""
    pieces = [shown[at : at + PART] for at in range(0, len(shown), PART)] if isinstance(shown, str) else [shown]
    for number, piece in enumerate(pieces or [""]):
        emit("media", **about, part=number, parts=len(pieces) or 1, shown=piece)


def _file_name(name: Any) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", str(name))[:60].strip(".") or "_"


# -- images -----------------------------------------------------------------------------------------------------------


def _image(value: Any) -> tuple[str, bytes, str]:
    """Return suffix, bytes and what is shown of an image: an array, a PIL image, a matplotlib figure, PNG or JPEG."""
    if hasattr(value, "savefig"):
        stream = io.BytesIO()
        value.savefig(stream, format="png")
        value = stream.getvalue()
    elif hasattr(value, "save") and hasattr(value, "thumbnail"):
        return _pil_image(value)
    elif isinstance(value, (str, os.PathLike)):
        with open(value, "rb") as file:
            value = file.read(MOST_FILE + 1)
    if isinstance(value, (bytes, bytearray)):
        content = bytes(value)
        suffix = next((suffix for start, suffix in _KINDS.items() if content.startswith(start)), None)
        if suffix is None:
            raise ValueError("an image must be PNG or JPEG")
        return suffix, content, _base64(content) if len(content) <= MOST_SHOWN else ""
    rows = _pixels(value)
    content, small, every = _png(rows), b"", 1
    small = content
    while len(small) > MOST_SHOWN:
        every += 1
        small = _png([row[::every] for row in rows[::every]])
    return "png", content, _base64(small)


def _pil_image(image: Any) -> tuple[str, bytes, str]:
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    content, side = stream.getvalue(), 1024
    small = content
    while len(small) > MOST_SHOWN and side >= 16:
        side //= 2
        copy = image.convert("RGB")
        copy.thumbnail((side, side))
        stream = io.BytesIO()
        copy.save(stream, format="JPEG", quality=80)
        small = stream.getvalue()
    return "png", content, _base64(small)


def _pixels(value: Any) -> list[list[tuple[int, ...]]]:
    """Return rows of grey or RGB pixels of an array: height x width, with 1, 3 or 4 channels last or first; floats are
    from 0 to 1."""
    for method in ("detach", "cpu"):
        value = getattr(value, method)() if hasattr(value, method) else value
    shape = tuple(getattr(value, "shape", ()))
    if len(shape) == 3 and shape[0] in (1, 3, 4) and shape[2] not in (1, 3, 4) and hasattr(value, "swapaxes"):
        value = value.swapaxes(0, 1).swapaxes(1, 2)  # channels first, as torch has them
    rows = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(rows, list) or not rows or not isinstance(rows[0], list) or not rows[0]:
        raise TypeError(
            f"{type(value).__name__} is not an image: an array of height x width (x 1, 3 or 4 channels) is one"
        )
    whole = [[tuple(pixel) if isinstance(pixel, list) else (pixel,) for pixel in row] for row in rows]
    width, channels = len(whole[0]), len(whole[0][0])
    if channels not in (1, 3, 4) or any(len(row) != width or any(len(p) != channels for p in row) for row in whole):
        raise ValueError("all rows of an image need the same width, and pixels need 1, 3 or 4 channels")
    scale = 255.0 if any(isinstance(part, float) for pixel in whole[0] for part in pixel) else 1
    return [[tuple(_byte(part, scale) for part in pixel[:3]) for pixel in row] for row in whole]


def _byte(value: Any, scale: float) -> int:
    number = float(value) * scale
    return 0 if math.isnan(number) else int(max(0.0, min(255.0, number)))


def _png(rows: Sequence[Sequence[tuple[int, ...]]]) -> bytes:
    """Return pixels as PNG (https://www.w3.org/TR/png-3/, read 2026-11-23)."""
    colour = 0 if len(rows[0][0]) == 1 else 2
    data = b"".join(b"\0" + bytes(part for pixel in row for part in pixel) for row in rows)
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, colour, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(data, 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode() if len(content) <= MOST_SHOWN else ""


# -- texts, tables, histograms ----------------------------------------------------------------------------------------


def _text(value: Any) -> tuple[str, bytes, dict[str, Any]]:
    text = str(value)
    shown = text[:MOST_TEXT]
    while len(json.dumps(shown)) > MOST_TEXT:
        shown = shown[: len(shown) * 3 // 4]
    return "txt", text.encode("utf-8", "replace"), {"text": shown, "left_out": len(text) - len(shown)}


def _table(value: Any, columns: Sequence[Any] | None = None) -> tuple[str, bytes, dict[str, Any]]:
    """Return a table as JSON: rows of cells, rows of named cells, or a pandas data frame."""
    if columns is None and hasattr(value, "to_dict") and hasattr(value, "columns"):
        columns, value = list(value.columns), value.values.tolist()
    rows = list(value)
    if rows and isinstance(rows[0], dict):
        columns = list(columns or dict.fromkeys(key for row in rows for key in row))
        rows = [[row.get(key) for key in columns] for row in rows]
    heads = [str(head) for head in columns or ()]
    cells = [[_cell(cell) for cell in row] for row in rows]
    shown = [[_short(cell) for cell in row[:MOST_COLUMNS]] for row in cells[:MOST_ROWS]]
    names = [head[:MOST_CELL] for head in heads[:MOST_COLUMNS]]
    while shown and len(json.dumps([names, shown])) > MOST_TEXT:
        shown = shown[: len(shown) * 3 // 4]
    content = json.dumps({"columns": heads, "rows": cells}, ensure_ascii=False).encode("utf-8", "replace")
    return "json", content, {"columns": names, "rows": shown, "left_out": len(cells) - len(shown)}


def _cell(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _short(cell: Any) -> Any:
    return cell[:MOST_CELL] if isinstance(cell, str) else cell


def _histogram(value: Any, bins: int = 30) -> tuple[str, bytes, dict[str, Any]]:
    """Return counts and edges of the finite numbers in an array or a list, however deep."""
    for method in ("detach", "cpu", "tolist"):
        value = getattr(value, method)() if hasattr(value, method) else value
    numbers: list[float] = []
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, (list, tuple)):
            waiting.extend(one)
        else:
            numbers.append(float(one))
    finite = [number for number in numbers if math.isfinite(number)]
    count = max(1, min(int(bins), MOST_BINS))
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    width = (high - low) / count or 1.0 / count
    counts = [0] * count
    for number in finite:
        counts[min(int((number - low) / width), count - 1)] += 1
    edges = [low + width * at for at in range(count + 1)]
    shown = {
        "counts": counts,
        "edges": [float(f"{edge:.6g}") for edge in edges],
        "left_out": len(numbers) - len(finite),
    }
    return "json", json.dumps({"counts": counts, "edges": edges}).encode(), shown


_WRITERS: dict[str, Callable[..., tuple[str, bytes, Any]]] = {
    "image": _image,
    "text": _text,
    "table": _table,
    "histogram": _histogram,
}
