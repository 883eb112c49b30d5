"""What watching many runs costs, and what a watcher that is killed loses: SageMaker's simulator, whose jobs wait.

    python benchmarks/watcher.py [--runs 100] [--seconds 60] [--submits 40] [--processes 4] [--kills 4]

The first part submits `--runs` runs, measures the watcher for `--seconds`, then ends some jobs and notes when the history
says so. The second submits from several processes while the watcher is killed again and again. Issue 21 asks for
`--runs 1000 --submits 5000 --processes 20 --kills 50`.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from measure import report, table

from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.simulators.sagemaker.server import REGION, ROLE, Simulator

BUCKET = "bench"
ENDED = 10  # jobs whose end is timed
SUBMIT = """
import sys
from cloudtrain import Submitter
home, source, first, count, role, region = sys.argv[1:]
submitter = Submitter("sagemaker", role=role, bucket="bench", region=region, image="any", client="boto3")
job = {"name": "bench", "source": source, "entrypoint": "train.py", "environment": {"requirements": "none"},
       "resources": {"instance_type": "ml.m5.xlarge"}}
for number in range(int(first), int(first) + int(count)):
    submitter.submit(job, key=f"{home.rpartition('/')[2]}-{number}").acknowledge()
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--submits", type=int, default=40)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--kills", type=int, default=4)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "source").mkdir()
        (folder / "source" / "train.py").write_text("print('hello')\n")
        simulator = Simulator(folder / "hosts")
        simulator.behavior.pending_s = 1e9
        os.environ.update(simulator.environ)
        simulator.make_bucket(BUCKET)
        try:
            rows, gates = watch(simulator, folder, given.runs, given.seconds)
            more_rows, more_gates = kill(simulator, folder, given.submits, given.processes, given.kills)
        finally:
            for pid in (*watchers(folder / "watched"), *watchers(folder / "killed")):
                os.kill(pid, signal.SIGKILL)
            simulator.close()
    body = table([*rows, *more_rows], ["", "measured"])
    return report("watcher", f"One watcher for {given.runs} runs", body, [*gates, *more_gates])


Rows = list[tuple[str, object]]
Gates = list[tuple[str, float, float]]


def watch(simulator: Simulator, folder: Path, runs: int, seconds: float) -> tuple[Rows, Gates]:
    """Measure the watcher of so many live runs."""
    home = folder / "watched"
    wait_all([submitter(folder, home, 0, runs)])
    store = Store(home)
    wait_until(lambda: all(store.watched(record.run_id) for record in store.runs(limit=runs)), "a watcher")
    time.sleep(10)  # what is asked more often because something has just begun is over
    pids, before, calls = watchers(home), cpu_s(watchers(home)), len(simulator.calls)
    began, memory = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        time.sleep(1)
        memory = max(memory, sum(map(resident_bytes, watchers(home))))
    wall = time.monotonic() - began
    share, calls = (cpu_s(pids) - before) / wall, len(simulator.calls) - calls
    chosen = random.sample([record.run_id for record in store.runs(limit=runs)], min(ENDED, runs))
    for run_id in chosen:
        simulator.jobs[f"{run_id}-a1"].stop()
    ends: dict[str, float] = {}
    stale: dict[str, float] = {}

    def seen() -> bool:
        for run_id in set(chosen) - stale.keys():
            if simulator.jobs[f"{run_id}-a1"].status == "Stopped":
                ends.setdefault(run_id, time.monotonic())
            if store.find(run_id).status.state.final:
                stale[run_id] = time.monotonic() - ends.get(run_id, time.monotonic())
        return len(stale) == len(chosen)

    wait_until(seen, "the ends in the history")
    rows: Rows = [
        ("live runs", runs),
        ("processes of the watcher", len(pids)),
        ("their memory, MiB", f"{memory / 2**20:.0f}"),
        ("their share of a processor", f"{share:.1%}"),
        ("calls of the platform a second", f"{calls / wall:.1f}"),
        (f"an end is in the history after, s ({len(stale)} jobs)", f"{min(stale.values()):.1f} to {max(stale.values()):.1f}"),
    ]  # fmt: skip
    slowest = max(stale.values())
    gates = [
        ("memory, MB", memory / 1e6, 400.0),
        ("share of a processor", share, 0.15),
        ("staleness, s", slowest, 30.0),
    ]
    return rows, gates


def kill(simulator: Simulator, folder: Path, submits: int, processes: int, kills: int) -> tuple[Rows, Gates]:
    """Submit from several processes while the watcher is killed."""
    home, before = folder / "killed", set(simulator.jobs)
    each = -(-submits // processes)
    children = [submitter(folder, home, n * each, min(each, submits - n * each)) for n in range(processes)]
    killed = 0
    while killed < kills:
        for pid in watchers(home)[:1]:
            os.kill(pid, signal.SIGKILL)
            killed += 1
        if all(child.poll() is not None for child in children) and not watchers(home):
            break
        time.sleep(random.uniform(0.2, 1.0))
    wait_all(children)
    store = Store(home)
    records = store.runs(limit=submits * 2)
    jobs = [name for name in simulator.jobs if name not in before]
    subprocess.run(
        [sys.executable, "-m", "cloudtrain.cli", "show"],
        env=os.environ | {"CLOUDTRAIN_HOME": str(home)},
        stdout=subprocess.DEVNULL,
        check=True,
    )  # fmt: skip - any command starts a watcher where none is left
    began = time.monotonic()
    wait_until(lambda: all(store.watched(record.run_id) for record in records), "all runs to be watched")
    lost = submits - len({record.run_id for record in records if record.status.state is not State.FAILED})
    doubled = len(jobs) - len({name.rpartition("-a")[0] for name in jobs})
    rows: Rows = [
        (f"submits by {processes} processes", submits),
        ("kills of the watcher", killed),
        ("all are watched again after, s", f"{time.monotonic() - began:.1f}"),
    ]
    return rows, [
        ("runs lost", lost, 0),
        ("jobs without a run", abs(len(jobs) - submits), 0),
        ("jobs sent twice", doubled, 0),
    ]


def submitter(folder: Path, home: Path, first: int, count: int) -> subprocess.Popen[bytes]:
    arguments = [str(home), str(folder / "source"), str(first), str(count), ROLE, REGION]
    env: Mapping[str, str] = os.environ | {"CLOUDTRAIN_HOME": str(home)}
    return subprocess.Popen([sys.executable, "-c", SUBMIT, *arguments], env=env, cwd=folder)


def wait_all(children: list[subprocess.Popen[bytes]]) -> None:
    if any(child.wait() for child in children):
        sys.exit("a submit failed")


def wait_until(condition, what: str, bound_s: float = 300.0) -> None:
    end = time.monotonic() + bound_s
    while not condition():
        if time.monotonic() > end:
            sys.exit(f"{what} did not come within {bound_s:.0f} s")
        time.sleep(0.1)


def watchers(home: Path) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"cloudtrain.runs.watch_all" in words and str(home).encode() in words:
            found.append(int(entry.parent.name))
    return found


def cpu_s(pids: list[int]) -> float:
    """Return the processor time of processes, in seconds."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
