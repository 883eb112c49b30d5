"""How fast a log is read: 1,000,000 lines of 8 nodes through the real command line, whole and from a cursor.

    python benchmarks/logs.py [--lines 1000000] [--rounds 3]

The lines are written into the folders of a finished run of 8 simulated nodes, in the form that the launcher writes. One line
in 100 is a metric. `watching` is what the watcher does: it reads the log, finds the metrics and stores them. With
`--every 1` each line is a metric, of three points, and a second table has one run of a script that prints 200,000 of
them, followed by `submit -f`: when each part is done, in seconds after the job's own end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from measure import Sample, interleaved, median, process, report, spread, table

NODES = 8
WATCH = """
import sys
from cloudtrain.history.store import Store
from cloudtrain.job import targets
from cloudtrain.runs.planning.attempts import backend_of
from cloudtrain.runs.watching.collect import Collector
store = Store(targets.home())
with store.database.write() as db:
    for statement in ("UPDATE attempts SET cursor = NULL", "DELETE FROM metrics", "DELETE FROM curves"):
        db.execute(statement)
(attempt,) = store.attempts(sys.argv[1])
backend = backend_of(attempt.plan, store.home, attempt.handle)
Collector(lambda: None, print).read_log(store, attempt, backend, ended=True)
found = sum(row.points for row in store.curves.summary(sys.argv[1], None))
sys.exit(found != int(sys.argv[2]) and f"{found:,} points instead of {sys.argv[2]}")
"""


PRINT = """
for step in range(200_000):
    print(f"step {step} loss 3.14159 lr 0.001 grad_norm 0.5")
"""


def run_of_metric_lines(program: str, folder: Path, env: Mapping[str, str]) -> dict[str, float]:
    """Return the seconds after the job's own end until each part is done."""
    from cloudtrain.history.store import Store
    from cloudtrain.job.units import unix_time

    (folder / "print.py").write_text(PRINT)
    store = Store(Path(env["CLOUDTRAIN_HOME"]))
    before, times = set(store.names()), dict[str, float]()
    submit = subprocess.Popen([program, "submit", "print.py", "-f"], cwd=folder, env=env, stdout=subprocess.DEVNULL)
    while not (new := set(store.names()) - before):
        time.sleep(0.05)
    (run_id,) = new
    while "its points are stored" not in times or "submit -f has returned" not in times:
        now = time.time()
        final = store.find(run_id).status.state.final
        done = {
            "its state is SUCCEEDED": final,
            "submit -f has returned": submit.poll() is not None,
            "its points are stored": final and not store.is_unread(run_id),
        }
        times |= {name: now for name, is_done in done.items() if is_done and name not in times}
        time.sleep(0.05)
    status = store.find(run_id).status
    points = sum(row.points for row in store.curves.summary(run_id, None))
    if points != 600_000 or submit.returncode != 0:
        sys.exit(f"{points:,} points instead of 600,000, exit code {submit.returncode}")
    assert status.started_at and status.ended_at
    ended = unix_time(status.ended_at)
    return {"the job has run": ended - unix_time(status.started_at)} | {name: at - ended for name, at in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every", type=int, default=100, help="one line in so many is a metric")
    arguments = parser.parse_args()
    program = str(Path(sys.executable).parent / "cloudtrain")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "hello.py").write_text("print('hello')\n")
        env = dict(os.environ, CLOUDTRAIN_HOME=str(folder / "home"))
        submit = [program, "submit", "hello.py", "--nodes", str(NODES), "--wait", "--json"]
        shown = subprocess.run(submit, cwd=folder, env=env, capture_output=True, text=True, check=True).stdout
        run_id = json.loads(shown.splitlines()[0])["run_id"]
        attempt = folder / "home" / "runs" / run_id / "a1"
        each = arguments.lines // NODES
        for node in range(NODES):
            with (attempt / f"node-{node}" / "log").open("w") as log:
                for n in range(each):
                    at = f"2026-01-01T{n // 3_600_000:02d}:{n // 60_000 % 60:02d}:{n // 1000 % 60:02d}.{n % 1000:03d}000Z"
                    text = (
                        f"step {n} loss 3.14159 lr 0.001 grad_norm 0.5"
                        if n % arguments.every == 0
                        else f"worker {n} has read its part and says more words"
                    )
                    log.write(f"{n} {node} {at} {text}, as scripts print them\n")

        def read(*extra: str) -> Sample:
            return process(
                ["/bin/sh", "-c", 'exec "$@" > "$OUT"', "sh", program, "logs", run_id, *extra], env | {"OUT": str(out)}
            )

        out = folder / "out"
        found = interleaved(
            {
                "logs": lambda: read(),
                "logs -f": lambda: read("-f"),
                "logs --json": lambda: read("--json"),
                "watching": lambda: process(
                    [sys.executable, "-c", WATCH, run_id, str(3 * NODES * -(-each // arguments.every))], env
                ),
            },
            arguments.rounds,
            warm=0,
        )
        own = run_of_metric_lines(program, folder, env) if arguments.every == 1 else {}
        read()
        with out.open("rb") as file:
            lines = sum(1 for _ in file)
        if lines != each * NODES:
            sys.exit(f"{lines:,} lines came out of {each * NODES:,}")
    rates = {name: lines / median(samples, "wall") for name, samples in found.items()}
    body = table(
        [
            (name, f"{rates[name]:,.0f}", spread(samples, "cpu"), spread(samples, "wall"))
            for name, samples in found.items()
        ],
        ["command", "lines/s", "CPU s: median (min to max)", "wall s: median (min to max)"],
    )
    shape = f"{lines:,} lines of {NODES} nodes, one in {arguments.every} with three metrics"
    body += f"\n\n{shape}, all of them counted at the other end, {arguments.rounds} rounds."
    watching = median(found["watching"], "cpu") * 200_000 / lines
    if arguments.every == 1:
        rows = [(name, f"{seconds:.1f}") for name, seconds in own.items()]
        body += "\n\n" + table(rows, ["200,000 metric lines", "seconds"])
        gates = [
            ("CPU seconds for 200,000 metric lines, watching", watching, 8.0),
            ("seconds from the end of 200,000 metric lines to SUCCEEDED", own["its state is SUCCEEDED"], 5.0),
        ]
        return report("metric_lines", "Reading metric lines", body, gates)
    gates = [
        ("seconds for 200,000 lines, following", 200_000 / rates["logs -f"], 1.0),
        ("CPU seconds for 200,000 lines, watching", watching, 1.0),
    ]
    return report("logs", "Reading a log", body, gates)


if __name__ == "__main__":
    sys.exit(main())
