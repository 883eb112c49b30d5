"""The page of all runs."""

from __future__ import annotations

from cloudtrain.console import frame, history


async def show() -> None:
    """Show the runs."""
    from nicegui import ui

    frame.heading("Runs")
    for record in await history.current().ask(lambda store: store.runs(limit=50)):
        ui.label(record.run_id)
