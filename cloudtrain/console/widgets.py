"""Pieces that pages are made of: a state, pairs, a table, text as it was written. What they show is text, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cloudtrain.console import shell, text
from cloudtrain.events import State

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOOKS = {
    State.SUCCEEDED: "ct-good",
    State.RUNNING: "ct-live",
    State.STARTING: "ct-live",
    State.STOPPING: "ct-warn",
    State.PREEMPTED: "ct-warn",
    State.CANCELLED: "ct-warn",
    State.FAILED: "ct-bad",
    State.LOST: "ct-bad",
    State.TIMED_OUT: "ct-bad",
}


def element(tag: str, words: str) -> Any:
    """Return an element that holds words and nothing else."""
    from nicegui.elements.mixins.text_element import TextElement

    return TextElement(tag=tag, text=words)


def state(what: State) -> None:
    """Show a state."""
    from nicegui import ui

    ui.label(what.value).classes(f"ct-state {look(what)}")


def look(what: State) -> str:
    """Return the CSS class of a state's colour."""
    return _LOOKS.get(what, "")


@contextmanager
def card(title: str = "", *, name: str = "") -> Iterator[Any]:
    """Draw a box with a heading; a person who hears the page is told its name."""
    from nicegui import ui

    with ui.element("section").classes("ct-card") as made:
        made.props["aria-label"] = name or title
        if title:
            shell.heading(title, 2)
        yield made


def pairs(rows: Iterable[tuple[str, object]]) -> None:
    """Show labels and values, those that there are."""
    from nicegui import ui

    with ui.element("dl").classes("ct-pairs"):
        for label, value in rows:
            if value in (None, ""):
                continue
            element("dt", label)
            with ui.element("dd"):
                if callable(value):
                    value()
                else:
                    for line in str(value).split("\n"):
                        ui.label(text.clean(line, 2000))


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    caption: str,
    looks: Mapping[str, str] | None = None,
) -> None:
    """Show a table; a cell is text, or a function that draws it. `looks` are CSS classes of columns by their head."""
    from nicegui import ui

    of = [(looks or {}).get(head, "") for head in heads]
    with ui.element("div").classes("ct-scroll").props('tabindex="0" role="region"') as around:
        around.props["aria-label"] = caption
        with ui.element("table").classes("ct-table"):
            with ui.element("thead"), ui.element("tr"):
                for head, look in zip(heads, of, strict=True):
                    element("th", head).props('scope="col"').classes(look)
            with ui.element("tbody"):
                for row in rows:
                    with ui.element("tr"):
                        for cell, look in zip(row, of, strict=True):
                            if callable(cell):
                                with ui.element("td").classes(look):
                                    cell()
                            else:
                                element("td", "" if cell is None else text.clean(cell)).classes(look)


def written(lines: str, *, name: str, most: int = 200_000) -> None:
    """Show text as it was written, line by line, the first `most` characters."""
    from nicegui import ui

    shown = "\n".join(text.clean(line, 2000) for line in lines[:most].split("\n"))
    with ui.element("pre").classes("ct-pre").props('tabindex="0" role="region"') as made:
        made.props["aria-label"] = name
        ui.label(shown + ("\n…" if len(lines) > most else "")).style("white-space: pre-wrap")


@contextmanager
def folded(title: str, *, opened: bool = False, turned: Callable[[bool], None] | None = None) -> Iterator[None]:
    """Draw something that a person opens; `turned` is told when they open or close it."""
    from nicegui import ui

    with ui.element("details") as made:
        made.props["open"] = opened
        if turned:
            made.on("toggle", lambda event: turned(bool(event.args)), js_handler="(event) => emit(event.target.open)")
        element("summary", title)
        yield


def button(words: str, on_click: Any, look: str = "ct-plain", icon: str = "") -> Any:
    """Draw a button."""
    from nicegui import ui

    return ui.button(words, on_click=on_click, color=None, icon=icon or None).props("unelevated no-caps").classes(look)
