"""Conformance tests that every backend must pass. Subclass BackendContract in a test file and give one fixture:

    class TestMine(BackendContract):
        @pytest.fixture
        def connect(self, tmp_path):
            return lambda: MineBackend({"option": "value"}, tmp_path / "work")

Each call of `connect()` returns a new backend object for the same account or folder: an attempt that one object submits
is visible to the next one. Override `leftovers()` to list processes, containers or pods that an attempt left behind. The
scripts need Python only, except that `test_a_collective_over_two_nodes` needs torch where the job runs.
"""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from cloudtrain import events
from cloudtrain.backends import registry
from cloudtrain.backends.api import Backend, Feature, HasImages, HasStatuses, Plan
from cloudtrain.backends.images import pinned_image
from cloudtrain.events import MARK, State
from cloudtrain.job.job import Job
from cloudtrain.testing.fixtures import WAIT_S, ContractFixtures

__all__ = ["WAIT_S", "BackendContract"]

HOSTILE = [
    "",
    " ",
    "plain",
    "two words",
    "--flag",
    "--key=value",
    "-1",
    "-",
    "--",
    "'single'",
    '"double"',
    "back\\slash",
    "$HOME ${PATH} $(id) `id`",
    "line\nbreak",
    "tab\there",
    "a;b|c&d>e<f",
    "*?[a]{b,c}",
    "~",
    "#no comment",
    "%s %%",
    "!history",
    "ünïcödé 漢字 🚀",
    '{"json": [1, 2]}',
    "[1, 2]",
    "true",
    "null",
    "0123",
    "1e-4",
    "trailing ",
    "=",
    "\x7f\x01",
]


class BackendContract(ContractFixtures):
    """Tests of what every backend promises."""

    # -- the plan -----------------------------------------------------------------------------------------------------

    def test_it_is_a_backend(self, backend: Backend) -> None:
        assert isinstance(backend, Backend)
        assert backend.name and backend.features <= frozenset(Feature)
        assert registry.backend_class(backend.name) is type(backend)
        assert isinstance(type(backend).discover(), dict)

    def test_unknown_options_are_refused(self, backend: Backend) -> None:
        from pydantic import ValidationError

        with pytest.raises(ValidationError):
            type(backend).options().model_validate({"no_such_option": 1})

    def test_plan_is_pure(self, backend: Backend, prepare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        plan, bundle = prepare("print(1)", run_id="pure-run")
        job = Job.from_dict(plan.job)

        def forbidden(*_: Any, **__: Any) -> Any:
            raise AssertionError("plan() used the network, the clock or randomness")

        with monkeypatch.context() as patch:
            patch.setattr(socket, "socket", forbidden)
            for name in ("time", "time_ns"):
                patch.setattr(time, name, forbidden)
            patch.setattr("os.urandom", forbidden)
            patch.setattr(random, "random", forbidden)
            again = backend.plan(job, bundle, "pure-run", 1)
        time.sleep(1.1)  # a timestamp in the plan would differ by now
        assert again == plan == backend.plan(job, bundle, "pure-run", 1)

    def test_plan_survives_json(self, prepare: Any) -> None:
        plan, _ = prepare("print(1)", args=HOSTILE, env={"A": "b c"})
        assert Plan.from_json(plan.to_json()) == plan

    def test_plan_holds_no_secret(self, backend: Backend, prepare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        if Feature.ENV_SECRETS not in backend.features:
            return
        monkeypatch.setenv("CONTRACT_SECRET", "s3cr3t-in-the-plan")
        plan, _ = prepare("print(1)", secrets={"TOKEN": ["env:CONTRACT_SECRET"]})
        assert "s3cr3t-in-the-plan" not in plan.to_json()

    # -- arguments and environment -----------------------------------------------------------------------------------------

    def test_arguments_arrive_as_written(self, backend: Backend, start: Any) -> None:
        handle = start("import json, sys; print(json.dumps(sys.argv[1:]))", args=HOSTILE)
        assert self.until_final(backend, handle).state is State.SUCCEEDED, self.text(backend, handle)
        assert json.loads(self.script_lines(backend, handle)[0].text) == HOSTILE

    def test_environment_arrives_as_written(self, backend: Backend, start: Any) -> None:
        env = {f"CONTRACT_{n}": text for n, text in enumerate(HOSTILE)}
        script = (
            "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('CONTRACT_')}))"
        )
        handle = start(script, env=env)
        assert self.until_final(backend, handle).state is State.SUCCEEDED, self.text(backend, handle)
        assert json.loads(self.script_lines(backend, handle)[0].text) == env

    def test_secrets_reach_the_script_and_nothing_else(
        self, backend: Backend, start: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if Feature.ENV_SECRETS not in backend.features:
            return
        monkeypatch.setenv("CONTRACT_SECRET", "s3cr3t-of-the-suite")
        script = "import hashlib, os; t = os.environ['TOKEN']; print(hashlib.sha256(t.encode()).hexdigest()); print('it is', t)"
        handle = start(script, secrets={"TOKEN": ["env:CONTRACT_SECRET"]})
        assert self.until_final(backend, handle).state is State.SUCCEEDED, self.text(backend, handle)
        from hashlib import sha256

        first, second = (line.text for line in self.script_lines(backend, handle))
        assert first == sha256(b"s3cr3t-of-the-suite").hexdigest()
        assert "s3cr3t" not in second and second.startswith("it is ")

    # -- exit codes --------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("code", [0, 1, 3, 75, 78, 255])
    def test_exit_code_is_the_scripts(self, backend: Backend, start: Any, code: int) -> None:
        handle = start(f"import sys; sys.exit({code})")
        status = self.until_final(backend, handle)
        assert (status.state, status.exit_code) == (State.FAILED if code else State.SUCCEEDED, code)
        assert status.ended_at is not None

    def test_a_signal_becomes_128_plus_n(self, backend: Backend, start: Any) -> None:
        handle = start("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
        status = self.until_final(backend, handle)
        assert (status.state, status.exit_code) == (State.FAILED, 137)

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

    # -- the log ------------------------------------------------------------------------------------------------------

    def test_every_line_once_and_in_order(self, backend: Backend, start: Any) -> None:
        script = "import sys\nfor n in range(5000): print('line', n)\nsys.stdout.write('the last one')\n"
        handle = start(script)
        self.until_final(backend, handle)
        assert [line.text for line in self.script_lines(backend, handle)] == [f"line {n}" for n in range(5000)] + [
            "the last one"
        ]
        lines = list(backend.logs(handle))
        assert [line.seq for line in lines] == list(range(len(lines)))
        last = events.parse([line.text for line in lines if line.rank == -1][-1])
        assert last is not None and last[0] == "state" and last[1]["state"] == "SUCCEEDED", "the launcher's last line"

    def test_a_cursor_continues_behind_its_line(self, backend: Backend, start: Any) -> None:
        handle = start("for n in range(200): print('line', n)")
        self.until_final(backend, handle)
        lines = list(backend.logs(handle))
        for cut in {0, 1, 17, len(lines) // 2, len(lines) - 1}:
            assert list(backend.logs(handle, after=lines[cut].cursor)) == lines[cut + 1 :]

    def test_following_sees_lines_as_they_come_and_ends(self, backend: Backend, start: Any) -> None:
        handle = start("import time\nprint('early', flush=True)\ntime.sleep(1)\nprint('late', flush=True)\n")
        seen, running = [], []

        def follow() -> None:
            for line in backend.logs(handle, follow=True):
                if line.text == "early":
                    running.append(not backend.status(handle).state.final)
                seen.append(line)

        reader = threading.Thread(target=follow, daemon=True)
        reader.start()
        reader.join(WAIT_S)
        assert not reader.is_alive(), f"following did not end within {WAIT_S} s"
        assert running == [True]
        assert [line.text for line in seen if line.rank == 0 and not line.text.startswith(MARK)] == ["early", "late"]
        assert seen == list(backend.logs(handle))
        assert list(islice(backend.logs(handle, follow=True, after=seen[-1].cursor), 1)) == []

    def test_junk_in_the_log_does_no_harm(self, backend: Backend, start: Any) -> None:
        script = "import os\nos.write(1, b'\\xff\\xfe\\x00 junk\\r\\nnext\\n' + b'x' * 100000 + b'\\nend')\n"
        handle = start(script)
        assert self.until_final(backend, handle).state is State.SUCCEEDED
        lines = [line.text for line in self.script_lines(backend, handle)]
        assert "junk" in lines[0] and lines[1] == "next" and lines[-1] == "end"
        assert "".join(lines[2:-1]) == "x" * 100000

    # -- handles ------------------------------------------------------------------------------------------------------

    def test_handle_survives_a_new_backend_object(self, connect: Callable[[], Backend], start: Any) -> None:
        handle = start("import time\nprint('there', flush=True)\ntime.sleep(600)\n")
        self.until_line(connect(), handle, "there")
        assert connect().status(handle).state is State.RUNNING
        if isinstance(again := connect(), HasImages):
            images = again.images(handle)
            assert set(images) <= {0} and all(pinned_image(image) == image for image in images.values())
        connect().cancel(handle)
        assert self.until_final(connect(), handle).state is State.CANCELLED
        assert any(line.text == "there" for line in connect().logs(handle))

    def test_find(self, backend: Backend, connect: Callable[[], Backend], prepare: Any) -> None:
        plan, bundle = prepare("print('found')")
        assert backend.find(plan.attempt_id) is None
        handle = backend.submit(plan, bundle)
        assert connect().find(plan.attempt_id) == handle
        assert connect().find(f"{plan.run_id}-a2") is None
        self.until_final(backend, handle)
        assert connect().find(plan.attempt_id) == handle

    def test_submitting_a_plan_twice_is_one_attempt(
        self, backend: Backend, connect: Callable[[], Backend], prepare: Any
    ) -> None:
        plan, bundle = prepare("print('once')")
        handle = backend.submit(plan, bundle)
        assert connect().submit(plan, bundle) == handle
        self.until_final(backend, handle)
        assert connect().submit(plan, bundle) == handle
        assert backend.status(handle).state is State.SUCCEEDED
        assert [line.text for line in self.script_lines(backend, handle)] == ["once"]

    # -- cancel -------------------------------------------------------------------------------------------------------

    def test_cancel_is_not_success_and_ends_everything(self, backend: Backend, start: Any) -> None:
        script = (
            "import os, signal, subprocess, sys, time\n"
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"  # exits with 0, but the state must not be SUCCEEDED
            "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
            "print('ready', flush=True)\n"
            "time.sleep(600)\n"
        )
        handle = start(script, processes_per_node=2)
        self.until_line(backend, handle, "ready", times=2)
        backend.cancel(handle)
        backend.cancel(handle)
        assert self.until_final(backend, handle).state is State.CANCELLED
        self.assert_no_leftovers(handle)

    def test_cancel_rewrites_no_history(self, backend: Backend, start: Any) -> None:
        handle = start("print('done')")
        before = self.until_final(backend, handle)
        backend.cancel(handle)
        after = backend.status(handle)
        assert after == before, (before, after)
        assert before.state is State.SUCCEEDED

    # -- files --------------------------------------------------------------------------------------------------------

    def test_fetch_brings_what_the_script_wrote(self, backend: Backend, start: Any, tmp_path: Path) -> None:
        script = (
            "import os, pathlib\n"
            "for name, folder in [('MODEL', 'm'), ('OUTPUT', 'o'), ('CHECKPOINT', 'c')]:\n"
            "    path = pathlib.Path(os.environ[f'CLOUDTRAIN_{name}_DIR'], 'deep')\n"
            "    path.mkdir(parents=True, exist_ok=True)\n"
            "    (path / 'file.txt').write_text(name)\n"
        )
        handle = start(script)
        assert self.until_final(backend, handle).state is State.SUCCEEDED, self.text(backend, handle)
        into = backend.fetch(handle, tmp_path / "fetched")
        fetched = {str(path.relative_to(into)): path.read_text() for path in into.rglob("*.txt")}
        assert fetched == {
            "model/deep/file.txt": "MODEL",
            "outputs/deep/file.txt": "OUTPUT",
            "checkpoints/deep/file.txt": "CHECKPOINT",
        }

    def test_checkpoints_belong_to_the_run(self, backend: Backend, start: Any) -> None:
        script = (
            "import os, pathlib\n"
            "path = pathlib.Path(os.environ['CLOUDTRAIN_CHECKPOINT_DIR'], 'step')\n"
            "print('found', path.read_text() if path.exists() else None)\n"
            "path.parent.mkdir(parents=True, exist_ok=True)\n"
            "path.write_text(os.environ['CLOUDTRAIN_ATTEMPT'])\n"
        )
        run_id = f"contract-{random.getrandbits(32):08x}"
        first = start(script, run_id=run_id, attempt=1)
        self.until_final(backend, first)
        second = start(script, run_id=run_id, attempt=2)
        self.until_final(backend, second)
        assert [line.text for line in self.script_lines(backend, first)] == ["found None"]
        assert [line.text for line in self.script_lines(backend, second)] == ["found 1"]

    # -- several nodes ------------------------------------------------------------------------------------------------

    def test_ranks_over_two_nodes(self, backend: Backend, start: Any) -> None:
        if Feature.MULTI_NODE not in backend.features:
            return
        names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK"
        script = f"import json, os\nprint(json.dumps([int(os.environ[n]) for n in '{names}'.split()]))\n"
        handle = start(script, num_nodes=2, processes_per_node=2)
        assert self.until_final(backend, handle).state is State.SUCCEEDED, self.text(backend, handle)
        seen = sorted((line.node, line.rank, *json.loads(line.text)) for line in self.script_lines(backend, handle))
        assert seen == [(0, 0, 0, 0, 4, 2, 0), (0, 1, 1, 1, 4, 2, 0), (1, 2, 2, 0, 4, 2, 1), (1, 3, 3, 1, 4, 2, 1)]

    def test_one_failing_node_ends_the_attempt(self, backend: Backend, start: Any) -> None:
        if Feature.MULTI_NODE not in backend.features:
            return
        handle = start(
            "import os, sys, time\nif os.environ['NODE_RANK'] == '1': sys.exit(23)\ntime.sleep(600)\n", num_nodes=2
        )
        status = self.until_final(backend, handle)
        assert (status.state, status.exit_code) == (State.FAILED, 23), self.text(backend, handle)
        self.assert_no_leftovers(handle)

    @pytest.mark.train
    def test_a_collective_over_two_nodes(self, backend: Backend, start: Any) -> None:
        if Feature.MULTI_NODE not in backend.features:
            return
        script = (
            "import torch, torch.distributed as dist\n"
            "dist.init_process_group('gloo')\n"
            "rank, world = dist.get_rank(), dist.get_world_size()\n"
            "value = torch.tensor([10.0 ** rank])\n"
            "dist.all_reduce(value)\n"
            "print('result', rank, world, value.item(), flush=True)\n"
            "dist.destroy_process_group()\n"
        )
        handle = start(script, num_nodes=2, processes_per_node=2, env={"OMP_NUM_THREADS": "1"})
        assert self.until_final(backend, handle).state is State.SUCCEEDED, self.text(backend, handle)
        results = sorted(line.text for line in self.script_lines(backend, handle) if line.text.startswith("result"))
        assert results == [f"result {rank} 4 1111.0" for rank in range(4)]

    # -- many attempts at once ----------------------------------------------------------------------------------------

    def test_statuses_are_those_of_status_in_fewer_calls(
        self, backend: Backend, connect: Callable[[], Backend], start: Any
    ) -> None:
        if not isinstance(backend, HasStatuses):
            return
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
            assert isinstance(asked, HasStatuses) and asked.group == backend.group and asked.calls_per_s > 0
            for _ in range(2):
                before = self.calls()
                statuses = asked.statuses(handles)
                between = self.calls()
                expected = {handle: backend.status(handle) for handle in handles}
                after = self.calls()
                assert dict(statuses) == {handle: expected[handle] for handle in handles if handle in statuses}
                assert set(running) <= set(statuses), "running attempts must be in the answer"
                if before is not None and between is not None and after is not None:
                    assert between - before < after - between
        assert dict(backend.statuses([])) == {}

    # -- lookups --------------------------------------------------------------------------------------------

    def test_what_was_never_submitted_is_lost(self, backend: Backend, start: Any) -> None:
        handle = start("print('real')")
        self.until_final(backend, handle)
        unknown = backend.status(handle[:-1] + ("8" if handle[-1] != "8" else "9"))
        assert unknown.state is State.LOST

    def test_check_returns_problems(self, backend: Backend) -> None:
        assert all(problem.message for problem in backend.check())
