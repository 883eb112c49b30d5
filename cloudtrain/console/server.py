"""The console's process: listens on a free port of this machine alone, prints the address, ends with Ctrl-C."""

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
from cloudtrain.source.atomic import new_file

ADDRESS = "127.0.0.1"
BUILD_S = 120.0  # how long a page may take on a busy machine, or where a failed run's log is read for its verdict
RECONNECT_S = 60  # how long a page may be silent, on a machine that is busy or asleep, before it is made anew
END_S = 2  # how long open pages may hold up the end


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
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn has ended well and says so once more
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
        raise BadRequest(f"port {port} cannot be had: {error.strerror}", "--port 0 takes a free one") from None
    listener.listen(128)
    return listener


def _application(home: Path) -> Any:
    """Return the ASGI application of all pages, over the history below a home."""
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
    """Return the function of a page with all that surrounds it; it takes what `show` takes."""

    @wraps(show)
    async def build(*args: Any, **kwargs: Any) -> None:
        with shell.page_frame(page):
            await shell.show_or_error(lambda: show(*args, **kwargs))

    return build


@contextlib.contextmanager
def open_in_browser(address: str, home: Path) -> Iterator[None]:
    """Open the address in the person's browser, where there is one, as long as the block lasts.

    The browser's command line, which everybody on the machine may read, names a file of mode 600 that leads there.
    """
    if sys.platform != "darwin" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        yield  # else a browser for terminals would take this one
        return
    path = home / f"console-{os.getpid()}.html"
    with new_file(path) as stream:
        stream.write(f'<!doctype html><meta http-equiv="refresh" content="0;url={escape(address)}">'.encode())
    try:
        webbrowser.open(path.as_uri())
        yield
    finally:
        path.unlink(missing_ok=True)
