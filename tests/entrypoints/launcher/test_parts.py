"""The smaller parts of a node: status, GPUs, inputs, usage, ports, Accelerate configurations, processes."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from launcher import processes, result, status
from launcher.environment import input_variable
from launcher.errors import Refused
from launcher.output.written import NewCheckpoints
from launcher.prepare import accelerate_config, gpus, inputs
from launcher.usage import Usage
from launcher.world import ports
from launcher.world.outcome import Outcome

from tests.conftest import wait_for
from tests.entrypoints.launching import Attempt


def test_times_are_utc_with_six_digits():
    assert status.stamp(0.0) == "1970-01-01T00:00:00.000000Z"
    assert status.stamp(1763637265.9999996).startswith("2025-11-20T11:14:25.99999")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", status.now())


def test_the_status_is_replaced_whole(tmp_path: Path):
    said = status.Status(str(tmp_path), os.getpid())
    said.set(state="RUNNING")
    torn = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            if not status.read(str(tmp_path)):
                torn.append(1)

    reader = threading.Thread(target=look)
    reader.start()
    for number in range(300):
        said.set(reason="x" * number)
    stop.set()
    reader.join()
    assert not torn and os.listdir(tmp_path) == ["status.json"]
    assert said.cancelled is False
    (tmp_path / "cancel").mkdir()
    assert said.cancelled is True


def test_on_a_full_disk_the_status_is_written_over_the_former_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said = status.Status(str(tmp_path), os.getpid())
    said.set(state="RUNNING", reason="r" * 500)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    said.set(state="SUCCEEDED", reason="")
    assert status.read(str(tmp_path))["state"] == "SUCCEEDED"


def smi(folder: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Put a program named nvidia-smi on PATH that lists so many GPUs."""
    lines = "".join(f"echo 'GPU {n}: NVIDIA H100 80GB HBM3 (UUID: GPU-{n:08d}-aaaa)'\n" for n in range(count))
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{lines}")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("present", "asked", "chosen", "environ", "fine"),
    [
        (4, 4, None, {}, True),
        (4, 2, None, {}, False),
        (2, 4, None, {}, False),
        (4, 2, "2,3", {}, True),
        (4, 2, "3,4", {}, False),
        (4, 2, None, {"CUDA_VISIBLE_DEVICES": "0,1"}, True),
        (4, 4, None, {"CUDA_VISIBLE_DEVICES": "0,1"}, False),
        (2, 1, "GPU-00000001", {}, True),
        (2, 1, "GPU-00000009", {}, False),
        (4, 2, "", {}, False),
        (0, 1, None, {}, False),
    ],
)
def test_the_gpus_that_were_asked_for_have_to_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, present, asked, chosen, environ, fine
):
    smi(tmp_path, monkeypatch, present)
    if fine:
        gpus.check(asked, chosen, environ)
    else:
        with pytest.raises(Refused, match=f"{asked} GPUs per node were requested"):
            gpus.check(asked, chosen, environ)


def test_ranks_get_the_gpus_of_their_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "bin").mkdir()
    smi(tmp_path / "bin", monkeypatch, 4)
    script = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ.get('ACCELERATE_USE_CPU'))"
    with Attempt(
        tmp_path, script, gpus_per_node=2, environ={"CLOUDTRAIN_GPUS": "2,3", "PATH": os.environ["PATH"]}
    ) as attempt:
        assert attempt.run() == [0]
        assert attempt.texts(0) == ["2,3 None"]


def test_inputs_that_are_missing_are_told_all_at_once(tmp_path: Path):
    (tmp_path / "here").touch()
    with pytest.raises(Refused) as refused:
        inputs.resolve(
            {"a": {"uri": str(tmp_path / "here")}, "b": {"uri": "file:///absent/b"}, "c": {"uri": "hdfs://x/y"}},
            str(tmp_path),
            None,
        )
    assert str(refused.value) == (
        "the input b does not exist on this node: /absent/b; "
        "the input c is at hdfs://x/y, and a node can read only folders, s3://, gs:// and az://"
    )


def test_names_of_inputs_become_variables():
    assert [input_variable(name) for name in ("train", "my-data.v2", "ä b")] == [
        "CLOUDTRAIN_INPUT_TRAIN",
        "CLOUDTRAIN_INPUT_MY_DATA_V2",
        "CLOUDTRAIN_INPUT_Ä_B",
    ]


def test_usage_counts_processors_memory_and_gpus():
    usage = Usage()
    code = """
import time
held = bytearray(50_000_000)
end = time.process_time() + 0.3
while time.process_time() < end:
    pass
print("", flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        found = usage.sample()
        assert found["processes"] >= 1 and found["rss_bytes"] > 50_000_000 and 0 < found["cpu_percent"] < 10000
        assert "gpus" not in found
        usage.parse(b"1, 87, 40211, 81559\n0, 3, 10, 815")
        usage.parse(b"59\n[N/A], x\n")
        assert usage.sample()["gpus"] == [
            {"index": 0, "percent": 3.0, "memory_bytes": 10 << 20, "memory_total_bytes": 81559 << 20},
            {"index": 1, "percent": 87.0, "memory_bytes": 40211 << 20, "memory_total_bytes": 81559 << 20},
        ]
        child.stdin.close()


def test_a_held_port_is_given_to_nobody_but_who_asks_for_it_by_number():
    held = [ports.hold() for _ in range(40)]
    numbers = {one.getsockname()[1] for one in held}
    assert len(numbers) == 40
    others = []
    for _ in range(500):
        other = socket.socket()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        others.append(other)
        assert other.getsockname()[1] not in numbers
    for number in numbers:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", number))
        rank = socket.create_server(("127.0.0.1", number))  # it sets SO_REUSEADDR, as TCPStore does
        socket.create_connection(("127.0.0.1", number)).close()
        rank.close()
    for one in (*held, *others):
        one.close()


@pytest.mark.train
def test_torch_listens_on_held_ports_forty_at_once():
    code = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from launcher.world import ports
from torch.distributed import TCPStore
held = [ports.hold() for _ in range(40)]
done = []
def meet(port):
    stores = [TCPStore("127.0.0.1", port, 2, first, wait_for_workers=False) for first in (True, False)]
    stores[0].set("port", str(port))
    done.append(stores[1].get("port") == str(port).encode())
threads = [threading.Thread(target=meet, args=(one.getsockname()[1],)) for one in held]
[t.start() for t in threads]; [t.join() for t in threads]
print(done.count(True))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(ports.__file__).parents[2])], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["40"]


ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: {kind}
mixed_precision: bf16
num_machines: 1
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
"""


@pytest.mark.train
def test_an_accelerate_configuration_becomes_what_its_own_launcher_would_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "bin").mkdir()
    smi(tmp_path / "bin", monkeypatch, 2)
    files = {"fsdp.yaml": ACCELERATE.format(kind="FSDP")}
    script = "import json, os; print(json.dumps(dict(os.environ)))"
    with Attempt(
        tmp_path / "a", script, processes=2, files=files, parallelism={"accelerate_config": "fsdp.yaml"},
        gpus_per_node=2, environ={"CLOUDTRAIN_GPUS": "0,1", "PATH": os.environ["PATH"]},
    ) as attempt:  # fmt: skip
        assert attempt.run() == [0], attempt.texts(-1)
        env = json.loads(attempt.texts(1)[0])
        assert (env["ACCELERATE_MIXED_PRECISION"], env["ACCELERATE_USE_FSDP"], env["FSDP_VERSION"]) == (
            "bf16",
            "true",
            "2",
        )
        assert (env["FSDP_AUTO_WRAP_POLICY"], env["WORLD_SIZE"], env["RANK"]) == ("TRANSFORMER_BASED_WRAP", "2", "1")


@pytest.mark.train
def test_an_accelerate_configuration_that_cannot_be_used_is_refused(tmp_path: Path):
    files = {"fsdp.yaml": ACCELERATE.format(kind="FSDP"), "wrong.yaml": "distributed_type: [nonsense\n"}
    with Attempt(
        tmp_path / "b", "", processes=2, files=files, parallelism={"accelerate_config": "fsdp.yaml"}
    ) as attempt:
        assert attempt.run() == [78]
        assert (
            "fsdp.yaml requests a sharded strategy, which Accelerate supports on GPUs only"
            in attempt.status()["reason"]
        )
    with pytest.raises(Refused, match=r"Accelerate cannot use wrong\.yaml"):
        accelerate_config.environment(sys.executable, str(attempt.folders[0] / "source" / "wrong.yaml"), 2, os.environ)
    with pytest.raises(Refused, match=r"does not contain the Accelerate configuration absent\.yaml"):
        accelerate_config.environment(sys.executable, str(tmp_path / "absent.yaml"), 2, os.environ)


def test_the_network_interface_is_the_loopback_on_one_machine(tmp_path: Path):
    script = "import os; print(os.environ.get('GLOO_SOCKET_IFNAME'))"
    with Attempt(tmp_path / "a", script) as attempt:
        assert attempt.run() == [0]
        assert attempt.texts(0) == ["lo"]
    with Attempt(tmp_path / "b", script, env={"GLOO_SOCKET_IFNAME": "lo"}) as attempt:
        assert attempt.run() == [0]
        assert attempt.texts(0) == ["lo"]


def test_marked_processes_are_found_in_any_session():
    env = os.environ | {"CLOUDTRAIN_ATTEMPT_ID": "x-a1", "CLOUDTRAIN_NODE_DIR": "/nowhere/of this test"}
    with subprocess.Popen(["sleep", "60"], env=env, start_new_session=True) as child:
        wait_for(lambda: processes.marked(CLOUDTRAIN_NODE_DIR="/nowhere/of this test") == [child.pid], "the process")
        assert processes.marked(CLOUDTRAIN_NODE_DIR="/nowhere/of this test", CLOUDTRAIN_ATTEMPT_ID="x-a2") == []
        assert processes.marked(CLOUDTRAIN_NODE_DIR="/nowhere/of") == []
        child.kill()
        wait_for(
            lambda: processes.marked(CLOUDTRAIN_NODE_DIR="/nowhere/of this test") == [], "its end"
        )  # a zombie is none


def test_usage_events_come_while_ranks_run(tmp_path: Path):
    script = "import os, time\nwhile not os.path.exists(os.environ['CLOUDTRAIN_RUN_DIR'] + '/gate'): time.sleep(0.05)"
    with Attempt(tmp_path, script) as attempt:
        attempt.set("usage", "EVERY_S", 0.5).start()
        (event,) = wait_for(lambda: attempt.events("usage"), "a usage event")[:1]
        assert event["processes"] == 1 and event["rss_bytes"] > 1 << 20 and event["cpu_percent"] >= 0
        assert event["files"] is False  # without an output the run's files are on this node alone
        (tmp_path / "run" / "model").mkdir(exist_ok=True)
        (tmp_path / "run" / "model" / "weights").touch()
        wait_for(lambda: [event for event in attempt.events("usage") if event["files"]], "the file to be reported")
        (tmp_path / "run" / "gate").touch()
        assert attempt.wait() == [0]


def test_on_sagemaker_the_verdict_is_left_where_the_platform_reads_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    outcome = Outcome("FAILED", 75, "script", 1, "")
    result.write_failure(outcome, "rank 1 exited with code 75")
    assert list(tmp_path.iterdir()) == [], "this is no node of SageMaker's"
    (tmp_path / "input" / "config").mkdir(parents=True)
    (tmp_path / "input" / "config" / "resourceconfig.json").write_text("{}")
    result.write_failure(outcome, "rank 1 exited with code 75")
    assert (tmp_path / "output" / "failure").read_text() == "rank 1 exited with code 75 [cloudtrain FAILED 75 script]"
    result.write_failure(Outcome("LOST", None), "x" * 5000)
    text = (tmp_path / "output" / "failure").read_text()
    assert len(text) < 1000 and text.endswith("[cloudtrain LOST - launcher]")


def test_a_channel_is_a_folder_or_its_one_object(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    place = tmp_path / "input" / "data" / "train"
    place.mkdir(parents=True)
    wanted = {"train": {"uri": "s3://b/k/x.jsonl", "mode": "channel", "file": "x.jsonl"}}
    assert inputs.resolve(wanted, str(tmp_path / "inputs"), None) == {"train": str(place)}
    (place / "x.jsonl").touch()
    assert inputs.resolve(wanted, str(tmp_path / "inputs"), None) == {"train": str(place / "x.jsonl")}
    with pytest.raises(Refused, match="other does not exist"):
        inputs.resolve({"other": {"uri": "s3://b/k", "mode": "channel"}}, str(tmp_path / "inputs"), None)


# -- checkpoints of scripts that do not tell --------------------------------------------------------------------------


def test_what_a_script_writes_into_its_folder_of_checkpoints_is_told_once(tmp_path: Path):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "model.pt").write_text("of an earlier attempt")
    writes = NewCheckpoints([str(tmp_path)])
    for ours in ("epochs/00000002.json", "step-00000004.a2/state/part", ".seen"):
        (tmp_path / ours).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / ours).write_text("the shared trainer tells of itself")
    (tmp_path / "checkpoint-2").mkdir()
    assert writes.look() == {}
    (tmp_path / "checkpoint-2" / "model.pt").write_text("new")
    assert [writes.look(), writes.look()] == [{"written": "checkpoint-2", "step": 2}, {}]


def test_a_file_that_is_written_over_is_new_too(tmp_path: Path):
    (tmp_path / "last.pt").write_text("old")
    os.utime(tmp_path / "last.pt", ns=(1, 1))
    writes = NewCheckpoints([str(tmp_path)])
    assert writes.look() == {}
    (tmp_path / "last.pt").write_text("new")
    assert writes.look() == {"written": "last.pt"}


def test_a_step_is_read_of_what_is_named_as_a_checkpoint(tmp_path: Path):
    model, outputs = tmp_path / "model", tmp_path / "outputs"
    model.mkdir()
    outputs.mkdir()
    writes = NewCheckpoints([str(tmp_path / "checkpoints")], {"{model_dir}": str(model), "{output_dir}": str(outputs)},
                            lambda name: name.startswith("out/"))  # fmt: skip
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "1.txt").write_text("no step")
    assert writes.look() == {"written": "1.txt"}
    for number, name in enumerate(("model/log.txt", "outputs/out/step_9.pt", "model/checkpoint-6/optimizer.pt"), 1):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, ns=(0, 2 * 10**18 + number))
        assert writes.look() == {}, "no checkpoint, a copy, and one that is not whole"
    (tmp_path / "model/checkpoint-6/trainer_state.json").write_text("{}")
    assert writes.look() == {"kept": "{model_dir}/checkpoint-6", "step": 6}


def test_the_launcher_tells_of_it_at_the_end_at_the_latest(tmp_path: Path):
    script = (
        "import os\n"
        "folder = os.environ['CLOUDTRAIN_CHECKPOINT_DIR']\n"
        "open(os.path.join(folder, 'mine.pt'), 'w').write('state')\n"
        "os._exit(3)\n"
    )
    with Attempt(tmp_path, script) as attempt:
        assert attempt.run() == [3], attempt.texts(-1)
        assert [event.get("written") for event in attempt.events("checkpoint")] == ["mine.pt"]


def test_a_script_that_writes_to_sagemakers_folder_of_checkpoints_itself(tmp_path: Path):
    from launcher import resume

    top = tmp_path / "checkpoints"
    places = resume.checkpoint_folders({"checkpoints": str(top / "checkpoint_dir")})
    assert places == [str(top / "checkpoint_dir"), str(top)]
    assert resume.checkpoint_folders({"checkpoints": str(top)}) == [str(top)]
    writes = NewCheckpoints(places)
    (top / ".cloudtrain" / "kept").mkdir(parents=True)
    (top / ".cloudtrain" / "kept" / "ours").touch()
    assert writes.look() == {} and resume.newest_checkpoint(places) is None
    (top / "checkpoint-5").mkdir()
    (top / "checkpoint-5" / "trainer_state.json").write_text("{}")
    assert writes.look() == {"written": "checkpoint-5", "step": 5} and resume.newest_checkpoint(places) == str(
        top / "checkpoint-5"
    )
