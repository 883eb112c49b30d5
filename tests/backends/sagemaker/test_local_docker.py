"""sagemaker-local with Docker: containers, signals, S3, two hosts."""

from __future__ import annotations  # noqa: I001

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from cloudtrain.backends.sagemaker import docker as docker_engine
from cloudtrain.backends.sagemaker.local import SagemakerLocalBackend
from cloudtrain.backends.sagemaker.local_request import IMAGE
from cloudtrain.errors import BackendError
from cloudtrain.events import State
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from cloudtrain.simulators.sagemaker.server import Simulator
from cloudtrain.testing.contract import BackendContract
from tests.backends.forwarded import check_forward
from tests.backends.sagemaker.test_backend import BUCKET, simulator  # noqa: F401 - a fixture
from tests.backends.sagemaker.test_local import S3_JOB, Bench, bench, stored  # noqa: F401 - fixtures
from tests.backends.sagemaker.test_quickstart import cloudtrain
from tests.backends.slurm.test_quickstart import SETS, STEPS
from tests.backends.vertex.test_local import end_simulator
from tests.conftest import WAIT_S, wait_for


@pytest.fixture
def docker() -> None:
    """Skip where there is no engine or image; fail where CLOUDTRAIN_REQUIRE names docker (make test-docker)."""
    try:
        why = docker_engine.why_unavailable(IMAGE)
    except BackendError as error:
        why = str(error)
    if why and "docker" in os.environ.get("CLOUDTRAIN_REQUIRE", "").split(","):
        pytest.fail(why)
    if why:
        pytest.skip(why)


@pytest.mark.docker
@pytest.mark.usefixtures("docker")
class TestSagemakerLocal(BackendContract):
    @pytest.fixture
    def connect(self, home: Path):
        return lambda: SagemakerLocalBackend({}, home / "runs")

    def leftovers(self, handle: str) -> list[str]:
        networks = docker_engine.call("network", "ls", "--quiet", "--filter", f"label={docker_engine.LABEL}={handle}")
        return [*docker_engine.list_containers(Path(handle)), *networks.split()]


TOLD = [
    "",
    "two words",
    "--lr=1e-4",
    "0123",
    "$HOME `id`",
    "line\nbreak",
    "'\"\\",
    "ünïcödé 🚀",
    "-x",
    "[1, 2]",
    "null",
]


@pytest.mark.docker
@pytest.mark.usefixtures("docker")
def test_under_the_images_toolkit_arguments_arrive_as_written_and_exit_codes_are_kept(bench: Bench) -> None:  # noqa: F811
    """On two hosts of image-toolkit: its own `train` is the first process, and starts the launcher."""
    image = f"{IMAGE}-toolkit"
    if why := docker_engine.why_unavailable(image):  # it is built where Python is the image's, 3.11
        assert "toolkit" not in os.environ.get("CLOUDTRAIN_REQUIRE", "").split(","), why
        pytest.skip(f"{why}: make image-toolkit")
    bench.backend = SagemakerLocalBackend({"entry": "toolkit", "image": image}, bench.home / "runs")
    script = (
        "import json, os, sys\n"
        "first = open('/proc/1/cmdline').read().split('\\0')\n"
        "print('argv', json.dumps(sys.argv[1:]), flush=True)\n"
        "print('world', os.environ['WORLD_SIZE'], os.environ['RANK'], flush=True)\n"
        "print('first', any(word.endswith('/train') for word in first), flush=True)\n"
        "sys.exit(3 * (os.environ['RANK'] == os.environ.get('FAIL')))\n"
    )
    handle = bench.backend.submit(*bench.plan(script, num_nodes=2, args=TOLD))
    assert bench.final(handle).state is State.SUCCEEDED, bench.final(handle)
    lines = bench.log_texts(handle)
    assert [json.loads(text[5:]) for text in lines if text.startswith("argv ")] == [TOLD] * 2, lines
    assert sorted(text for text in lines if text.startswith("world ")) == ["world 2 0", "world 2 1"]
    assert lines.count("first True") == 2
    failed = bench.backend.submit(*bench.plan(script, "failing", num_nodes=2, env={"FAIL": "1"}))
    status = bench.final(failed)
    assert (status.state, status.exit_code) == (State.FAILED, 3), status


# What sagemaker_pytorch_container.training does in AWS' images (2.8.1, training.py).
TORCH_MAIN = """
from sagemaker_training import entry_point, environment, runner

def main():
    env = environment.Environment()
    assert env.additional_framework_parameters["sagemaker_torch_distributed_enabled"] is True
    kind = runner.RunnerType.TorchDistributed
    entry_point.run(env.module_dir, env.user_entry_point, env.to_cmd_args(), env.to_env_vars(), runner_type=kind)
"""


@pytest.mark.docker
@pytest.mark.usefixtures("docker")
def test_the_toolkits_torchrun_starts_the_ranks_with_distribution(bench: Bench, tmp_path: Path) -> None:  # noqa: F811
    base, image = f"{IMAGE}-toolkit", "cloudtrain-test:torchrun"
    if why := docker_engine.why_unavailable(base):
        assert "toolkit" not in os.environ.get("CLOUDTRAIN_REQUIRE", "").split(","), why
        pytest.skip(f"{why}: make image-toolkit")
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "torch_main.py").write_text(TORCH_MAIN)
    packages = "/opt/train/lib/python3.11/site-packages/"
    lines = [f"FROM {base}", f"COPY torch_main.py {packages}", "ENV SAGEMAKER_TRAINING_MODULE=torch_main:main"]
    (tmp_path / "image" / "Dockerfile").write_text("\n".join(lines) + "\n")
    env = {**os.environ, "DOCKER_BUILDKIT": "0"}
    build = ["docker", "build", "--quiet", "--network", "none", "--tag", image, str(tmp_path / "image")]
    subprocess.run(build, check=True, capture_output=True, env=env)
    options = {"entry": "toolkit", "image": image, "distribution": {"torch_distributed": {"enabled": True}}}
    bench.backend = SagemakerLocalBackend(options, bench.home / "runs")
    script = (
        "import json, os, pathlib, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor([dist.get_rank() + 1])\n"
        "dist.all_reduce(total)\n"
        "print('sum', int(total), os.environ['WORLD_SIZE'], os.environ['CLOUDTRAIN_NUM_NODES'], flush=True)\n"
        "print('argv', json.dumps(sys.argv[1:]), 'TORCHELASTIC_RUN_ID' in os.environ, flush=True)\n"
        "pathlib.Path(os.environ['SM_MODEL_DIR'], f'rank-{dist.get_rank()}').touch()\n"
        "dist.destroy_process_group()\n"
    )
    handle = bench.backend.submit(*bench.plan(script, num_nodes=2, args=TOLD))
    assert bench.final(handle).state is State.SUCCEEDED, (bench.final(handle), bench.log_texts(handle))
    texts = bench.log_texts(handle)
    assert [text for text in texts if text.startswith("sum ")] == ["sum 3 2 2"] * 2, texts
    assert [text for text in texts if text.startswith("argv ")] == [f"argv {json.dumps(TOLD)} True"] * 2, texts
    model = bench.backend.fetch(handle, tmp_path / "out", what=("model",)) / "model"
    assert sorted(path.name for path in model.iterdir()) == ["rank-0", "rank-1"]
    docker_engine.call("rmi", "--force", image)


@pytest.mark.docker
@pytest.mark.usefixtures("docker")
def test_two_hosts_are_two_containers(bench: Bench) -> None:  # noqa: F811
    script = "import os, socket\nprint(socket.gethostname(), os.environ['MASTER_ADDR'], os.getcwd(), flush=True)\n"
    handle = bench.backend.submit(*bench.plan(script, num_nodes=2))
    assert bench.final(handle).state is State.SUCCEEDED
    shown = subprocess.run(["docker", "image", "inspect", IMAGE], capture_output=True, text=True, check=True).stdout
    assert bench.backend.images(handle) == dict.fromkeys((0, 1), json.loads(shown)[0]["Id"])  # built here, never pushed
    lines = sorted(text for text in bench.log_texts(handle) if not text.startswith("::"))
    assert [text.split()[0] for text in lines] == ["algo-1", "algo-2"], lines
    assert all(text.split()[2].startswith("/opt/ml/cloudtrain") for text in lines), lines


@pytest.mark.docker
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("docker", "census")
def test_the_quickstart_on_two_hosts(tmp_path: Path) -> None:
    sets = [word for pair in SETS for word in ("--set", pair)]
    words = ["submit", "examples/quickstart/job.yaml", "-t", "sagemaker-local", *sets, "--wait", "--json"]
    run = Run.find(json.loads(cloudtrain(*words).splitlines()[-1])["run_id"])
    worlds = [event.data for event in run.store.events(run.run_id, "world")]
    assert [world["world_size"] for world in worlds if "world_size" in world] and run.state is State.SUCCEEDED
    assert {world["world_size"] for world in worlds if "world_size" in world} == {2}
    assert max(point.step for point in run.metrics("loss")) == STEPS
    cloudtrain("fetch", run.run_id, "-o", str(tmp_path / "out"))
    assert (tmp_path / "out" / "model" / "model.safetensors").stat().st_size > 10_000
    assert list((tmp_path / "out" / "checkpoints").rglob("COMPLETE"))


@pytest.mark.docker
@pytest.mark.usefixtures("docker")
def test_sigterm_reaches_the_script_which_saves(bench: Bench) -> None:  # noqa: F811
    script = (
        "import os, pathlib, signal, sys, time\n"
        "path = pathlib.Path(os.environ['CLOUDTRAIN_CHECKPOINT_DIR'], 'step')\n"
        "if path.exists(): print('resumed at', path.read_text(), flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, lambda *_: (path.write_text('41'), sys.exit(75)))\n"
        "print('waiting', flush=True)\n"
        "time.sleep(600)\n"
    )
    handle = bench.backend.submit(*bench.plan(script))
    wait_for(lambda: "waiting" in bench.log_texts(handle), "its start")
    bench.backend.cancel(handle)
    assert bench.final(handle).state is State.CANCELLED
    again = bench.backend.submit(*bench.plan(script, attempt=2))
    assert bench.final(again).state is State.SUCCEEDED
    assert "resumed at 41" in bench.log_texts(again)


@pytest.mark.docker
@pytest.mark.usefixtures("docker")
def test_a_script_behind_a_shell_and_tee_saves_and_a_service_does_not_hold_the_stop(bench: Bench) -> None:  # noqa: F811
    saver = (
        "import os, pathlib, signal, sys, time\n"
        "def save(*_):\n"
        "    time.sleep(3)\n"
        "    pathlib.Path(os.environ['CLOUDTRAIN_CHECKPOINT_DIR'], 'step').write_text('41')\n"
        "    print('saved', flush=True)\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('waiting', flush=True)\n"
        "time.sleep(600)\n"
    )
    service = "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: None)\nwhile True: time.sleep(600)\n"
    (bench.source / "saver.py").write_text(saver)
    (bench.source / "service.py").write_text(service)
    (bench.source / "wrap.sh").write_text("python service.py &\npython saver.py | tee log.txt\ntouch after\n")
    handle = bench.backend.submit(*bench.plan(entrypoint="wrap.sh"))
    wait_for(lambda: "waiting" in bench.log_texts(handle), "its start")
    bench.backend.cancel(handle)
    assert bench.final(handle).state is State.CANCELLED
    assert bench.log_texts(handle)[-1] == "saved"


@pytest.mark.docker
@pytest.mark.usefixtures("docker")
def test_cancelled_as_soon_as_it_was_submitted(bench: Bench) -> None:  # noqa: F811
    for turn, wait_s in enumerate((0.0, 0.3, 0.6)):  # before the network, while the container is made, as it starts
        handle = bench.backend.submit(*bench.plan("import time\ntime.sleep(600)\n", f"soon-{turn}"))
        time.sleep(wait_s)
        bench.backend.cancel(handle)
        assert bench.final(handle).state is State.CANCELLED
        assert docker_engine.list_containers(Path(handle)) == []


@pytest.mark.docker
@pytest.mark.usefixtures("docker")
def test_inputs_are_there_and_cannot_be_written(bench: Bench, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a folder's")
    (tmp_path / "plain").write_text("a file's")
    script = (
        "import os\n"
        "print(open(os.environ['CLOUDTRAIN_INPUT_PLAIN']).read(), flush=True)\n"
        "folder = os.environ['CLOUDTRAIN_INPUT_TEXTS']\n"
        "print(open(folder + '/a.txt').read(), flush=True)\n"
        "try: open(folder + '/b.txt', 'w')\n"
        "except OSError as error: print(error.strerror, flush=True)\n"
    )
    inputs = {"plain": str(tmp_path / "plain"), "texts": f"file://{tmp_path}/texts"}
    handle = bench.backend.submit(*bench.plan(script, inputs=inputs))
    assert bench.final(handle).state is State.SUCCEEDED
    assert bench.log_texts(handle) == ["a file's", "a folder's", "Read-only file system"]
    gone = bench.backend.submit(*bench.plan(script, "gone", inputs={"x": str(tmp_path / "nowhere")}))
    status = bench.final(gone)
    assert (status.state, status.exit_code) == (State.FAILED, 78) and "input x does not exist" in status.reason


@pytest.mark.docker
@pytest.mark.usefixtures("docker")
def test_a_job_through_s3(stored: Bench, simulator: Simulator, tmp_path: Path) -> None:  # noqa: F811
    script = (
        "import os, pathlib\n"
        "print(open(os.environ['CLOUDTRAIN_INPUT_ONE']).read(), flush=True)\n"
        "texts = pathlib.Path(os.environ['CLOUDTRAIN_INPUT_TEXTS'])\n"
        "print(sorted(str(p.relative_to(texts)) for p in texts.rglob('*.txt')), flush=True)\n"
        "pathlib.Path(os.environ['CLOUDTRAIN_MODEL_DIR'], 'weights').write_text('w')\n"
    )
    stored.backend = SagemakerLocalBackend({**stored.backend._options, "bucket": BUCKET}, stored.home / "runs")
    handle = stored.backend.submit(*stored.plan(script, **S3_JOB))
    assert stored.final(handle).state is State.SUCCEEDED, stored.final(handle)
    assert not (Path(handle) / "code").exists(), "the source came from the bucket"
    assert stored.log_texts(handle) == ["texts/a.txt", "['a.txt', 'deep/b.txt']"]
    keys = [item["Key"] for item in simulator.call("s3", "list_objects_v2", Bucket=BUCKET, Prefix="out/")["Contents"]]
    assert "out/near/near-a1/output/model.tar.gz" in keys
    stored.backend.fetch(handle, tmp_path / "out")
    assert (tmp_path / "out" / "model" / "weights").read_text() == "w"
    assert not (Path(handle) / "inputs").exists()
    lost = stored.backend.submit(*stored.plan(script, "lost", **{**S3_JOB, "output": "s3://no-such-bucket/out"}))
    status = stored.final(lost)
    assert (status.state, status.exit_code) == (State.FAILED, 74) and "no bucket no-such-bucket" in status.reason


@pytest.mark.docker
@pytest.mark.usefixtures("docker")
def test_when_the_keeper_is_killed_the_attempt_is_lost_and_its_containers_can_be_ended(bench: Bench) -> None:  # noqa: F811
    handle = bench.backend.submit(*bench.plan("import time\nprint('there', flush=True)\ntime.sleep(600)\n"))
    wait_for(lambda: "there" in bench.log_texts(handle), "its start")
    keeper = json.loads((Path(handle) / "status.json").read_text())["pid"]
    os.kill(keeper, signal.SIGKILL)
    assert bench.final(handle).state is State.LOST
    assert docker_engine.list_containers(Path(handle)), "they run on: nothing has ended them"
    bench.backend.cancel(handle)
    assert docker_engine.list_containers(Path(handle)) == []


@pytest.mark.docker
@pytest.mark.usefixtures("docker")
def test_an_interpreter_that_is_not_in_the_image_is_said(bench: Bench) -> None:  # noqa: F811
    bench.backend = SagemakerLocalBackend({"python": "no-such-python"}, bench.home / "runs")
    handle = bench.backend.submit(*bench.plan())
    status = bench.final(handle)
    assert status.state is State.FAILED and "no-such-python" in status.reason, status


# A model of torch: five steps an attempt, and the third one ends well. It prints each step's loss.
TRAINS = """
import os, pathlib, sys, torch
saved, attempt = pathlib.Path(sys.argv[1]) / "state.pt", int(os.environ["CLOUDTRAIN_ATTEMPT"])
torch.manual_seed(7)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer, begin = torch.optim.AdamW(model.parameters(), lr=0.01), 0
if saved.exists():
    state = torch.load(saved)
    model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"])
    begin = state["step"]
for step in range(begin, begin + int(sys.argv[2])):
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
    loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    optimizer.zero_grad(), loss.backward(), optimizer.step()
    print(f"loss={loss.item():.8f} step={step}", flush=True)
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, saved)
sys.exit(0 if step == 14 else 3)
"""


@pytest.mark.docker
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("docker")
def test_it_moves_from_vertex_local_and_back_over_a_folder(home: Path, tmp_path: Path) -> None:
    """Both use a folder of this machine as output: the losses are those of a run that nothing interrupts."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "train.py").write_text(TRAINS)
    job = {"name": "moves", "source": str(tmp_path / "source"), "entrypoint": "train.py",
           "environment": {"requirements": "none"}}  # fmt: skip
    unbroken = Submitter("local", home=home, watch=False).submit({**job, "args": ["{checkpoint_dir}", "15"]})
    assert unbroken.wait(WAIT_S).state is State.SUCCEEDED, unbroken.record.status
    try:
        moving = {**job, "args": ["{checkpoint_dir}", "5"], "output": str(tmp_path / "out")}
        run = Submitter("vertex-local", home=home, watch=False).submit(moving)
        for place in ("sagemaker-local", "vertex-local"):
            assert run.wait(WAIT_S).exit_code == 3, run.record.status
            run.resume(target=place)
        assert run.wait(WAIT_S).state is State.SUCCEEDED, run.record.status
    finally:
        end_simulator(home)
    assert [attempt.plan.target for attempt in run.attempts] == ["vertex-local", "sagemaker-local", "vertex-local"]
    expected = {row.step: row.value for row in unbroken.metrics("loss")}
    losses = {row.step: row.value for row in run.metrics("loss")}
    assert len(expected) == 15 and losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.docker
@pytest.mark.usefixtures("docker", "census")
def test_a_server_in_a_rank_is_reached(tmp_path: Path) -> None:
    """Its loopback address is that of its container: no port of this machine leads to it."""
    check_forward(tmp_path, "sagemaker-local")
