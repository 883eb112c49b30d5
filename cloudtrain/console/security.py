"""Security of the console: check Host, Origin and token of every request and websocket, set security headers.

NiceGUI sends clicks over a websocket, so a client that may read may also write. Therefore every request needs the token.
It is random, new for every process, and never part of a page. The printed address carries it once; then the browser
stores it in a cookie that scripts cannot read (HttpOnly) and other sites' pages do not send (SameSite=Strict). Browsers
share cookies between all ports of a machine, so a page of another local server could send it: hence the checks of Origin
and Sec-Fetch-Site. The check of Host stops DNS rebinding.
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

OPEN_PATH = "/open"  # sets the cookie: /open?token=...&to=/runs/x
LOCAL_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
POLICY = (  # NiceGUI needs inline scripts and compiles templates in the browser; nothing is loaded from other hosts
    "default-src 'none'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline';"
    " img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none';"
    " frame-ancestors 'none'"
)
# Scripts and styles of NiceGUI and ours: their URL changes with their content, and they hold no user data.
CACHEABLE = re.compile(r"/_nicegui/\d[\w.]*/(static|components|libraries|esm)/.")
CACHE_FOREVER = "private, max-age=31536000, immutable"
_WHERE_TO = (
    "This address belongs to another console, or the console was restarted."
    " Open the address that cloudtrain console printed last. Run it again if it has ended."
)
HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class SecurityMiddleware:
    """ASGI middleware that refuses foreign requests with 403, and websockets before they are accepted."""

    def __init__(self, app: App, port: int) -> None:
        self.app = app
        self.cookie = f"cloudtrain-{port}"  # several consoles keep separate cookies
        self.token = secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        is_handover = scope["type"] == "http" and scope["method"] == "GET" and scope["path"] == OPEN_PATH
        refusal = _rejection(scope, headers, is_handover)
        if not refusal and is_handover:
            await self._hand_over_token(scope, send)
            return
        if refusal := refusal or ("" if self._has_token(headers) else _WHERE_TO):
            await _refuse(scope, receive, send, refusal)
            return

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                cacheable = message["status"] in (200, 304) and CACHEABLE.match(scope["path"])
                message["headers"] = _with_security_headers(
                    message["headers"], CACHE_FOREVER if cacheable else "no-store"
                )
            await send(message)

        await self.app(scope, receive, send_with_headers)

    def _has_token(self, headers: Mapping[str, str]) -> bool:
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return False
        return cookie is not None and hmac.compare_digest(cookie.value.encode(), self.token.encode())

    async def _hand_over_token(self, scope: Scope, send: Send) -> None:
        """Check the token of the printed address and set the cookie."""
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if not hmac.compare_digest(query.get("token", [""])[0].encode(), self.token.encode()):
            await _answer(send, 403, _html_page(_WHERE_TO))
            return
        path = query.get("to", ["/"])[0]
        path = quote(path, safe="/?=&-._~") if path.startswith("/") and not path.startswith(("//", "/\\")) else "/"
        # No HTTP redirect: a browser that came from another site would not send the Strict cookie after it.
        head = f'<meta http-equiv="refresh" content="0;url={escape(path)}">'
        cookie = f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"
        await _answer(send, 200, _html_page("one moment", head), {"set-cookie": cookie})


def _rejection(scope: Scope, headers: Mapping[str, str], is_handover: bool) -> str:
    """Return why to refuse a request, "" for one of the console's own pages.

    The port is not checked: through `ssh -L` it differs.
    """
    host = headers.get("host", "")
    if _hostname(host) not in LOCAL_NAMES:
        return "it accepts requests only for this machine's own names (localhost, 127.0.0.1)"
    origin = headers.get("origin")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return "the request comes from another website"
    if origin is None and (scope["type"] == "websocket" or scope["method"] not in ("GET", "HEAD")):
        return "the request has no Origin header"
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not is_handover:
        return "the request comes from another website"
    return ""


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


async def _refuse(scope: Scope, receive: Receive, send: Send, reason: str) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": reason})
        return
    await _answer(send, 403, _html_page(reason))


async def _answer(send: Send, status: int, body: bytes, extra: Mapping[str, str] | None = None) -> None:
    fields = {"content-type": "text/html; charset=utf-8", "content-length": str(len(body)), **(extra or {})}
    headers = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send(
        {"type": "http.response.start", "status": status, "headers": _with_security_headers(headers, "no-store")}
    )
    await send({"type": "http.response.body", "body": body})


def _with_security_headers(headers: list[tuple[bytes, bytes]], caching: str) -> list[tuple[bytes, bytes]]:
    """Return an answer's headers with ours; headers that allow caching or access by other sites are removed."""
    kept = [pair for pair in headers if not pair[0].lower().startswith((b"access-control-", b"cache-control"))]
    kept_names = {name.lower() for name, _ in kept}
    ours = {"cache-control": caching, **HEADERS}
    return kept + [(n.encode(), value.encode()) for n, value in ours.items() if n.encode() not in kept_names]


def _html_page(sentence: str, head: str = "") -> bytes:
    style = "body{font:16px/1.5 system-ui,sans-serif;margin:20vh auto;max-width:34rem;padding:0 1rem;color-scheme:light dark}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>cloudtrain</title>{head}'
        f"<style>{style}</style></head><body><main><h1>cloudtrain console</h1><p>{escape(sentence)}</p></main></body></html>"
    ).encode()
