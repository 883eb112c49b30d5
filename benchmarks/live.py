"""What following a run on a terminal costs: CPU of `cloudtrain logs -f` with its live view, for a quiet and a busy log.

python benchmarks/live.py [--seconds 20]
"""

from __future__ import annotations

import argparse
import os
import pty
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from measure import cpu_s, report, table

MOST = 0.02  # of one core

SCRIPT = """\
import math, sys, time
pause, began, step = float(sys.argv[1]), time.monotonic(), 0
while time.monotonic() - began < 600:
    print('::cloudtrain::{"kind": "metric", "step": %d, "loss": %f, "tokens_per_s": 1234}' % (step, 3 * math.exp(-step / 900)))
    print("step", step, "of a log that goes on and on", flush=True)
    step += 1
    time.sleep(pause)
"""


def follow(home: Path, run_id: str, seconds: float) -> float:
    """Return the share of a core that following takes, its start excepted."""
    main, worker = pty.openpty()
    env = dict(os.environ, CLOUDTRAIN_HOME=str(home), TERM="xterm", LINES="30", COLUMNS="100")
    words = [str(Path(sys.executable).parent / "cloudtrain"), "logs", "-f", run_id]
    process = subprocess.Popen(words, stdin=worker, stdout=worker, stderr=worker, env=env, start_new_session=True)
    os.close(worker)
    threading.Thread(target=drain, args=(main,), daemon=True).start()
    time.sleep(3)
    began, before = time.monotonic(), cpu_s(process.pid)
    time.sleep(seconds)
    used = (cpu_s(process.pid) - before) / (time.monotonic() - began)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    return used


def drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 65536):
            pass
    except OSError:
        pass


def main() -> int:
    """Measure and print; return 1 when it costs too much."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20)
    arguments = parser.parse_args()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        home, source = Path(folder) / "home", Path(folder) / "source"
        source.mkdir()
        (source / "train.py").write_text(SCRIPT)
        program = str(Path(sys.executable).parent / "cloudtrain")
        env = dict(os.environ, CLOUDTRAIN_HOME=str(home))
        for what, pause in {"a line a second": "1", "20 lines a second": "0.05"}.items():
            words = [program, "submit", "train.py", "--", pause]
            shown = subprocess.run(words, cwd=source, env=env, capture_output=True, text=True, check=True)
            run_id = shown.stdout.split()[0]
            try:
                found[what] = follow(home, run_id, arguments.seconds)
            finally:
                subprocess.run([program, "cancel", run_id], env=env, capture_output=True, check=False)
                subprocess.run([program, "wait", run_id], env=env, capture_output=True, check=False)
    body = table([(what, f"{100 * used:.2f}%") for what, used in found.items()], ["log", "CPU of one core"])
    body += f"\n\n`cloudtrain logs -f` on a terminal, {arguments.seconds:g} s each, after its first 3 s; a local run."
    return report(
        "live", "The live view", body, [(f"share of a core: {what}", used, MOST) for what, used in found.items()]
    )


if __name__ == "__main__":
    sys.exit(main())
