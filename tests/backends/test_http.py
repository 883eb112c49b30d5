"""The HTTP core against servers that fail: what is tried again, what is reported, and what continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cloudtrain.backends import http
from cloudtrain.backends.akash.client import Console
from cloudtrain.backends.http import Answer, Http, HttpError
from cloudtrain.backends.kubernetes.client import KubeApi
from cloudtrain.backends.kubernetes.kubeconfig import ClusterAccess
from cloudtrain.errors import BackendError, NoService, Unreachable
from cloudtrain.testing.clock import VirtualClock
from tests.conftest import served

Reply = Callable[[BaseHTTPRequestHandler], None]
DATA = bytes(range(256)) * 4096  # 1 MiB


@contextmanager
def serving(reply: Reply) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Yield a server's URL, and the headers of the requests that it has had."""
    received: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            received.append({name.lower(): value for name, value in self.headers.items()})
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            reply(self)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with served(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield f"http://127.0.0.1:{server.server_port}", received


def send(handler: BaseHTTPRequestHandler, status: int, body: bytes = b"", length: int = -1, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(body) if length < 0 else length))
    handler.end_headers()
    handler.wfile.write(body)


def client(url: str, clock: VirtualClock) -> Http:
    return Http(
        lambda path: (url + path, {"Authorization": "Bearer secret"}),
        lambda answer, failure: HttpError(f"{failure}: {answer.status}", "", answer),
        lambda reason: "check the network",
        clock=clock,
    )


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def test_an_overloaded_server_is_asked_again_when_it_says(clock: VirtualClock) -> None:
    replies = [
        lambda h: send(h, 429, Retry_After="7"),
        lambda h: send(h, 503, Retry_After="3600"),
        lambda h: send(h, 502),
        lambda h: send(h, 200, b'{"a": 1}'),
    ]
    with serving(lambda handler: replies.pop(0)(handler)) as (url, received):
        assert client(url, clock).call("GET", "/x", "it failed").json == {"a": 1}
    assert len(received) == 4 and clock.slept == [7, http.MAX_PAUSE_S, 2.0]


@pytest.mark.parametrize("first", [0, 500, 503])
def test_a_refusal_after_a_lost_answer_is_not_known_to_be_one(first: int, clock: VirtualClock) -> None:
    replies = [lambda h: send(h, first) if first else None, lambda h: send(h, 403)]
    with serving(lambda handler: replies.pop(0)(handler)) as (url, _):
        with pytest.raises(Unreachable, match="it failed: 403"):
            client(url, clock).call("POST", "/x", "it failed", data=b"{}")
    replies = [lambda h: send(h, 429), lambda h: send(h, 403)]  # nothing was done before
    with serving(lambda handler: replies.pop(0)(handler)) as (url, _):
        with pytest.raises(HttpError, match="it failed: 403"):
            client(url, clock).call("POST", "/x", "it failed", data=b"{}")


@pytest.mark.parametrize("name", ["Audit-Id", "X-GUploader-UploadID", "X-Request-Id"])
def test_a_failure_of_the_servers_own_has_its_request_id(name: str, clock: VirtualClock) -> None:
    with serving(lambda handler: send(handler, 500, **{name: "r-17"})) as (url, received):
        with pytest.raises(HttpError, match=r"it failed: 500 \(request r-17\)") as caught:
            client(url, clock).call("GET", "/x", "it failed")
    assert len(received) == http.TRIES and caught.value.request_id == "r-17"
    with serving(lambda handler: send(handler, 403, **{name: "r-18"})) as (url, received):
        with pytest.raises(HttpError, match="it failed: 403$") as caught:
            client(url, clock).call("GET", "/x", "it failed")
    assert len(received) == 1 and caught.value.request_id == "r-18"


def test_a_proxys_page_is_no_answer() -> None:
    with pytest.raises(Unreachable, match="the answer of the API is not JSON: <html> log in"):
        Answer(200, {}, b"<html>\nlog in").json  # noqa: B018


def test_a_cluster_that_redirects_to_another_host_gets_no_token_there() -> None:
    with serving(lambda handler: send(handler, 200, b"{}")) as (other, received):
        with serving(lambda handler: send(handler, 302, Location=f"{other}/y")) as (url, first):
            api = KubeApi(None, None)
            api._access = ClusterAccess(url, {"token": "secret"}, {})
            assert api.get("/x", "it failed") == {}
    assert first[0]["authorization"] == "Bearer secret" and "authorization" not in received[0]


def test_an_api_that_redirects_to_another_host_gets_no_key_there(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AKASH_API_KEY", "secret")
    with serving(lambda handler: send(handler, 200, b"[]")) as (other, received):
        with serving(lambda handler: send(handler, 302, Location=f"{other}/y")) as (url, first):
            assert Console(url, "env:AKASH_API_KEY", clock).providers(["akash1"]) == {}
    assert first[0]["x-api-key"] == "secret" and "secret" not in received[0].values()
    assert received[0]["accept"] == "application/json"


@pytest.mark.parametrize("knows_range", [True, False])
def test_a_stream_that_breaks_off_continues(knows_range: bool, clock: VirtualClock) -> None:
    cuts = iter([300_000, 400_000, 500_000, 600_000, 700_000, 800_000, len(DATA)])  # more than the tries of one call

    def reply(handler: BaseHTTPRequestHandler) -> None:
        end, header = next(cuts), handler.headers.get("Range")
        start = int(header[6:-1]) if header and knows_range else 0
        send(handler, 206 if start else 200, DATA[start:end], len(DATA) - start)

    with serving(reply) as (url, received):
        assert b"".join(client(url, clock).stream("/x", "it failed")) == DATA
    ranges = [headers.get("range") for headers in received]
    assert ranges == [None, *(f"bytes={n}00000-" for n in range(3, 9))] and len(clock.slept) == 6


def test_a_stream_without_progress_gives_up(clock: VirtualClock) -> None:
    with serving(lambda handler: send(handler, 200, b"", 10)) as (url, received):
        with pytest.raises(BackendError, match="it failed: http://127.0.0.1:.* cannot be reached"):
            list(client(url, clock).stream("/x", "it failed"))
    assert len(received) == http.TRIES


def test_a_refused_connection_has_sent_nothing(clock: VirtualClock) -> None:
    with pytest.raises(NoService, match="cannot be reached"):
        client("http://127.0.0.1:1", clock).call("POST", "/x", "it failed")


def test_a_refused_connection_behind_a_lost_answer_may_have_sent_something(clock: VirtualClock) -> None:
    addresses = ["http://127.0.0.1:1"] * 4

    def break_off(handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True

    with serving(break_off) as (url, received):
        addresses.append(url)
        api = client(url, clock)
        api._address = lambda path: (
            addresses[-1] + path if len(addresses) > 4 and not received else addresses[0] + path,
            {},
        )
        with pytest.raises(Unreachable) as caught:
            api.call("POST", "/x", "it failed")
    assert len(received) == 1 and not isinstance(caught.value, NoService)


@pytest.mark.parametrize("status", [200, 400])
def test_an_answer_has_a_bound_of_size(status: int, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "ANSWER_BYTES", len(DATA) // 2)
    with serving(lambda handler: send(handler, status, DATA)) as (url, _):
        with pytest.raises(BackendError) as caught:
            client(url, clock).call("GET", "/x?key=secret", "it failed")
    if status == 200:
        assert "is over the limit" in caught.value.message and "secret" not in caught.value.message
        assert isinstance(caught.value, Unreachable)
    else:
        assert caught.value.answer.data == b""


def test_an_answer_has_a_bound_of_time(clock: VirtualClock) -> None:
    """A server that sends a byte a minute keeps each read below its own limit."""

    class Slow:
        url, length = "https://api.example/x", 10**9
        pieces = 0

        def read1(self, _: int) -> bytes:
            self.pieces += 1
            clock.sleep(http.TIMEOUT_S - 1)
            return b"x"

    slow = Slow()
    with pytest.raises(Unreachable, match="api.example is over the limit of 300 s"):
        http.read_body(slow.read1, "https://api.example/x", clock)
    assert slow.pieces == 6


def test_a_body_that_is_shorter_than_its_header_says_is_asked_for_again(clock: VirtualClock) -> None:
    replies = [lambda h: send(h, 200, b"[1", 100), lambda h: send(h, 200, b"[1]")]
    with serving(lambda handler: replies.pop(0)(handler)) as (url, _):
        assert client(url, clock).call("GET", "/x", "it failed").json == [1]


@pytest.mark.parametrize("answers", [True, False], ids=["TLS", "refused"])
def test_a_proxy_and_its_certificates_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: VirtualClock, answers: bool
):
    """A proxy of a company ends TLS itself, with a certificate of its own; another one takes nobody."""
    from tests.backends.credentials import unknown_certificate  # it imports this module

    context = unknown_certificate(tmp_path)

    class Proxy(BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            self.send_response(200 if answers else 407)
            self.end_headers()
            if answers:
                with suppress(OSError):  # the client does not trust it
                    context.wrap_socket(self.connection, server_side=True)
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    for name in ("NO_PROXY", "no_proxy", "https_proxy", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/ca.pem")
    with served(ThreadingHTTPServer(("127.0.0.1", 0), Proxy)) as server:
        proxy = f"127.0.0.1:{server.server_port}"
        monkeypatch.setenv("HTTPS_PROXY", f"http://me:secret@{proxy}")
        cloud = Http(
            lambda path: (f"https://cloud.example/{path}", {}),
            lambda answer, failure: HttpError(failure, "", answer),
            lambda it: http.network_hint(str(it)),
        )
        with pytest.raises(Unreachable, match="https://cloud.example cannot be reached") as refused:
            cloud.call("GET", "x", "it failed", tries=1)
        api = KubeApi(None, None, clock=clock)
        api._access = ClusterAccess("https://cloud.example", {"token": "secret"}, {})
        with pytest.raises(Unreachable) as no_cluster:
            api.get("/x", "it failed")
    of_cluster = f"the kubeconfig's certificate authority is not the server's, or the proxy {proxy} ends TLS itself"
    assert no_cluster.value.hint == (of_cluster if answers else f"check the proxy {proxy} (HTTPS_PROXY, NO_PROXY)")
    hint = f"export SSL_CERT_FILE=FILE REQUESTS_CA_BUNDLE=FILE, with the certificates of the proxy http://{proxy}"
    hint += "; SSL_CERT_FILE is /nowhere/ca.pem, which does not exist"
    refusal = f"check the proxy http://{proxy} (HTTPS_PROXY), or name the host in NO_PROXY"
    assert refused.value.hint == (hint if answers else refusal)
