"""Keeping a page up to date, as long as it is open."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from cloudtrain.console import shell
from cloudtrain.errors import CloudtrainError

INTERVAL_S = 0.7  # how often a page looks whether something is new


def poll(live: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Look again and again whether something is new; what stands in the way is said at the end of the page."""
    from nicegui import ui

    client = ui.context.client

    async def refresh_all() -> None:
        if not client.has_socket_connection:
            return  # nobody looks any more, or not yet
        for refresh in live:
            try:
                await refresh()
            except CloudtrainError as error:
                status_label.text = shell.format_error(error)
                return
        status_label.text = ""

    status_label = ui.label("").classes("ct-dim ct-small").props('role="status"')
    ui.timer(INTERVAL_S, refresh_all)
