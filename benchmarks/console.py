"""The console's speed, in a real headless Chromium: the first page over 10,000 runs, a log of 1,000,000 lines, and how long a
metric takes from its emission to the screen.

python benchmarks/console.py        writes results/console.md; about two minutes
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import report, table
from playwright.sync_api import Page, sync_playwright

from cloudtrain.backends.api import Plan
from cloudtrain.events import State, Status
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import Process
from cloudtrain.runs.submit import Submitter

RUNS, LINES, POINTS, ROUNDS = 10_000, 1_000_000, 15, 21
EMITTING = """
import json, sys, time
from pathlib import Path

folder = Path(sys.argv[1])
for step in range(int(sys.argv[2])):
    while not (folder / str(step)).exists():
        time.sleep(0.005)
    print("::cloudtrain::" + json.dumps({"kind": "metric", "step": step, "loss": 1.0}), flush=True)
    (folder / f"{step}.at").write_text(str(time.time()))
"""
TALKING = "for n in range(%d): print(f'line {n} of a long log, with a few words in it: loss={n %% 977}')"


def main() -> int:
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        home = Path(name) / "home"
        fill(home)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        environment = {**os.environ, "CLOUDTRAIN_HOME": str(home)}
        command = [sys.executable, "-m", "cloudtrain", "console", "--no-open", "--json"]
        console = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=name)
        try:
            address = json.loads(console.stdout.readline())["url"]
            page = browser.new_context(viewport={"width": 1180, "height": 800}).new_page()
            page.set_default_timeout(300_000)
            root = address.partition("/open")[0]
            page.goto(address)
            page.wait_for_selector("tbody tr")
            memory_mb = resident_mb(console.pid)
            first = [first_page(page, root) for _ in range(ROUNDS)]
            emitted = emission(page, root, home, Path(name))
            begins, jump, search = log(page, root, home, Path(name))
        finally:
            console.terminate()
            console.wait()
            browser.close()
    rows = [
        (f"first page, {RUNS:,} runs, until its 50 rows are drawn", *of(first)),
        (f"a metric, from its emission until it is drawn ({POINTS} points)", *of(emitted)),
        (f"log of {LINES:,} lines: its first lines after the page was opened", f"{begins:.2f}", ""),
        ("from anywhere to line 500,000", f"{jump:.2f}", ""),
        ("a search over all lines", f"{search:.2f}", ""),
    ]
    gates = [
        ("first page (median, s)", statistics.median(first), 1.0),
        ("memory of the process after the first page (MB)", memory_mb, 90.0),
        ("metric to screen (median, s)", statistics.median(emitted), 2.0),
        ("log: to a line (s)", jump, 1.0),
    ]
    return report("console", "The console in the browser", table(rows, ["what", "seconds", "range"]), gates)


def of(values: list[float]) -> tuple[str, str]:
    return f"{statistics.median(values):.2f}", f"{min(values):.2f} to {max(values):.2f}"


def fill(home: Path) -> None:
    """Make a history of many runs, in one transaction."""
    store = Store(home)
    with store.database.write() as db:
        db.execute("SELECT 1")
    made = []
    for number in range(RUNS):
        run_id = f"tiny-{number:06d}"
        job = {"name": "tiny", "source": ".", "hyperparameters": {"lr": str(number)}, "labels": {"team": "nlp"}}
        made.append((Plan("local", run_id, 1, {}, {"sha256": "0"}, {"secrets": {}}, job, "local"), run_id))
    ended = Status(State.SUCCEEDED, 0, "", "2026-11-21T10:00:00Z", "2026-11-21T11:00:00Z")
    with store.database.write() as db:
        for number, (plan, run_id) in enumerate(made):
            at = f"2026-11-{1 + number // 500:02d}T10:{number // 60 % 60:02d}:{number % 60:02d}.000000Z"
            db.execute(
                "INSERT INTO runs (run_id, name, backend, target, identity, job, created_at, acked_at, state, exit_code,"
                " started_at, ended_at) VALUES (?, 'tiny', 'local', 'local', 'i', ?, ?, ?, ?, 0, ?, ?)",
                (run_id, json.dumps(plan.job), at, at, ended.state.value, ended.started_at, ended.ended_at),
            )
            db.execute(
                "INSERT INTO attempts (attempt_id, run_id, number, plan, handle, owner, created_at, state)"
                " VALUES (?, ?, 1, ?, 'h', ?, ?, ?)",
                (f"{run_id}-a1", run_id, plan.to_json(), str(Process.here()), at, ended.state.value),
            )


def first_page(page: Page, root: str) -> float:
    """Return how long the page of all runs takes until its rows are there."""
    page.goto("about:blank")
    began = time.perf_counter()
    page.goto(root, wait_until="commit")
    page.wait_for_function("document.querySelectorAll('tbody tr').length === 50")
    return time.perf_counter() - began


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def submit(home: Path, folder: Path, script: str, *args: str) -> str:
    folder.mkdir()
    (folder / "train.py").write_text(script)
    job = {"name": "tiny", "source": str(folder), "entrypoint": "train.py", "args": list(args)}
    run = Submitter("local", home=home).submit(job)
    run.acknowledge()
    return run.run_id


def emission(page: Page, root: str, home: Path, folder: Path) -> list[float]:
    """Return how long each of some points takes from the job's line to the picture."""
    orders = folder / "orders"
    orders.mkdir()
    run_id = submit(home, folder / "emitting", EMITTING, str(orders), str(POINTS + 2))
    page.goto(f"{root}/runs/{run_id}")
    found = []
    drawn = (
        "[...document.querySelectorAll('.ct-plots .js-plotly-plot')].some(p => p.data && p.data.at(-1).x.length > %d)"
    )
    for step in range(POINTS + 2):
        (orders / str(step)).touch()
        page.wait_for_function(drawn % step, polling=10)
        seen = time.time()
        if step >= 2:  # the first ones bring plotly itself
            found.append(seen - float((orders / f"{step}.at").read_text()))
        time.sleep(0.13 * (step % 5))  # at any moment between two looks of the page
    return found


def log(page: Page, root: str, home: Path, folder: Path) -> tuple[float, float, float]:
    """Return how long a long log takes: to its first lines, to a line in its middle once it was read, to a search's end."""
    run_id = submit(home, folder / "talking", TALKING % LINES)
    while not Store(home).find(run_id).status.state.final:
        time.sleep(0.5)
    began = time.perf_counter()
    page.goto(f"{root}/runs/{run_id}", wait_until="commit")
    page.wait_for_selector(".ct-log .ct-line")
    begins = time.perf_counter() - began
    page.get_by_text(f"of {LINES:,} lines").wait_for()
    began = time.perf_counter()
    page.get_by_label("Line", exact=True).fill("500000")
    page.get_by_label("Line", exact=True).press("Enter")
    page.locator(".ct-found").get_by_text("line 499999 of").wait_for()
    jump = time.perf_counter() - began
    began = time.perf_counter()
    page.get_by_label("Search").fill("line 777777 of")
    page.get_by_text(f"1 to 1 of 1 of {LINES:,} lines").wait_for()
    return begins, jump, time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
