"""The frame of every page: header, theme, keyboard shortcuts, main part, and errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.console import text
from cloudtrain.console.routes import PAGES, Page
from cloudtrain.errors import CloudtrainError

if TYPE_CHECKING:
    from nicegui.events import KeyEventArguments

ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="7" fill="#0b5cad"/>'
    '<path d="M6 8c4 13 9 16 20 16" fill="none" stroke="#fff" stroke-width="3.4" stroke-linecap="round"/></svg>'
)
_THEMES: dict[bool | None, tuple[str, str]] = {  # NiceGUI's dark mode -> name and icon
    None: ("same as system", "brightness_auto"),
    False: ("light", "light_mode"),
    True: ("dark", "dark_mode"),
}
_LOADING = """<script>
  for (const [event, loading] of [["beforeunload", true], ["pageshow", false]])
    addEventListener(event, () => document.body.classList.toggle("ct-loading", loading));
</script>"""
_LOST = "The console does not answer: this page is no longer updated."
_WHERE_TO = "If the console was stopped or restarted, run cloudtrain console and open the address that it prints."
_theme: list[bool | None] = [None]  # for the whole process: it has one user


def add_styles() -> None:
    """Add to all pages the stylesheet, a sign while the next page loads, and what a page says without its console."""
    from nicegui import app, ui
    from nicegui.translations import translations

    app.config.quasar_config["loadingBar"] = {
        "skipHijack": True
    }  # it flickers at every request, and has no accessible name
    ui.add_css((Path(__file__).parent / "style.css").read_text("utf-8"), shared=True)
    ui.add_head_html(_LOADING, shared=True)
    translations["en-US"].update(connection_lost=_LOST, trying_to_reconnect=_WHERE_TO)


@contextmanager
def page_frame(page: Page) -> Iterator[None]:
    """Draw the frame of a page; the block's elements go into the main part."""
    from nicegui import ui

    ui.context.client.page.language = "en-US"
    with ui.header().classes("ct-head"), ui.element("div").classes("ct-bar"):
        ui.link("cloudtrain", "/").classes("ct-brand")
        with ui.element("nav").classes("ct-nav").props('aria-label="Pages"'):
            for other in PAGES:
                if other.key:
                    link = ui.link(other.title, other.path)
                    if other.path == page.path:
                        link.props('aria-current="page"')
        _theme_button()
    _keyboard()
    with ui.element("div").classes("ct-main") as main:  # inside the <main> of NiceGUI
        yield
    ui.skip_link("Skip to content", target=main)


async def show_or_error(show: Callable[[], Awaitable[None]]) -> None:
    """Show a page, or the message and hint of the error that it raised."""
    from nicegui import ui

    try:
        await show()
    except CloudtrainError as error:
        heading("Error")
        with ui.element("section").classes("ct-card"):
            ui.label(format_error(error))


def heading(title: str, level: int = 1) -> Any:
    """Draw a heading, and return it."""
    from nicegui.elements.mixins.text_element import TextElement

    return TextElement(tag=f"h{level}", text=title)


def format_error(error: CloudtrainError) -> str:
    """Return the message and hint of an error as one line."""
    hint = f" ({error.hint})" if error.hint else ""
    return text.clean(f"{error.message}{hint}", 2000)


def notify_error(error: CloudtrainError) -> None:
    """Show a notification with the error of an action."""
    from nicegui import ui

    ui.notify(format_error(error), type="negative", multi_line=True, close_button="Close", timeout=0)


def _theme_button() -> None:
    from nicegui import ui

    theme = ui.dark_mode(_theme[0])

    def show() -> None:
        name, icon = _THEMES[theme.value]
        button.props["icon"] = icon
        button.props["aria-label"] = f"Theme: {name}"
        button.update()

    def next_theme() -> None:
        order = list(_THEMES)
        theme.value = _theme[0] = order[(order.index(theme.value) + 1) % len(order)]
        show()

    button = ui.button(on_click=next_theme, color=None).props("flat dense round").tooltip("Change the theme")
    show()


def _keyboard() -> None:
    """Add keyboard shortcuts: letters open pages, / focuses the search, ? lists the shortcuts; not while typing."""
    from nicegui import ui

    with ui.dialog().props('aria-label="Keys"') as dialog, ui.card():
        heading("Keys", 2)
        with ui.element("dl").classes("ct-keys ct-pairs"):
            for key, description in [*((p.key, p.title) for p in PAGES if p.key), ("/", "Search"), ("?", "These keys")]:
                with ui.element("dt"):
                    ui.label(key).classes("ct-mono")
                with ui.element("dd"):
                    ui.label(description)
        ui.button("Close", on_click=dialog.close, color=None).classes("ct-plain")

    def pressed(event: KeyEventArguments) -> None:
        if not event.action.keydown or event.modifiers.ctrl or event.modifiers.alt or event.modifiers.meta:
            return
        if event.key.name == "?":
            dialog.open()
        elif event.key.name == "/":
            ui.run_javascript("document.querySelector('[data-search] input, input[data-search]')?.focus()")
        for page in PAGES:
            if page.key and event.key.name == page.key:
                ui.navigate.to(page.path)

    ui.keyboard(on_key=pressed)
