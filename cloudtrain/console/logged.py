"""Show the images, texts, tables and histograms that a run has logged.

A job writes these events, so nothing in them is trusted: an image must be PNG or JPEG of limited size and becomes the source of
an `img`, a number is checked, and everything else is text.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cloudtrain.console import charts, history, lists, shell, text, widgets
from cloudtrain.events import Event
from cloudtrain.history.store import Store
from cloudtrain.report import plots

MAX_NAMES = 40  # shown
MAX_STEPS = 200  # to choose from, the newest ones
MAX_PARTS = 64
MAX_SIDE = 4096  # pixels: a small file may claim to be an image that fills the memory
MAX_CELLS = 20, 100  # columns and rows
KINDS = ("image", "text", "table", "histogram")


@dataclass
class Logged:
    """One logged object: its parts by number, and of how many there are."""

    what: str
    name: str
    step: int
    rank: int
    attempt: str
    file: str
    parts: int
    shown: dict[int, Any] = field(default_factory=dict)

    @property
    def content(self) -> Any:
        """What was sent: a dictionary, or the text of all parts; None where a part is missing."""
        if len(self.shown) != self.parts:
            return None
        values = [self.shown[number] for number in range(self.parts)]
        return "".join(values) if all(isinstance(value, str) for value in values) else values[0]


def collect(events: Iterable[Event]) -> dict[tuple[str, str], list[Logged]]:
    """Return kind and name -> the objects of the lowest rank that logged it, the oldest first."""
    found: dict[tuple[Any, ...], Logged] = {}
    for event in events:
        data = event.data
        what, name, file = (str(data.get(key, "")) for key in ("what", "name", "file"))
        step, rank, part, parts = (_count(data.get(key)) for key in ("step", "_rank", "part", "parts"))
        if what not in KINDS or step is None or rank is None or part is None or not parts or parts > MAX_PARTS:
            continue
        key = event.attempt, event.node, rank, what, name, step, file
        one = found.setdefault(key, Logged(what, name, step, rank, event.attempt.rpartition("-a")[2], file, parts))
        if part < one.parts:
            one.shown[part] = data.get("shown")
    lowest: dict[tuple[str, str], int] = {}
    for one in found.values():
        lowest[one.what, one.name] = min(one.rank, lowest.get((one.what, one.name), one.rank))
    named: dict[tuple[str, str], list[Logged]] = {}
    for one in found.values():
        if one.rank == lowest[one.what, one.name]:
            named.setdefault((one.what, one.name), []).append(one)
    return {key: objects[-MAX_STEPS:] for key, objects in list(named.items())[:MAX_NAMES]}


class LoggedObjects:
    """The objects on the page of a run; there is no card where a run has none."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._known = 0
        self._drawn: dict[tuple[str, str], tuple[list[Logged], Any, Any]] = {}  # objects, choice of a step, body

    async def show(self) -> None:
        """Draw the card."""
        from nicegui import ui

        with widgets.card("Logged") as self._card:
            self._grid = ui.element("div").classes("ct-plots")
        self._card.visible = False
        await self.refresh()

    async def refresh(self) -> None:
        """Draw what is new."""
        count = await history.current().query(lambda store: store.count_events(self._run_id, "media"))
        if count == self._known:
            return
        self._known, self._card.visible = count, True
        for key, objects in (await history.current().query(self._read)).items():
            self._draw(key, objects)

    def _read(self, store: Store) -> dict[tuple[str, str], list[Logged]]:
        return collect(store.events(self._run_id, "media"))

    def _draw(self, key: tuple[str, str], objects: list[Logged]) -> None:
        from nicegui import ui

        if key not in self._drawn:
            with self._grid, ui.element("div").classes("ct-plot"):
                shell.heading(text.clean(key[1], 80) or key[0], 3)
                choice = ui.select([], label="step", on_change=lambda event: self._choose(key, event.value))
                choice.props("outlined dense").classes("ct-choice")
                self._drawn[key] = ([], choice, ui.element("div"))
        before, choice, _ = self._drawn[key]
        at_newest = choice.value in (None, len(before) - 1)
        before[:] = objects
        choice.set_options({number: _label(one) for number, one in enumerate(objects)})
        if at_newest and choice.value != len(objects) - 1:
            choice.value = len(objects) - 1  # which draws it
        else:
            self._choose(key, choice.value)

    def _choose(self, key: tuple[str, str], number: int | None) -> None:
        objects, _, body = self._drawn[key]
        body.clear()
        with body:
            if number is not None and number < len(objects):
                _draw_object(objects[number])


def _label(one: Logged) -> str:
    rank = f", rank {one.rank}" if one.rank else ""
    return f"{one.step}{f', attempt {one.attempt}' if one.attempt != '1' else ''}{rank}"


def _draw_object(one: Logged) -> None:
    from nicegui import ui

    draw: Callable[[], None] | None = None
    if one.what == "image":
        draw = _image(one.content, one.name)
    elif isinstance(one.content, Mapping):
        draw = {"text": _text, "table": _table, "histogram": _histogram}[one.what](one.content, one.name)
    if draw is None:
        ui.label(
            f"too large or not readable, so it is not shown; `cloudtrain fetch` downloads it: outputs/{text.clean(one.file, 200)}"
        ).classes("ct-dim")
    else:
        draw()


def _image(content: Any, name: str) -> Callable[[], None] | None:
    try:
        data = base64.b64decode(content, validate=True) if isinstance(content, str) else b""
    except (binascii.Error, ValueError):
        return None
    size, kind = _png_size(data) or _jpeg_size(data), "png" if data.startswith(b"\x89PNG") else "jpeg"
    if size is None or not all(0 < side <= MAX_SIDE for side in size):
        return None
    source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"

    def draw() -> None:
        from nicegui import ui

        image = ui.element("img").style("max-width: 100%; min-width: min(100%, 10rem); image-rendering: pixelated")
        image.props["src"], image.props["alt"] = source, text.clean(name, 80)

    return draw


def _png_size(data: bytes) -> tuple[int, int] | None:
    whole = data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR" and len(data) > 33
    return struct.unpack(">II", data[16:24]) if whole else None


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Return width and height from the frame header (ITU T.81, B.2.2; https://www.w3.org/Graphics/JPEG/itu-t81.pdf)."""
    at = 2
    while data.startswith(b"\xff\xd8\xff") and at + 9 <= len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], struct.unpack(">H", data[at + 2 : at + 4])[0]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack(">HH", data[at + 5 : at + 9])
            return width, height
        at += 2 + length
    return None


def _text(content: Mapping[str, Any], name: str) -> Callable[[], None]:
    shown, left_out = str(content.get("text", "")), _count(content.get("left_out"))
    return lambda: widgets.preformatted(
        shown + (f"\n… {left_out:,} more characters are in the file" if left_out else ""), name=text.clean(name, 200)
    )


def _table(content: Mapping[str, Any], name: str) -> Callable[[], None] | None:
    rows, columns = content.get("rows"), content.get("columns")
    if not isinstance(rows, list) or not isinstance(columns, list) or not all(isinstance(row, list) for row in rows):
        return None
    wide = min(max([len(columns), *map(len, rows)]), MAX_CELLS[0])
    heads = [text.clean(head, 80) for head in [*columns, *[""] * wide][:wide]]
    cells = [[*row, *[""] * wide][:wide] for row in rows[: MAX_CELLS[1]]]
    left_out = _count(content.get("left_out"))

    def draw() -> None:
        from nicegui import ui

        widgets.table(heads, cells, caption=text.clean(name, 200))
        if left_out:
            ui.label(f"{left_out:,} more rows are in the file").classes("ct-dim")

    return draw


def _histogram(content: Mapping[str, Any], name: str) -> Callable[[], None] | None:
    counts, edges = content.get("counts"), content.get("edges")
    if not isinstance(counts, list) or not isinstance(edges, list) or not 0 < len(counts) == len(edges) - 1 <= 100:
        return None
    numbers = [*counts, *edges]
    if not all(isinstance(one, int | float) and abs(one) < 1e300 and math.isfinite(one) for one in numbers):
        return None

    def draw() -> None:

        lists.chart(charts.style_figure(plots.histogram(counts, edges)))

    return draw


def _count(value: object) -> int | None:
    """Return a whole number from 0 on that a page can show, None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 else None
