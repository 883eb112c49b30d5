"""How long a curve of a million points takes to be drawn from the history, and a history of 10,000 runs to be listed.

python benchmarks/curves.py [--points 1000000] [--runs 10000] [--rounds 9]
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from history import fill, name

CURVE_S, LIST_S = 0.3, 0.2  # what each may take


def curve(home: Path, run_id: str, points: int) -> None:
    """Write a curve with noise into a run of the history, the fast way: as rows, past the watcher."""
    from cloudtrain.events import Row
    from cloudtrain.history.store import Store

    store = Store(home)
    for first in range(0, points, 100_000):
        rows = [
            Row(
                0,
                number,
                "2026-11-21T00:00:00Z",
                number,
                "loss",
                5 * math.exp(-number / points * 4) + math.sin(number * 12.9898) / 9,
            )
            for number in range(first, min(first + 100_000, points))
        ]
        store.record(f"{run_id}-a1", metrics=rows)


def main() -> int:
    """Measure and print; return 1 when a question takes too long."""
    from measure import report, table

    from cloudtrain.history.store import Store

    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        fill(home, arguments.runs)
        one = name(arguments.runs // 3)
        curve(home, one, arguments.points)
        size = (home / "history.sqlite3").stat().st_size
        every = [name(number) for number in range(arguments.runs)]
        asked: dict[str, tuple[Callable[[Store], object], float]] = {
            "a curve in 1,000 points": (lambda store: store.curves.points(one, "loss"), CURVE_S),
            "its last 40 values (live view)": (lambda store: store.curves.tail(one, "loss", 40), CURVE_S),
            "a summary of every curve": (lambda store: store.curves.summary(one), CURVE_S),
            "a list of all runs": (lambda store: store.runs(limit=arguments.runs), LIST_S),
            "the last loss of all runs": (lambda store: store.curves.last(every), LIST_S),
        }
        times: dict[str, list[float]] = {what: [] for what in asked}
        for _ in range(arguments.rounds):
            for what, (ask, _) in asked.items():
                store = Store(home)  # opened anew, as every command does
                began = time.perf_counter()
                ask(store)
                times[what].append(time.perf_counter() - began)
    middle = {what: sorted(found)[len(found) // 2] for what, found in times.items()}
    rows = [(what, f"{middle[what]:.4f}", f"{min(found):.4f} to {max(found):.4f}") for what, found in times.items()]
    body = table(rows, ["question, with opening the history", "wall s: median", "min to max"])
    body += f"\n\nA curve of {arguments.points:,} points in a history of {arguments.runs:,} runs, {size / 1e6:,.0f} MB,"
    body += f" {arguments.rounds} rounds."
    gates = [(f"seconds: {what}", middle[what], most) for what, (_, most) in asked.items()]
    return report("curves", "Drawing long curves, listing many runs", body, gates)


if __name__ == "__main__":
    sys.exit(main())
