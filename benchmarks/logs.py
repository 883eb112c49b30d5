"""How fast a log is read: 1,000,000 lines of 8 nodes through the real command line, whole and from a cursor.

    python benchmarks/logs.py [--lines 1000000] [--rounds 3]

The lines are written into the folders of a finished run of 8 simulated nodes, in the form that the launcher writes. One line
in 100 is a metric. `watching` is what the watcher does: it reads the log, finds the metrics and stores them. With
`--every 1` each line is a metric, of three points.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
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
    return report(
        "logs",
        "Reading a log",
        body,
        [
            ("seconds for 200,000 lines, following", 200_000 / rates["logs -f"], 1.0),
            ("CPU seconds for 200,000 lines, watching", median(found["watching"], "cpu") * 200_000 / lines, 1.0),
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
