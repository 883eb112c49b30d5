"""limits.stall: an attempt in which nothing happens any more is ended, and its log says where its ranks were."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
from launcher import processes
from launcher.stall import StallDetector
from launcher.usage import Usage
from launcher.world.outcome import IDLE, SILENT, STALLED, ClusterState, Outcome, Start

from cloudtrain.backends.manifest import Manifest
from cloudtrain.events import State
from cloudtrain.runs.planning import spend
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from cloudtrain.testing.clock import VirtualClock
from tests.conftest import WAIT_S, wait_for
from tests.entrypoints.launching import Attempt

# The last rank is stopped, as by a debugger or a broken driver; the others wait for it, as in a collective operation.
HANGING = """\
import os, signal, threading
def last_step():
    if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Event().wait(600)
print("begun", flush=True)
last_step()
"""
LIMIT_S = 10  # long enough for a slow machine to start Python in it


def test_a_stopped_rank_ends_the_attempt_and_all_ranks_say_where_they_are(tmp_path):
    """On one node and on two, which wait for the limit at the same time."""
    with ExitStack() as stack:
        attempts = []
        for nodes in (1, 2):
            attempt = Attempt(tmp_path / str(nodes), HANGING, nodes=nodes, processes=2 // nodes, stall_s=LIMIT_S)
            attempts.append(stack.enter_context(attempt).start())
            for node in range(nodes):
                attempt.heard("begun", node, 2 // nodes)
        for nodes, attempt in enumerate(attempts, 1):
            assert attempt.wait() == [69] * nodes
            for node in range(nodes):
                status = attempt.status(node)
                assert (status["state"], status["exit_code"]) == ("LOST", None)
                assert status["reason"] == f"nothing happened for {LIMIT_S} s (limits.stall)"
            for rank in range(2):
                told = attempt.texts(rank, rank if nodes > 1 else 0)
                assert told[0] == "begun"
                assert any("Fatal Python error: Aborted" in text for text in told)
                assert any("in last_step" in text for text in told), "\n".join(told)
    assert not list(tmp_path.rglob("core*")), "no core is left behind"


def test_the_next_attempt_is_made_and_the_verdict_says_why(tmp_path, home, census):
    project = tmp_path / "project"
    project.mkdir()
    first_only = HANGING.replace("\nlast_step()", '\nif os.environ["CLOUDTRAIN_ATTEMPT"] == "1":\n    last_step()')
    (project / "train.py").write_text(first_only)
    job = {"name": "hangs", "source": str(project), "entrypoint": "train.py", "limits": {"stall": f"{LIMIT_S}s"}}
    run = Submitter(target="local").submit({**job, "retry": {"max_attempts": 2}})
    wait_for(lambda: any(line.text == "begun" for line in run.logs()), "its start")
    once = Submitter(target="local").submit({**job, "name": "once", "retry": {"max_attempts": 1}})
    assert run.wait(WAIT_S).state is State.SUCCEEDED
    assert [attempt.status.state for attempt in run.attempts] == [State.LOST, State.SUCCEEDED]
    assert once.wait(WAIT_S).state is State.LOST
    share = spend.share_of(once.attempts[0], once.store.home)
    assert 0 < share.node_s < WAIT_S and not share.whole_limit, "the launcher reported the end"
    verdict = Run.find(once.run_id).verdict()
    assert verdict is not None and (verdict.label, verdict.where) == ("stalled", "reason")


def test_an_endless_loop_is_retried_and_the_log_has_its_stack(tmp_path, home, census):
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text(
        'import os, time\nprint("begun", flush=True)\ndef never_ends():\n    while True:\n'
        "        sum(range(100_000))\n        time.sleep(0.01)\n"  # busy enough, and cheap
        'if os.environ["CLOUDTRAIN_ATTEMPT"] == "1":\n    never_ends()\n'
    )
    job = {"name": "spins", "source": str(project), "entrypoint": "train.py", "limits": {"max_silence": f"{LIMIT_S}s"}}
    run = Submitter(target="local").submit({**job, "retry": {"max_attempts": 2}})
    assert run.wait(WAIT_S).state is State.SUCCEEDED
    assert [attempt.status.state for attempt in run.attempts] == [State.LOST, State.SUCCEEDED]
    assert run.attempts[0].status.reason == f"no rank printed a line for {LIMIT_S} s (limits.max_silence)"
    assert any("in never_ends" in line.text for line in run.logs())


def gang(nodes: int = 2, stall_s: int | None = 60, idle_s: int | None = None, silence_s: int | None = None):
    """Return the state of a cluster whose nodes have started."""
    from launcher import manifest

    limits = {"stall_s": stall_s, "idle_s": idle_s, "silence_s": silence_s}
    made = ClusterState(manifest.decode(Manifest("run", 1, ("train.py",), nodes, 1, **limits).encode()), 100.0, 100.0)
    for node in range(nodes):
        made.join(node, f"node-{node}", 1)
        made.ready(node)
    assert isinstance(made.decide(0.0), Start)
    return made


@pytest.mark.parametrize(
    ("signs", "stalled"),
    [
        ([(61, 61), (70, 1)], True),  # one waits and nobody speaks: the other may spin in a collective operation
        ([(61, 1), (70, 1)], False),  # all are busy in silence
        ([(5, 61), (70, 70)], False),  # somebody speaks
        ([(61, 61)], False),  # a node that was not heard of yet
        ([(59, 70), (70, 70)], False),
    ],
)
def test_when_nothing_happens(signs, stalled):
    attempt = gang()
    for node, (quiet_s, idle_s) in enumerate(signs):
        attempt.idle(node, quiet_s, idle_s, 0.0)
    assert (attempt.hung == STALLED) is stalled


def test_who_has_ended_waits_for_nothing_and_without_a_limit_nobody_does():
    attempt = gang()
    attempt.idle(0, 99, 1, 0)
    attempt.idle(1, 99, 99, 0)
    attempt.end(1)
    assert not attempt.hung
    without = gang(stall_s=None)
    for node in range(2):
        without.idle(node, 1e6, 1e6, 1e6)
    assert not without.hung


def test_silence_of_all_ranks_ends_an_attempt_whose_processors_are_busy():
    attempt = gang(stall_s=None, silence_s=60)
    attempt.idle(0, 61, 0, 0)
    assert not attempt.hung, "the other node has not reported yet"
    attempt.idle(1, 59, 0, 0)
    assert not attempt.hung, "a rank of it has printed a line"
    attempt.idle(1, 61, 0, 0)
    assert attempt.hung == SILENT
    attempt.stop(SILENT, 0.0)
    for node in range(2):
        attempt.end(node)
    reason = "no rank printed a line for 60 s (limits.max_silence)"
    assert attempt.decide(1.0) == Outcome("LOST", None, "launcher", None, reason)


def test_what_has_stalled_is_lost_once():
    attempt = gang()
    for node in range(2):
        attempt.idle(node, 99, 99, 0)
    attempt.stop(STALLED, 0.0)
    assert not attempt.hung, "it is being ended"
    for node in range(2):
        attempt.end(node)
    assert attempt.decide(1.0) == Outcome("LOST", None, "launcher", None, "nothing happened for 60 s (limits.stall)")


def test_gpus_that_do_nothing_on_any_node_end_the_attempt():
    attempt = gang(stall_s=None, idle_s=60)
    attempt.idle(0, 0, 0, 61)
    assert not attempt.hung, "the other node has not reported yet"
    attempt.idle(1, 0, 0, 1)
    assert not attempt.hung, "it uses its GPUs"
    attempt.idle(1, 0, 0, 60)
    assert attempt.hung == IDLE
    attempt.stop(IDLE, 0.0)
    for node in range(2):
        attempt.end(node)
    assert attempt.decide(1.0) == Outcome(
        "LOST", None, "launcher", None, "the GPUs were not used for 60 s (limits.idle)"
    )


def test_gpus_are_idle_while_none_is_used_and_it_is_reported_once():
    clock = VirtualClock()
    began, usage = clock.monotonic(), Usage(clock)

    def report(at: float, *percents: float) -> str:
        clock.sleep(began + at - clock.monotonic())
        usage.parse(b"".join(b"%d, %d, 100, 1000\n" % (index, percent) for index, percent in enumerate(percents)))
        return usage.idle_alarm()

    assert not report(10, 99, 0) and usage.gpus_idle_s == 0, "one is used"
    assert not report(1800, 4, 0) and usage.gpus_idle_s == 1790
    assert report(1810, 4, 4) == "the GPUs were used less than 5 % for 30 minutes"
    assert not report(1820, 0, 0), "once"
    clock.sleep(1e6)
    assert usage.gpus_idle_s == 1810, "where nothing is reported nothing is known"
    assert not report(1_010_000, 5, 0) and usage.gpus_idle_s == 0
    assert report(1_012_000, 0, 0), "again after it was used"


def test_an_attempt_whose_gpu_is_never_used_ends(tmp_path):
    (tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\ncase $1 in -L) echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-00000000-aaaa)';;\n"
        "*) while echo '0, 1, 9, 99'; do sleep 0.2; done;; esac\n"
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CLOUDTRAIN_GPUS": "0"}
    script = "import time\nwhile True:\n    print('busy, but not there', flush=True)\n    time.sleep(0.1)\n"
    with Attempt(tmp_path / "run", script, environ=environ, idle_s=3, gpus_per_node=1) as attempt:
        assert attempt.run() == [69]
        assert attempt.status(0)["reason"] == "the GPUs were not used for 3 s (limits.idle)"


def test_processor_time_is_a_sign_of_life():
    """Times are given: 0.5 s of work in 10 s are enough, a process that sleeps in them has done nothing."""
    sleeper = subprocess.Popen([sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    try:
        sleeper.stdout.readline()  # it has begun, and does nothing from now on
        stall = StallDetector(100.0, [os.getpid(), sleeper.pid], 0.0)
        assert not stall.look([os.getpid(), sleeper.pid], 5.0), "too early"
        assert stall.look([os.getpid(), sleeper.pid], 10.0)
        until = time.process_time() + 0.5
        while time.process_time() < until:
            pass
        assert stall.look([os.getpid(), sleeper.pid], 20.0)
        assert stall.idle_s(20.0) >= 10.0 and processes.stat(sleeper.pid) is not None
        assert stall.look([os.getpid()], 30.0)
        assert stall.idle_s(30.0) <= 10.0, "of those that run, ours was busy until 20"
    finally:
        sleeper.communicate()
