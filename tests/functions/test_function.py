"""Calls of functions as runs: plans, values, exceptions, futures, groups, and what is loaded of whom."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cloudtrain
from cloudtrain.backends import registry
from cloudtrain.backends.plan import ATTACHED
from cloudtrain.errors import BadRequest, RunFailed, Unreachable
from cloudtrain.events import State, Status
from cloudtrain.functions.function import Function
from cloudtrain.history.store import Store
from cloudtrain.history.trials import SweepHistory
from cloudtrain.nodes.process import Process
from cloudtrain.runs import futures, returned
from cloudtrain.runs.futures import RunFuture
from cloudtrain.runs.run import Run
from cloudtrain.sweeps.sweep import Sweep
from cloudtrain.testing.clock import VirtualClock
from cloudtrain.testing.memory import MemoryBackend
from tests.conftest import WAIT_S, wait_for
from tests.functions.test_call import Harm
from tests.sweeps.conftest import kill_clients


def scaled(x, factor=2):
    return x * factor


scaled.__module__ = "__main__"  # as in a script: it travels by value

# -- planned ----------------------------------------------------------------------------------------------------------


def test_a_function_runs_here_as_before():
    made = cloudtrain.function(scaled)
    assert (made(2), made(2, factor=3), made.__name__) == (4, 6, "scaled")
    assert inspect.signature(made) == inspect.signature(scaled)


def test_decorator_and_call_take_the_same_options(home: Path):
    @cloudtrain.function(target="local", num_nodes=2)
    def decorated():
        pass

    more = cloudtrain.function(decorated, num_nodes=3, env={"A": "1"})
    assert isinstance(more, Function)
    assert (more.target, more.job) == ("local", {"num_nodes": 3, "env": {"A": "1"}})
    assert decorated.job == {"num_nodes": 2}


def test_keys_that_a_call_sets_itself_are_refused():
    with pytest.raises(BadRequest, match="entrypoint is not an argument of cloudtrain.function"):
        cloudtrain.function(scaled, entrypoint="train.py")


def test_the_plan_is_a_job_with_the_function_and_its_text(home: Path):
    plan = cloudtrain.function(scaled, target="local", num_nodes=2).plan(1, factor=5)
    assert plan.run_id.startswith("scaled-") and plan.job["num_nodes"] == 2
    assert plan.job["entrypoint"] == ".cloudtrain/call/call.py"
    words = dict(zip(plan.job["args"][::2], plan.job["args"][1::2], strict=True))
    assert words["--python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert words.keys() == {"--digest", "--python", "--arguments"}
    assert plan.bundle["files"] == 1, "the text of the function"
    again = cloudtrain.function(scaled, target="local").plan(2)
    assert again.bundle["sha256"] == plan.bundle["sha256"], "another argument sends no other bundle"


def test_arguments_that_the_function_does_not_take_are_refused_before_anything_is_sent(home: Path):
    with pytest.raises(TypeError, match="too many positional arguments"):
        cloudtrain.function(scaled, target="local").submit(1, 2, 3)
    assert not Store(home).runs()


def test_another_python_in_the_image_is_refused(home: Path):
    image = "python:3.9-slim" if sys.version_info >= (3, 10) else "python:3.13-slim"
    made = cloudtrain.function(scaled, target="kubernetes", image=image, output="s3://bucket/runs")
    with pytest.raises(
        BadRequest, match=r"python:3\.9-slim has Python 3\.9, and the function is pickled with Python 3"
    ):
        made.plan(1)


def test_a_call_whose_value_nothing_would_keep_is_refused(home: Path):
    made = cloudtrain.function(scaled, target="kubernetes", image="registry/train:1")
    with pytest.raises(BadRequest, match="output: is needed: the value of a function is kept there"):
        made.plan(1)
    assert cloudtrain.function(made, output="s3://bucket/runs").plan(1).backend == "kubernetes"


def test_a_repository_as_source_is_passed_on(home: Path, monkeypatch):
    from cloudtrain.runs.submit import Submitter

    sent: list[dict] = []
    monkeypatch.setattr(Submitter, "plan_job", lambda self, job, extra: [sent.append(job)])
    cloudtrain.function(scaled, target="local", source="git+https://example.com/repo@main").plan(1)
    assert sent[0]["source"] == "git+https://example.com/repo@main"


@pytest.mark.parametrize("values", [[5], [5, 6]])
def test_each_call_of_a_group_has_its_file(home: Path, monkeypatch, values):
    begun: list[dict] = []
    monkeypatch.setattr("cloudtrain.sweeps.sweep.begin", lambda document, folder, **more: begun.append(more["extra"]))
    cloudtrain.function(scaled, target="local").map(values)
    assert {f".cloudtrain/call/{at}.pkl" for at in range(len(values))} <= begun[0].keys()


# -- read -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ended(home: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that ends a call in memory, which has left these files."""
    monkeypatch.setattr(registry, "BUILT_IN", dict(registry.BUILT_IN))
    MemoryBackend.install()

    def end(files: dict[str, bytes], state: State | None = State.SUCCEEDED, **job: object) -> Run:
        def fetch(self, handle, into, what=()):
            folder = into / "outputs" / "returned"
            folder.mkdir(parents=True)
            for name, data in files.items():
                (folder / name).write_bytes(data)
            return into

        monkeypatch.setattr(MemoryBackend, "fetch", fetch)
        from cloudtrain.runs.submit import Submitter

        made = cloudtrain.function(scaled, output="/shared/runs", **job)
        monkeypatch.setattr("cloudtrain.runs.submit.Submitter", lambda target, **more: Submitter("memory", watch=False))
        run = made.submit(1)
        if state is not None:
            run.store.set_status(run.run_id, Status(state, 0 if state is State.SUCCEEDED else 1))
        return run

    return end


def test_the_values_are_those_of_the_last_attempt_by_rank(ended):
    run = ended(
        {f"value-{attempt}-{rank}.pkl": pickle.dumps((attempt, rank)) for attempt in (1, 2) for rank in range(11)}
    )
    assert run.result() == (2, 0)
    assert run.results() == [(2, rank) for rank in range(11)]
    assert (run.exception(), run.done()) == (None, True)


def test_a_value_is_fetched_alone_where_the_platform_does_not_pack_outputs(ended, monkeypatch):
    run, asked = ended({"value-1-0.pkl": pickle.dumps(7)}), []
    fetch = MemoryBackend.fetch
    monkeypatch.setattr(
        MemoryBackend, "fetch", lambda self, handle, into, what: asked.append(what) or fetch(self, handle, into, what)
    )
    assert run.result() == 7
    attached = replace(run.record, identity=ATTACHED + "s3://bucket/run")  # its outputs may be packed
    assert returned.values(run.store, attached, trust=True) == [7]
    monkeypatch.setattr(MemoryBackend, "traits", replace(MemoryBackend.traits, packs=True))
    assert run.result() == 7
    assert asked == [("outputs/returned",), ("outputs",), ("outputs",)]


def test_a_call_without_a_value_says_so(ended):
    with pytest.raises(BadRequest, match="has left no value"):
        ended({"error-1-0.json": b"{}"}).result()


def test_the_exception_of_the_node_is_the_cause(ended):
    kept = base64.b64encode(pickle.dumps(ValueError("no"))).decode()
    about = {"type": "ValueError", "text": "no", "traceback": "  line 7", "pickle": kept}
    run = ended({"error-1-0.json": json.dumps(about).encode()}, State.FAILED)
    with pytest.raises(RunFailed) as caught:
        run.result()
    assert repr(caught.value.__cause__) == "ValueError('no')"
    assert caught.value.__cause__.__notes__ == ["on the node:\n  line 7"]
    assert repr(run.exception().__cause__) == "ValueError('no')"


class Leaves:
    """A pickle that ends the process where it is loaded."""

    def __reduce__(self):
        return sys.exit, (3,)


LEAVES = json.dumps({"pickle": base64.b64encode(pickle.dumps(Leaves())).decode()}).encode()


def test_the_exception_of_an_earlier_attempt_is_no_cause(ended):
    run = ended({"error-1-0.json": b'{"type": "ValueError", "text": "no"}'}, State.FAILED)
    assert repr(run.exception().__cause__) == "RemoteError('ValueError: no')"
    run.store.record(run.attempts[0].attempt_id, status=run.record.status)
    assert run.store.next_attempt(replace(run.attempts[0].plan, attempt=2), owner=Process.here())
    run.store.set_status(run.run_id, Status(State.FAILED, 137))
    assert run.exception().__cause__ is None


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"pickle": "!!"}', b'{"pickle": "bm8="}', b"\xff", LEAVES])
def test_a_damaged_exception_hides_no_failure(ended, data):
    with pytest.raises(RunFailed) as caught:
        ended({"error-1-0.json": data}, State.FAILED).result()
    assert "the exception of the node cannot be read" in "".join(caught.value.__notes__)


def test_a_damaged_value_is_said(ended):
    with pytest.raises(BadRequest, match="has returned a value that cannot be loaded here: UnpicklingError"):
        ended({"value-1-0.pkl": b"no pickle"}).result()
    with pytest.raises(BadRequest, match="has returned a value that cannot be loaded here: SystemExit"):
        ended({"value-1-0.pkl": pickle.dumps(Leaves())}).result()


def test_a_value_of_another_user_is_loaded_where_it_is_trusted_only(ended, tmp_path: Path, monkeypatch):
    harm = tmp_path / "loaded"
    run = ended({"value-1-0.pkl": pickle.dumps(Harm(harm))})
    monkeypatch.setattr(returned.getpass, "getuser", lambda: "another")
    for ask in (run.result, run.results):
        with pytest.raises(BadRequest, match="is a pickle, which runs code when it is loaded"):
            ask()
    assert not harm.exists()
    run.result(trust=True)
    assert harm.exists()


def test_an_exception_of_another_user_is_read_as_text(ended, tmp_path: Path, monkeypatch):
    harm = tmp_path / "loaded"
    kept = base64.b64encode(pickle.dumps(Harm(harm))).decode()
    about = {"type": "ValueError", "text": "no", "traceback": "", "pickle": kept}
    run = ended({"error-1-0.json": json.dumps(about).encode()}, State.FAILED)
    monkeypatch.setattr(returned.getpass, "getuser", lambda: "another")
    assert repr(run.exception().__cause__) == "RemoteError('ValueError: no')"
    assert not harm.exists()


def test_readers_that_ask_for_no_value_load_none(ended, tmp_path: Path, cli):
    harm = tmp_path / "loaded"
    run = ended({"value-1-0.pkl": pickle.dumps(Harm(harm))})
    run.wait()
    run.fetch(tmp_path / "fetched")
    run._repr_html_()
    assert (tmp_path / "fetched" / "outputs" / "returned" / "value-1-0.pkl").exists()
    assert cli("show", run.run_id)[0] == cli("ls")[0] == 0
    assert not harm.exists()


def test_links_in_what_came_back_are_not_followed(ended, tmp_path: Path, monkeypatch):
    harm, secret = tmp_path / "loaded", tmp_path / "elsewhere.pkl"
    secret.write_bytes(pickle.dumps(Harm(harm)))
    run = ended({})

    def fetch(self, handle, into, what=()):
        (into / "outputs" / "returned").mkdir(parents=True)
        (into / "outputs" / "returned" / "value-1-0.pkl").symlink_to(secret)
        return into

    monkeypatch.setattr(MemoryBackend, "fetch", fetch)
    with pytest.raises((BadRequest, OSError)):
        run.result()
    assert not harm.exists()


def test_a_script_has_a_status_and_no_values(ended, tmp_path: Path):
    from cloudtrain.runs.submit import Submitter

    (tmp_path / "train.py").write_text("")
    run = Submitter("memory", watch=False).submit({"source": str(tmp_path), "entrypoint": "train.py"})
    run.store.set_status(run.run_id, Status(State.SUCCEEDED, 0))
    assert run.result().state is State.SUCCEEDED
    with pytest.raises(BadRequest, match="is not the call of a function"):
        run.results()


# -- futures ----------------------------------------------------------------------------------------------------------


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


# -- groups -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def group(ended, home: Path, monkeypatch):
    """A group of three calls that was stopped: one has ended, one was stored alone, one was never drawn."""
    monkeypatch.setattr(Sweep, "ensure_driven", lambda self: None)
    run = ended({"value-1-0.pkl": pickle.dumps(7)})
    group = cloudtrain.function(scaled, target="local").map([1, 2, 3])
    history = SweepHistory(home)
    for number, call in enumerate((0, 1), start=1):
        history.add_trial(group.sweep_id, number, {"call": call}, {}, "local")
    history.submitted(group.sweep_id, 1, run.run_id)
    history.set_state(group.sweep_id, "CANCELLED", "stopped", old=("RUNNING",))
    return group


def test_a_group_that_was_stopped_has_a_place_for_each_call(group):
    values = group.results(return_exceptions=True)
    assert values[0] == 7
    assert [str(value).partition(" of ")[0] for value in values[1:]] == ["trial 2", "call 2"]
    assert all(isinstance(value, BadRequest) for value in values[1:])
    with pytest.raises(BadRequest, match="has no run"):
        group.results()


def test_a_sweep_of_a_script_has_no_values(home: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(Sweep, "ensure_driven", lambda self: None)
    (tmp_path / "train.py").write_text("")
    sweep = Sweep(
        {"entrypoint": "train.py", "source": str(tmp_path)}, {"lr": {"values": [1]}}, method="grid", target="local"
    )
    with pytest.raises(BadRequest, match="is no group of calls of a function"):
        sweep.results()


# -- run on this machine ----------------------------------------------------------------------------------------------

CLIENT = """
import os, signal, sys
import cloudtrain

@cloudtrain.function(target="local")
def slow(x):
    return {"x": x, "pid": os.getpid()}

run = slow.submit(5)
print(run.run_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ranks_of_several_nodes_return_each_their_own(census: Path):
    def where(x):
        import cloudtrain_runtime

        context = cloudtrain_runtime.context()
        cloudtrain_runtime.log_metrics(step=1, loss=0.5)
        return x, context.rank, context.node_rank

    run = cloudtrain.function(where, target="local", num_nodes=2, processes_per_node=2).submit(1)
    assert run.results(WAIT_S) == [(1, rank, rank // 2) for rank in range(4)]
    assert [row.value for row in run.metrics("loss")] == [0.5]


def test_a_function_of_a_module_runs_from_the_source(census: Path, module):
    module("other", "ONE = 1\n")
    tasks = module(
        "tasks",
        "import cloudtrain, other\n@cloudtrain.function(target='local')\ndef add(a):\n    return other.ONE + a\n",
    )
    assert tasks.add.submit(4).result(WAIT_S) == 5


def test_a_value_is_read_without_the_other_outputs(census: Path, monkeypatch: pytest.MonkeyPatch):
    def call():
        import os

        with open(os.path.join(os.environ["CLOUDTRAIN_OUTPUT_DIR"], "large"), "w") as file:
            file.write("x")
        return 1

    run = cloudtrain.function(call, target="local").submit()
    run.wait(WAIT_S)
    from cloudtrain.source import folder_writer

    copied: list[str] = []
    copy = folder_writer.copy_tree
    monkeypatch.setattr(
        folder_writer, "copy_tree", lambda start, into, **more: copied.append(start.name) or copy(start, into, **more)
    )
    assert (run.result(), copied) == (1, ["returned"])


def test_a_failed_call_has_the_exception_and_its_traceback(census: Path):
    def fails(x):
        raise LookupError(f"no {x}")

    run = cloudtrain.function(fails, target="local").submit("row")
    failure = run.exception(WAIT_S)
    assert repr(failure.__cause__) == "LookupError('no row')"
    assert 'raise LookupError(f"no {x}")' in failure.__cause__.__notes__[0]
    assert "LookupError: no row" in failure.message


def test_a_killed_client_finds_the_value_again(census: Path, tmp_path: Path):
    (tmp_path / "client.py").write_text(CLIENT)
    done = subprocess.run([sys.executable, "client.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    [run] = cloudtrain.runs()
    assert run.run_id == done.stdout.strip()
    value = run.result(WAIT_S)
    assert value["x"] == 5 and value["pid"] != os.getpid()


def test_a_group_keeps_order_and_partial_failures(census: Path, tmp_path: Path):
    def inverse(x):
        return 1 / x

    group = cloudtrain.function(inverse, target="local").map([4, 0, 2], max_parallel=2)
    values = group.results(return_exceptions=True)
    assert [values[0], values[2]] == [0.25, 0.5]
    assert isinstance(values[1], RunFailed) and isinstance(values[1].__cause__, ZeroDivisionError)
    assert len(group.trials) == 3, "a failed call is not repeated"
    with pytest.raises(RunFailed):
        group.results()
    assert len(cloudtrain.runs(f"label.sweep={group.sweep_id}")) == 3
    assert cloudtrain.Sweep.find(group.sweep_id).results(return_exceptions=True)[0] == 0.25


def test_a_group_continues_after_its_processes_were_killed(census: Path, home: Path, tmp_path: Path):
    gate, starts = str(tmp_path / "gate"), str(tmp_path / "starts")

    def call(x):
        import os
        import time

        with open(starts, "a") as file:
            file.write(f"{x}\n")
        while not os.path.exists(gate):
            time.sleep(0.05)
        return x * x

    group = cloudtrain.function(call, target="local").map([1, 2, 3], max_parallel=2, key="squares")
    wait_for(lambda: len(Path(starts).read_text().split()) == 2 if Path(starts).exists() else False, "two calls")
    kill_clients(group, home)
    Path(gate).touch()
    assert cloudtrain.Sweep.find(group.sweep_id).results() == [1, 4, 9]
    assert sorted(Path(starts).read_text().split()) == ["1", "2", "3"], "each call has run once"
