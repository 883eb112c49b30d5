"""Packing source: cloudtrain's bundle against the way of the SageMaker SDK (tarfile, "w:gz", compression level 9).

    python benchmarks/packaging.py [--rounds 3] [--files 5000] [--megabytes 200]

Both pack the same tree, in turn; the figures are CPU seconds of the process and its children (git), as medians. The
tree is a git repository of text (Python's own library, line by line in another order), numbers as JSON, and one fifth
of bytes that no compressor can shrink. A small tree shows what `submit` of a single script pays. Memory is what packing
a file of 400 MB takes more than packing nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from measure import report, table

from cloudtrain.source.bundle import Bundle


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=int, default=5000)
    parser.add_argument("--megabytes", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        large = repository(make_tree(work / "large", options.files, options.megabytes * 1_000_000 // options.files))
        small = repository(make_tree(work / "small", 3, 4000))
        time.sleep(2.5)  # a tree that has only just been written is read once more, as git does
        rows = measure(work, large, small, options.rounds)
        grown = memory_mb(work)
    ours, peer = rows["large: cloudtrain"][0], rows["large: tarfile, w:gz, level 9"][0]
    cells = [(name, f"{cpu:.4f}", f"{wall:.4f}", f"{size / 1e6:.2f}") for name, (cpu, wall, size) in rows.items()]
    head = f"{options.files:,} files, {options.megabytes} MB, and 3 files, 12 kB; medians of {options.rounds} rounds."
    body = (
        f"{head}\n\n{table(cells, ['', 'CPU s', 'wall s', 'MB'])}\n\nThe peer takes {peer / ours:.1f} x the CPU time."
    )
    return report("packaging", "Packing source", body, [
        ("CPU s of an unchanged tree, git included", rows["large: cloudtrain, unchanged"][0], 0.15),
        ("CPU of the first packing, as part of the peer's", ours / peer, 0.25),
        ("MB of memory that a file of 400 MB adds", grown, 48.0),
    ])  # fmt: skip


def measure(work: Path, large: Path, small: Path, rounds: int) -> dict[str, tuple[float, float, float]]:
    """Return the medians of CPU seconds, wall seconds and archive bytes by name."""
    Bundle.make(small, work / "warm-up").extract(work / "warm-up-tree")
    taken: dict[str, list[tuple[float, float, float]]] = {}

    def run(name: str, action: Callable[[], int]) -> None:
        before, start = cpu_s(), time.perf_counter()
        size = action()
        taken.setdefault(name, []).append((cpu_s() - before, time.perf_counter() - start, size))

    for number in range(rounds):
        new = work / f"round-{number}"
        new.mkdir()
        run("large: tarfile, w:gz, level 9", lambda: tar_gz(large, new / "peer.tar.gz"))  # noqa: B023
        run("large: cloudtrain", lambda: Bundle.make(large, new / "bundles").size_bytes)  # noqa: B023
        run("large: cloudtrain, unchanged", lambda: Bundle.make(large, new / "bundles").size_bytes)  # noqa: B023
        run("small: tarfile, w:gz, level 9", lambda: tar_gz(small, new / "small.tar.gz"))  # noqa: B023
        run("small: cloudtrain, with its runtime", lambda: Bundle.make(small, new / "bundles").size_bytes)  # noqa: B023
        run("small: cloudtrain, unchanged", lambda: Bundle.make(small, new / "bundles").size_bytes)  # noqa: B023
        bundle = Bundle.make(small, new / "bundles")
        run("small: cloudtrain, unpacked", lambda: bundle.extract(new / "tree") or 0)  # noqa: B023
        shutil.rmtree(new)
    return {name: tuple(map(statistics.median, zip(*values, strict=True))) for name, values in taken.items()}  # type: ignore[misc]


def memory_mb(work: Path) -> float:
    """Return by how many MB the peak grows when a file of 400 MB is in the source."""
    code = """
import resource, sys
from pathlib import Path
from cloudtrain.source.bundle import Bundle
Bundle.make(Path(sys.argv[1]), Path(sys.argv[2]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    root = work / "memory"
    root.mkdir()
    peaks = []
    for name, pieces in (("a.py", 0), ("b.bin", 40)):
        with open(root / name, "wb") as stream:
            for _ in range(pieces):
                stream.write(os.urandom(10_000_000))
        done = subprocess.run(
            [sys.executable, "-c", code, root, work / name], capture_output=True, text=True, check=True
        )
        peaks.append(int(done.stdout))
    return (peaks[1] - peaks[0]) * 1024 / 1e6


def tar_gz(source: Path, target: Path) -> int:
    """Pack as sagemaker.utils.create_tar_file does: every entry of the directory into a gzip of the default level."""
    with tarfile.open(target, "w:gz") as tar:
        for path in sorted(source.iterdir()):
            if path.name != ".git":
                tar.add(path, arcname=path.name)
    return target.stat().st_size


def make_tree(root: Path, files: int, size: int) -> Path:
    """Write files of about that size, the same ones on every machine that has the same Python."""
    dice = random.Random(1)
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    lines = b"".join(path.read_bytes() for path in library).splitlines(keepends=True)
    for number in range(files):
        path = root / f"part{number % 40:02}" / f"file{number:05}"
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = number % 5
        if kind == 4:
            path.with_suffix(".bin").write_bytes(dice.randbytes(size))
        elif kind == 3:
            numbers = [round(dice.gauss(0, 1), 6) for _ in range(size // 11)]
            path.with_suffix(".json").write_text(json.dumps(numbers)[:size])
        else:
            text, length = [], 0
            while length < size:
                text.append(lines[dice.randrange(len(lines))])
                length += len(text[-1])
            path.with_suffix(".py").write_bytes(b"".join(text)[:size])
    return root


def repository(root: Path) -> Path:
    for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x"]):
        subprocess.run(["git", *command], cwd=root, check=True, env={**os.environ, "GIT_CONFIG_GLOBAL": os.devnull})
    return root


def cpu_s() -> float:
    """Return the CPU time of this process and of the children that ended, user's and system's."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


if __name__ == "__main__":
    sys.exit(main())
