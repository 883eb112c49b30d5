"""What a trial of a sweep costs over a plain submit, and the memory of the process that drives it.

    python benchmarks/sweep.py --trials 200

The driver runs in this process, on `local`, with trials that print one loss and end. CPU seconds are this process's own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = 'print(\'{"step": 1, "loss": 0.5}\')\n'
JOB = {"name": "trial", "entrypoint": "train.py", "environment": {"requirements": "none"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--method", default="random", help="random, or tpe to rebuild a study at each ask")
    parser.add_argument("--submits", type=int, default=20, help="plain submits to compare with")
    given = parser.parse_args()
    sys.path.remove(str(Path(__file__).parent))  # its packaging.py would be taken for the package, which Optuna imports
    with tempfile.TemporaryDirectory() as folder:
        home, source = Path(folder, "home"), Path(folder, "source")
        os.environ["CLOUDTRAIN_HOME"] = str(home)
        source.mkdir()
        (source / "train.py").write_text(SCRIPT)
        print(json.dumps(measure(given, home, source), indent=1))


def measure(given: argparse.Namespace, home: Path, source: Path) -> dict[str, object]:
    from cloudtrain.history.trials import SweepHistory
    from cloudtrain.runs.submit import Submitter
    from cloudtrain.sweeps.drive import Driver
    from cloudtrain.sweeps.file import read
    from cloudtrain.sweeps.send import specification

    job = {**JOB, "source": str(source)}
    submitter = Submitter("local", home=home)
    submitter.submit(job, new=True).wait(60)
    began = time.process_time()
    runs = [submitter.submit({**job, "hyperparameters": {"lr": n}}, new=True) for n in range(given.submits)]
    submit_s = (time.process_time() - began) / given.submits
    for run in runs:
        run.wait(600)

    space = {"lr": {"distribution": "log_uniform_values", "min": 1e-5, "max": 0.1}, "width": {"min": 8, "max": 256}}
    document = {
        "job": job,
        "method": given.method,
        "metric": {"name": "loss"},
        "parameters": space,
        "run_cap": given.trials,
    }
    history = SweepHistory(home)
    history.add("bench", "bench", specification(home, document, read(document, source)))
    wall, began = time.perf_counter(), time.process_time()
    Driver(home, "bench").run()
    trial_s = (time.process_time() - began) / given.trials
    record, trials = history.find("bench"), history.trials("bench")
    assert record.state == "SUCCEEDED" and len(trials) == given.trials, record
    return {
        "trials": given.trials,
        "method": given.method,
        "cpu_s_of_a_submit": round(submit_s, 3),
        "cpu_s_of_a_trial": round(trial_s, 3),
        "over_a_submit_s": round(trial_s - submit_s, 3),
        "trials_per_minute": round(60 * given.trials / (time.perf_counter() - wall)),
        "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


if __name__ == "__main__":
    main()
