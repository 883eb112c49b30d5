"""Widgets of the pages: state, pairs, table, preformatted text, buttons. All values are shown as text, never as markup."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cloudtrain.console import shell, text
from cloudtrain.events import State

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_TEXT = 200_000  # characters
_STATE_CLASSES = {
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


def element(tag: str, content: str) -> Any:
    """Return an element with a text."""
    from nicegui.elements.mixins.text_element import TextElement

    return TextElement(tag=tag, text=content)


def state(run_state: State) -> None:
    """Draw the state of a run."""
    from nicegui import ui

    ui.label(run_state.value).classes(f"ct-state {state_class(run_state)}")


def state_class(run_state: State) -> str:
    """Return the CSS class of a state's colour."""
    return _STATE_CLASSES.get(run_state, "")


@contextmanager
def loading(area: Any) -> Iterator[None]:
    """Show that an element's content is being read, where that takes longer than a blink."""
    area.classes("ct-busy").props("aria-busy=true")
    try:
        yield
    finally:
        area.classes(remove="ct-busy").props(remove="aria-busy")


@contextmanager
def card(title: str = "", *, name: str = "") -> Iterator[Any]:
    """Draw a box with a heading; `name` is its label for screen readers."""
    from nicegui import ui

    with ui.element("section").classes("ct-card") as section:
        section.props["aria-label"] = name or title
        if title:
            shell.heading(title, 2)
        yield section


def area(title: str) -> Any:
    """Draw a box with a heading, and return the element inside, whose content may be drawn again."""
    from nicegui import ui

    with card(title):
        return ui.element("div")


def link(label: str, target: str) -> None:
    """Draw a link to a page of the console."""
    element("a", text.clean(label, 200)).props["href"] = target


def pairs(rows: Iterable[tuple[str, object]]) -> None:
    """Draw labels and values, without empty ones."""
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
    """Draw a table. A cell is text or a function that draws it; `looks` maps headers to CSS classes of their columns."""
    from nicegui import ui

    classes = [(looks or {}).get(head, "") for head in heads]
    with ui.element("div").classes("ct-scroll").props('tabindex="0" role="region"') as region:
        region.props["aria-label"] = caption
        with ui.element("table").classes("ct-table"):
            with ui.element("thead"), ui.element("tr"):
                for head, look in zip(heads, classes, strict=True):
                    element("th", head).props('scope="col"').classes(look)
            with ui.element("tbody"):
                for row in rows:
                    with ui.element("tr"):
                        for cell, look in zip(row, classes, strict=True):
                            if callable(cell):
                                with ui.element("td").classes(look):
                                    cell()
                            else:
                                element("td", "" if cell is None else text.clean(cell)).classes(look)


def preformatted(lines: str, *, name: str) -> None:
    """Draw text line by line, at most MOST_TEXT characters."""
    from nicegui import ui

    cleaned = "\n".join(text.clean(line, 2000) for line in lines[:MOST_TEXT].split("\n"))
    with ui.element("pre").classes("ct-pre").props('tabindex="0" role="region"') as block:
        block.props["aria-label"] = name
        ui.label(cleaned + ("\n…" if len(lines) > MOST_TEXT else "")).style("white-space: pre-wrap")


@contextmanager
def collapsible(title: str, *, opened: bool = False, on_toggle: Callable[[bool], Any] | None = None) -> Iterator[Any]:
    """Draw a collapsible section and give its title; `on_toggle` is called with whether it is open."""
    from nicegui import ui

    with ui.element("details") as details:
        details.props["open"] = opened
        if on_toggle:
            details.on(
                "toggle", lambda event: on_toggle(bool(event.args)), js_handler="(event) => emit(event.target.open)"
            )
        yield element("summary", title)


def button(label: str, on_click: Any, look: str = "ct-plain", icon: str = "") -> Any:
    """Draw a button."""
    from nicegui import ui

    return ui.button(label, on_click=on_click, color=None, icon=icon or None).props("unelevated no-caps").classes(look)


async def confirm(title: str, lines: Sequence[str], yes: str, no: str) -> bool:
    """Ask with a dialog, and return whether the person is sure."""
    from nicegui import ui

    with ui.dialog() as dialog, ui.card():
        dialog.props["aria-label"] = title
        for line in lines:
            ui.label(line)
        with ui.element("div").classes("ct-row"):
            button(yes, lambda: dialog.submit(True), "ct-danger")
            button(no, lambda: dialog.submit(False))
    sure = bool(await dialog)
    dialog.delete()
    return sure


def slider(label: str, value: float, most: float, on_change: Callable[[float], Awaitable[None]]) -> None:
    """Draw a slider from 0 to `most` in steps of a hundredth, with its value beside it."""
    from nicegui import ui

    async def changed(event: Any) -> None:
        shown.text = f"{event.args:.2f}"
        await on_change(event.args)

    with ui.element("label").classes("ct-row ct-slider"):
        element("span", label).classes("ct-dim ct-small")
        control = ui.element("input").props(f'type=range min=0 max={most} step=0.01 aria-label="{label}"')
        # `^` sets the attribute: Vue would set the property again at every update of the page, below the person's finger.
        control.props["^value"] = str(value)
        control.on("input", changed, throttle=0.1, js_handler="(event) => emit(event.target.valueAsNumber)")
        shown = element("span", f"{value:.2f}").classes("ct-dim ct-small")
