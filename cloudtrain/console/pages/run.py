"""The page of a run: how it went, its curves, its log, its results; cancel, resume, run again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

from cloudtrain.console import charts, history, shell, text, widgets
from cloudtrain.console.pages import origin
from cloudtrain.console.pages.overview import Overview, Told
from cloudtrain.console.pages.results import Results
from cloudtrain.console.pages.runlog import RunLog
from cloudtrain.console.polling import poll
from cloudtrain.console.routes import PAGES
from cloudtrain.errors import CloudtrainError
from cloudtrain.events import State
from cloudtrain.runs.run import Run


async def show(run_id: str) -> None:
    """Show a run."""
    from nicegui import ui

    await history.current().query_run(run_id, _known)
    ui.page_title(f"{run_id} · cloudtrain")
    with ui.element("div").classes("ct-row"):
        with ui.element("div").classes("ct-grow"):
            shell.heading(run_id)
        state = ui.element("div").props('role="status"')
        actions = ui.element("div").classes("ct-row")

    drawn: list[object] = []

    def head(said: Told) -> None:
        if drawn == [now := (said.status.state, said.cancelling)]:
            return  # whoever is at a button with the keyboard stays there
        drawn[:] = [now]
        state.clear()
        with state:
            widgets.state(said.status.state)
        actions.clear()
        with actions:
            _actions(run_id, said)

    overview = Overview(run_id, head)
    await overview.show()
    live: list[Callable[[], Awaitable[None]]] = [overview.refresh]
    await charts.draw_run_charts(run_id, live)
    log = RunLog(run_id)
    log.show()
    results = Results(run_id)
    await results.show()
    await origin.show(run_id)
    live += [log.refresh, results.refresh]
    poll(live)


def _known(run: Run) -> None:
    """Raise UnknownRun where there is no such run; bring one up to date that nobody watches any more."""
    try:
        run.refresh()
    except CloudtrainError:
        pass  # what cannot be reached stays as it was


def _actions(run_id: str, said: Told) -> None:
    """Draw what can be done with a run as it is now."""
    from nicegui import ui

    state = said.status.state
    if not state.final:
        words = "Cancelling…" if said.cancelling else "Cancel"
        button = widgets.button(words, lambda: _cancel(run_id), "ct-danger", "stop")
        button.set_enabled(not said.cancelling)
    elif state is not State.SUCCEEDED:
        widgets.button("Resume", lambda: _do(run_id, Run.resume, "the next attempt starts"), icon="play_arrow")
    if any(page.path == "/new" for page in PAGES):
        widgets.button("Rerun with changes", lambda: ui.navigate.to(f"/new?run={quote(run_id)}"), icon="edit")


async def _cancel(run_id: str) -> None:
    from nicegui import ui

    with ui.dialog().props('aria-label="Cancel the run"') as dialog, ui.card():
        ui.label(f"Cancel {text.clean(run_id)}? It ends everything that the run has started.")
        with ui.element("div").classes("ct-row"):
            widgets.button("Cancel the run", lambda: dialog.submit(True), "ct-danger")
            widgets.button("Let it go on", lambda: dialog.submit(False))
    sure = await dialog
    dialog.delete()
    if sure:
        await _do(run_id, lambda run: run.cancel(), "it is being cancelled")


async def _do(run_id: str, what: Callable[[Run], Any], words: str) -> None:
    """Do something with a run off the event loop, and say what came of it."""
    from nicegui import ui

    try:
        await asyncio.shield(history.current().query_run(run_id, what))
    except CloudtrainError as error:
        shell.notify_error(error)
    else:
        ui.notify(words, type="positive")
