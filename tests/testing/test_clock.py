"""The virtual clock: time passes where threads wait, in the order of their deadlines."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cloudtrain.clock import SYSTEM
from cloudtrain.testing import clock as module
from cloudtrain.testing.clock import EPOCH, VirtualClock


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def test_time_passes_only_where_somebody_waits(clock):
    began = clock.monotonic()
    assert (clock.now(), clock.now(), clock.monotonic()) == (EPOCH, EPOCH, began)
    clock.sleep(3600.0)
    assert not clock.wait(threading.Event(), 60.0)
    assert (clock.now(), clock.monotonic() - began, clock.slept) == (EPOCH + 3660, 3660.0, [3600.0, 60.0])
    clock.sleep(0.0)
    clock.sleep(-1.0)
    assert clock.monotonic() - began == 3660.0


def test_the_wall_clock_jumps_and_the_other_does_not(clock):
    began = clock.monotonic()
    clock.jump(-86400.0)
    assert (clock.now(), clock.monotonic()) == (EPOCH - 86400, began)
    clock.jump(90000.0)
    clock.sleep(1.0)
    assert (clock.now(), clock.monotonic()) == (EPOCH + 3601, began + 1)
    assert clock.utc().timestamp() == clock.now()


def test_an_event_that_is_set_takes_no_time(clock):
    event = threading.Event()
    event.set()
    assert clock.wait(event, 60.0) and clock.wait(event) and clock.now() == EPOCH


def test_threads_wake_in_the_order_of_their_deadlines(clock):
    """The same in each of 20 runs, though the threads start as the system likes."""
    seen: list[tuple[float, str]] = []

    def ticker(name: str, pause_s: float, times: int) -> None:
        for _ in range(times):
            clock.sleep(pause_s)
            seen.append((clock.now() - EPOCH, name))

    for _ in range(20):
        clock = VirtualClock()
        seen.clear()
        clock.join(
            *clock.start(lambda: ticker("three", 3.0, 4), lambda: ticker("five", 5.0, 2), lambda: ticker("one", 1.0, 2))
        )
        assert seen == [
            (1, "one"),
            (2, "one"),
            (3, "three"),
            (5, "five"),
            (6, "three"),
            (9, "three"),
            (10, "five"),
            (12, "three"),
        ]


def test_an_event_wakes_its_waiter_before_its_time(clock):
    event, woken = threading.Event(), []

    def set_later() -> None:
        clock.sleep(7.0)
        event.set()

    def wait() -> None:
        woken.append((clock.wait(event, 100.0), clock.now() - EPOCH))
        event.clear()
        woken.append((clock.wait(event, 100.0), clock.now() - EPOCH))

    clock.join(*clock.start(wait, set_later))
    assert woken == [(True, 7.0), (False, 107.0)]


def test_a_pool_without_work_does_not_stop_the_time(clock):
    with ThreadPoolExecutor(2) as pool:
        pool.submit(clock.sleep, 5.0).result()
        clock.sleep(5.0)
    assert clock.now() == EPOCH + 10


@pytest.mark.parametrize("busy", [True, False])
def test_a_wait_that_nothing_can_end_says_why(monkeypatch, clock, busy):
    monkeypatch.setattr(module, "STUCK_S", 0.05)
    event = threading.Event()
    if busy:
        clock.start(event.wait)
    with pytest.raises(RuntimeError, match="stands still until Thread" if busy else "no thread is left"):
        clock.sleep(1.0) if busy else clock.wait(event)
    event.set()


def test_the_systems_clock_is_the_systems():
    began, event = SYSTEM.monotonic(), threading.Event()
    SYSTEM.sleep(0.001)
    assert not SYSTEM.wait(event, 0.001) and SYSTEM.monotonic() >= began + 0.002
    event.set()
    assert SYSTEM.wait(event) and SYSTEM.utc().year >= 2026
