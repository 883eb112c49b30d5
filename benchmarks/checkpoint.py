"""How long a training stands for a checkpoint, written behind it and while it waits; and verifying one against sha256sum.

    python benchmarks/checkpoint.py [--rounds 9] [--megabytes 1024] [--files 4] [--only stall|verify]

Stall: the trainer's own keeper saves a model with AdamW's state, fsync and hashing included, in turn behind steps and while
they wait. `stands` is how long the call takes; `costs` is all the time that steps lose until the checkpoint is complete:
the wall time from the call on, less what as many steps take otherwise.

Verifying: both read the same files in turn, from the page cache: what is compared is hashing, not the disk. Ours is a process
of its own too, so that its start counts. Figures are wall seconds; the spread is printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from measure import ROOT, interleaved, process, report, table

VERIFY = (
    "import pathlib, sys; sys.path.insert(0, sys.argv[1]); from trainer.checkpoints import files; "
    "sys.exit(files.damage(pathlib.Path(sys.argv[2])))"
)
ENTRYPOINTS = str(ROOT / "entrypoints")
WIDTH = 2048
Gate = tuple[str, float, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--only", choices=["stall", "verify"])
    options = parser.parse_args()
    sys.path.insert(0, ENTRYPOINTS)  # before this folder, whose own checkpoint.py this is
    parts = [part for part in (stall, verify) if options.only in (None, part.__name__)]
    with tempfile.TemporaryDirectory() as folder:
        found = [part(Path(folder), options) for part in parts]
    body = "\n\n".join(text for text, _ in found)
    return report("checkpoint", "Checkpoints", body, [gate for _, gates in found for gate in gates])


def stall(folder: Path, options: argparse.Namespace) -> tuple[str, list[Gate]]:
    """Return what saves cost a training of one process, and the gates."""
    import torch
    from trainer.checkpoints.manager import CheckpointManager
    from trainer.checkpoints.state import TrainingState

    torch.set_num_threads(1)
    count = max(1, options.megabytes * 1_000_000 // (WIDTH * WIDTH * 4 * 3))  # AdamW has two numbers for each weight
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    training = TrainingState(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))
    manager = CheckpointManager(folder / "stall", 1, 1, lambda *_, **__: None, print)

    def step() -> float:
        began = time.perf_counter()
        model(torch.ones(8, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return time.perf_counter() - began

    step()
    stood: dict[str, list[float]] = {"while it waits": [], "behind it": []}
    cost: dict[str, list[float]] = {name: [] for name in stood}
    saved = 0
    for number in range(options.rounds + 1):
        for name in stood:
            usual = statistics.median(step() for _ in range(5))
            manager.behind, saved, steps = name == "behind it", saved + 1, 0
            began = time.perf_counter()
            manager.save(saved, training, {}, {})
            standing = time.perf_counter() - began
            while manager.busy:
                step()
                steps += 1
            manager.wait()
            lost = time.perf_counter() - began - steps * usual
            if manager.saved_step != saved:
                sys.exit("the checkpoint could not be written")
            if number:  # the first one behind it takes memory for its copy
                stood[name].append(standing)
                cost[name].append(lost)
    rows = [(name, *cells(stood[name]), *cells(cost[name])) for name in stood]
    head = f"{options.megabytes} MB of model and AdamW; medians of {options.rounds} rounds, seconds."
    shares = [statistics.median(of["behind it"]) / statistics.median(stood["while it waits"]) for of in (stood, cost)]
    text = f"{head}\n\n{table(rows, ['saved', 'stands', 'spread', 'costs', 'spread'])}"
    gates = [("stands, of a save while it waits", shares[0], 0.6), ("costs, of the same", shares[1], 1.0)]
    return f"## What a save costs\n\n{text}", gates


def verify(folder: Path, options: argparse.Namespace) -> tuple[str, list[Gate]]:
    """Return what it takes to verify a checkpoint, and the gate."""
    from trainer.checkpoints import files

    path = files.folder_of(folder, 1, 1)
    files.begin(path)
    for number in range(options.files):
        with (path / f"part-{number}").open("wb") as file:
            for _ in range(options.megabytes // options.files):
                file.write(os.urandom(1_000_000))
    files.commit(path, step=1)
    names = [str(path / f"part-{number}") for number in range(options.files)]
    samples = interleaved(
        {
            "verified": lambda: process([sys.executable, "-c", VERIFY, ENTRYPOINTS, str(path)]),
            "sha256sum": lambda: process(["sha256sum", *names]),
        },
        options.rounds,
    )
    walls: Mapping[str, Sequence[float]] = {name: [sample.wall for sample in found] for name, found in samples.items()}
    ratio = statistics.median(walls["verified"]) / statistics.median(walls["sha256sum"])
    head = f"{options.megabytes} MB in {options.files} files; medians of {options.rounds} rounds."
    text = f"{head}\n\n{table([(name, *cells(found)) for name, found in walls.items()], ['', 'wall s', 'spread'])}"
    return f"## Verifying one\n\n{text}", [("wall of sha256sum", ratio, 1.2)]


def cells(seconds: Sequence[float]) -> tuple[str, str]:
    """Return median and spread."""
    return f"{statistics.median(seconds):.3f}", f"{min(seconds):.3f} to {max(seconds):.3f}"


if __name__ == "__main__":
    sys.exit(main())
