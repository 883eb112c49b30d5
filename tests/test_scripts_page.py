"""Every case of docs/scripts.md is run as it is written, here and on simulated platforms, and what it left is fetched."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.backends.kubernetes.clusters import Ground, ground
from tests.backends.sagemaker.test_local_docker import docker  # noqa: F401 - a fixture
from tests.backends.vertex.test_local import shared_home  # noqa: F401 - a fixture
from tests.conftest import run_bounded, wait_for

PAGE = (Path(__file__).parents[1] / "docs" / "scripts.md").read_text()
SECRET = "a-key-of-nobody"


class Case(NamedTuple):
    """What one heading of the page shows: a command, and the job.yaml that it submits, "" where it needs none."""

    command: list[str]
    job: str


def cases() -> dict[str, Case]:
    found = {}
    for section in PAGE.split("\n## ")[1:]:
        commands, jobs = (re.findall(rf"```{kind}\n(.*?)```", section, re.DOTALL) for kind in ("bash", "yaml"))
        if commands:
            (command,) = commands[0].splitlines()
            assert len(commands) == 1 and len(jobs) <= 1 and len("".join(jobs).splitlines()) <= 4, section
            found[section.splitlines()[0]] = Case(shlex.split(command), "".join(jobs))
    return found


CASES = cases()

# Each does what such a script does, and writes what it was told, so that the fetched files say what arrived.
TRAIN = """
import argparse, json, os
parser = argparse.ArgumentParser()
for name in ("--output_dir", "--train_file", "--node", "--nodes", "--master"):
    parser.add_argument(name)
told = vars(parser.parse_args())
rank = os.environ.get("RANK") or told["node"] or "0"
told.update({name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MODE", "WANDB_API_KEY") if name in os.environ})
told["setup"] = os.path.exists("made-by-setup")
told["rows"] = open(told["train_file"]).read().split() if told["train_file"] else []
if told["output_dir"]:
    json.dump(told, open(told["output_dir"] + "/model-" + rank + ".json", "w"))
print("trained", flush=True)
"""
BESIDE = """
import os
for name in ("out/deep/model.bin", "runs/1/best.pt", "runs/1/last.pt"):
    os.makedirs(os.path.dirname(name), exist_ok=True)
    open(name, "w").write(name * 100)
"""
MODULE = """
import sys
from package import words
open(sys.argv[4] + "/weights", "w").write(words.WORD + " " + " ".join(sys.argv[1:3]))
"""
# Its machine is taken away behind the second step: the supervisor gets SIGTERM. In a pod the cluster itself does that.
RESUMES = """
import argparse, json, os, signal, time
parser = argparse.ArgumentParser()
parser.add_argument("--output_dir")
parser.add_argument("--resume_from_checkpoint")
args = parser.parse_args()
print("found", sorted(os.listdir(args.output_dir)), flush=True)
done = json.load(open(args.resume_from_checkpoint + "/trainer_state.json"))["steps"] if args.resume_from_checkpoint else []
for step in range(len(done) + 1, 5):
    done.append([step, os.path.basename(args.resume_from_checkpoint or "")])
    folder = f"{args.output_dir}/checkpoint-{step}"
    os.makedirs(folder, exist_ok=True)
    json.dump({"steps": done}, open(folder + "/trainer_state.json", "w"))
    if step == 2:
        os.makedirs(args.output_dir + "/checkpoint-3")
        open(args.output_dir + "/checkpoint-3/model.bin", "w").write("cut off: it has no state")
        print("two steps", flush=True)
        if "JOB_COMPLETION_INDEX" not in os.environ:
            os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(600)
"""
FILES = {
    "train.py": TRAIN,
    "run_clm.py": RESUMES,
    "package/__init__.py": "",
    "package/words.py": "WORD = 'trained'\n",
    "package/train.py": MODULE,
    "run.sh": "python train.py --output_dir $1 --node 7\n",
    "prepare.sh": "echo prepared >made-by-setup\n",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "train.csv").write_text("a b\n")
    return folder


class Home(NamedTuple):
    """What came home of a case: the followed log, name -> text of the fetched files, `logs` and `show` where they count."""

    log: str
    files: dict[str, str]
    views: tuple[str, ...] = ()

    def told(self, name: str = "model/model-0.json") -> dict:
        return json.loads(self.files[name])


def brought_home(title: str, project: Path, *target: str, home: Path | None = None) -> Home:
    """Run the case's command in the project, and fetch."""
    case = CASES[title]
    beside = title == "A script that writes beside itself"
    if beside:
        (project / "train.py").write_text(BESIDE)
    if case.job:
        (project / "job.yaml").write_text(case.job.replace("s3://bucket/texts", str(project.parent / "texts")))
    program, verb, *words = case.command
    assert (program, verb) == ("cloudtrain", "submit")
    home = home or Path(os.environ["CLOUDTRAIN_HOME"])
    env = {**os.environ, "WANDB_API_KEY": SECRET, "CLOUDTRAIN_HOME": str(home)}

    def run(*words: str) -> str:
        done = run_bounded([sys.executable, "-m", "cloudtrain", *words], home, cwd=project, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    log = run("submit", *target, *words)
    run("fetch", "-o", str(project.parent / "fetched"))
    fetched = project.parent / "fetched"
    files = {str(path.relative_to(fetched)): path for path in fetched.rglob("*") if path.is_file()}
    views = (run("logs"), run("show")) if beside else ()
    return Home(log, {name: path.read_text() for name, path in files.items() if not name.startswith(".")}, views)


def check(title: str, came: Home) -> None:
    """Check what came home of a case on whatever platform it ran."""
    match title:
        case "A script that takes a folder":
            assert set(came.files) == {"model/model-0.json"} and came.told()["output_dir"].startswith("/")
        case "A script that reads data":
            assert came.told()["rows"] == ["a", "b"]
        case "A script that writes beside itself":
            kept = {"outputs/out/deep/model.bin", "outputs/runs/1/best.pt"}
            assert set(came.files) == kept and all(text == name[8:] * 100 for name, text in came.files.items())
            line = (
                "1.4 KB in runs/ are not kept, and the next attempt will not find them: set keep: [runs] in the job file,"
                " or add --set 'keep=[runs]' to submit"
            )
            for view in (came.log, *came.views):
                assert line in " ".join(view.split()), view
        case "A module":
            assert came.files == {"model/weights": "trained --lr 1e-4"}
        case "A command that starts its own ranks":
            assert [came.told(f"model/model-{rank}.json")["WORLD_SIZE"] for rank in "01"] == ["2", "2"]
        case "A shell script":
            assert came.told("model/model-7.json")["node"] == "7"
        case "A shell text, with a set-up before it":
            for node in "01":
                told = came.told(f"model/model-{node}.json")
                assert (told["nodes"], told["setup"]) == ("2", True)
        case "A SkyPilot or dstack file":
            assert (came.told()["node"], came.told()["master"]) == ("0", "127.0.0.1")
        case "A script that knows how to resume":
            found = [line.partition("found ")[2] for line in came.log.splitlines() if "found [" in line]
            assert found == ["[]", "['checkpoint-1', 'checkpoint-2', 'checkpoint-3']"]
            last = came.told("checkpoints/checkpoint-4/trainer_state.json")
            assert last["steps"] == [[1, ""], [2, ""], [3, "checkpoint-2"], [4, "checkpoint-2"]]
        case "Variables and secrets":
            assert (came.told()["MODE"], came.told()["WANDB_API_KEY"]) == ("fast", SECRET) and SECRET not in came.log
        case _:
            raise AssertionError(f"nothing is known of {title}")


def test_the_page_has_ten_cases():
    assert len(CASES) == 10


@pytest.mark.usefixtures("census")
@pytest.mark.parametrize("title", CASES)
def test_a_case_on_this_machine(title: str, project: Path):
    check(title, brought_home(title, project))


# -- the same files elsewhere -----------------------------------------------------------------------------------------

ELSEWHERE = (
    "A script that takes a folder",
    "A script that writes beside itself",
    "A module",
    "A shell text, with a set-up before it",
    "A script that knows how to resume",
)


# What its machines do otherwise than others: a folder of the platform that comes home, a restart. The rest is `long`.
ON_VERTEX = ("A script that writes beside itself", "A script that knows how to resume")


@pytest.mark.parametrize(
    "title", [title if title in ON_VERTEX else pytest.param(title, marks=pytest.mark.long) for title in ELSEWHERE]
)
def test_a_case_on_vertex_local(title: str, project: Path, shared_home: Path):  # noqa: F811
    check(title, brought_home(title, project, "-t", "vertex-local", home=shared_home))


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    with ground(tmp_path_factory.mktemp("kubernetes")) as made:
        config = {"kubeconfig": str(made.cluster.kubeconfig), "server": made.cluster.url, "image": "any:1"}
        lines = [
            "[defaults]",
            'output = "gs://local/out"',
            "[targets.cluster]",
            'backend = "kubernetes"',
            "poll_s = 0.2",
        ]
        lines += [f"{name} = {json.dumps(value)}" for name, value in config.items()]
        (made.folder / "cloudtrain.toml").write_text("\n".join(lines))
        yield made


@pytest.fixture
def cluster(shared_cluster: Ground, monkeypatch: pytest.MonkeyPatch) -> Ground:
    """A simulated cluster with a bucket beside it; it is the target `cluster`."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", shared_cluster.store.url)
    monkeypatch.setenv("CLOUDTRAIN_CONFIG_HOME", str(shared_cluster.folder))
    return shared_cluster


def evict(cluster: Ground) -> None:
    """Wait for a pod whose script has done two steps, and take its machine away."""
    objects, kubelet = cluster.cluster.objects, cluster.cluster.kubelet

    def victim() -> dict | None:
        with objects.lock:
            pods = objects.all("pods")
        saved = (
            pod
            for pod in pods
            if any(text.endswith("two steps") for _, text in kubelet.log(pod["metadata"]["uid"]) or ())
        )
        return next(saved, None)

    pod = wait_for(victim, "two steps")
    with objects.lock:
        kubelet.disrupt(pod, "EvictionByEvictionAPI")


@pytest.mark.usefixtures("census")
@pytest.mark.parametrize("title", ELSEWHERE)
def test_a_case_on_kubernetes(title: str, project: Path, cluster: Ground):
    if title == "A script that knows how to resume":
        threading.Thread(target=evict, args=(cluster,), daemon=True).start()
    check(title, brought_home(title, project, "-t", "cluster"))


@pytest.mark.docker
@pytest.mark.usefixtures("docker", "census")
@pytest.mark.parametrize("title", ELSEWHERE)
def test_a_case_in_containers_as_on_sagemaker(title: str, project: Path):
    check(title, brought_home(title, project, "-t", "sagemaker-local"))
