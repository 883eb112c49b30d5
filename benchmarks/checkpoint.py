"""Verifying a checkpoint against `sha256sum` of the same files.

    python benchmarks/checkpoint.py [--rounds 9] [--megabytes 1024] [--files 4]

Both read the same files in turn, from the page cache: what is compared is hashing, not the disk. Ours is a process of its
own too, so that its start counts. Figures are wall seconds; the spread is printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from measure import ROOT, interleaved, process, report, table

VERIFY = (
    "import pathlib, sys; sys.path.append(sys.argv[1]); import checkpoint; "
    "sys.exit(checkpoint.damage(pathlib.Path(sys.argv[2])))"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--files", type=int, default=4)
    options = parser.parse_args()
    entrypoints = str(ROOT / "entrypoints")
    sys.path.insert(0, entrypoints)  # before this folder, whose own checkpoint.py this is
    import checkpoint

    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint.folder_of(Path(folder), 1, 1)
        checkpoint.begin(path)
        for number in range(options.files):
            with (path / f"part-{number}").open("wb") as file:
                for _ in range(options.megabytes // options.files):
                    file.write(os.urandom(1_000_000))
        checkpoint.commit(path, step=1)
        names = [str(path / f"part-{number}") for number in range(options.files)]
        samples = interleaved(
            {
                "verified": lambda: process([sys.executable, "-c", VERIFY, entrypoints, str(path)]),
                "sha256sum": lambda: process(["sha256sum", *names]),
            },
            options.rounds,
        )
    walls = {name: [sample.wall for sample in found] for name, found in samples.items()}
    cells = [
        (name, f"{statistics.median(found):.3f}", f"{min(found):.3f} to {max(found):.3f}")
        for name, found in walls.items()
    ]
    ratio = statistics.median(walls["verified"]) / statistics.median(walls["sha256sum"])
    head = f"{options.megabytes} MB in {options.files} files; medians of {options.rounds} rounds."
    body = f"{head}\n\n{table(cells, ['', 'wall s', 'spread'])}"
    return report("checkpoint", "Verifying a checkpoint", body, [("wall of sha256sum", ratio, 1.2)])


if __name__ == "__main__":
    sys.exit(main())
