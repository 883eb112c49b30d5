"""The console server: listens on a local port, prints the address, stops with Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import webbrowser
from collections.abc import Awaitable, Callable, Iterator
from functools import wraps
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from cloudtrain.console import artifacts, history, shell
from cloudtrain.console.routes import PAGES, Page
from cloudtrain.console.security import OPEN_PATH, SecurityMiddleware
from cloudtrain.errors import BadRequest
from cloudtrain.job.homes import new_file

ADDRESS = "127.0.0.1"
BUILD_S = 120.0  # limit for building a page: a busy machine, or the log of a failed run is read for its verdict
RECONNECT_S = 60  # how long a page may stay disconnected before it is rebuilt
END_S = 2  # how long open pages may delay the shutdown


def serve(home: Path, port: int, started: Callable[[str], None]) -> None:
    """Serve the console until Ctrl-C or SIGTERM; blocking. `started` is called with the address once it answers.

    Raises BadRequest where the port is taken.
    """
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            started(address)

    listener = _listen(port)
    port = listener.getsockname()[1]
    middleware = SecurityMiddleware(_application(home), port)
    address = f"http://{ADDRESS}:{port}{OPEN_PATH}?token={middleware.token}"
    config = uvicorn.Config(
        middleware, log_level="warning", access_log=False, proxy_headers=False, server_header=False,
        timeout_graceful_shutdown=END_S,
    )  # fmt: skip
    try:
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again after its shutdown
            Server(config).run(sockets=[listener])
    finally:
        history.current().close()
        listener.close()


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((ADDRESS, port))
    except OSError as error:
        listener.close()
        raise BadRequest(
            f"port {port} cannot be used: {error.strerror}", "use --port 0 to choose a free port"
        ) from None
    listener.listen(128)
    return listener


def _application(home: Path) -> Any:
    """Return the ASGI application with all pages, for the history below a home."""
    from fastapi import FastAPI
    from nicegui import ui

    history.open_history(home)
    application = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    for page in PAGES:
        module, _, function = page.show.partition(":")
        show = getattr(import_module(f"cloudtrain.console.{module}"), function)
        decorate = ui.page(page.path, title=f"{page.title} · cloudtrain", response_timeout=BUILD_S)
        decorate(_with_frame(page, show))
    artifacts.add_route()
    shell.add_styles()
    ui.run_with(
        application, title="cloudtrain", favicon=shell.ICON, tailwind=False, show_welcome_message=False,
        reconnect_timeout=RECONNECT_S,
    )  # fmt: skip
    return application


def _with_frame(page: Page, show: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Wrap the `show` function of a page in the page frame; it takes the same parameters."""

    @wraps(show)
    async def build(*args: Any, **kwargs: Any) -> None:
        with shell.page_frame(page):
            await shell.show_or_error(lambda: show(*args, **kwargs))

    return build


@contextlib.contextmanager
def open_in_browser(address: str, home: Path) -> Iterator[None]:
    """Open the address in the browser of the desktop, if there is one.

    All users can read the browser's command line, so it names a file of mode 600 that redirects to the address. The file
    is deleted when the block ends.
    """
    if sys.platform != "darwin" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        yield  # without a desktop a text browser would take over the terminal
        return
    path = home / f"console-{os.getpid()}.html"
    with new_file(path) as stream:
        stream.write(f'<!doctype html><meta http-equiv="refresh" content="0;url={escape(address)}">'.encode())
    try:
        webbrowser.open(path.as_uri())
        yield
    finally:
        path.unlink(missing_ok=True)
