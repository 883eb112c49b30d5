"""Nodes with `ray: true`: real launchers, and a package `ray` that keeps its nodes in a folder. tests/backends/results has
the real one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from launcher.ray_cluster import gpu_words

from cloudtrain.job.job import Job
from tests.entrypoints.launching import Attempt

NODES = """\
import os
def init(address, **_):
    pass
def nodes():
    return [{"Alive": True} for _ in os.listdir("../../ray")]
"""
START = """\
import os, signal, socket, sys
if "--head" in sys.argv:
    words = dict(word.split("=") for word in sys.argv if "=" in word)
    if os.path.exists("../../broken"):
        sys.exit("no head here")
    server = socket.create_server(("", int(words["--port"])))
elif os.path.exists("../../late"):
    os.rename("../../late", "../../later")
    sys.exit("too slow")
with open("../../started", "a") as words:
    print(*(word for word in sys.argv if word.startswith("--num-gpus")), file=words)
here = f"../../ray/{os.getpid()}"
with open(f"../../{os.getpid()}", "w") as secrets:
    print(os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"], file=secrets)
os.rename(secrets.name, here)
def leave(*_):
    os.remove(here)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
while True:
    signal.pause()
"""
FAKE = {"ray/__init__.py": NODES, "ray/scripts/__init__.py": "", "ray/scripts/scripts.py": START}


def attempt(root: Path, script: str, entrypoint: str | list[str] = "train.py", **about) -> Attempt:
    job = Job(entrypoint=entrypoint, args=["a b"], source=str(root.parent), ray=True, num_nodes=2)
    form, argv = job.node_program()
    (root / "ray").mkdir(parents=True)
    about.setdefault("environ", {"PYTHONPATH": "."})
    return Attempt(root, script, nodes=2, form=form, argv=tuple(argv), files=FAKE, **about)


def test_the_command_runs_once_when_all_nodes_have_joined_and_its_code_is_the_attempts(tmp_path):
    script = (
        "import os, sys\nhost, port = os.environ['RAY_ADDRESS'].split(':')\n"
        "print(sys.argv[1:], host, len(os.listdir('../../ray')), 'RANK' in os.environ, flush=True)\nsys.exit(7)\n"
    )
    for name, entrypoint in (("script", "train.py"), ("command", ["python", "train.py"])):
        with attempt(tmp_path / name, script, entrypoint) as one:
            assert one.run() == [7, 7]
            assert "['a b'] 127.0.0.1 2 False" in one.texts(0, 0) and one.texts(1, 1) == []
            assert one.status(0)["reason"].startswith("node 0: rank 0 exited with code 7")
            assert list((tmp_path / name / "ray").iterdir()) == [] and one.left() == []
            assert (tmp_path / name / "started").read_text() == "--num-gpus=0\n" * 2, "the job asks for none"


@pytest.mark.parametrize(
    ("chosen", "words"),
    [("3,5", ["--num-gpus=2"]), ("GPU-1a, GPU-2b", ["--num-gpus=2"]), ("", ["--num-gpus=0"]), ("-1", ["--num-gpus=0"])],
)
def test_ray_has_the_gpus_that_are_chosen_for_the_node(chosen: str, words: list[str]):
    assert gpu_words({"CUDA_VISIBLE_DEVICES": chosen}) == words and gpu_words({}) == []


@pytest.mark.parametrize("given", [True, False])
def test_all_nodes_have_one_token_so_that_no_other_user_of_a_host_can_use_ray(given, tmp_path):
    script = (
        "import os\nfolder = '../../ray/'\nsecrets = {open(folder + name).read() for name in os.listdir(folder)}\n"
        "mode, token = secrets.pop().split()\n"
        "print(len(secrets), mode, len(token), token == os.environ['RAY_AUTH_TOKEN'], flush=True)\n"
    )
    about = {"stdin": {"token": "t" * 32}, "environ": {"PYTHONPATH": ".", "CLOUDTRAIN_STDIN": "1"}} if given else {}
    with attempt(tmp_path / "a", script, **about) as one:
        assert one.run() == [0, 0]
        assert "0 token 64 True" in one.texts(0, 0)


def test_a_command_that_is_asked_to_stop_still_has_ray(tmp_path):
    script = (
        "import os, signal, sys, time\n"
        "def save(*_):\n"
        "    time.sleep(1)\n"
        "    print('saved with', len(os.listdir('../../ray')), flush=True)\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    with attempt(tmp_path / "a", script) as one:
        one.start()
        one.heard("up", 0)
        one.launchers[0].send_signal(signal.SIGTERM)
        assert one.wait() == [75, 75]
        assert "saved with 2" in one.texts(0, 0) and one.left() == []


def test_a_node_whose_start_takes_ray_too_long_is_started_again_until_all_have_joined(tmp_path):
    script = "import os, time\nprint(len(os.listdir('../../ray')), 'joined', flush=True)\n"
    with attempt(tmp_path / "a", script) as one:
        (tmp_path / "a/late").touch()
        assert one.run() == [0, 0]
        assert "2 joined" in one.texts(0, 0)
        again = "Ray has ended on this node with exit code 1 before all nodes have joined: it is started again"
        assert {"too slow", again} <= set(one.texts(1, 1)) and one.left() == []


def test_a_node_whose_ray_ends_later_ends_the_attempt(tmp_path):
    script = (
        "import os, time\n"
        "folder = '../../ray/'\n"
        "names = sorted(os.listdir(folder), key=lambda name: os.path.getmtime(folder + name))\n"
        "os.kill(int(names[-1]), 9)\n"
        "while set(os.listdir(folder)) <= set(names):\n"
        "    time.sleep(0.05)\n"
    )
    with attempt(tmp_path / "a", script) as one:
        assert one.run() == [1, 1]
        assert "Ray has ended on this node with exit code 137" in one.texts(1, 1) and one.left() == []


def test_a_head_that_does_not_start_ends_the_attempt_and_is_quoted(tmp_path):
    with attempt(tmp_path / "a", "print('never')") as one:
        (tmp_path / "a/broken").touch()
        assert one.run() == [1, 1]
        assert {"no head here", "Ray has ended on this node with exit code 1"} <= set(one.texts(0, 0))
        assert one.left() == []
