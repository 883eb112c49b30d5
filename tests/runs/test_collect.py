"""What an attempt writes is collected by threads of a watcher that take turns."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from cloudtrain.history.store import Store
from cloudtrain.runs.watching.collect import Collector
from cloudtrain.testing.memory import MemoryBackend

pytestmark = pytest.mark.usefixtures("memory")


def test_threads_take_turns_with_one_attempt(submitter, job, home):
    """Each has its own connection to the history, and no other may use it."""
    run = submitter.submit(job)
    (attempt,) = run.attempts
    collector, backend, errors = Collector(lambda: None, pytest.fail), MemoryBackend({}, home), []
    state = home / "runs" / run.run_id / "outputs" / "trainer_state.json"
    state.parent.mkdir(parents=True)

    def collect(step: int) -> None:
        store = Store(home)
        MemoryBackend.say(attempt.handle, f"{{'accuracy': 0.{step}, 'step': {step}}}")
        history = [{"step": n, "loss": 1.0 / n} for n in range(1, step + 1)]
        state.write_text(json.dumps({"global_step": step, "log_history": history}))
        try:
            collector.read_log(store, store.attempts(run.run_id)[-1], backend)
            collector.read_files(store, attempt, at_once=True)
        except Exception as error:
            errors.append(error)

    for step in (1, 2, 3):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(collect, step).result()
    assert errors == []
    assert [row.step for row in run.metrics("accuracy")] == [1, 2, 3]
    assert [row.step for row in run.metrics("loss")] == [1, 2, 3]
