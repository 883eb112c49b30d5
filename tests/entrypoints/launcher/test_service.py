"""A service on its node: when it is ready, when it is restarted; the clock is the test's."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from launcher.loop import Loop
from launcher.service import ANSWER_S, LOOK_S, Service, check_free

from cloudtrain.testing.clock import VirtualClock


class Case:
    def __init__(self, **role: Any) -> None:
        self.clock, self.reports = VirtualClock(), 0
        self.loop = Loop(self.clock)
        given = {"name": "server", "ready": None, "ready_s": 1800, "restart": 3, **role}
        self.service = Service(given, self.loop, self.report)
        self.service.began()

    def report(self) -> None:
        self.reports += 1

    def look(self) -> str:
        self.clock.sleep(LOOK_S)
        return self.service.look()


@pytest.fixture
def listener():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(60)
        yield server


def test_it_is_restarted_after_growing_pauses_and_then_ends_the_attempt():
    case = Case(restart=8)
    case.service.printed([b"one", b"the last", b" "])
    pauses = []
    for _ in range(8):
        assert case.service.ended("exited with code 3") == "" and case.service.has_ended
        pauses.append(case.service.patience_s)
        case.clock.sleep(pauses[-1] - 0.5)
        assert not case.service.is_due
        case.clock.sleep(0.5)
        assert case.service.is_due
        case.service.began()
        assert not case.service.is_due and not case.service.has_ended
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert case.service.ended("exited with code 3") == (
        'role server exited with code 3 after 8 restarts; its last line: "the last"'
    )
    assert case.service.has_ended and not case.service.is_due


def test_after_the_main_role_it_has_what_a_stop_has_left_of_the_grace():
    case = Case()
    assert case.service.patience_after(120) == 120
    case.service.stop()
    case.clock.sleep(30)
    case.service.stop()
    assert case.service.patience_after(120) == 90
    case.clock.sleep(89)
    assert case.service.patience_after(120) == 5


def test_without_restarts_its_first_end_ends_the_attempt():
    assert Case(restart=0).service.ended("exited with code 0") == "role server exited with code 0"


def test_a_line_makes_it_ready_once():
    case = Case(ready="line:Serving (on) port")
    case.service.printed([b"loading", b"Serving on port"])
    assert case.look() == "" and case.reports == 0
    case.service.printed([b"INFO Serving (on) port 8000"])
    case.service.printed([b"INFO Serving (on) port 8000"])
    assert case.reports == 1


def test_a_port_that_accepts_makes_it_ready(held):
    case = Case(ready=f"tcp://:{held.getsockname()[1]}")
    assert case.look() == "" and case.reports == 0
    held.listen()
    assert case.look() == "" and case.reports == 1
    assert case.look() == "" and case.reports == 1


def test_a_connection_to_itself_is_none(held, monkeypatch):
    met = []

    def connect(address, timeout):
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.connect(address)  # TCP lets both ends be one socket
        met.append(made)
        return made

    monkeypatch.setattr(socket, "create_connection", connect)
    case = Case(ready=f"tcp://:{held.getsockname()[1]}")
    assert case.look() == "" and case.reports == 0 and met


def test_a_service_may_listen_at_the_nodes_address_alone(monkeypatch):
    with socket.socket() as server:
        server.bind(("127.0.0.2", 0))
        server.listen()
        case = Case(ready=f"tcp://:{server.getsockname()[1]}", ready_s=60)
        case.service.host = "127.0.0.3"
        assert case.look() == "" and case.reports == 0
        case.service.host = "127.0.0.2"
        assert case.look() == "" and case.reports == 1


def test_the_verdict_names_the_address_that_did_not_answer():
    case = Case(ready="tcp://:1", ready_s=0.05)
    case.service.host = "10.0.0.3"
    case.clock.sleep(LOOK_S)
    case.service._check.look = lambda host: False
    assert case.service.look() == (
        "role server did not become ready (tcp://:1 at 10.0.0.3) within 0.05 s (ready_timeout)"
    )


@pytest.mark.parametrize(
    ("answer", "reports"),
    [(b"HTTP/1.1 204 No Content\r\n\r\n", 1), (b"HTTP/1.0 503 Loading\r\n\r\n", 0), (b"", 0), (b"SSH-2.0\r\n", 0)],
)
def test_an_answer_makes_it_ready(listener, answer: bytes, reports: int):
    case = Case(ready=f"http://:{listener.getsockname()[1]}/health?deep=1")
    assert case.look() == "" and case.reports == 0, "the answer is not waited for"
    connection, _ = listener.accept()
    assert connection.recv(4096).startswith(b"GET /health?deep=1 HTTP/1.0\r\n")
    connection.sendall(answer)
    connection.close()
    case.loop.wait(10)
    assert case.look() == "" and case.reports == reports


def test_an_answer_that_does_not_come_is_asked_for_again(listener):
    case = Case(ready=f"http://:{listener.getsockname()[1]}/")
    case.look()
    first, _ = listener.accept()
    case.clock.sleep(ANSWER_S)
    case.look()
    again, _ = listener.accept()
    assert again.recv(3) == b"GET"
    first.close(), again.close()


def test_one_that_is_not_ready_in_time_ends_the_attempt_once():
    case = Case(ready="line:never", ready_s=60)
    case.service.printed([b"loading weights"])
    case.clock.sleep(59)
    assert case.service.look() == ""
    case.service.ended("exited with code 1")
    case.service.began()  # a restart gives it no more time
    case.clock.sleep(2)
    assert case.service.look() == (
        'role server did not become ready (line:never) within 60 s (ready_timeout); its last line: "loading weights"'
    )
    assert case.look() == ""


def test_a_port_that_is_taken_is_named(listener, held):
    port = listener.getsockname()[1]
    with pytest.raises(OSError) as raised:
        check_free(port)
    assert f"port {port} is not free" in raised.value.filename
    check_free(held.getsockname()[1])
