"""The page of a run: overview, charts, log, results; cancel, resume, rerun."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from cloudtrain.console import charts, curvestyle, history, logged, nodeuse, shell, text, widgets
from cloudtrain.console.pages import marks, origin
from cloudtrain.console.pages.overview import Overview, RunDetails
from cloudtrain.console.pages.results import Results
from cloudtrain.console.pages.runlog import RunLog
from cloudtrain.console.polling import poll
from cloudtrain.console.routes import PAGES
from cloudtrain.errors import CloudtrainError
from cloudtrain.events import State
from cloudtrain.history import table
from cloudtrain.runs.planning import upstream
from cloudtrain.runs.run import Run


async def show(
    run_id: str, over: str = "step", smoothing: float = 0.0, log: bool = False, log_x: bool = False, search: str = ""
) -> None:
    """Show a run; the address keeps how its curves are drawn."""
    from nicegui import ui

    await history.current().query_run(run_id, history.refresh)
    short, project = (await history.current().query(lambda s: table.rows_of(s, [run_id], ["short", "name"])))[0].values
    with ui.element("div").classes("ct-row"):
        with ui.element("div").classes("ct-grow"):
            headline = marks.Headline(run_id, str(short))
        state = ui.element("div").props('role="status"')
        actions = ui.element("div").classes("ct-row")
    headline.show_marks()
    drawn_state: list[object] = []

    def draw_heading(details: RunDetails) -> None:
        if drawn_state == [now := (details.status.state, details.cancelling, details.attached)]:
            return  # keeps the keyboard focus on a button
        drawn_state[:] = [now]
        state.clear()
        with state:
            widgets.state(details.status.state)
        actions.clear()
        with actions:
            _actions(run_id, details)

    roles = await history.current().query_run(run_id, lambda run: run.attempts[-1].plan.node_roles)
    log_panel = RunLog(run_id, roles)
    overview = Overview(run_id, draw_heading, log_panel.open_line)
    await overview.show()
    live: list[Callable[[], Awaitable[None]]] = [overview.refresh]

    def keep() -> None:
        ui.navigate.history.replace(f"/runs/{quote(run_id, safe='')}?{urlencode(style.address())}".rstrip("?"))

    with widgets.card("Curves"):
        style = curvestyle.of_address(over, smoothing, log, log_x, search)
        curves = charts.Curves([run_id], project=str(project), style=style, on_style=keep)
        await curves.show()
    with widgets.card("Use of each node"):
        used = nodeuse.Use(run_id)
        await used.show()
    now, check = nodeuse.Now(run_id), nodeuse.Check(run_id)
    await now.show()
    await check.show()
    live += [curves.refresh, used.refresh, now.refresh, check.refresh]
    objects = logged.LoggedObjects(run_id)
    await objects.show()
    live.append(objects.refresh)
    with ui.element("div").classes("ct-logs") as logs:
        log_panel.show()

    async def add_log() -> None:
        """Draw one more log beside the others, to follow several ranks."""
        with logs:
            panel = RunLog(run_id, roles, len(list(logs)) + 1)
            panel.show()
        live.append(panel.refresh)
        await panel.refresh()

    with ui.element("div").classes("ct-row"):
        widgets.button("Add a log beside", add_log)
    results = Results(run_id)
    await results.show()
    await marks.show(run_id, headline)
    await origin.show(run_id)
    live += [log_panel.refresh, results.refresh]
    poll(live)


def _actions(run_id: str, details: RunDetails) -> None:
    """Draw the buttons for the actions that a run allows in its state."""
    from nicegui import ui

    state = details.status.state
    if not state.final and not details.attached:
        label = "Cancelling…" if details.cancelling else "Cancel"
        button = widgets.button(label, lambda: _cancel(run_id), "ct-danger", "stop")
        button.set_enabled(not details.cancelling)
    elif state.final and state is not State.SUCCEEDED:
        widgets.button("Resume", lambda: _run_action(run_id, Run.resume, "the next attempt starts"), icon="play_arrow")
    widgets.button("Report", lambda: _download_report(run_id), icon="download").tooltip("One HTML file to share")
    if any(page.path == "/new" for page in PAGES) and not details.attached:
        widgets.button("Rerun with changes", lambda: ui.navigate.to(f"/new?run={quote(run_id)}"), icon="edit")


async def _download_report(run_id: str) -> None:
    """Download the run as one HTML file."""
    from nicegui import ui

    def write(run: Run) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            return run.report(Path(folder) / "report.html").read_bytes()

    ui.notify("Writing the report…")
    try:
        content = await history.current().query_run(run_id, write)
    except CloudtrainError as error:
        shell.notify_error(error)
    else:
        ui.download.content(content, f"{run_id}.html", "text/html")


async def _cancel(run_id: str) -> None:
    if await sure_to_cancel([run_id]):
        await _run_action(run_id, lambda run: run.cancel(), "cancelling")


async def sure_to_cancel(run_ids: Sequence[str]) -> bool:
    """Ask whether to cancel runs, naming those that wait for them, and return whether the person is sure."""
    try:
        waiting = await history.current().query(lambda store: upstream.waiting(store, run_ids))
    except CloudtrainError as error:
        shell.notify_error(error)
        return False
    one = len(run_ids) == 1
    what, whose, it = (text.clean(run_ids[0]), "its", "it") if one else (f"{len(run_ids)} runs", "their", "them")
    lines = [f"Cancel {what}? This stops all {whose} processes."]
    if waiting:
        lines.append(f"Runs that wait for {it} will be cancelled too: {text.clean(', '.join(waiting), 500)}")
    return await widgets.confirm("Cancel runs", lines, f"Cancel {'the run' if one else it}", f"Keep {it} running")


async def _run_action(run_id: str, action: Callable[[Run], Any], message: str) -> None:
    """Run an action off the event loop, and notify about its outcome."""
    from nicegui import ui

    try:
        await asyncio.shield(history.current().query_run(run_id, action))
    except CloudtrainError as error:
        shell.notify_error(error)
    else:
        ui.notify(message, type="positive")
