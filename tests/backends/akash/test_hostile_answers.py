"""Answers that are not the Console's: other shapes of JSON, HTML, dates, long ones, slow ones. Each is one sentence."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from cloudtrain.backends import http
from cloudtrain.backends.akash.client import Console
from cloudtrain.errors import Unreachable
from cloudtrain.simulators.http import Request, Response, Server
from cloudtrain.testing.clock import VirtualClock
from tests.seed import first_seed

CALLS = {
    "create": lambda console: console.create("sdl"),
    "deployments": lambda console: list(console.deployments()),
    "deployment": lambda console: console.deployment("1"),
    "bids": lambda console: console.bids("1"),
    "providers": lambda console: console.providers(["akash1x"]),
    "gpus": lambda console: console.gpus(),
    "close": lambda console: console.close("1"),
}
HTML = b"<html><title>Sign in</title>" + b"x" * 1000


class Hostile:
    """A server that answers everything with one body."""

    def __init__(self) -> None:
        self.body: Any = None
        self.headers: dict[str, str] = {}
        self.server = Server([(method, ".*", self._answer) for method in ("GET", "POST", "DELETE")])

    def _answer(self, _: Request) -> Response:
        return Response(self.body, 200, self.headers)


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hostile]:
    monkeypatch.setenv("AKASH_API_KEY", "key")
    made = Hostile()
    yield made
    made.server.close()


@pytest.mark.parametrize("call", CALLS)
def test_html_in_place_of_an_answer_is_a_proxys(hostile: Hostile, call: str) -> None:
    hostile.body = HTML
    with pytest.raises(Unreachable, match="not JSON: <html>") as raised:
        CALLS[call](Console(hostile.server.url, "env:AKASH_API_KEY"))
    assert len(raised.value.message) < 200


def drawn(choose: random.Random, depth: int = 0) -> Any:
    """Return JSON of a drawn shape, often with the names that the client looks for."""
    kind = choose.randrange(7 if depth < 4 else 4)
    if kind < 4:
        return (None, 5, "text", True)[kind]
    if kind == 4:
        return [drawn(choose, depth + 1) for _ in range(choose.randrange(3))]
    names = ("data", "deployments", "pagination", "bid", "dseq", "manifest", "owner", "leases")
    return {choose.choice(names): drawn(choose, depth + 1) for _ in range(choose.randrange(4))}


@pytest.mark.parametrize("call", CALLS)
def test_json_of_any_shape_is_an_answer_or_one_sentence(hostile: Hostile, call: str) -> None:
    choose, console = random.Random(first_seed()), Console(hostile.server.url, "env:AKASH_API_KEY")
    for _ in range(60):
        hostile.body = drawn(choose)
        if not isinstance(hostile.body, bytes | None):
            try:
                CALLS[call](console)
            except http.BackendError as error:
                assert "the answer is not one of Akash's Console API" in error.message or "cannot be" in error.message


def test_any_date_is_taken(hostile: Hostile) -> None:
    console = Console(hostile.server.url, "env:AKASH_API_KEY")
    hostile.body, hostile.headers = {"data": []}, {"Date": "tomorrow"}
    assert console.bids("1") == []


def test_an_answer_without_an_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    monkeypatch.setattr(http, "ANSWER_BYTES", 1 << 20)
    with pytest.raises(Unreachable, match="over the limit of 1 MiB"):
        http.read_body(lambda size: b"x" * size, "https://console.example/v1", clock)

    def slow(_: int) -> bytes:
        clock.sleep(30)
        return b"x"

    with pytest.raises(Unreachable, match="over the limit of"):
        http.read_body(slow, "https://console.example/v1", clock)
