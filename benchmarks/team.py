"""A team's output with many runs: the first `attach --all`, a second one, and `ls` after it, in CPU seconds.

python benchmarks/team.py [runs]
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.runs.test_attach_all import name, write


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CLOUDTRAIN_HOME"] = f"{folder}/home"
        output = Path(folder, "runs")
        for number in range(count):
            write(output, number, state="SUCCEEDED" if number % 100 else "RUNNING", user=f"user-{number % 20}")
        from cloudtrain.cli import main as cloudtrain
        from cloudtrain.runs.attach import attach_all

        def measure(what: str, work: Callable[[], object]) -> None:
            before = time.process_time()
            work()
            print(f"{what:40} {time.process_time() - before:6.2f} CPU s")

        print(f"{count} runs in a folder, 1 in 100 is live; the last one is {name(count - 1)}")
        measure("first attach --all", lambda: attach_all(str(output)))
        measure("second attach --all", lambda: attach_all(str(output)))
        measure("ls state:succeeded", lambda: cloudtrain(["ls", "state:succeeded"]))
        measure("costs --by user", lambda: cloudtrain(["costs", "--by", "user"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
