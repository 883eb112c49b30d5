"""Futures of runs are those of the standard library: values, failures, cancels, and the one thread that settles them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import pickle
import sys
import threading
from typing import Any

import pytest

from cloudtrain.errors import RunFailed, Unreachable
from cloudtrain.events import State, Status
from cloudtrain.runs import futures
from cloudtrain.runs.futures import RunFuture
from cloudtrain.runs.run import Run
from cloudtrain.testing.clock import VirtualClock
from tests.conftest import WAIT_S


def run_async(coroutine: Any) -> Any:
    """Run a coroutine in a thread of its own: a browser of other tests has a loop in this one."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def test_futures_are_those_of_the_standard_library(ended):
    run = ended({"value-1-0.pkl": pickle.dumps(7)})
    several = [run.future() for _ in range(3)]
    done, waiting = concurrent.futures.wait(several, timeout=WAIT_S)
    assert (len(done), waiting) == (3, set())
    assert [each.result() for each in concurrent.futures.as_completed(several, timeout=WAIT_S)] == [7, 7, 7]

    async def main() -> object:
        return await run

    assert run_async(main()) == 7


@pytest.mark.parametrize("when", ["FIRST_COMPLETED", "FIRST_EXCEPTION", "ALL_COMPLETED"])
def test_runs_themselves_are_taken_like_futures(ended, when):
    first, second, open_run = ended({}), ended({}, State.FAILED), ended({}, None)
    runs = [first, second]
    assert {*concurrent.futures.as_completed(runs, timeout=WAIT_S)} == {*runs}
    assert [*concurrent.futures.as_completed(runs, timeout=WAIT_S)] != [], "once more"
    done, waiting = concurrent.futures.wait(runs, timeout=WAIT_S, return_when=when)
    assert done <= {*runs} and done | waiting == {*runs}
    done, waiting = concurrent.futures.wait([open_run, first], timeout=WAIT_S, return_when="FIRST_COMPLETED")
    assert (done, waiting) == ({first}, {open_run})
    with pytest.raises(concurrent.futures.TimeoutError):
        [*concurrent.futures.as_completed([open_run, first], timeout=0.1)]
    open_run.store.set_status(open_run.run_id, Status(State.CANCELLED, 1))
    assert [*concurrent.futures.as_completed([open_run], timeout=WAIT_S)] == [open_run]
    assert open_run.cancelled() and not first.cancelled() and not second.cancelled()


def test_a_future_has_the_failure_of_the_run(ended):
    future = ended({}, State.FAILED).future()
    assert isinstance(future.exception(timeout=WAIT_S), RunFailed)


def test_cancelling_a_future_cancels_the_run(ended):
    run = ended({}, None)
    future = run.future()
    assert future.cancel() and future.cancelled()
    assert run.record.cancel_requested


def test_a_future_that_is_being_cancelled_takes_no_result(ended, monkeypatch):
    """The run may have ended before its cancel returns."""
    run = ended({}, None)
    future = RunFuture(run)
    settler = threading.Thread(target=lambda: future.settle({}))
    cancel = type(run).cancel

    def cancel_and_settle(self) -> None:
        cancel(self)
        run.store.set_status(run.run_id, Status(State.CANCELLED, 1))
        settler.start()
        settler.join(0.1)

    monkeypatch.setattr(type(run), "cancel", cancel_and_settle)
    assert future.cancel() and future.cancelled()
    settler.join()
    assert future.cancelled()


def test_a_value_that_ends_the_process_leaves_the_other_futures(ended, monkeypatch):
    """Whatever a run raises is its future's, also where a callback raises in the thread, and a later future is settled."""
    run, other = ended({}), ended({"value-1-0.pkl": pickle.dumps(7)})
    waited_for = threading.Event()
    results = {run.run_id: lambda: sys.exit(waited_for.wait(WAIT_S)), other.run_id: lambda: 7}
    monkeypatch.setattr(Run, "result", lambda self, timeout_s=None: results[self.run_id]())
    first, second = run.future(), other.future()
    first.add_done_callback(lambda _: sys.exit(4))
    waited_for.set()
    assert isinstance(first.exception(timeout=WAIT_S), SystemExit)
    assert second.result(timeout=WAIT_S) == other.future().result(timeout=WAIT_S) == 7


def test_a_thread_that_has_ended_is_started_again(ended):
    """As after a fork, whose child has the open futures and not the thread."""
    run = ended({"value-1-0.pkl": pickle.dumps(7)})
    waiter, left, added = futures._Waiter(), RunFuture(run), RunFuture(run)
    waiter._open.append(left)
    waiter.add(added)
    assert left.result(timeout=WAIT_S) == added.result(timeout=WAIT_S) == 7


def test_who_holds_a_future_can_open_another_one(ended):
    """As `as_completed` does with runs: it holds the first one's condition while the second one's future is made."""
    run, asked = ended({}, None), threading.Event()
    waiter, first = futures._Waiter(), RunFuture(run)
    first.done = lambda: asked.set() or RunFuture.done(first)  # type: ignore[method-assign, func-returns-value]
    with first._condition:
        waiter.add(first)
        assert asked.wait(WAIT_S), "the thread waits for the condition now"
        second = RunFuture(run)
        adding = threading.Thread(target=waiter.add, args=(second,), daemon=True)
        adding.start()
        adding.join(WAIT_S)
        assert not adding.is_alive()
    run.store.set_status(run.run_id, Status(State.CANCELLED, 1))
    assert {*concurrent.futures.wait([first, second], timeout=WAIT_S).done} == {first, second}


def test_a_value_whose_store_does_not_answer_is_fetched_again(ended, monkeypatch):
    run, clock = ended({}), VirtualClock()
    answers = [Unreachable("a"), Unreachable("b"), 7]

    def result(self, timeout_s=None):
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    monkeypatch.setattr(Run, "result", result)
    stores = {run.store.home: run.store}
    future, patient = RunFuture(run), RunFuture(run)
    future.clock = patient.clock = clock
    for left in (2, 2, 1, 1, 0):  # every other look is too early
        future.settle(stores)
        assert len(answers) == left
        clock.sleep(futures.AGAIN_S / 2)
    assert future.result(timeout=0) == 7
    answers += [Unreachable("c"), Unreachable("d")]
    patient.settle(stores)
    assert not patient.done()
    clock.sleep(futures.UNREACHABLE_S)
    patient.settle(stores)
    assert isinstance(patient.exception(timeout=0), Unreachable)


def test_waiting_no_longer_for_a_run_does_not_cancel_it(ended):
    run = ended({}, None)

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(run, 0)
        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def wait() -> object:
        return await run

    run_async(main())
    assert not run.record.cancel_requested
