"""What watching many runs costs, and what a watcher that is killed loses: SageMaker's simulator, whose jobs run nothing.

    python benchmarks/watcher.py [--runs 100] [--seconds 60] [--submits 40] [--processes 4] [--kills 4]

The first part submits `--runs` runs, lets each print a metric once a minute, and measures the watcher for `--seconds`: its
memory and processor time, and once a second how old the oldest state is. Then it ends some jobs and notes when the history
says so. The second part submits from several processes while the watcher is killed after each so many jobs. The third lets a
platform hang for `--hangs` seconds beside another one.
Issue 21 asks for `--runs 1000 --submits 5000 --processes 20 --kills 50`.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hung_platform import hang
from measure import Gates, Rows, cpu_s, report, resident_bytes, table, wait_until, watchers

from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.job.units import format_time
from cloudtrain.simulators.sagemaker.server import REGION, ROLE, Simulator
from cloudtrain.simulators.sagemaker.training_job import TrainingJob

BUCKET, GROUP = "bench", "/aws/sagemaker/TrainingJobs"
ENDED = 10  # jobs whose end is timed
PRINT_S = 60.0  # between two metrics of a run
SUBMIT = """
import sys
from cloudtrain import Submitter
source, first, count, role, region = sys.argv[1:]
submitter = Submitter("sagemaker", role=role, bucket="bench", region=region, image="any", client="boto3")
job = {"name": "bench", "source": source, "entrypoint": "train.py", "environment": {"requirements": "none"},
       "resources": {"instance_type": "ml.m5.xlarge"}}
for number in range(int(first), int(first) + int(count)):
    submitter.submit({**job, "labels": {"number": str(number)}}).acknowledge()
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--submits", type=int, default=40)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--hangs", type=float, default=40.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "source").mkdir()
        (folder / "source" / "train.py").write_text("print('hello')\n")
        rows, gates = watch(folder, given.runs, given.seconds)
        more_rows, more_gates = kill(folder, given.submits, given.processes, given.kills)
        hung_rows, hung_gates = hang(folder, given.hangs)
    body = table([*rows, *more_rows, *hung_rows], ["", "measured"])
    return report("watcher", f"One watcher for {given.runs} runs", body, [*gates, *more_gates, *hung_gates])


@contextmanager
def platform(folder: Path, home: Path) -> Iterator[Simulator]:
    """Yield a simulator whose jobs wait; at the end the watchers of a home are killed."""
    simulator = Simulator(folder / f"hosts-{home.name}")
    simulator.behavior.pending_s = 1e8
    os.environ.update(simulator.environ)
    simulator.make_bucket(BUCKET)
    try:
        yield simulator
    finally:
        for pid in watchers(home):
            os.kill(pid, signal.SIGKILL)
        simulator.close()


# -- what watching costs ----------------------------------------------------------------------------------------------


def watch(folder: Path, runs: int, seconds: float) -> tuple[Rows, Gates]:
    """Measure the watcher of so many live runs."""
    home = folder / "watched"
    with platform(folder, home) as simulator:
        wait_all([submitter(folder, home, n, min(100, runs - n)) for n in range(0, runs, 100)])
        store = Store(home)
        ids = [record.run_id for record in store.runs(limit=runs)]
        wait_until(lambda: all(map(store.watched, ids)), "a watcher")
        printer = Printer(simulator, ids)
        wait_until(lambda: sum(r.status.state is State.RUNNING for r in store.runs(limit=runs)) == runs, "their states")
        time.sleep(min(seconds, 30))  # what is asked more often because something has just begun is over
        say(f"{runs} runs are watched")
        pids, before, calls = watchers(home), sum(map(cpu_s, watchers(home))), len(simulator.calls)
        began, memory, oldest = time.monotonic(), 0, 0.0
        while time.monotonic() - began < seconds:
            time.sleep(1)
            memory = max(memory, sum(map(resident_bytes, watchers(home))))
            states = [(home / "runs" / run_id / "asked").stat().st_mtime for run_id in ids]  # history/spool.py
            oldest = max(oldest, time.time() - min(states))
        wall = time.monotonic() - began
        share, calls = (sum(map(cpu_s, pids)) - before) / wall, len(simulator.calls) - calls
        metric_s = printer.oldest_unread_s(store)
        printer.close()
        ends = noticed_ends(simulator, printer, store, random.sample(ids, min(ENDED, runs)))
    rows: Rows = [
        ("live runs, each of which prints a metric a minute", runs),
        ("load of the machine meanwhile", f"{os.getloadavg()[0]:.1f}"),
        ("processes of the watcher", len(pids)),
        ("their memory, MB", f"{memory / 1e6:.0f}"),
        ("their share of a processor", f"{share:.1%}"),
        ("calls of the platform a second", f"{calls / wall:.1f}"),
        (f"the oldest state in {seconds:.0f} s, s", f"{oldest:.1f}"),
        ("the oldest metric that is not in the history yet, s", f"{metric_s:.1f}"),
        (f"an end is in the history after, s ({len(ends)} jobs)", f"{min(ends):.1f} to {max(ends):.1f}"),
    ]  # fmt: skip
    gates = [
        ("memory, MB", memory / 1e6, 400.0),
        ("share of a processor", share, 0.15),
        ("age of the oldest state, s", oldest, 30.0),
        ("an end is noticed after, s", max(ends), 30.0),
    ]
    return rows, gates


class Printer:
    """Lets each job run, as the platform says, and print a metric every PRINT_S."""

    def __init__(self, simulator: Simulator, ids: list[str]) -> None:
        self._simulator, self._ids = simulator, ids
        self._printed: dict[str, list[float]] = {run_id: [] for run_id in ids}
        self._closed = threading.Event()
        simulator.call("logs", "create_log_group", logGroupName=GROUP)
        threading.Thread(target=self._print, daemon=True).start()

    def _print(self) -> None:
        for run_id in self._ids:
            start(self._simulator.jobs[f"{run_id}-a1"])
            stream = {"logGroupName": GROUP, "logStreamName": f"{run_id}-a1/algo-1-1"}
            self._simulator.call("logs", "create_log_stream", **stream)
        while True:
            for run_id in self._ids:
                if self._closed.wait(PRINT_S / len(self._ids)):
                    return
                step = len(self._printed[run_id])
                self.print(run_id, 0, f'{{"kind":"metric","step":{step},"loss":0.5}}')

    def print(self, run_id: str, rank: int, event: str) -> None:
        """Write a line of a run's launcher into its log."""
        times, moment = self._printed[run_id], time.time()
        message = f"{len(times)} {rank} {format_time(moment)} ::cloudtrain::{event}"
        stream = {"logGroupName": GROUP, "logStreamName": f"{run_id}-a1/algo-1-1"}
        events = [{"timestamp": int(moment * 1000), "message": message}]
        self._simulator.call("logs", "put_log_events", logEvents=events, **stream)
        times.append(moment)

    def oldest_unread_s(self, store: Store) -> float:
        """Return the age of the oldest metric that the history does not have."""
        ages = [0.0]
        for run_id, times in self._printed.items():
            known = max((int(each.step) + 1 for each in store.curves.newest(run_id)), default=0)
            ages += [time.time() - moment for moment in times[known : known + 1]]
        return max(ages)

    def close(self) -> None:
        self._closed.set()


def start(job: TrainingJob) -> None:
    """Let a job run in the eyes of the platform, without a process."""
    with job._lock:
        job._transition("Training", "Training image download completed. Training in progress.")
        job._started = time.time()


def noticed_ends(simulator: Simulator, printer: Printer, store: Store, chosen: list[str]) -> list[float]:
    """End jobs, and return how long after it each end is in the history, in seconds."""
    ended: dict[str, float] = {}
    noticed: dict[str, float] = {}
    for run_id in chosen:
        printer.print(run_id, -1, '{"kind":"state","state":"PREEMPTED"}')
        simulator.jobs[f"{run_id}-a1"].stop()

    def seen() -> bool:
        for run_id in set(chosen) - noticed.keys():
            if simulator.jobs[f"{run_id}-a1"].status == "Stopped":
                ended.setdefault(run_id, time.monotonic())
            if store.find(run_id).status.state.final:
                noticed[run_id] = time.monotonic() - ended.get(run_id, time.monotonic())
        return len(noticed) == len(chosen)

    wait_until(seen, "the ends in the history")
    return list(noticed.values())


# -- what a kill loses ------------------------------------------------------------------------------------------------


def kill(folder: Path, submits: int, processes: int, kills: int) -> tuple[Rows, Gates]:
    """Submit from several processes while the watcher is killed."""
    home, each = folder / "killed", -(-submits // processes)
    with platform(folder, home) as simulator:
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        children = [submitter(folder, home, n * each, min(each, submits - n * each)) for n in range(processes)]
        killed, loads = 0, []
        while killed < kills:  # spread over the submits
            done = all(child.poll() is not None for child in children)
            if not done and len(simulator.jobs) < (killed + 0.5) * submits / kills:
                time.sleep(0.05)
                continue
            if done and not watchers(home):
                show(home)
            for pid in watchers(home)[:1]:
                os.kill(pid, signal.SIGKILL)
                killed += 1
                loads.append(os.getloadavg()[0])
                say(f"{killed} kills, {len(simulator.jobs)} jobs, {time.monotonic() - began:.0f} s")
        wait_all(children)
        wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        store = Store(home)
        records = store.runs(limit=submits * 2)
        show(home)  # any command starts a watcher where none is left
        began = time.monotonic()
        wait_until(lambda: all(store.watched(record.run_id) for record in records), "all runs to be watched")
        again_s = time.monotonic() - began
        sent = Counter(tag["Value"] for job in simulator.jobs.values() for tag in job.request["Tags"]
                       if tag["Key"] == "number")  # fmt: skip
        arns = {job.arn for job in simulator.jobs.values()}
        handles = [store.attempts(record.run_id)[-1].handle for record in records]
    rows: Rows = [
        (f"submits by {processes} processes", submits),
        ("kills of the watcher", killed),
        ("load of the machine meanwhile", f"{max(loads, default=0):.1f}"),
        ("a submit, CPU s", f"{used / submits:.3f}"),
        ("submits a second", f"{submits / wall:.1f}"),
        ("all are watched again after, s", f"{again_s:.1f}"),
    ]
    return rows, [
        ("submits without a job", submits - len(sent), 0),
        ("jobs sent twice", sum(sent.values()) - len(sent), 0),
        ("runs without their job", sum(handle not in arns for handle in handles), 0),
        ("runs too many or too few", abs(len(records) - submits), 0),
        ("kills that were not made", kills - killed, 0),
    ]


def show(home: Path) -> None:
    command = [sys.executable, "-m", "cloudtrain.cli", "show"]
    env = os.environ | {"CLOUDTRAIN_HOME": str(home)}
    subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=True)


def submitter(folder: Path, home: Path, first: int, count: int) -> subprocess.Popen[bytes]:
    arguments = [str(folder / "source"), str(first), str(count), ROLE, REGION]
    env: Mapping[str, str] = os.environ | {"CLOUDTRAIN_HOME": str(home)}
    return subprocess.Popen([sys.executable, "-c", SUBMIT, *arguments], env=env, cwd=folder)


def wait_all(children: list[subprocess.Popen[bytes]]) -> None:
    codes = [child.wait() for child in children]
    if any(codes):
        sys.exit("a submit failed")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
