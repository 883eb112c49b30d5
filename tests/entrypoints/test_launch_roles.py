"""Several programs in one attempt: real launchers, real services, real signals."""

from __future__ import annotations

import json
import random
import signal
import socket
import time
from pathlib import Path

import pytest
from launcher import processes

from cloudtrain.events import MARK
from cloudtrain.job.job import Job
from cloudtrain.job.roles import to_manifest
from tests.conftest import wait_for
from tests.entrypoints.launching import Attempt

SERVE = """\
import os, signal, socket, sys
def leave(number, frame):
    open(os.path.join(os.environ["CLOUDTRAIN_OUTPUT_DIR"], "left.txt"), "w").write(os.environ["CLOUDTRAIN_ROLE"])
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
server = socket.create_server(("", int(sys.argv[1])))
print("serving", flush=True)
while True:
    connection, _ = server.accept()
    connection.sendall(b"weights")
"""
TRAIN = """\
import os, socket, sys
host, port = sys.argv[1].split(":")
answer = socket.create_connection((host, int(port))).makefile().read(7)
print(answer, os.environ["CLOUDTRAIN_ROLE"], os.environ["CLOUDTRAIN_ROLE_SERVER_ADDRESSES"], flush=True)
"""


def attempt(root: Path, roles: dict, script: str = TRAIN, **keys) -> Attempt:
    job = Job(entrypoint="train.py", source=str(root.parent), roles=roles)
    made = Attempt(
        root, script, nodes=job.num_nodes, roles=to_manifest(job), rank_env=False, files={"serve.py": SERVE}, **keys
    )
    return made.set("service", "FIRST_PAUSE_S", 0.05)


def test_the_main_role_waits_for_a_service_finds_it_and_ends_it(tmp_path, held):
    port = held.getsockname()[1]
    server = {"entrypoint": "serve.py", "args": [str(port)], "ready": f"tcp://:{port}"}
    with attempt(
        tmp_path / "a",
        {"trainer": {"after": ["server"]}, "server": server},
        argv=("train.py", f"{{role.server.host}}:{port}"),
    ) as one:
        assert one.run() == [0, 0]
        assert one.texts(0, 0) == ["weights trainer 127.0.0.1"]
        assert one.texts(0, 1) == ["serving"]
        assert "role trainer starts when server is ready" in one.texts(-1)
        said = [text for text in one.texts(-1) if '"kind":"role"' in text]
        assert [json.loads(text.removeprefix(MARK)) for text in said] == [
            {"kind": "role", "name": "trainer", "waits": ["server"]},
            {"kind": "role", "name": "server", "waits": []},
        ]
        assert (tmp_path / "a/run/outputs/server/left.txt").read_text() == "server", "it had SIGTERM and its grace"
        assert one.status(1)["state"] == "SUCCEEDED"


def test_ranks_count_within_their_role(tmp_path):
    line = "print([os.environ.get(name) for name in ('RANK', 'WORLD_SIZE', 'NODE_RANK', 'CLOUDTRAIN_NUM_NODES')], flush=True)"
    text = f"import os, time\n{line}\ntime.sleep(600 if os.environ['CLOUDTRAIN_ROLE'] == 'judge' else 0)\n"
    judge = {"entrypoint": "train.py", "num_nodes": 2, "processes_per_node": 2, "ready": "line:'4'"}
    with attempt(tmp_path / "a", {"trainer": {"after": ["judge"]}, "judge": judge}, text) as one:
        one.start()
        for rank in range(4):
            one.heard(str([str(rank), "4", str(rank // 2), "2"]), 1 + rank // 2)
        assert one.wait() == [0, 0, 0]


def test_a_service_that_ends_is_restarted_without_what_it_left_and_then_ends_the_run(tmp_path):
    server = {
        "run": "kill -0 $(cat left) && echo left; setsid sleep 600 & echo $! > left; echo started; echo the end; exit 7",
        "restart": 2,
    }
    with attempt(tmp_path / "a", {"trainer": {}, "server": server}, "import time\ntime.sleep(600)\n") as one:
        assert one.run() == [7, 7]
        assert one.texts(0, 1).count("started") == 3 and "left" not in one.texts(0, 1)
        reason = 'node 1: role server exited with code 7 after 2 restarts; its last line: "the end"'
        assert (one.status(0)["state"], one.status(0)["reason"], one.status(0)["failed_rank"]) == (
            "FAILED",
            reason,
            None,
        )
        assert one.left() == []


def test_the_runs_code_is_the_main_roles_also_before_a_service_is_ready(tmp_path):
    roles = {"trainer": {}, "server": {"run": "exec sleep 600", "ready": "line:never"}}
    with attempt(tmp_path / "a", roles, "raise SystemExit(5)") as one:
        assert one.run() == [5, 5]
        assert one.status(1)["reason"] == "node 0: rank 0 exited with code 5"


def test_a_stop_ends_a_main_role_that_waits(tmp_path):
    roles = {"trainer": {"after": ["server"]}, "server": {"run": "echo up; exec sleep 600", "ready": "line:never"}}
    with attempt(tmp_path / "a", roles) as one:
        one.start()
        one.heard("up", 1)
        one.launchers[0].send_signal(signal.SIGTERM)
        assert one.wait() == [75, 75]
        assert one.status(0)["state"] == "PREEMPTED" and one.texts(0, 0) == []


def test_a_port_that_is_taken_ends_the_run_by_its_name(tmp_path):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        roles = {
            "trainer": {"after": ["server"]},
            "server": {"run": "sleep 600", "ports": [port], "ready": "line:never"},
        }
        with attempt(tmp_path / "a", roles) as one:
            assert one.run() == [78, 78]
            assert f"port {port} is not free" in one.status(0)["reason"]


SEEDS = [*range(10), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(10, 100))]


@pytest.mark.parametrize("seed", SEEDS)
def test_whoever_is_killed_whenever_nothing_is_left_and_the_end_is_the_one_promised(tmp_path, seed: int):
    """A killed service is restarted; a killed rank of the main role ends the run with its code, a killed launcher as LOST."""
    draw = random.Random(seed)
    node, who, after_s = draw.choice((0, 1)), draw.choice(("rank", "supervisor", "guard")), draw.random()
    starts = tmp_path / "a/run/outputs/server/starts"
    server = {"run": 'echo up >> "$CLOUDTRAIN_OUTPUT_DIR/starts"; echo up; exec sleep 600', "ready": "line:up"}
    script = (
        f"import time\nprint('up', flush=True)\nwhile open({str(starts)!r}).read() != 'up\\nup\\n': time.sleep(0.05)\n"
    )
    with attempt(tmp_path / "a", {"trainer": {"after": ["server"]}, "server": server}, script) as one:
        one.start()
        one.heard("up", node)
        time.sleep(after_s)
        victim = one.guard(node) if who == "guard" else one.supervisor(node)
        if who == "rank":
            victim = int(Path(f"/proc/{victim}/task/{victim}/children").read_text().split()[0])
        processes.kill(victim, signal.SIGKILL)
        codes = one.wait()
        if who == "rank":
            assert codes == ([0, 0] if node == 1 else [137, 137])
        else:
            assert (codes[1 - node], one.status(1 - node)["state"]) == (69, "LOST")
        wait_for(lambda: not one.left(), "the end of every process")  # a killed guard has not waited for the others
