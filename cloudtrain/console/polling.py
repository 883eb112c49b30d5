"""Refresh an open page periodically."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from cloudtrain.console import shell
from cloudtrain.errors import CloudtrainError

INTERVAL_S = 0.7  # between two refreshes of a page


def poll(live: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Call the refresh functions periodically; an error is shown at the end of the page."""
    from nicegui import ui

    client = ui.context.client

    async def refresh_all() -> None:
        if not client.has_socket_connection:
            return  # the page is closed, or not connected yet
        for refresh in live:
            try:
                await refresh()
            except CloudtrainError as error:
                status_label.text = shell.format_error(error)
                return
        status_label.text = ""

    status_label = ui.label("").classes("ct-dim ct-small").props('role="status"')
    ui.timer(INTERVAL_S, refresh_all)
