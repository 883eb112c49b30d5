"""One node under its launcher: exit codes, arguments, environment, refusals, the log."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import wait_for
from tests.entrypoints.launching import Attempt


def _oldest() -> str | None:
    """Return a Python 3.9 that runs; a version manager's shim on PATH may not."""
    for found in (shutil.which("python3.9"), *map(str, Path.home().glob(".pyenv/versions/3.9.*/bin/python3"))):
        if found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            return found
    return None


OLDEST = _oldest()
SHOW_ENV = "import json, os; print(json.dumps(dict(os.environ)))"


def test_a_script_runs_and_its_end_is_recorded(tmp_path: Path):
    with Attempt(tmp_path, "print('hello')") as attempt:
        assert attempt.run() == [0]
        status = attempt.status()
        assert (status["state"], status["exit_code"], status["by"], status["failed_rank"]) == (
            "SUCCEEDED",
            0,
            "script",
            None,
        )
        assert status["started_at"] <= status["ended_at"] and status["world_size"] == 1
        assert attempt.texts(0) == ["hello"]
        states = [event["state"] for event in attempt.events("state")]
        assert states == ["STARTING", "RUNNING", "SUCCEEDED"]
        assert attempt.events("result") == [
            {"kind": "result", "code": 0, "state": "SUCCEEDED", "by": "script", "failed_rank": None, "reason": ""}
            | {"has_results": False}
        ]
        assert [line[0] for line in attempt.lines()] == list(range(len(attempt.lines())))


def test_the_status_names_the_guard_while_it_runs(tmp_path: Path):
    with Attempt(tmp_path, "import sys; print('up'); sys.stdin.read(); import time; time.sleep(300)") as attempt:
        attempt.start().heard("up")
        status = wait_for(lambda: attempt.status()["state"] == "RUNNING" and attempt.status(), "RUNNING")
        outer = attempt.launchers[0].pid  # the guard, or its parent where no control group is to be had
        assert status["pid"] in (outer, *map(int, Path(f"/proc/{outer}/task/{outer}/children").read_text().split()))
        stat = Path(f"/proc/{status['pid']}/stat").read_text().rpartition(") ")[2].split()
        assert status["start_ticks"] == int(stat[19])
        assert status["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@pytest.mark.parametrize("code", [1, 2, 3, 17, 69, 70, 75, 78, 100, 126, 127, 129, 137, 200, 255])
def test_the_scripts_exit_code_is_the_launchers(tmp_path: Path, code: int):
    with Attempt(tmp_path, f"import os; os._exit({code})") as attempt:
        assert attempt.run() == [code]
        status = attempt.status()
        assert (status["state"], status["exit_code"], status["by"], status["failed_rank"]) == (
            "FAILED",
            code,
            "script",
            0,
        )
        told = {129: "SIGHUP", 137: "SIGKILL"}.get(code)
        more = f", the code of a program that was killed by {told}" if told else ""
        assert status["failed_at"] and status["reason"] == f"rank 0 exited with code {code}{more}"
        assert attempt.events("result")[0]["by"] == "script"


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM"])
def test_a_signal_is_128_and_its_number(tmp_path: Path, name: str):
    script = f"import os, signal; signal.signal(signal.SIGTERM, signal.SIG_DFL); os.kill(os.getpid(), signal.{name})"
    with Attempt(tmp_path, script) as attempt:
        code = 128 + int(getattr(__import__("signal"), name))
        assert attempt.run() == [code]
        assert attempt.status()["reason"] == f"rank 0 was killed by signal {code - 128} ({name})"


def test_the_first_failed_rank_is_named_and_the_others_are_ended(tmp_path: Path):
    script = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(41)
time.sleep(300)
"""
    with Attempt(tmp_path, script, processes=3) as attempt:
        assert attempt.run() == [41]
        status = attempt.status()
        assert (status["failed_rank"], status["reason"]) == (1, "rank 1 exited with code 41")


HOSTILE = (
    "--lr",
    "3.0e-4",
    "",
    "a b",
    "'single' \"double\"",
    "$HOME `id` $(id)",
    "two\nlines",
    "tab\tand \\ back",
    "-",
    "--",
    "--flag=--x",
    "ünï ☃ \U0001f600",
    "*",
    "\r",
    "--flag=--x",
    "%s {} \x7f",
)


def test_arguments_and_values_arrive_as_written(tmp_path: Path):
    script = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['V']]))"
    with Attempt(
        tmp_path / "a b 'c' \"d\"", script, argv=("train.py", *HOSTILE), env={"V": "\n".join(HOSTILE)}
    ) as attempt:
        assert attempt.run() == [0]
        assert json.loads(attempt.texts(0)[0]) == [list(HOSTILE), "\n".join(HOSTILE)]


def test_modules_shell_scripts_and_odd_names_run_too(tmp_path: Path):
    files = {
        "-odd.py": "print('odd')",
        "job.sh": 'echo "shell $1"\nexit 5\n',
        "mod.py": "import sys; print(sys.argv[1:])",
    }
    for number, (argv, said, code) in enumerate(
        [
            (("-odd.py",), "odd", 0),
            (("job.sh", "a b"), "shell a b", 5),
            (("-m", "mod", "x"), "['x']", 0),
        ]
    ):
        with Attempt(tmp_path / str(number), argv=argv, files=files) as attempt:
            assert attempt.run() == [code]
            assert attempt.texts(0) == [said]


def test_ranks_see_their_place_and_not_the_launchers_orders(tmp_path: Path):
    with Attempt(
        tmp_path,
        SHOW_ENV,
        processes=2,
        environ={"RANK": "7", "WORLD_SIZE": "9", "TORCHELASTIC_RUN_ID": "x"},
        env={"MINE": "1", "OMP_NUM_THREADS": "3"},
        checkpoint={"every_s": 900, "every_steps": None, "keep": 3},
        parallelism={"strategy": "ddp"},
    ) as attempt:
        assert attempt.run() == [0]
        envs = [json.loads(attempt.texts(rank)[0]) for rank in (0, 1)]
    for rank, env in enumerate(envs):
        assert {
            name: env[name]
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK")
        } == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "NODE_RANK": "0",
        }
        assert env["MASTER_ADDR"] == "127.0.0.1" and int(env["MASTER_PORT"]) > 1023
        assert (
            env["ACCELERATE_USE_CPU"] == "true" and env["CUDA_VISIBLE_DEVICES"] == "" and env["PYTHONUNBUFFERED"] == "1"
        )
        assert (env["MINE"], env["OMP_NUM_THREADS"]) == ("1", "3")
        assert (env["CLOUDTRAIN_RUN_ID"], env["CLOUDTRAIN_ATTEMPT"], env["CLOUDTRAIN_ATTEMPT_ID"]) == (
            "run",
            "1",
            "run-a1",
        )
        assert env["CLOUDTRAIN_CHECKPOINT_EVERY_S"] == "900" and "CLOUDTRAIN_CHECKPOINT_EVERY_STEPS" not in env
        assert json.loads(env["CLOUDTRAIN_PARALLELISM"]) == {"strategy": "ddp"}
        for name in ("CHECKPOINT", "OUTPUT", "MODEL"):
            assert Path(env[f"CLOUDTRAIN_{name}_DIR"]).parent == tmp_path / "run"
        assert not [name for name in env if name.startswith(("CLOUDTRAIN_MANIFEST", "TORCHELASTIC"))]
    assert envs[0]["MASTER_PORT"] == envs[1]["MASTER_PORT"]


OWN = {
    f"{folder}{name}": f"mine = '{name}'"
    for folder in ("", "src/")
    for name in ("data.py", "train.py", "runtime.py", "trainer/__init__.py", "trainer/model.py", "launcher/__init__.py")
}
NAMES = """
import cloudtrain_runtime, data, launcher, runtime, train, trainer, trainer.model
print(data.mine, train.mine, runtime.mine, trainer.mine, trainer.model.mine, launcher.mine, cloudtrain_runtime.context().run_id)
"""


@pytest.mark.parametrize(
    "argv, env",
    [
        (("main.py",), {}),
        (("src/main.py",), {}),
        (("-m", "main"), {}),
        (("-m", "src.main"), {}),
        (("-m", "trainer.main"), {}),
        (("main.py",), {"PYTHONPATH": "src"}),
    ],
)
def test_a_script_imports_its_own_modules_whatever_they_are_called(tmp_path: Path, argv: tuple[str, ...], env: dict):
    """`.cloudtrain` holds packages `trainer` and `launcher` and modules `train` and `runtime`: no script may see them."""
    files = OWN | {"main.py": NAMES, "src/main.py": NAMES, "trainer/main.py": NAMES}
    with Attempt(tmp_path, argv=argv, files=files, env=env) as attempt:
        assert attempt.run() == [0], attempt.lines()
        names = "data.py train.py runtime.py trainer/__init__.py trainer/model.py launcher/__init__.py run"
        assert attempt.texts(0) == [names]


def test_a_script_sees_nothing_of_ours_but_the_runtime(tmp_path: Path):
    script = """
import importlib.util, sys
print([name for name in ("trainer", "launcher", "train", "runtime", "launch") if importlib.util.find_spec(name)])
print([path for path in sys.path if ".cloudtrain" in path and not path.endswith(".cloudtrain/path")])
"""
    with Attempt(tmp_path, argv=("main.py",), files={"main.py": script}) as attempt:
        (attempt.folders[0] / "source" / "train.py").unlink()
        assert attempt.run() == [0]
        assert attempt.texts(0) == ["[]", "[]"]


def test_inputs_are_found_by_name(tmp_path: Path):
    (tmp_path / "data").mkdir()
    inputs = {
        "my-train": {"uri": str(tmp_path / "data"), "mode": "copy"},
        "eval": {"uri": f"file://{tmp_path}/data", "mode": "copy"},
    }
    with Attempt(tmp_path / "a", SHOW_ENV, inputs=inputs) as attempt:
        assert attempt.run() == [0]
        env = json.loads(attempt.texts(0)[0])
        assert env["CLOUDTRAIN_INPUT_MY_TRAIN"] == env["CLOUDTRAIN_INPUT_EVAL"] == str(tmp_path / "data")


REFUSED = {
    "no script": ({"argv": ("absent.py",)}, "the source has no file absent.py"),
    "missing input": (
        {"inputs": {"train": {"uri": "/no/such", "mode": "copy"}}},
        "the input train does not exist on this node: /no/such",
    ),
    "missing secret": (
        {"secrets": {"TOKEN": ["env:TOKEN"]}},
        "the secret TOKEN was not found (env:TOKEN: the client did not send it)",
    ),
    "short secret": (
        {"secrets": {"PIN": ["env:PIN"]}},
        "the secret PIN has fewer than 4 characters and cannot be masked in the log",
    ),
    "gpus": ({"gpus_per_node": 2}, "2 GPUs per node were requested, but this machine has none (nvidia-smi)"),
    "cloud output": (
        {"output": "ftp://b/p"},
        "output ftp://b/p cannot be reached from this node; use s3://, gs:// or az://",
    ),
    "cloud input": (
        {"inputs": {"x": {"uri": "ftp://b/x", "mode": "copy"}}},
        "the input x is at ftp://b/x, and a node can read only folders, s3://, gs:// and az://",
    ),
    "cloud secret": (
        {"secrets": {"T": ["gcp-secretmanager:t"]}},
        "gcp-secretmanager:t needs google-cloud-secret-manager on the node: pip install google-cloud-secret-manager",
    ),
    "requirements": ({"requirements": "absent.txt"}, "the requirements file absent.txt cannot be read"),
    "interface": ({"env": {"GLOO_SOCKET_IFNAME": "nope0"}}, "GLOO_SOCKET_IFNAME names nope0"),
    "NUL": ({"env": {"X": "a\0b"}}, "cannot be started: Invalid argument"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_begin_is_refused_in_one_sentence(tmp_path: Path, case: str):
    manifest, reason = REFUSED[case]
    with Attempt(tmp_path, "print('never')", stdin={"secrets": {"env:PIN": "123"}}, **manifest) as attempt:
        assert attempt.run() == [78]
        status = attempt.status()
        assert (status["state"], status["exit_code"], status["by"]) == ("FAILED", 78, "launcher")
        assert reason in status["reason"] and "\n" not in status["reason"]
        assert [text for text in attempt.texts(-1) if reason in text and not text.startswith("::")]
        assert attempt.events("result")[0]["code"] == 78
        assert not attempt.texts(0)


def test_a_damaged_manifest_is_refused(tmp_path: Path):
    for number, (pieces, reason) in enumerate(
        [
            (["xxxx"], "the manifest is damaged"),
            ([], "there is no manifest"),
        ]
    ):
        with Attempt(tmp_path / str(number)) as attempt:
            attempt.pieces = pieces
            assert attempt.run() == [78]
            assert reason in attempt.status()["reason"]


def test_a_wrong_number_of_nodes_is_refused(tmp_path: Path):
    with Attempt(tmp_path, environ={"CLOUDTRAIN_NUM_NODES": "3"}) as attempt:
        assert attempt.run() == [78]
        assert attempt.status()["reason"] == "1 nodes were requested, but local gave 3"


def test_a_full_disk_is_refused(tmp_path: Path):
    # The run's folder lies below a file: nothing can be made there.
    (tmp_path / "run").write_text("")
    with Attempt(tmp_path, "print('never')") as attempt:
        assert attempt.run() == [78]
        assert "the node cannot be prepared" in attempt.status()["reason"]


def test_without_a_folder_the_log_is_the_launchers_output(tmp_path: Path):
    with Attempt(tmp_path, "print('hello'); import sys; sys.exit(4)") as attempt:
        attempt.environ = {"CLOUDTRAIN_NODE_DIR": ""}
        assert attempt.run() == [4]
        lines = (attempt.folders[0] / "launcher.out").read_text().splitlines()
        assert [line.split(" ", 3)[3] for line in lines if line.split(" ", 2)[1] == "0"] == ["hello"]
        assert '"code":4' in lines[-2] and attempt.status() is None


def test_another_launchers_rank_is_not_launched_again(tmp_path: Path):
    """Under torchrun: every process is one rank, with the names that torchrun gave it."""
    outer = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234",
    }
    with Attempt(tmp_path / "a", SHOW_ENV, processes=2) as attempt:
        attempt.environ = outer
        env = attempt.environment(0)
        attempt.environment = lambda rank: {
            name: value for name, value in env.items() if name != "CLOUDTRAIN_NODE_RANK"
        }
        assert attempt.run() == [0]
        seen = json.loads(attempt.texts(1)[0])
        assert {name: seen[name] for name in outer} == outer
    with Attempt(tmp_path / "b", SHOW_ENV, processes=3) as attempt:
        env = attempt.environment(0) | outer
        attempt.environment = lambda rank: {
            name: value for name, value in env.items() if name != "CLOUDTRAIN_NODE_RANK"
        }
        assert attempt.run() == [78]
        reason = attempt.status()["reason"]
        assert reason.startswith("3 processes were requested in all") and reason.endswith(" started 2")


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_of_the_ranks_of_sagemakers_torchrun_the_first_of_a_node_numbers_its_lines(tmp_path: Path, local_rank: str):
    """They share a standard output: a reader drops lines with a number that it has read."""
    outer = {"RANK": local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    outer |= {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1", "MASTER_ADDR": "algo-1", "MASTER_PORT": "7777"}
    script = "import os; print(os.environ['TORCHELASTIC_RUN_ID'], os.environ['MASTER_PORT'], os.environ['RANK'])"
    with Attempt(tmp_path, script, processes=2) as attempt:
        env = attempt.environment(0) | outer | {"SAGEMAKER_BASE_DIR": str(tmp_path / "ml"), "CLOUDTRAIN_NODE_DIR": ""}
        for name in ("CLOUDTRAIN_NODE_RANK", "CLOUDTRAIN_RUN_DIR"):
            del env[name]
        attempt.environment = lambda _: env
        assert attempt.run() == [0]
        lines = (attempt.folders[0] / "launcher.out").read_text().splitlines()
        if local_rank == "1":
            assert lines == ["x 7777 1"]
        else:
            assert [line.split()[0] for line in lines] == [str(number) for number in range(len(lines))]
            assert [line.split(" ", 3)[3] for line in lines if line.split()[1] == "0"] == ["x 7777 0"]
        assert (tmp_path / "ml" / "checkpoints" / "checkpoint_dir").is_dir()
        assert (tmp_path / "ml" / "checkpoints" / ".cloudtrain").exists() == (local_rank == "0")


@pytest.mark.skipif(
    OLDEST is None and "python3.9" not in os.environ.get("CLOUDTRAIN_REQUIRE", ""), reason="Python 3.9 is not installed"
)
def test_it_runs_on_python_3_9(tmp_path: Path):
    with Attempt(
        tmp_path,
        "import sys, cloudtrain_runtime as r; r.emit('metric', step=1, loss=2.0); print(sys.version_info[:2])",
        nodes=2,
        processes=2,
        python=OLDEST,
        secrets={"T": ["env:T"]},
        stdin={"secrets": {"env:T": "hidden"}, "token": "t" * 8},
    ) as attempt:
        assert attempt.run() == [0, 0]
        assert attempt.texts(3, node=1)[-1] == "(3, 9)"


def test_supervisor_imports_nothing_heavy(tmp_path: Path):
    """Start-up is paid by every node of every attempt: these modules cost milliseconds each."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import launcher.supervisor; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-S", "-c", code, str(Path(__file__).parents[2] / "entrypoints")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    heavy = {
        "asyncio",
        "ssl",
        "urllib.request",
        "multiprocessing",
        "subprocess",
        "typing",
        "dataclasses",
        "shutil",
        "hashlib",
        "logging",
        "inspect",
        "tempfile",
        "importlib.metadata",
        "traceback",
        "socket",
        "launcher.service",
        "launcher.world.worker",
    }
    assert not heavy & set(loaded)
