"""Who may speak with the console: every request and every websocket is asked for its Host, Origin and token.

Pages of NiceGUI are live: what is clicked travels over a websocket, so a reader who may open one may write. Therefore the
token is asked of everything, reading too. It is random, new for every process, and never in a page: the printed address
hands it over once, and from then on the browser keeps it in a cookie that no script reads (HttpOnly) and that no other
site's page sends (SameSite=Strict). Browsers keep one cookie jar for all ports of a machine, so that a page of another
local server could send it along: hence the Origin, and what the browser says of it in Sec-Fetch-Site. A name that was
pointed here by DNS (rebinding) is told by its Host.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from html import escape
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = "/open"  # where the token is handed over: /open?token=...&to=/runs/x
NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
POLICY = (  # NiceGUI builds its pages by inline scripts and compiles templates in the browser; nothing comes from elsewhere
    "default-src 'none'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline';"
    " img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none';"
    " frame-ancestors 'none'"
)
# NiceGUI's scripts and styles, and ours: their address changes when they do, and nobody's data is in them.
KEPT = re.compile(r"/_nicegui/\d[\w.]*/(static|components|libraries|esm)/.")
FOR_EVER = "private, max-age=31536000, immutable"
HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class Gate:
    """An ASGI application before another one; refuses with 403, and a websocket before it is accepted."""

    def __init__(self, app: App, port: int) -> None:
        self.app = app
        self.cookie = f"cloudtrain-{port}"  # two consoles of one person do not overwrite each other's
        self.token = secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        opens = scope["type"] == "http" and scope["method"] == "GET" and scope["path"] == OPEN
        why = _foreign(scope, headers, opens)
        if not why and opens:
            await self._hand_over(scope, send)
            return
        if why := why or ("" if self._knows(headers) else "the token is missing: open the address that it printed"):
            await _refuse(scope, receive, send, why)
            return

        async def closed(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                kept = message["status"] in (200, 304) and KEPT.match(scope["path"])
                message["headers"] = _with(message["headers"], FOR_EVER if kept else "no-store")
            await send(message)

        await self.app(scope, receive, closed)

    def _knows(self, headers: Mapping[str, str]) -> bool:
        try:
            kept = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return False
        return kept is not None and hmac.compare_digest(kept.value.encode(), self.token.encode())

    async def _hand_over(self, scope: Scope, send: Send) -> None:
        """Take the token of the printed address and give it to the browser to keep."""
        asked = parse_qs(scope["query_string"].decode("latin-1"))
        if not hmac.compare_digest(asked.get("token", [""])[0].encode(), self.token.encode()):
            await _answer(send, 403, _page("this token is of another console: open the address that it printed"))
            return
        to = asked.get("to", ["/"])[0]
        to = quote(to, safe="/?=&-._~") if to.startswith("/") and not to.startswith(("//", "/\\")) else "/"
        # No redirect: it would count as the other site's that led here, and a Strict cookie would stay at home.
        head = f'<meta http-equiv="refresh" content="0;url={escape(to)}">'
        cookie = f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"
        await _answer(send, 200, _page("one moment", head), {"set-cookie": cookie})


def _foreign(scope: Scope, headers: Mapping[str, str], opens: bool) -> str:
    """Return why a request is not one of the console's own pages', "" where it is.

    The port is not asked for: through `ssh -L` it is another one.
    """
    host = headers.get("host", "")
    if _name(host) not in NAMES:
        return "it listens to this machine's own names only (localhost, 127.0.0.1)"
    origin = headers.get("origin")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return "another site's page asked for it"
    if origin is None and (scope["type"] == "websocket" or scope["method"] not in ("GET", "HEAD")):
        return "it does not say which page it comes from (Origin)"
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not opens:
        return "another site's page asked for it"
    return ""


def _name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


async def _refuse(scope: Scope, receive: Receive, send: Send, why: str) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": why})
        return
    await _answer(send, 403, _page(why))


async def _answer(send: Send, status: int, body: bytes, extra: Mapping[str, str] | None = None) -> None:
    told = {"content-type": "text/html; charset=utf-8", "content-length": str(len(body)), **(extra or {})}
    headers = [(name.encode(), value.encode()) for name, value in told.items()]
    await send({"type": "http.response.start", "status": status, "headers": _with(headers, "no-store")})
    await send({"type": "http.response.body", "body": body})


def _with(headers: list[tuple[bytes, bytes]], caching: str) -> list[tuple[bytes, bytes]]:
    """Return an answer's headers with ours; those that would let another site read it, or a cache keep it, are taken out."""
    theirs = [pair for pair in headers if not pair[0].lower().startswith((b"access-control-", b"cache-control"))]
    known = {name.lower() for name, _ in theirs}
    ours = {"cache-control": caching, **HEADERS}
    return theirs + [(n.encode(), value.encode()) for n, value in ours.items() if n.encode() not in known]


def _page(sentence: str, head: str = "") -> bytes:
    style = "body{font:16px/1.5 system-ui,sans-serif;margin:20vh auto;max-width:34rem;padding:0 1rem;color-scheme:light dark}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>cloudtrain</title>{head}'
        f"<style>{style}</style></head><body><main><h1>cloudtrain console</h1><p>{escape(sentence)}</p></main></body></html>"
    ).encode()
