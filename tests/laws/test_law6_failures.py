"""Law 6: a failure says why: the script's exit code is the run's, and the first failing rank is told first."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cloudtrain.events import State
from cloudtrain.runs.run import Run
from tests.conftest import WAIT_S, wait_for

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "entrypoints"))  # as tests/entrypoints/conftest.py does
from tests.entrypoints.launching import Attempt  # noqa: E402
from tests.seed import first_seed

CODES = range(1, 256)
SOME = sorted({1, 2, 69, 70, 75, 78, 124, 126, 127, 128, 129, 137, 143, 254, 255, *range(3, 256, 9)})
UNHEARD = {"SIGKILL", "SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGCHLD", "SIGCONT", "SIGURG", "SIGWINCH"}
DEADLY = [number for number in signal.valid_signals() if getattr(number, "name", "?") not in UNHEARD]
DEADLY = [*(number for number in DEADLY if number < 32), signal.SIGKILL]


def ended(attempt: Attempt) -> tuple[int, dict, list[dict]]:
    with attempt:
        (code,) = attempt.run()
        return code, attempt.status(), attempt.events("result")


def exits(folder: Path, code: int) -> None:
    files = {"end.sh": f"exit {code}\n", "end.py": f"raise SystemExit({code})\n"}
    attempt = Attempt(folder / str(code), argv=("end.py" if code % 8 == 0 else "end.sh",), files=files)
    got, status, results = ended(attempt)
    assert (got, status["exit_code"], status["state"], status["by"]) == (code, code, "FAILED", "script")
    assert (results[0]["code"], results[0]["failed_rank"]) == (code, 0)


def test_some_exit_codes_are_the_runs_own(tmp_path, figure):
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda code: exits(tmp_path, code), SOME))
    figure("exit codes", len(SOME))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_exit_code_is_the_runs_own(tmp_path, figure):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda code: exits(tmp_path, code), CODES))
    figure("exit codes", len(CODES))


def dies(folder: Path, number: int) -> None:
    script = (
        "import os, resource, signal\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        f"if {number} != 9: signal.signal({number}, signal.SIG_DFL)\nos.kill(os.getpid(), {number})\n"
    )
    code, status, _ = ended(Attempt(folder / str(number), script))
    assert (code, status["exit_code"], status["state"]) == (128 + number, 128 + number, "FAILED")
    assert f"signal {number} ({signal.Signals(number).name})" in status["reason"]


def test_every_deadly_signal_is_128_and_its_number(tmp_path, figure):
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda number: dies(tmp_path, number), DEADLY))
    assert len(DEADLY) > 20
    figure("signals", len(DEADLY))


LOUDER = """
import os, pathlib, signal, sys, time, traceback
first, folder, rank = int(sys.argv[1]), pathlib.Path(sys.argv[2]), int(os.environ["RANK"])
deadline = time.monotonic() + 120

def louder(*_):
    for n in range(300):
        print(f"Traceback (most recent call last):\\n  frame {n}\\nRuntimeError: a consequence on rank {rank}", file=sys.stderr)
    if rank % 2:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(1)

def wait(until):
    while not until() and time.monotonic() < deadline:
        time.sleep(0.01)

def gone(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] in "ZX"
    except OSError:
        return True

signal.signal(signal.SIGTERM, louder)
(folder / f"{rank}.new").write_text(str(os.getpid()))
(folder / f"{rank}.new").rename(folder / f"{rank}.pid")
wait(lambda: len(list(folder.glob("*.pid"))) == 4)
if rank == first:
    try:
        raise ValueError("the cause")
    except ValueError:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(40 + rank)
pid = int((folder / f"{first}.pid").read_text())
wait(lambda: gone(pid))
time.sleep(60)  # SIGTERM comes: the launcher asks those who are left
louder()
"""


def four_ranks(folder: Path, first: int) -> None:
    """Two nodes of two ranks: one fails, the others die of it, with more words and by worse ends."""
    project, pids = folder / "project", folder / "pids"
    project.mkdir(parents=True)
    pids.mkdir()
    (project / "louder.py").write_text(LOUDER)
    command = [sys.executable, "-m", "cloudtrain.cli", "submit", "louder.py", "--wait", "--nodes", "2"]
    command += ["--set=processes_per_node=2", "--", str(first), str(pids)]
    env = {**os.environ, "CLOUDTRAIN_HOME": str(folder / "home")}
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 40 + first, done.stdout + done.stderr
    run = Run.find(home=folder / "home")
    status = run.record.status
    assert (status.state, status.exit_code) == (State.FAILED, 40 + first)
    assert f"rank {first} exited with code {40 + first}" in status.reason
    told = done.stdout + done.stderr
    assert "ValueError: the cause" in told and f"the last lines of node {first // 2}, rank {first}" in told
    assert "a consequence" not in told
    assert sum("a consequence" in line.text for line in run.logs()) >= 300, "the others did die louder"


def test_the_first_of_four_is_found_though_others_die_louder(tmp_path, figure):
    choose = random.Random(first_seed())
    firsts = [0, 1, 2, 3, choose.randrange(4), choose.randrange(4)]
    with ThreadPoolExecutor(3) as pool:  # each mostly waits
        list(pool.map(lambda n: four_ranks(tmp_path / str(n), firsts[n]), range(len(firsts))))
    figure("attempts of four ranks whose first failure was told first", len(firsts))


UNSEEN = """
import os, pathlib, sys, time
rank, folder = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
order = [int(text) for text in sys.argv[2].split(",")]
deadline = time.monotonic() + 120

def dead(number):
    pid = int((folder / f"{number}.pid").read_text())
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "Z"
    except OSError:
        return False

(folder / f"{rank}.new").write_text(str(os.getpid()))
(folder / f"{rank}.new").rename(folder / f"{rank}.pid")
before = order[: order.index(rank)]
while not ((folder / "go").exists() and all(map(dead, before))) and time.monotonic() < deadline:
    time.sleep(0.005)
os._exit(40 + rank)
"""


def test_the_first_of_many_is_found_though_nobody_looked_while_they_died(tmp_path, figure):
    """The supervisor stands still while its ranks die one after the other, and sees all of them dead at once."""
    choose = random.Random(first_seed())
    orders = [[3, 2, 1, 0], [1, 0, 3, 2], *(choose.sample(range(4), 4) for _ in range(2))]
    for n, order in enumerate(orders):
        pids = tmp_path / f"pids-{n}"
        pids.mkdir()
        argv = ("train.py", str(pids), ",".join(map(str, order)))
        with Attempt(tmp_path / str(n), UNSEEN, processes=4, argv=argv) as attempt:
            attempt.start()
            wait_for(lambda: len(list(pids.glob("*.pid"))) == 4, "four ranks")  # noqa: B023 - at once
            guard = attempt.status()["pid"]
            supervisor = int(Path(f"/proc/{guard}/task/{guard}/children").read_text())  # its only child
            os.kill(supervisor, signal.SIGSTOP)
            try:
                (pids / "go").touch()
                last = int((pids / f"{order[-1]}.pid").read_text())
                wait_for(lambda: Path(f"/proc/{last}/stat").read_text().rpartition(") ")[2][0] == "Z", "four zombies")  # noqa: B023
            finally:
                os.kill(supervisor, signal.SIGCONT)
            (code,) = attempt.wait()
            assert (code, attempt.events("result")[0]["failed_rank"]) == (40 + order[0], order[0]), order
    figure("orders of death that nobody saw", len(orders))
