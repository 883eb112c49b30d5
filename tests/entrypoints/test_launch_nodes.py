"""Several nodes: they start together, end together, and say the same about it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
from launcher.world.channel import SILENCE_S

from tests.conftest import wait_for
from tests.entrypoints.launching import Attempt

SAME = ("state", "exit_code", "by", "failed_rank", "reason")
UP = "import os, time; print('up', flush=True); time.sleep(600)"


def agreed(attempt: Attempt) -> dict:
    """Return what all nodes say; they must say the same."""
    said = [{name: attempt.status(node)[name] for name in SAME} for node in range(len(attempt.folders))]
    assert all(other == said[0] for other in said), said
    assert not attempt.left()
    return said[0]


def test_nodes_start_one_world(tmp_path: Path):
    script = "import json, os; print(json.dumps(dict(os.environ)))"
    with Attempt(tmp_path, script, nodes=3, processes=2, stdin={"token": "the attempt's token"}) as attempt:
        assert attempt.run() == [0, 0, 0]
        seen = {rank: json.loads(attempt.texts(rank, rank // 2)[0]) for rank in range(6)}
        for rank, env in seen.items():
            assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["NODE_RANK"], env["GROUP_RANK"]) == (
                str(rank),
                "6",
                str(rank % 2),
                str(rank // 2),
                str(rank // 2),
            )
        assert len({env["MASTER_PORT"] for env in seen.values()}) == 1
        for node in range(3):
            (world,) = attempt.events("world", node)
            assert (world["nodes"], world["processes"], world["world_size"], world["node_rank"]) == (3, 2, 6, node)
            assert world["hostname"] == socket.gethostname() and world["gpus"] == 0 and world["pid"] > 0
        assert agreed(attempt)["state"] == "SUCCEEDED"
        assert "control" in attempt.status(0) and "control" not in attempt.status(1)


@pytest.mark.train
def test_torch_reduces_over_two_nodes_of_two(tmp_path: Path):
    script = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([float(2 ** dist.get_rank())])
dist.all_reduce(value)
print("rank", dist.get_rank(), "of", dist.get_world_size(), "sum", value.item())
dist.destroy_process_group()
"""
    with Attempt(tmp_path, script, nodes=2, processes=2) as attempt:
        assert attempt.run() == [0, 0], attempt.texts(0) + attempt.texts(2, 1)
        for rank in range(4):
            assert f"rank {rank} of 4 sum 15.0" in attempt.texts(rank, rank // 2)


@pytest.mark.parametrize("node", [0, 1])
def test_the_first_failure_ends_all_nodes_with_its_own_code(tmp_path: Path, node: int):
    script = f"""
import os, signal, sys, time
def late(*_): os._exit(99)       # what others exit with afterwards does not matter
signal.signal(signal.SIGTERM, late)
print("up", flush=True)
if os.environ["NODE_RANK"] == "{node}" and os.environ["LOCAL_RANK"] == "1":
    sys.exit(23)
time.sleep(600)
"""
    with Attempt(tmp_path, script, nodes=2, processes=2) as attempt:
        assert attempt.run() == [23, 23]
        rank = 2 * node + 1
        assert agreed(attempt) == {
            "state": "FAILED",
            "exit_code": 23,
            "by": "script",
            "failed_rank": rank,
            "reason": f"node {node}: rank {rank} exited with code 23",
        }
        assert attempt.status(node)["failed_at"] and not attempt.status(1 - node)["failed_at"]


def test_of_two_failures_the_earlier_one_counts(tmp_path: Path):
    """Node 1 fails first; the death of its connection then fails node 0's rank, which node 0 hears of at once."""
    script = """
import os, sys, time
flag = os.environ["CLOUDTRAIN_RUN_DIR"] + "/failed"
if os.environ["RANK"] == "1":
    open(flag, "w").close()
    os._exit(11)
while not os.path.exists(flag): time.sleep(0.001)
time.sleep(0.05)
os._exit(12)
"""
    with Attempt(tmp_path, script, nodes=2) as attempt:
        # Node 1's launcher is slow to tell: it is stopped for a moment, and its rank's end is older all the same.
        assert attempt.run() == [11, 11]
        assert agreed(attempt)["failed_rank"] == 1


def test_a_node_that_is_done_waits_for_the_others(tmp_path: Path):
    script = """
import os, time
gate = os.environ["CLOUDTRAIN_RUN_DIR"] + "/gate"
if os.environ["RANK"] == "0":
    print("up", flush=True)
    while not os.path.exists(gate): time.sleep(0.01)
print("done", flush=True)
"""
    with Attempt(tmp_path, script, nodes=2) as attempt:
        attempt.start().heard("done", node=1)
        attempt.heard("up")
        time.sleep(0.3)
        assert attempt.status(1)["state"] == "RUNNING" and attempt.launchers[1].poll() is None
        (tmp_path / "run" / "gate").touch()
        assert attempt.wait() == [0, 0]
        assert agreed(attempt)["state"] == "SUCCEEDED"


@pytest.mark.parametrize("node", [0, 1])
def test_a_request_to_one_node_stops_all(tmp_path: Path, node: int):
    with Attempt(tmp_path, UP, nodes=2, processes=2) as attempt:
        attempt.start()
        for each in (0, 1):
            attempt.heard("up", each, 2)
        attempt.launchers[node].send_signal(signal.SIGTERM)
        assert attempt.wait() == [75, 75]
        assert agreed(attempt)["state"] == "PREEMPTED"


def test_node_0_may_be_taken_away_first_after_a_request(tmp_path: Path):
    script = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    with Attempt(tmp_path, script, nodes=2, grace_s=600) as attempt:
        attempt.start()
        for each in (0, 1):
            attempt.heard("up", each)
        attempt.launchers[0].send_signal(signal.SIGTERM)
        wait_for(lambda: attempt.status(1)["state"] == "STOPPING", "STOPPING")
        os.kill(attempt.supervisor(0), signal.SIGKILL)
        assert attempt.wait() == [69, 75]
        assert attempt.status(1)["state"] == "PREEMPTED"


def test_cancelling_one_node_cancels_all(tmp_path: Path):
    with Attempt(tmp_path, UP, nodes=2) as attempt:
        attempt.start()
        for each in (0, 1):
            attempt.heard("up", each)
        (attempt.folders[1] / "cancel").touch()
        assert attempt.wait() == [75, 75]
        assert agreed(attempt)["state"] == "CANCELLED"


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("victim", ["supervisor", "guard"])
def test_a_lost_node_ends_the_others(tmp_path: Path, node: int, victim: str):
    with Attempt(tmp_path, UP, nodes=2, processes=2) as attempt:
        attempt.start()
        for each in (0, 1):
            attempt.heard("up", each, 2)
        os.kill(getattr(attempt, victim)(node), signal.SIGKILL)
        codes = attempt.wait()
        assert codes[1 - node] == 69
        wait_for(lambda: not attempt.left(), "the end of every process")
        assert attempt.status(0)["state"] == attempt.status(1)["state"] == "LOST"
        assert f"node {node}" in attempt.status(1 - node)["reason"] and "lost" in attempt.status(1 - node)["reason"]


def test_a_node_that_says_nothing_is_lost(tmp_path: Path):
    with Attempt(tmp_path, UP, nodes=2) as attempt:
        attempt.start()
        for each in (0, 1):
            attempt.heard("up", each)
        frozen = attempt.supervisor(1)
        os.kill(frozen, signal.SIGSTOP)
        wait_for(lambda: attempt.launchers[0].poll() is not None, "node 0's end")
        assert "no message arrived for 10 s" in attempt.status(0)["reason"]
        os.kill(frozen, signal.SIGCONT)
        attempt.wait()
        assert attempt.status(1)["state"] == "LOST"
        assert not attempt.left()


def test_nodes_that_stand_still_together_lose_nobody(tmp_path: Path):
    """A machine was paused. Node 0 goes on first, and has heard nothing of the other one for longer than is allowed."""
    script = """
import os, time
print("up", flush=True)
while not os.path.exists(os.environ["CLOUDTRAIN_RUN_DIR"] + "/gate"): time.sleep(0.01)
"""
    with Attempt(tmp_path, script, nodes=2) as attempt:
        attempt.start()
        for each in (0, 1):
            attempt.heard("up", each)
        frozen = [attempt.supervisor(1), attempt.supervisor(0)]
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(SILENCE_S + 1)
        for pid in reversed(frozen):
            os.kill(pid, signal.SIGCONT)
            time.sleep(1)
        (tmp_path / "run" / "gate").touch()
        assert attempt.wait() == [0, 0], attempt.status(0)


def test_what_one_node_refuses_ends_all(tmp_path: Path):
    with Attempt(tmp_path, "print('never')", nodes=2) as attempt:
        (attempt.folders[1] / "source" / "train.py").unlink()
        assert attempt.run() == [78, 78]
        assert agreed(attempt)["reason"] == "node 1: the source has no file train.py"
        assert not attempt.texts(0) and not attempt.texts(1, 1)


def test_node_0_waits_a_moment_to_tell_a_late_node(tmp_path: Path):
    with Attempt(tmp_path, "print('never')", nodes=2) as attempt:
        (attempt.folders[0] / "source" / "train.py").unlink()
        attempt.start(0)
        wait_for(lambda: (attempt.status() or {}).get("control"), "node 0's address")
        attempt.start(1)
        assert attempt.wait() == [78, 78]
        assert agreed(attempt)["reason"] == "node 0: the source has no file train.py"


def test_too_few_nodes_are_no_capacity(tmp_path: Path):
    """The next attempt may find them: it is not refused. With min_nodes fewer begin, and are numbered anew."""
    script = "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['NODE_RANK'])"
    late = {"CLOUDTRAIN_JOIN_TIMEOUT_S": "15"}  # both attempts wait at the same time
    with (
        Attempt(tmp_path / "enough", script, nodes=3, min_nodes=2, environ=late) as attempt,
        Attempt(tmp_path / "too-few", UP, nodes=3, min_nodes=3, environ=late) as ended,
    ):
        attempt.start(0, 2)
        ended.start(0, 2)
        assert attempt.wait() == [0, 0]
        assert attempt.texts(0) == ["0 2 0"] and attempt.texts(1, node=2) == ["1 2 1"]
        (world,) = attempt.events("world", 2)
        assert (world["nodes"], world["node_rank"], world["world_size"]) == (2, 1, 2)
        assert attempt.status(2)["world_size"] == 2
        assert ended.wait() == [75, 75]
        assert ended.status(0)["state"] == "PREEMPTED"
        assert ended.status(0)["reason"] == "2 of 3 nodes joined within 15 s; missing: 1"


def test_a_node_that_cannot_reach_node_0_says_so(tmp_path: Path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        environ = {"CLOUDTRAIN_JOIN_TIMEOUT_S": "1", "CLOUDTRAIN_CONTROL": f"127.0.0.1:{closed.getsockname()[1]}"}
        with Attempt(tmp_path, UP, nodes=2, environ=environ) as attempt:
            attempt.environment = lambda rank, made=attempt.environment: made(0) | {"CLOUDTRAIN_NODE_RANK": "1"}
            assert attempt.start(0).wait() == [78]
            assert "node 0 was not reached at 127.0.0.1" in attempt.status(0)["reason"]


def test_a_node_that_cannot_connect_says_where_and_why(tmp_path: Path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{closed.getsockname()[1]}"
        with Attempt(tmp_path, UP, nodes=2, environ={"CLOUDTRAIN_CONTROL": where}) as attempt:
            attempt.set("world/channel", "WAIT_LINE_S", 0.0)
            attempt.environment = lambda rank, made=attempt.environment: made(0) | {"CLOUDTRAIN_NODE_RANK": "1"}
            attempt.start(0)
            head = f"node 1 does not reach node 0 at {where}: Connection refused; trying for "
            line = wait_for(
                lambda: next((text for text in attempt.texts(-1) if text.startswith(head)), None), "its line"
            )
            assert "(limits.max_wait)" in line and "cloudtrain doctor TARGET" in line


def test_how_long_others_are_waited_for(tmp_path: Path):
    """docs/watching.md: `limits.max_wait`, where it is not set 30 minutes, and 5 with min_nodes."""
    waits = {"not set": ({}, 1800), "fewer": ({"min_nodes": 1}, 300), "set": ({"join_s": 7200}, 7200)}
    for name, (manifest, wait_s) in waits.items():
        with Attempt(tmp_path / name, UP, nodes=2, **manifest).set("world/channel", "WAIT_LINE_S", 0.0) as attempt:
            attempt.start(0)
            said = re.compile(r"1 of 2 nodes have joined; waiting (\d+) s more for node 1 \(limits.max_wait\)")
            left_s = wait_for(lambda: next(filter(None, map(said.fullmatch, attempt.texts(-1))), None), "node 0's line")
            assert wait_s / 2 < int(left_s[1]) <= wait_s


@pytest.mark.skipif(os.geteuid() != 0, reason="only root shows a process another /etc/resolv.conf")
def test_a_pod_asks_for_node_0_by_its_whole_name(tmp_path: Path):
    """Without its last dot a name is looked up below each search domain first. No name server answers here."""
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\nsearch team.svc.cluster.local svc.cluster.local\n")
    environ = {"JOB_COMPLETION_INDEX": "1", "CLOUDTRAIN_NUM_NODES": "2", "MASTER_ADDR": "run-a1-0.run-a1"}
    with Attempt(tmp_path, UP, nodes=2, environ={**environ, "CLOUDTRAIN_JOIN_TIMEOUT_S": "1"}) as attempt:
        shown, attempt.python = attempt.python, str(tmp_path / "with-its-dns")
        mount = f"mount --bind {tmp_path}/resolv.conf /etc/resolv.conf"
        Path(attempt.python).write_text(
            f'#!/bin/sh\nexec unshare --mount sh -c \'{mount}; exec "$0" "$@"\' {shown} "$@"\n'
        )
        os.chmod(attempt.python, 0o755)
        variables = attempt.environment(0)
        del variables["CLOUDTRAIN_NODE_RANK"]  # a pod's own variables count then
        attempt.environment = lambda _: variables
        assert attempt.start(0).wait() == [75]
        reason = attempt.status(0)["reason"]
        assert "node 0 was not reached at run-a1-0.run-a1.team.svc.cluster.local.:29380 within 1 s" in reason


def test_only_who_knows_the_token_may_join(tmp_path: Path):
    with Attempt(tmp_path, "print('ran')", nodes=2, stdin={"token": "right and secret"}) as attempt:
        attempt.start(0)
        control = wait_for(lambda: (attempt.status() or {}).get("control"), "node 0's address")
        with socket.create_connection((control["host"], control["port"])) as stranger:
            challenge = stranger.makefile().readline()
            assert json.loads(challenge)["kind"] == "challenge"
            hello = {
                "kind": "hello",
                "node": 1,
                "hostname": "x",
                "processes": 1,
                "attempt": "run-a1",
                "nonce": "n",
                "proof": "guess",
            }
            stranger.sendall(json.dumps(hello).encode() + b"\n")
            answer = json.loads(stranger.makefile().readline())
            assert answer["reason"] == "node 1 has a wrong token"
        with socket.create_connection((control["host"], control["port"])) as noise:
            noise.sendall(b"GET / HTTP/1.1\r\n\r\n")
            noise.makefile().read()
        attempt.start(1)
        assert attempt.wait() == [0, 0]
        assert not [line for node in (0, 1) for line in attempt.lines(node) if "right and secret" in line[3]]


def test_a_node_of_another_attempt_may_not_join(tmp_path: Path):
    with (
        Attempt(tmp_path / "old", UP, nodes=2, environ={"CLOUDTRAIN_JOIN_TIMEOUT_S": "30"}) as old,
        Attempt(tmp_path / "new", UP, nodes=2) as new,
    ):
        new.manifest = type(new.manifest)(**{**new.manifest.to_dict(), "attempt": 2})
        new.pieces = new.manifest.encode()
        new.start(0)
        control = wait_for(lambda: (new.status() or {}).get("control"), "node 0's address")
        old.environ["CLOUDTRAIN_CONTROL"] = f"{control['host']}:{control['port']}"
        old.environment = lambda rank, made=old.environment: made(0) | {"CLOUDTRAIN_NODE_RANK": "1"}
        assert old.start(0).wait() == [78]
        assert "belongs to attempt run-a1, not to run-a2" in old.status(0)["reason"]
        new.launchers[0].send_signal(signal.SIGTERM)
        assert new.wait() == [75]


def test_a_request_before_all_have_joined_ends_the_wait(tmp_path: Path):
    with Attempt(tmp_path, UP, nodes=2) as attempt:
        attempt.start(0)
        wait_for(lambda: (attempt.status() or {}).get("control"), "node 0's address")
        attempt.launchers[0].send_signal(signal.SIGTERM)
        assert attempt.wait() == [75]
        assert attempt.status()["reason"] == "stopped by SIGTERM before the ranks started"
