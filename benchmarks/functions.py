"""A trivial call from submit to result, and many calls, beside submitit's LocalExecutor in the same run.

    python benchmarks/functions.py [--submitit PYTHON] [--calls 20] [--rounds 5]

PYTHON is an interpreter that has submitit (pip install submitit==1.5.4). Prints one JSON object: medians of wall seconds, and
the client's memory in MB, also with 1,000 calls that are open (`open_mb`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

OURS = """
import json, resource, sys, time
calls, folder = int(sys.argv[1]), sys.argv[2]
import cloudtrain

@cloudtrain.function(target="local")
def add(a, b=1):
    return a + b

def one():
    began = time.perf_counter()
    assert add.submit(1).result() == 2
    return time.perf_counter() - began

first = one()
again = [one() for _ in range(3)]
began = time.perf_counter()
assert add.map(range(calls), max_parallel=8).results() == list(range(1, calls + 1))
many = time.perf_counter() - began

@cloudtrain.function(target="local")
def nap():
    time.sleep(600)

mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
sleeping = nap.submit()
held = [cloudtrain.Run.find(sleeping.run_id) for _ in range(500)]
futures = [run.future() for run in held]
group = add.map(range(500), max_parallel=1)
time.sleep(3)
open_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
group.stop()
sleeping.cancel()
print(json.dumps({"first": first, "again": min(again), "many": many, "mb": mb, "open_mb": open_mb}))
"""
THEIRS = """
import json, resource, sys, time
calls, folder = int(sys.argv[1]), sys.argv[2]
import submitit

def add(a, b=1):
    return a + b

executor = submitit.LocalExecutor(folder=folder)
executor.update_parameters(timeout_min=10)

def one():
    began = time.perf_counter()
    assert executor.submit(add, 1).result() == 2
    return time.perf_counter() - began

first = one()
again = [one() for _ in range(3)]
began = time.perf_counter()
jobs = executor.map_array(add, range(calls))
assert [job.result() for job in jobs] == list(range(1, calls + 1))
many = time.perf_counter() - began
print(json.dumps({"first": first, "again": min(again), "many": many,
                  "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
"""


def measure(python: str, program: str, calls: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "bench.py")
        script.write_text(program)
        env = {**os.environ, "CLOUDTRAIN_HOME": str(Path(folder, "home"))}
        done = subprocess.run(
            [python, str(script), str(calls), folder], cwd=folder, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--submitit", default="")
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(given.rounds):  # in turn, so that the load of the machine is that of both
        found.setdefault("cloudtrain", []).append(measure(sys.executable, OURS, given.calls))
        if given.submitit:
            found.setdefault("submitit", []).append(measure(given.submitit, THEIRS, given.calls))
    table = {
        name: {key: round(statistics.median(row[key] for row in rows), 3) for key in rows[0]}
        for name, rows in found.items()
    }
    if given.submitit:
        table["ratio"] = {key: round(table["cloudtrain"][key] / table["submitit"][key], 2) for key in table["submitit"]}
    print(json.dumps({"calls": given.calls, "rounds": given.rounds, **table}))


if __name__ == "__main__":
    main()
