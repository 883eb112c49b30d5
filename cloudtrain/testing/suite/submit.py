"""Submit, find, status: one attempt, known by its handle to every object."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.api import Backend
from cloudtrain.backends.images import pinned_image
from cloudtrain.events import State
from cloudtrain.testing.fixtures import ContractFixtures
from cloudtrain.testing.suite.fetch import WRITER


class SubmitContract(ContractFixtures):
    """What `submit`, `find`, `status` and `statuses` promise."""

    def test_handle_survives_a_new_backend_object(self, connect: Callable[[], Backend], start: Any) -> None:
        handle = start("import time\nprint('there', flush=True)\ntime.sleep(600)\n")
        self.until_line(connect(), handle, "there")
        assert connect().status(handle).state is State.RUNNING
        images = connect().images(handle)
        assert set(images) <= {0} and all(pinned_image(image) == image for image in images.values())
        connect().cancel(handle)
        assert self.until_final(connect(), handle).state is State.CANCELLED
        assert any(line.text == "there" for line in connect().logs(handle))

    def test_find(self, backend: Backend, connect: Callable[[], Backend], prepare: Any) -> None:
        plan, bundle = prepare("print('found')", attempt=11)
        run_id = plan.run_id
        assert backend.find(plan.attempt_id) is None
        handle = backend.submit(plan, bundle)
        assert connect().find(plan.attempt_id) == handle
        for other in (f"{run_id}-a1", f"{run_id}-a12", f"{run_id}-a111", f"{run_id}0-a11", f"{run_id[:-1]}-a11"):
            assert connect().find(other) is None, other
        self.until_final(backend, handle)
        assert connect().find(plan.attempt_id) == handle

    def test_labels_are_those_of_the_attempt(
        self, backend: Backend, connect: Callable[[], Backend], start: Any
    ) -> None:
        team = f"team-{random.getrandbits(32):08x}"
        handle, other = (start("print(1)", labels={"contract": name}) for name in (team, f"{team}0"))
        stored = connect().labels(handle), connect().labels(other)
        if type(backend).labels is not Backend.labels:
            assert [each["contract"] for each in stored if each] == [team, f"{team}0"]
        if type(backend).labelled is not Backend.labelled:
            attempt_id = self.submitted[handle]
            found = [(each.attempt_id, each.handle) for each in connect().labelled("contract", team, set())]
            assert found in ([], [(attempt_id, handle)]), "labelled() may return only this attempt"
            assert not list(connect().labelled("contract", team, {attempt_id}))
        self.until_final(backend, handle)

    def test_two_attempts_have_nothing_in_common(self, backend: Backend, start: Any, tmp_path: Path) -> None:
        """What is done with one that has ended leaves the other running."""
        ended = start(WRITER + "print('it ends')\nraise SystemExit(3)\n", args=["1:one"], attempt=11)
        runs = start("import time\nprint('it runs', flush=True)\ntime.sleep(600)\n", attempt=12)
        self.until_line(backend, runs, "it runs")
        assert self.until_final(backend, ended).exit_code == 3
        for handle, text in ((ended, "it ends"), (runs, "it runs")):
            assert [line.text for line in self.script_lines(backend, handle)] == [text]
            assert backend.find(self.submitted[handle]) == handle
        into = backend.fetch(ended, tmp_path / "fetched")
        assert (into / "outputs" / "kept" / "one").exists()
        run_id = self.submitted[runs].rpartition("-a")[0]
        for other in (self.submitted[ended], f"{run_id}-a1", f"{run_id}-a2", f"{run_id}-a120", f"{run_id}0-a12"):
            for _ in range(2):
                backend.discard(other)
        backend.cancel(ended)
        assert backend.remains(ended) or type(backend).remove is Backend.remove
        for _ in range(2):
            backend.remove(ended)
            assert not backend.remains(ended)
        assert backend.find(self.submitted[runs]) == runs
        assert backend.status(runs).state is State.RUNNING
        if type(backend).remove is not Backend.remove:
            assert backend.status(ended).state is State.LOST
        backend.cancel(runs)
        assert self.until_final(backend, runs).state is State.CANCELLED
        self.assert_no_leftovers(ended)

    def test_submitting_a_plan_twice_is_one_attempt(
        self, backend: Backend, connect: Callable[[], Backend], prepare: Any
    ) -> None:
        plan, bundle = prepare("print('once')")
        stored = plan.to_json()
        handle = backend.submit(plan, bundle)
        assert connect().submit(plan, bundle) == handle
        assert plan.to_json() == stored, "a plan is kept and read by others: a submit must not change it"
        self.until_final(backend, handle)
        assert connect().submit(plan, bundle) == handle
        assert backend.status(handle).state is State.SUCCEEDED
        assert [line.text for line in self.script_lines(backend, handle)] == ["once"]

    def test_statuses_are_those_of_status_in_fewer_calls(
        self, backend: Backend, connect: Callable[[], Backend], start: Any
    ) -> None:
        if not backend.group:
            pytest.skip("it has no `statuses`")
        wait = "import time\nprint('there', flush=True)\ntime.sleep(600)\n"
        running, cancelled = [start(wait), start(wait)], start(wait)
        finished, failed = start("print('done')"), start("raise SystemExit(3)")
        for handle in (*running, cancelled):
            self.until_line(backend, handle, "there")
        backend.cancel(cancelled)
        for handle in (cancelled, finished, failed):
            self.until_final(backend, handle)
        unknown = finished[:-1] + ("8" if finished[-1] != "8" else "9")
        handles = [*running, cancelled, finished, failed, unknown]
        for asked in (connect(), backend):  # one that knows nothing yet, and one that has asked before
            assert asked.group == backend.group and asked.calls_per_s > 0
            for _ in range(2):
                before = self.calls()
                statuses = asked.statuses(handles)
                between = self.calls()
                expected = {handle: backend.status(handle) for handle in handles}
                after = self.calls()
                assert dict(statuses) == {handle: expected[handle] for handle in handles if handle in statuses}
                assert set(running) <= set(statuses), "statuses() must include each running attempt"
                if before is not None and between is not None and after is not None:
                    assert between - before < after - between
        assert dict(backend.statuses([])) == {}

    def test_what_was_never_submitted_is_lost(self, backend: Backend, start: Any) -> None:
        handle = start("print('real')")
        self.until_final(backend, handle)
        unknown = backend.status(handle[:-1] + ("8" if handle[-1] != "8" else "9"))
        assert unknown.state is State.LOST
