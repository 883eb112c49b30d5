"""Vertex AI restarts workers: spot loss, crashes, late workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloudtrain.events import MARK, State
from cloudtrain.simulators.http import Fault
from tests.backends.vertex.bench import Bench, ended, log_texts
from tests.conftest import wait_for

pytestmark = pytest.mark.usefixtures("quick")
COUNTING = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"])
mark = folder / f"step-of-{os.environ.get('NODE_RANK', 0)}"  # the folder is the run's, and nodes are not in step
step = int(mark.read_text()) if mark.exists() else 0
leave = []
signal.signal(signal.SIGTERM, lambda *_: leave.append(1))
print("from", step, flush=True)
while step < 40:
    step += 1
    print("step", step, flush=True)
    time.sleep(0.1)
    if leave:
        mark.write_text(str(step))
        sys.exit(75)
print("whole", flush=True)
"""


@pytest.mark.parametrize("task", ["workerpool0-0", "workerpool1-0"])
def test_a_spot_loss_is_a_restart_from_the_checkpoint(bench: Bench, task: str):
    plan, bundle = bench.plan(COUNTING, num_nodes=2, resources={"use_spot": True})
    backend = bench.backend()
    handle = backend.submit(plan, bundle)
    wait_for(lambda: log_texts(backend, handle).count("step 5") == 2, "five steps on both nodes")
    bench.simulator.jobs.preempt(handle.rpartition("/")[2], task)
    assert ended(backend, handle).state is State.SUCCEEDED
    lines = list(backend.logs(handle))
    for node in (0, 1):
        own = [line for line in lines if line.node == node]
        assert [line.seq for line in own] == sorted({line.seq for line in own})
        texts = [line.text for line in own if line.rank == node]
        assert texts[0] == "from 0" and texts[-1] == "whole"
        starts = [text for text in texts if text.startswith("from")]
        assert len(starts) == 2 and int(starts[1].split()[1]) >= 5
        steps = [int(text.split()[1]) for text in texts if text.startswith("step")]
        assert steps == list(range(1, 41)), "no step twice, none left out"
    results = [json.loads(line.text[len(MARK) :]) for line in lines if '"kind":"result"' in line.text]
    assert [result["code"] for result in results if result["state"] == "PREEMPTED"] == [75, 75]


def test_a_start_that_was_replaced_brings_nothing_home(bench: Bench):
    """Machines that were thought lost go on behind a network that has healed: a later start has claimed the run."""
    storage = bench.simulator.storage
    script = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"])
signal.signal(signal.SIGTERM, lambda *_: ((folder / "late").write_text("of the replaced one"), sys.exit(75)))
print("up", flush=True)
time.sleep(600)
"""
    plan, bundle = bench.plan(script, "replaced", resources={"use_spot": True}, retry={"max_attempts": 1})
    backend = bench.backend()
    handle = backend.submit(plan, bundle)
    wait_for(lambda: "up" in log_texts(backend, handle), "its first line")
    base = "cloudtrain/replaced"
    assert storage.names("local", f"{base}/epochs/") == [f"{base}/epochs/00000001.json"]
    storage.put("local", f"{base}/epochs/00000002.json", b'{"epoch": 2, "attempt": 1, "token": "of another"}')
    bench.simulator.jobs.preempt(handle.rpartition("/")[2])
    status = ended(backend, handle)
    assert status.state is State.PREEMPTED and "start 2 of this run writes to" in status.reason
    assert f"{base}/checkpoints/late" not in storage.names("local", base)


def test_without_restarts_a_spot_loss_is_preempted(bench: Bench):
    plan, bundle = bench.plan(COUNTING, resources={"use_spot": True}, retry={"max_attempts": 1})
    backend = bench.backend()
    handle = backend.submit(plan, bundle)
    wait_for(lambda: "step 2" in log_texts(backend, handle), "two steps")
    bench.simulator.jobs.preempt(handle.rpartition("/")[2])
    status = ended(backend, handle)
    assert (status.state, status.exit_code) == (State.PREEMPTED, 75)


def test_a_crash_that_may_be_transient_is_tried_again(bench: Bench):
    script = (
        "import os, pathlib\n"
        "mark = pathlib.Path(os.environ['CLOUDTRAIN_CHECKPOINT_DIR'], 'tried')\n"
        "if mark.exists(): print('second'); raise SystemExit\n"
        "mark.touch()\n"
        "print('first', flush=True)\n"
        "os.abort()\n"
    )
    plan, bundle = bench.plan(script, retry={"max_attempts": 2})
    backend = bench.backend()
    handle = backend.submit(plan, bundle)
    assert ended(backend, handle).state is State.SUCCEEDED
    assert log_texts(backend, handle) == ["first", "second"]


def test_machines_that_vanish_without_notice(bench: Bench):
    plan, bundle = bench.plan(COUNTING, num_nodes=2, resources={"use_spot": True})
    backend = bench.backend()
    handle = backend.submit(plan, bundle)
    wait_for(lambda: log_texts(backend, handle).count("step 3") == 2, "three steps on both nodes")
    bench.simulator.jobs.preempt(handle.rpartition("/")[2], "workerpool1-0", notice=False)
    assert ended(backend, handle).state is State.SUCCEEDED
    assert log_texts(backend, handle, follow=True).count("whole") == 2


def test_the_first_node_waits_until_the_others_have_brought_their_results(bench: Bench, tmp_path: Path):
    script = (
        "import os, pathlib\n"
        "if os.environ['RANK'] == '1':\n"
        "    for n in range(40): pathlib.Path(os.environ['CLOUDTRAIN_OUTPUT_DIR'], f'{n}.bin').write_bytes(os.urandom(1 << 18))\n"
    )
    plan, bundle = bench.plan(script, num_nodes=2)
    bench.simulator.faults.append(Fault("POST", r"^/upload/.*outputs", 200, times=40, delay_s=0.1))
    backend = bench.backend()
    handle = backend.submit(plan, bundle)
    assert ended(backend, handle).state is State.SUCCEEDED
    into = backend.fetch(handle, tmp_path / "out")
    assert len(list((into / "outputs").iterdir())) == 40


def test_workers_that_come_late_are_waited_for(bench: Bench):
    bench.simulator.behavior.worker_late_s = 3.0
    plan, bundle = bench.plan("print('up')", num_nodes=2)
    backend = bench.backend()
    handle = backend.submit(plan, bundle)
    assert ended(backend, handle).state is State.SUCCEEDED
    assert log_texts(backend, handle) == ["up", "up"]


def test_a_source_that_is_not_what_its_name_says(bench: Bench):
    plan, bundle = bench.plan("print('never')")
    backend = bench.backend()
    bench.simulator.storage.put("local", plan.request["source"]["object"], b"something else")
    handle = backend.submit(plan, bundle)
    status = ended(backend, handle)
    assert (status.state, status.exit_code) == (State.FAILED, 78)
    assert any("cannot be fetched" in line.text for line in backend.logs(handle))
