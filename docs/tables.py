"""The page docs/tables-evidence.md: what the tests found, from the figures that they left in docs/*.json and docs/published.csv."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import contract
import own_strategies
import published
import resume
import strategies
import versions


def credentials() -> list[str]:
    """Return what is said in each case of docs/credentials.json (tests/backends/credentials.py)."""
    rows = json.loads((Path(__file__).parent / "credentials.json").read_text("utf-8"))
    lines = [" | ".join(row.values()).join(("| ", " |")) for row in rows]
    return ["| case | message | what to do |", "| --- | --- | --- |", *lines]


PARTS: dict[str, tuple[str, Callable[[], list[str]]]] = {
    "The shared trainer: each strategy against one process": (
        "15 steps each, the same global batch, gradient clipping, two micro-batches a step, 13 held-out samples, tied"
        " embeddings unless the row says otherwise. Loss and gradient norm are the largest differences at any step; that of"
        " the norm is relative. Parameters on a rank is the largest share. Ranks with the same parameters had bit-equal"
        " gradients, and the saved models agree within 2e-4. `make strategies` repeats it.",
        strategies.table,
    ),
    "The shared trainer: older versions": (
        "Eight steps with gradient checkpointing, and two more after a resume, in an environment for each row"
        " (`make test-versions`). A difference is the largest of a loss from one process. PyPI's CUDA builds ran on CPUs.",
        versions.table,
    ),
    "Strategies in unmodified scripts": (
        "On CPU ranks with gloo. Accelerate shards on GPUs only, so the tests replace the function with which it detects"
        " them. `plain` is a loop with Accelerate, `trainer` uses the Trainer. The saved model was loaded and complete.",
        own_strategies.table,
    ),
    "What resumes as what": (
        "Each row is a run that was killed, or whose later checkpoints were damaged, and that resumed. Its losses are"
        " compared with those of an unbroken run.",
        resume.table,
    ),
    "What each script leaves on each target": (
        "Its machine is lost at step 5 of 8, after a checkpoint at step 4, and the run is resumed. It writes into `out`,"
        " `{model_dir}`, `{output_dir}` or `{checkpoint_dir}`. The columns of the targets say with how many of the four it"
        " resumed at the step, ended with the exit code, and left the files for `fetch`. An empty place was not tried.",
        resume.results_table,
    ),
    "Published trainings against the forecast of time": (
        "150 trainings from 13 sources (docs/published.py names them). 130 set the shares of speed that programs reach. 20 were"
        " drawn and kept apart before, and were compared once.",
        published.table,
    ),
    "Credentials that cannot be used": (
        "Each is a case against moto, a token server on loopback, or botocore's and google-auth's own files."
        " `python -m tests.backends.credentials` repeats them.",
        credentials,
    ),
    "Faults that the suite for backends finds": (
        "Each mutant is the reference backend (`tests/testing/reference.py`) with one fault. Each runs against the whole"
        " suite, up to the first test that fails, and none is dropped. `python docs/contract.py --run` repeats it.",
        contract.table,
    ),
    "Faults of each call of a backend": (
        "Each call of the backend `local` is replaced by one that does nothing, does what it does twice, or does it for the"
        " attempt that was submitted last. Named is a test of the suite that fails. `benchmarks/results/call_faults.md` has"
        " other backends, calls and traits.",
        contract.calls,
    ),
}


def page(written: str) -> str:
    """Return the page; `written` is the line that says who wrote it."""
    parts = ["# Tables of the evidence", "", written]
    for title, (text, table) in PARTS.items():
        parts += ["", f"## {title}", "", text, "", *table()]
    return "\n".join(parts) + "\n"
