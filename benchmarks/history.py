"""How long a history of 100,000 runs takes to be asked: what `ls`, `show` and `submit` ask of it, and `ls` as a whole.

python benchmarks/history.py [--runs 100000] [--rounds 15]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from cloudtrain.history import table as table_of_runs
from cloudtrain.history.table import Query

MOST_S = 0.2  # what a query may take
LISTS = (
    Query("state:failed"),
    Query("label.team=nlp hp.key_3=3 metric.loss<0.001"),
    Query("label.team=nlp hp.key_3=3 metric.loss<0.5", "-hp.key_1"),  # half of them, sorted
    Query("hp.key_3=4"),  # there is none
    Query("tune-26 -state:failed took>1h"),
    Query("is:starred"),
    Query("", "metric.loss", "hp.key_1,metric.loss,took,step"),
    Query("", "-hp.key_1"),
)


def name(number: int) -> str:
    """Return the id of a run, as the submitter makes them."""
    return f"{('train', 'eval', 'tune', 'distil')[number % 4]}-261120-{number:06d}-{number * 7919 % 46656:04x}"


def fill(home: Path, count: int) -> None:
    """Write so many runs into a history, the newest last: nearly all of them over, one of a thousand running."""
    from cloudtrain.backends.api import Plan
    from cloudtrain.history.store import Store
    from cloudtrain.job.job import Job
    from cloudtrain.nodes.process import Process

    choose = random.Random(1)
    data = Job(
        source=str(home),
        entrypoint="train.py",
        hyperparameters={f"key_{n}": str(n) for n in range(20)},
        labels={"team": "nlp"},
    ).to_dict()
    job, owner = json.dumps(data), str(Process.here())
    store = Store(home)
    with store.database.write() as db:
        for number in range(count):
            run_id = name(number)
            state = (
                "RUNNING" if number % 1000 == 500 else choose.choice(("SUCCEEDED", "SUCCEEDED", "FAILED", "CANCELLED"))
            )
            at = f"2026-{number // 10_000 + 1:02d}-01T{number // 600 % 24:02d}:{number // 10 % 60:02d}:{number % 10:02d}.000000Z"
            db.execute(
                "INSERT INTO runs (run_id, name, backend, target, identity, job, created_at, acked_at, state)"
                " VALUES (?, ?, 'local', 'local', ?, ?, ?, ?, ?)",
                (run_id, run_id.partition("-")[0], f"{number:064x}", job, at, at, state),
            )
            plan = Plan("local", run_id, 1, {}, {"sha256": "0"}, {"secrets": {}}, data)
            db.execute(
                "INSERT INTO attempts (attempt_id, run_id, number, plan, handle, owner, created_at, state)"
                " VALUES (?, ?, 1, ?, 'h', ?, ?, ?)",
                (plan.attempt_id, run_id, plan.to_json(), owner, at, state),
            )
        db.execute(
            "INSERT INTO run_metrics SELECT 'loss', run_id, 0, 1, 9, rowid % 9973 / 9973.0, 0.1, 2.0, 1000 FROM runs"
        )


def main() -> int:
    """Measure and print; return 1 when a query takes too long."""
    from measure import interleaved, median, process, report, spread, table

    from cloudtrain.events import State
    from cloudtrain.history.store import Store

    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        fill(home, arguments.runs)
        size = (home / "history.sqlite3").stat().st_size
        live = [state for state in State if not state.final]
        one = name(arguments.runs // 3)
        asked: dict[str, Callable[[Store], object]] = {
            "ls": lambda store: store.runs(limit=50),
            "ls: those that may need a look": lambda store: store.runs(limit=50, states=live),
            "ls --state LOST (there is none)": lambda store: store.runs(limit=50, states=[State.LOST]),
            "ls --name": lambda store: store.runs(limit=50, name="tune"),
            "ls --name (there is none)": lambda store: store.runs(limit=50, name="no-such"),
            "show, by its whole id": lambda store: store.find(one),
            "show, by a prefix": lambda store: store.find(one[:-2]),
            "submit: what was left unsettled": lambda store: store.unsettled(),
            "completion of ids": lambda store: store.names(),
            **{f"ls {each.address()}": partial(table_of_runs.first_rows, query=each, limit=20) for each in LISTS},
        }
        times: dict[str, list[float]] = {what: [] for what in asked}
        for _ in range(arguments.rounds):
            for what, ask in asked.items():
                store = Store(home)  # opened anew, as every command does
                began = time.process_time()
                ask(store)
                times[what].append(time.process_time() - began)
        with Store(home).database.write() as db:
            db.execute(
                "UPDATE runs SET state = 'SUCCEEDED' WHERE state = 'RUNNING'"
            )  # else ls looks for their watchers
        env = dict(os.environ, CLOUDTRAIN_HOME=str(home))
        program = str(Path(sys.executable).parent / "cloudtrain")
        compound = LISTS[1].filter.split()
        commands = {"cloudtrain ls": [program, "ls"], f"cloudtrain ls {' '.join(compound)}": [program, "ls", *compound]}
        whole = interleaved(
            {what: partial(process, each, env=env) for what, each in commands.items()}, arguments.rounds
        )
    middle = {what: sorted(found)[len(found) // 2] for what, found in times.items()}
    rows = [(what, f"{middle[what]:.4f}", f"{min(found):.4f} to {max(found):.4f}") for what, found in times.items()]
    body = table(rows, ["question, with opening the history", "CPU s: median", "min to max"])
    body += f"\n\n{arguments.runs:,} runs with an attempt each, {size / 1e6:,.0f} MB, {arguments.rounds} rounds."
    body += " Commands as a whole, Python's start included:\n"
    body += "".join(
        f"\n- `{what}`: {spread(each, 'wall')} s wall, {median(each, 'cpu'):.3f} s CPU" for what, each in whole.items()
    )
    gates = [(f"CPU seconds: {what}", found, MOST_S) for what, found in middle.items()]
    return report("history", "Asking a long history", body, gates)


if __name__ == "__main__":
    sys.exit(main())
