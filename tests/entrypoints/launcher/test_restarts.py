"""retry.restarts: ranks are started again on the same nodes, where the cause may pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launcher import manifest as manifests
from launcher import restarts
from launcher.loop import Loop
from launcher.world.channel import Listener
from launcher.world.cluster import Cluster
from launcher.world.coordinator import Coordinator

from cloudtrain.backends.manifest import Manifest
from cloudtrain.errors import BadJob
from cloudtrain.job.job import Job
from cloudtrain.testing.clock import VirtualClock
from tests.entrypoints.launcher.world.test_channel import log_to
from tests.entrypoints.launching import CLEAN, Attempt
from tests.stores import S3, running

PAGE = Path(__file__).parents[3] / "docs" / "how" / "nodes.md"
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n'
# A row of the page -> wait statuses of a rank and the last lines that it printed.
ENDS = {
    "SIGSEGV, SIGABRT, SIGBUS, SIGILL, SIGKILL": [(11, ""), (6, ""), (7, ""), (4, ""), (9, ""), (139 << 8, "")],
    "SIGTERM, SIGINT": [(15, ""), (2, ""), (143 << 8, "")],
    "an error of NCCL or gloo": [
        (1 << 8, "[rank1]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:77, remote process exited\n"
         "[rank1]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting.\n"),
        (1 << 8, "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0.\n"),
        (1 << 8, TRACEBACK + "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer\n"),
    ],
    "CUDA: uncorrectable ECC or NVLink error, busy device": [
        (1 << 8, TRACEBACK + "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\n"),
        (1 << 8, TRACEBACK + "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution\n"),
        (1 << 8, TRACEBACK + "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable\n"),
    ],
    "CUDA: out of memory, illegal memory access": [
        (1 << 8, TRACEBACK + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"),
        (1 << 8, TRACEBACK + "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"),
    ],
    "a connection that was reset or closed": [
        (1 << 8, TRACEBACK + "ConnectionResetError: [Errno 104] Connection reset by peer\n"),
        (1 << 8, TRACEBACK + "BrokenPipeError: [Errno 32] Broken pipe\n"),
    ],
    "another error of the script": [
        (1 << 8, TRACEBACK + "ValueError: math domain error\n"),
        (1 << 8, "NCCL WARN socket: Connection reset by peer\n" + TRACEBACK + "KeyError: 'x'\n"),
        (1 << 8, "Broken pipe\n"),
        (3 << 8, ""),
    ],
}  # fmt: skip


def test_the_page_has_the_causes():
    rows = ["| a rank ends by | restarted |", "| --- | --- |"]
    for name, ends in ENDS.items():
        [passes] = {restarts.may_pass(status, printed) for status, printed in ends}
        rows.append(f"| {name} | {'yes' if passes else 'no'} |")
    assert "\n".join(rows) in PAGE.read_text()


def test_a_world_that_starts_again_has_a_new_port_and_its_number():
    loop, worlds, lines = Loop(VirtualClock()), [], []
    plan = manifests.decode(Manifest("run", 1, ("train.py",), 1, 1, restarts=1).encode())
    listener = Listener(worlds.append, lambda _: None, lines.append, log_to(lines), restart=lambda: made.ready())
    made = Coordinator(loop, plan, Cluster(master_port=1234), "", listener, 300.0)
    made.ready()
    for _ in range(2):
        made.fail(0, 139, 0.0, "rank 0 was killed", True)
    assert [world.restarts for world in worlds] == [0, 1] and worlds[0].master_port != worlds[1].master_port
    assert lines[0] == "restart 1 of 1 on the same nodes: rank 0 was killed"
    assert lines[1].reason == "rank 0 was killed; after 1 restart it ended with: rank 0 was killed"
    made.close()


def test_roles_are_refused():
    roles = {"trainer": {"entrypoint": "a.py"}, "data": {"run": "true"}}
    with pytest.raises(BadJob, match=r"retry.restarts: cannot be combined with roles"):
        Job(roles=roles, retry={"restarts": 1})


SCRIPT = """\
import os, signal, sys
count, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
print("start", count, os.environ["TORCHELASTIC_MAX_RESTARTS"], "TORCHELASTIC_RUN_ID" in os.environ, flush=True)
if int(count) < FAILS:
    if rank == "1":
        os.kill(os.getpid(), signal.SIGSEGV)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a rank that waits in a collective
    signal.pause()
"""


@pytest.mark.parametrize(("nodes", "processes"), [(1, 2), (2, 1)])
def test_a_killed_rank_is_started_again_with_the_others(tmp_path, nodes: int, processes: int):
    script = SCRIPT.replace("FAILS", "2")
    with Attempt(tmp_path, script, nodes=nodes, processes=processes, restarts=2) as attempt:
        assert attempt.run() == [0] * nodes
        assert attempt.texts(1, nodes - 1) == [f"start {count} 2 False" for count in range(3)]
        assert attempt.texts(0)[-1] == "start 2 2 False"  # before, it may be killed while it prints
        reasons = [event["reason"] for event in attempt.events("alarm")]
    of = "node 1: " if nodes == 2 else ""
    assert reasons == [
        f"restart {count} of 2 on the same nodes: {of}rank 1 was killed by signal 11 (SIGSEGV)" for count in (1, 2)
    ]


def test_what_does_not_pass_ends_with_the_first_cause(tmp_path):
    with Attempt(tmp_path, SCRIPT.replace("FAILS", "9"), processes=2, restarts=1) as attempt:
        assert attempt.run() == [139]
        status = attempt.status()
    first = "rank 1 was killed by signal 11 (SIGSEGV)"
    assert status["reason"] == f"{first}; after 1 restart it ended with: {first}"


def test_an_exception_of_the_script_is_restarted_only_where_the_job_says_so(tmp_path):
    script = "import os\nprint('start', flush=True)\nassert os.environ['TORCHELASTIC_RESTART_COUNT'] == '1'\n"
    for restart_on, starts, code in (("transient", 1, 1), ("any", 2, 0)):
        folder = tmp_path / restart_on
        with Attempt(folder, script, restarts=1, restart_on=restart_on) as attempt:
            assert attempt.run() == [code]
            assert attempt.texts(0).count("start") == starts


EPOCHS = """\
import os, signal, time
print("epoch", os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["CLOUDTRAIN_EPOCH"], flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] < "2":
    os.kill(os.getpid(), signal.SIGBUS)
"""


def test_each_restart_is_a_start_of_its_own_in_the_output(tmp_path):
    with running(S3) as s3:
        with Attempt(tmp_path, EPOCHS, restarts=2, output="s3://bucket/home", environ=s3.environ) as attempt:
            assert attempt.run() == [0], attempt.status()
            assert attempt.texts(0) == ["epoch 0 1", "epoch 1 2", "epoch 2 3"]
        assert {f"home/run/epochs/{number:08d}.json" for number in (1, 2, 3)} <= set(s3.objects())


AS_TORCHRUN = """\
import os
print({name: os.environ.get(f"TORCHELASTIC_{name}") for name in ("RESTART_COUNT", "MAX_RESTARTS")}, flush=True)
os._exit(1 if os.environ["TORCHELASTIC_RESTART_COUNT"] < "2" else 0)
"""


def test_a_restart_is_told_as_torchrun_tells_it(tmp_path):
    (tmp_path / "train.py").write_text(AS_TORCHRUN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--max-restarts=3"]
    theirs = subprocess.run([*torchrun, "train.py"], cwd=tmp_path, env=CLEAN, capture_output=True, text=True)
    assert theirs.returncode == 0, theirs.stderr
    with Attempt(tmp_path / "ours", AS_TORCHRUN, restarts=3, restart_on="any") as attempt:
        assert attempt.run() == [0]
        assert attempt.texts(0) == theirs.stdout.splitlines() and len(attempt.texts(0)) == 3
