"""Calls of functions as runs: plans, values, exceptions, groups, and what is loaded of whom."""

from __future__ import annotations

import base64
import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import cloudtrain
from cloudtrain.backends.plan import ATTACHED
from cloudtrain.errors import BadRequest, RunFailed
from cloudtrain.events import State, Status
from cloudtrain.functions.function import Function
from cloudtrain.history.store import Store
from cloudtrain.history.trials import SweepHistory
from cloudtrain.nodes.process import Process
from cloudtrain.runs import returned
from cloudtrain.runs.run import Run
from cloudtrain.sweeps.sweep import Sweep
from cloudtrain.testing.memory import MemoryBackend
from tests.conftest import WAIT_S, wait_for
from tests.functions.conftest import scaled
from tests.functions.test_call import Harm
from tests.sweeps.conftest import kill_clients

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
    assert str(replace(plan, notes=())) == f"<Plan {plan.run_id}-a1 on local: 2 nodes, 0 notes>"
    assert str(replace(plan, notes=("a",))) == f"<Plan {plan.run_id}-a1 on local: 2 nodes, 1 note>\nnote: a"
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

    monkeypatch.setattr(Submitter, "plan_job", lambda self, job, extra: (SimpleNamespace(job=job, notes=()), None))
    plan = cloudtrain.function(scaled, target="local", source="git+https://example.com/repo@main").plan(1)
    assert plan.job["source"] == "git+https://example.com/repo@main"


@pytest.mark.parametrize("values", [[5], [5, 6]])
def test_the_calls_of_a_group_share_a_file(home: Path, monkeypatch, values):
    begun: list[dict] = []
    monkeypatch.setattr("cloudtrain.sweeps.sweep.begin", lambda document, folder, **more: begun.append(more["extra"]))
    cloudtrain.function(scaled, target="local").map(values)
    assert {".cloudtrain/call/calls.pkl", ".cloudtrain/call/calls.json"} <= begun[0].keys()
    assert sum(name.endswith(".pkl") for name in begun[0]) == 2, "every node gets all files"


# -- read -------------------------------------------------------------------------------------------------------------


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


class Strict(Exception):
    """An exception that pickle cannot make again, as many are whose constructor takes more than one argument."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")


def test_an_exception_that_cannot_be_loaded_is_read_as_text(ended):
    kept = base64.b64encode(pickle.dumps(Strict("no loss", "step 3"))).decode()
    about = {"type": "Strict", "text": "no loss in step 3", "traceback": "line 3", "pickle": kept}
    failure = ended({"error-1-0.json": json.dumps(about).encode()}, State.FAILED).exception()
    assert repr(failure.__cause__) == "RemoteError('Strict: no loss in step 3')"
    assert failure.__cause__.__notes__ == ["on the node:\nline 3"]
    assert "cannot be read: TypeError" in "".join(failure.__notes__)


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


def test_arrays_and_tensors_come_back_from_files_beside_the_value(census: Path):
    torch = pytest.importorskip("torch")
    import numpy

    captured = torch.arange(210_001.0)[1:].reshape(-1, 7).T

    def call(rows):
        import torch

        captured[0, 0] += 1
        return {
            "rows": rows[::-1],
            "both": (captured, captured),
            "gpu": torch.ones(3),
            "lr": torch.nn.Parameter(captured),
        }

    rows = numpy.arange(100_000).astype("datetime64[s]")
    run = cloudtrain.function(call, target="local").submit(rows)
    value = run.result(WAIT_S)
    assert numpy.array_equal(value["rows"], rows[::-1]) and value["gpu"].tolist() == [1, 1, 1]
    expected = captured.clone()
    expected[0, 0] += 1
    assert torch.equal(value["both"][0], expected) and value["both"][0] is value["both"][1]
    assert value["lr"].requires_grad and torch.equal(value["lr"].detach(), expected)
    value["both"][0].zero_()
    assert run.result()["both"][0].any(), "each reader has its own"
    folder = run.fetch(home_of(run) / "fetched") / "outputs" / "returned"
    assert folder.joinpath("value-1-0.pkl").stat().st_size < 3000 < folder.joinpath("value-1-0.arrays").stat().st_size


def home_of(run: Run) -> Path:
    return Path(run.store.home)


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
