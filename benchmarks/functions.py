"""A trivial call of a function from submit to result, and many calls, beside submitit in the same run.

    python benchmarks/functions.py [calls] [rounds] [slurm]

Measured here, beside submitit's LocalExecutor, and with the word `slurm` on a Slurm of three simulated hosts too, beside its
SlurmExecutor (root and Slurm's programs are needed). Each round is a process of its own with a new home. `first` includes
imports: it is a program's first call, from the start of the interpreter. Memory is that of a client with 1,000 open calls.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from measure import ROOT, Gates, peer, report, table

sys.path.insert(0, str(ROOT))
SUBMITIT = "submitit==1.5.4"
COMMON = """
import json, os, resource, sys, time
calls, folder, began = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])

def add(a, b=1):
    return a + b

def measure(submit, many):
    def one():
        began = time.time()
        assert submit(1).result() == 2
        return time.time() - began
    one()
    first = time.time() - began
    again = min(one() for _ in range(3))
    start = time.time()
    assert many(range(calls)) == list(range(1, calls + 1))
    print(json.dumps({"first call": first, "next call": again, "calls by map": time.time() - start}))
"""
OURS = """
import cloudtrain
call = cloudtrain.function(add, target=sys.argv[4])
measure(call.submit, lambda values: call.map(values, max_parallel=8).results())
"""
THEIRS = """
import submitit
Executor = {"local": submitit.LocalExecutor, "cluster": submitit.SlurmExecutor}[sys.argv[4]]
executor = Executor(folder=folder)
executor.update_parameters(**({"timeout_min": 10} if sys.argv[4] == "local" else {"time": 10, "array_parallelism": 8}))
measure(lambda *a: executor.submit(add, *a), lambda values: [job.result() for job in executor.map_array(add, values)])
"""
OPEN = """
import resource, time
import cloudtrain

@cloudtrain.function(target="local")
def nap(seconds):
    time.sleep(seconds)

sleeping = nap.submit(600)
futures = [cloudtrain.Run.find(sleeping.run_id).future() for _ in range(1000)]
group = nap.map([600] * 1000, max_parallel=1)
time.sleep(5)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
group.stop()
sleeping.cancel()
"""


def run(python: Path | str, program: str, folder: Path, *args: str, **env: str) -> str:
    """Run a program with a new home and return what it has printed last."""
    script = folder / "program.py"
    script.write_text(program)
    given = {**os.environ, "CLOUDTRAIN_HOME": str(folder / "home"), **env}
    given.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run([str(python), str(script), *args], cwd=folder, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@contextlib.contextmanager
def cluster() -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield the shared folder of a Slurm, and the environment of its clients; `cluster` is its target."""
    from tests.lab.network import Lab
    from tests.lab.slurm import Slurm

    lab = Lab(hosts=3)
    try:
        slurm = Slurm(lab)
        config = lab.folder / "configuration"
        config.mkdir()
        options = {"backend": "slurm", "folder": str(slurm.shared), "python": sys.executable}
        lines = ["[targets.cluster]", *(f"{name} = {json.dumps(value)}" for name, value in options.items())]
        (config / "cloudtrain.toml").write_text("\n".join(lines) + "\n")
        yield slurm.shared, {**slurm.environ, "CLOUDTRAIN_CONFIG_HOME": str(config)}
    finally:
        lab.close()


def compare(target: str, parent: Path | None, calls: int, rounds: int, **env: str) -> tuple[list[list[str]], Gates]:
    """Return rows and gates of one target: what a call takes here and in submitit, in turn."""

    found: dict[str, list[dict[str, float]]] = {"cloudtrain": [], "submitit": []}
    theirs = peer("submitit", SUBMITIT)
    for _ in range(rounds):
        for name, python, program in (("cloudtrain", sys.executable, OURS), ("submitit", theirs, THEIRS)):
            with tempfile.TemporaryDirectory(dir=parent) as folder:
                args = [str(calls), folder, str(time.time()), target]
                found[name].append(json.loads(run(python, COMMON + program, Path(folder), *args, **env)))
    rows, gates = [], Gates()
    for key in found["cloudtrain"][0]:
        ours, their = (statistics.median(row[key] for row in found[name]) for name in ("cloudtrain", "submitit"))
        what = f"{calls} {key}" if key.startswith("calls") else key
        rows.append([f"{target}: {what}", f"{ours:.2f} s", f"{their:.2f} s", f"{ours / their:.2f}"])
        gates.append((f"{target}: share of submitit, {what}", ours / their, 0.5 if key.startswith("calls") else 0.6))
    return rows, gates


def main() -> int:
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
    calls, rounds = [*numbers, *[200, 3][len(numbers) :]]
    rows, gates = compare("local", None, calls, rounds)
    if "slurm" in sys.argv:
        with cluster() as (shared, env):
            more, gates_there = compare("cluster", shared, calls, rounds, **env)
            rows, gates = rows + more, gates + gates_there
    with tempfile.TemporaryDirectory() as folder:
        open_mb = float(run(sys.executable, OPEN, Path(folder)))
    rows.append(["client with 1,000 open calls", f"{open_mb:.1f} MB", "", ""])
    body = table(rows, ["", "cloudtrain", f"submitit ({SUBMITIT.partition('==')[2]})", "share"])
    return report("functions", "Calls of functions", body, [*gates, ("MB of 1,000 open calls", open_mb, 60.0)])


if __name__ == "__main__":
    sys.exit(main())
