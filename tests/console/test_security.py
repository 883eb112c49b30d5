"""Who may speak with the console: Host, Origin and token, of requests and of the websocket's handshake."""

from __future__ import annotations

import http.client
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect

from tests.console.conftest import Console, console_of

SOCKET = "/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
POLLING = "/_nicegui_ws/socket.io/?EIO=4&transport=polling"
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


def ask(console: Console, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    """Send one request with exactly these headers (`_` stands for `-`) and return the answer, read."""
    connection = http.client.HTTPConnection(urlsplit(console.root).netloc, timeout=60)
    told = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in ({"Host": urlsplit(console.root).netloc} | told).items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    answer.body = answer.read() if answer.status != 101 else b""
    connection.close()
    return answer


def test_without_the_token_nothing_is_shown(console):
    refused = ask(console, "/")
    assert (refused.status, b"Open the address that cloudtrain console printed last" in refused.body) == (403, True)
    assert ask(console, "/", Cookie=console.cookie + "x").status == 403
    assert ask(console, "/", Cookie=console.cookie.partition("=")[0] + "=").status == 403
    assert ask(console, POLLING).status == 403
    assert ask(console, "/open?token=wrong").status == 403
    assert ask(console, "/", Cookie=console.cookie).status == 200


def test_the_address_hands_the_token_over_once_and_for_all_pages(console):
    answer = ask(console, f"/open?token={console.token}&to=/runs/a-b")
    assert answer.status == 200
    assert answer.headers["Set-Cookie"] == f"{console.cookie}; Path=/; HttpOnly; SameSite=Strict"
    assert b'content="0;url=/runs/a-b"' in answer.body
    assert console.token.encode() not in answer.body


@pytest.mark.parametrize(
    "to", ["https://evil.example/", "//evil.example", "/\\evil.example", "javascript:alert(1)", '/"><x']
)
def test_it_leads_to_no_other_site(console, to):
    body = ask(console, f"/open?token={console.token}&to={to.replace(' ', '%20')}").body
    assert b"evil" not in body and b"alert" not in body and b'"><x' not in body


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", ""]
)
def test_a_name_that_was_pointed_here_is_refused(console, host):
    assert ask(console, "/", Host=host, Cookie=console.cookie).status == 403
    assert ask(console, f"/open?token={console.token}", Host=host).status == 403
    assert ask(console, SOCKET, Host=host, Cookie=console.cookie, Origin=f"http://{host}", **_under()).status == 403


def test_a_tunnel_has_another_port(console):
    assert ask(console, "/", Host="localhost:8080", Cookie=console.cookie).status == 200
    assert ask(console, "/", Host="[::1]:8080", Cookie=console.cookie).status == 200


def test_the_websocket_opens_for_its_own_pages_only(console):
    own = {"Cookie": console.cookie, "Origin": console.root}
    assert ask(console, SOCKET, **own, **_under()).status == 101
    assert ask(console, SOCKET, **_under(), Origin=console.root).status == 403  # no token
    assert ask(console, SOCKET, **_under(), Cookie=console.cookie).status == 403  # no origin
    others = [
        "http://evil.example",
        "http://127.0.0.1:1",
        "http://localhost:1",
        "null",
        "file://",
        console.root + ".evil",
    ]
    for other in others:
        assert ask(console, SOCKET, **_under(), Cookie=console.cookie, Origin=other).status == 403, other
        assert ask(console, POLLING, Cookie=console.cookie, Origin=other).status == 403, other
        assert ask(console, POLLING, "POST", Cookie=console.cookie, Origin=other).status == 403, other
    assert ask(console, POLLING, "POST", Cookie=console.cookie).status == 403


def test_another_sites_page_gets_nothing_even_with_the_cookie(console):
    for site in ("cross-site", "same-site"):
        assert ask(console, "/", Cookie=console.cookie, Sec_Fetch_Site=site).status == 403
    assert ask(console, "/", Cookie=console.cookie, Sec_Fetch_Site="same-origin").status == 200


def test_every_answer_forbids_what_is_foreign(console):
    for path in ("/", "/nothing-here", POLLING):
        headers = ask(console, path, Cookie=console.cookie).headers
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["Access-Control-Allow-Origin"] is None
        assert headers["Cache-Control"] == "no-store"


def test_only_what_holds_nobodys_data_is_kept_by_the_browser(console):
    """Scripts and styles, whose address changes when they do; private, since they lie behind the token."""
    page = ask(console, "/", Cookie=console.cookie)
    assert page.headers["Cache-Control"] == "no-store"
    paths = sorted(set(re.findall(r"/_nicegui/[\w./-]+\.(?:js|css)", page.body.decode())))
    assert any("/components/" in path and path.endswith("/runs.js") for path in paths), paths
    for path in paths:
        answer = ask(console, path, Cookie=console.cookie)
        assert (answer.status, answer.headers["Cache-Control"]) == (200, "private, max-age=31536000, immutable"), path
        assert console.token.encode() not in answer.body
        assert ask(console, path).status == 403  # behind the token all the same
        assert ask(console, path).headers["Cache-Control"] == "no-store"
    for path in (paths[0] + "x", "/_nicegui/../runs/nobody", "/favicon.ico", "/open?token=x", "/runs/nobody"):
        assert ask(console, path, Cookie=console.cookie).headers["Cache-Control"] == "no-store", path


def test_a_page_of_another_port_is_refused_in_a_real_browser(console, browser):
    """Another port of this machine is the same site to a browser: it sends the cookie along, and the Origin tells."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(console.url)
    page.wait_for_url(console.root + "/")
    script = """async ([root, socket]) => {
        const made = new WebSocket(root.replace('http', 'ws') + socket);
        const opened = new Promise(done => { made.onopen = () => done('open'); made.onerror = () => done('refused'); });
        const got = await fetch(root + '/', {credentials: 'include'}).then(answer => answer.status, () => 'refused');
        return [await opened, got];
    }"""
    assert page.evaluate(script, [console.root, SOCKET]) == ["open", 200]  # at home
    errors = []
    page.on("websocket", lambda socket: socket.on("socketerror", lambda error: errors.append(error)))
    with blank_pages() as other:
        page.goto(other)
        assert page.evaluate(script, [console.root, SOCKET]) == ["refused", "refused"]
        with page.expect_navigation() as led:
            page.evaluate("root => { location.href = root }", console.root)
        assert led.value.status == 403  # a link from there
    assert len(errors) == 1 and "403" in errors[0]
    context.close()


@contextmanager
def blank_pages() -> Iterator[str]:
    """Serve empty pages on another port of this machine and give their address."""

    class Blank(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Blank)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_console_listens_to_this_machine_alone_and_ends_at_ctrl_c(tmp_path):
    with console_of(tmp_path / "home") as console:
        port = urlsplit(console.root).port
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        listening = [row[1] for row in rows if row[3] == "0A"]
        assert [address for address in listening if int(address.split(":")[1], 16) == port] == [f"0100007F:{port:04X}"]
        console.process.send_signal(signal.SIGINT)
        assert console.process.wait(60) == 0
    assert "Traceback" not in (tmp_path / "console.err").read_text()


def test_the_shell_of_every_page(console, page, seemly, picture):
    page.goto(console.root)
    expect(page.locator("main h1")).to_have_text("Runs")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("Keys")
    seemly(page)
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".ct-main")).to_be_focused()
    button = page.get_by_role("button", name="Theme: same as system")
    button.click()
    page.get_by_role("button", name="Theme: light").click()
    expect(page.locator("body.body--dark")).to_have_count(1)
    page.get_by_role("button", name="Theme: dark").click()
    expect(page.get_by_role("button", name="Theme: same as system")).to_be_visible()


def _under() -> dict[str, str]:
    return {name.replace("-", "_"): value for name, value in UPGRADE.items()}
