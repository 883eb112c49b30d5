"""Exit codes and signals: the state in which an attempt ends by itself, and that nothing of it is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.api import Backend
from cloudtrain.clock import SYSTEM
from cloudtrain.events import State
from cloudtrain.testing.fixtures import ContractFixtures
from cloudtrain.testing.suite.fetch import WRITER


class EndsContract(ContractFixtures):
    """How an attempt ends."""

    @pytest.mark.parametrize("code", [0, 1, 3, 75, 78, 255])
    def test_exit_code_is_the_scripts(self, backend: Backend, start: Any, code: int) -> None:
        handle = start(f"import sys; sys.exit({code})")
        status = self.until_final(backend, handle)
        assert (status.state, status.exit_code) == (State.FAILED if code else State.SUCCEEDED, code)
        assert status.ended_at is not None
        assert status.reason or not code, "the status of a failure needs a reason"

    def test_the_time_limit_ends_the_attempt(self, backend: Backend, start: Any) -> None:
        script = "import time\nprint('there', flush=True)\ntime.sleep(3000)\n"
        handle = start(script, limits={"max_runtime": "6s", "grace": "1s"})
        status = self.until_final(backend, handle)
        assert status.state is State.TIMED_OUT and status.reason, status
        assert [line.text for line in self.script_lines(backend, handle)] in (["there"], []), self.text(backend, handle)
        self.assert_no_leftovers(handle)

    def test_a_failed_attempt_stays_and_has_files(
        self, backend: Backend, connect: Callable[[], Backend], start: Any, tmp_path: Path
    ) -> None:
        """Its status is the same however often it is asked for, by whom, and after any other call."""
        handle = start(WRITER + "raise SystemExit(3)\n", args=["1:one"])
        status = self.until_final(backend, handle)
        assert (status.state, status.exit_code) == (State.FAILED, 3)
        assert status.started_at and status.ended_at and status.started_at <= status.ended_at
        other = connect()
        for _ in range(20):
            assert backend.status(handle) == status == other.status(handle)
        into = backend.fetch(handle, tmp_path / "fetched")
        for folder in ("outputs", "checkpoints"):
            assert (into / folder / "kept" / "one").exists(), folder
        backend.cancel(handle)
        assert list(backend.logs(handle)) == list(other.logs(handle))
        assert backend.find(self.submitted[handle]) == handle
        SYSTEM.sleep(1)
        assert backend.status(handle) == status == connect().status(handle)

    def test_a_signal_becomes_128_plus_n(self, backend: Backend, start: Any) -> None:
        handle = start("import os, signal\nprint('still there', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n")
        status = self.until_final(backend, handle)
        assert (status.state, status.exit_code) == (State.FAILED, 137)
        assert [line.text for line in self.script_lines(backend, handle)] == ["still there"]

    def test_a_traceback_is_in_the_log(self, backend: Backend, start: Any) -> None:
        handle = start("def f():\n    raise ValueError('no such thing')\nf()\n")
        assert self.until_final(backend, handle).exit_code == 1
        text = self.text(backend, handle)
        assert "Traceback (most recent call last)" in text and "ValueError: no such thing" in text

    def test_the_first_failure_of_several_ranks_counts(self, backend: Backend, start: Any) -> None:
        script = (
            "import os, sys, time\n"
            "if os.environ['RANK'] == '1': print('first', flush=True); sys.exit(41)\n"
            "try: time.sleep(600)\n"
            "finally: sys.exit(9)\n"
        )
        handle = start(script, processes_per_node=3)
        status = self.until_final(backend, handle)
        assert (status.state, status.exit_code) == (State.FAILED, 41), status
        self.assert_no_leftovers(handle)
