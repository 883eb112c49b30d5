"""A team's output with many runs: the first `attach --all` with an index and without, a second one, `ls`, and the console's
list, in CPU seconds.

python benchmarks/team.py [runs] [--s3]

With --s3 the runs lie in a bucket of moto's server, in this process: requests are counted, whose number is what costs time there.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.runs.test_attach_all import name, places, record
from tests.stores import S3, running


def main() -> int:
    words = [word for word in sys.argv[1:] if word != "--s3"]
    count = int(words[0]) if words else 10_000
    s3 = "--s3" in sys.argv
    with tempfile.TemporaryDirectory() as folder, running(S3) if s3 else contextlib.nullcontext() as there:
        os.environ |= there.environ if there else {}
        output = "s3://bucket/runs" if there else f"{folder}/runs"
        from launcher.output import index

        place = places(output)
        began = time.process_time()
        for number in range(count):
            live = number % 100 == 0
            data = record(name(number), state="RUNNING" if live else "SUCCEEDED", user=f"user-{number % 20}")
            place.write(f"{name(number)}/run.json", data)
            if not live:
                index.add(place, data, "end")
        print(f"{count} runs in {output.partition(':')[0] if s3 else 'a folder'}, 1 in 100 is live; written in "
              f"{time.process_time() - began:.1f} CPU s")  # fmt: skip

        from cloudtrain.backends.attached import backend
        from cloudtrain.cli import main as cloudtrain
        from cloudtrain.runs.attach import attach_all

        reads = 0
        opened = backend.opened

        def counting(uri: str) -> object:
            files = opened(uri)
            real = files.read

            def read(*given: object) -> object:
                nonlocal reads
                reads += 1
                return real(*given)  # type: ignore[arg-type]

            files.read = read  # type: ignore[method-assign, assignment]
            return files

        backend.opened = counting  # type: ignore[assignment]

        def measure(what: str, work: Callable[[], object]) -> None:
            nonlocal reads
            before, reads = time.process_time(), 0
            work()
            print(f"{what:40} {time.process_time() - before:6.2f} CPU s  {reads:6} files read")

        os.environ["CLOUDTRAIN_HOME"] = f"{folder}/without"
        real, backend.AttachedBackend.read_index = backend.AttachedBackend.read_index, lambda *_: {}
        measure("first attach --all, without an index", lambda: attach_all(output))
        backend.AttachedBackend.read_index = real
        os.environ["CLOUDTRAIN_HOME"] = f"{folder}/home"
        measure("first attach --all", lambda: attach_all(output))
        measure("second attach --all", lambda: attach_all(output))
        measure("ls state:succeeded", lambda: cloudtrain(["ls", "state:succeeded"]))
        measure("costs --by user", lambda: cloudtrain(["costs", "--by", "user"]))

        from cloudtrain.console import runrows
        from cloudtrain.history.store import Store
        from cloudtrain.history.table import Query

        store, live = Store(Path(os.environ["CLOUDTRAIN_HOME"])), Query("state:live", "", "")
        measure("console, 50 live runs: the first list", lambda: runrows.read(store, live, 0))
        measure("its next refresh", lambda: runrows.read(store, live, 0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
