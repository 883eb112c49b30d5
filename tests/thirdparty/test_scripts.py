"""Public kinds of training scripts, unmodified: they end well, what they save comes home, and killed ones resume."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from cloudtrain.events import State
from cloudtrain.runs.run import Run
from tests.conftest import TORCH_AT_EXIT, WAIT_S, processes_of, wait_for
from tests.thirdparty.cases import CASES, LAYOUTS, Case

pytestmark = [pytest.mark.train, pytest.mark.timeout(900), pytest.mark.usefixtures("census")]
SCRIPTS = Path(__file__).parent / "scripts"
SAMPLE = {  # what is not marked `long`, two nodes once: each other script shows the same there; the rest is `long`
    ("accelerate_nlp", "one"),
    ("ddp_tutorial", "nodes"),
    ("imagenet", "one"),
    ("lightning", "two"),
    ("sagemaker_pytorch", "one"),
    ("run_clm", "one"),
}
PAIRS = [
    pytest.param(name, layout, marks=() if (name, layout) in SAMPLE else pytest.mark.long)
    for name, case in CASES.items()
    for layout in case.layouts
]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", TORCH_AT_EXIT)
    return tmp_path / "project"


def cloudtrain(project: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "cloudtrain", *words],
        cwd=project, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=5 * WAIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + "\n".join(line.text for line in Run.find().logs())
    return done.stdout


def losses(case: Case, run: Run) -> list[tuple[float, float]]:
    """Return the steps and losses that rank 0 printed, in order."""
    lines = (re.search(case.loss, line.text) for line in run.logs() if line.rank == 0)
    return [(float(found["step"]), float(found["loss"])) for found in lines if found]


def stored(case: Case, run: Run, attempt: int = 1) -> list[tuple[int, float]]:
    """Return the steps and losses that the history has of an attempt's rank 0; each step is there once."""
    points = [(row.step, row.value) for row in run.metrics(case.metric) if row.attempt == attempt]
    steps = [step for step, _ in points]
    assert steps == sorted(set(steps))
    return points


def check_world(case: Case, layout: str, run: Run, attempt: int = 1) -> None:
    """Each rank says who it is; the launcher says from which node and rank each line came."""
    per_node, nodes = case.starts or 1 + (layout == "two"), 1 + (layout == "nodes")
    lines = [line for line in run.logs() if line.cursor.startswith(f"{attempt}/")]
    if case.ranks is None:
        return
    said = {(line.node, line.rank, *found.groups()) for line in lines for found in re.finditer(case.ranks, line.text)}
    assert {(node, rank, size) for node, _, rank, size in said} == {
        (rank // per_node, str(rank), str(per_node * nodes)) for rank in range(per_node * nodes)
    }
    assert case.starts or all(str(rank) == its_own for _, rank, its_own, _ in said)


def fetched(case: Case, layout: str, run: Run, project: Path) -> float:
    """Fetch the model and return a number of it, which is the one that the script printed when it saved."""
    into = project.parent / f"fetched-{run.run_id}"
    cloudtrain(project, "fetch", run.run_id, "-o", str(into))
    value = case.read(into / case.model)
    if case.printed:
        printed = [float(found[1]) for line in run.logs() if (found := re.search(case.printed, line.text))]
        assert value == pytest.approx(printed[-1], abs=1e-5)
    assert not case.files or len(list(into.glob(case.files))) == (1 if layout == "one" else 2)
    return value


def end(case: Case, run: Run, home: Path) -> None:
    """End an attempt that has printed some losses, as the loss of its machines or the notice of it would."""
    wait_for(lambda: len(losses(case, run)) >= case.kill_at, f"{case.kill_at} losses", 5 * WAIT_S)
    if case.ending is State.PREEMPTED:
        pids = [event.data["pid"] for event in run.store.events(run.run_id, "world") if "pid" in event.data]
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
    else:
        for text in processes_of(home):
            try:
                os.kill(int(text.split(":")[0]), signal.SIGKILL)
            except ProcessLookupError:
                pass
    assert run.wait(5 * WAIT_S).state is case.ending


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_it_ends_well_comes_home_and_resumes(name: str, layout: str, project: Path, home: Path):
    case = CASES[name]
    missing = [package for package in case.needs if find_spec(package) is None]
    assert not missing, "make setup installs them"
    shutil.copytree(SCRIPTS / name, project)
    if (project / "make_data.py").exists():
        subprocess.run([sys.executable, "make_data.py", "../data"], cwd=project, check=True, timeout=WAIT_S)
    words = ["submit", "job.yaml", *case.layouts[layout]]
    cloudtrain(project, *words, "--wait")
    unbroken = Run.find()
    assert unbroken.state is State.SUCCEEDED
    check_world(case, layout, unbroken)
    model = fetched(case, layout, unbroken, project)
    expected = losses(case, unbroken)

    cloudtrain(project, *words, "--new")
    broken = Run.find()
    assert broken.run_id != unbroken.run_id
    end(case, broken, home)
    before = losses(case, broken)
    cloudtrain(project, "resume", broken.run_id, "--wait")
    assert [attempt.status.state for attempt in broken.attempts] == [case.ending, State.SUCCEEDED]
    check_world(case, layout, broken, attempt=2)
    resumed = fetched(case, layout, broken, project)
    after = losses(case, broken)[len(before) :]
    if case.resumes == "anew":
        assert after == expected
    else:
        assert len(expected) - len(before) <= len(after) < len(expected)
        assert [step for step, _ in after] == [step for step, _ in expected[-len(after) :]]
    if case.resumes != "close":
        assert after == expected[-len(after) :] and resumed == model
    if case.metric:
        curve, first, second = stored(case, unbroken), stored(case, broken), stored(case, broken, attempt=2)
        assert len(first) >= case.kill_at and len(curve) >= len(expected)
        if case.resumes != "close":
            assert (first, second) == (curve[: len(first)], curve[-len(second) :]), "the same losses at the same steps"


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("module", ["test_script", "test_sync", "test_distributed_data_loop"])
def test_accelerates_own_tests_pass_in_a_job(module: str, layout: str, project: Path, home: Path):
    project.mkdir()
    (project / "README.md").write_text("A folder that holds no script.\n")
    words = ["-m", f"accelerate.test_utils.scripts.{module}", *LAYOUTS[layout]]
    cloudtrain(project, "submit", *words, "--wait")
    run = Run.find()
    assert run.state is State.SUCCEEDED
    sizes = {int(found[1]) for line in run.logs() if (found := re.search(r"Num processes: (\d+)", line.text))}
    assert sizes <= {1 if layout == "one" else 2}
