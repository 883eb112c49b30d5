"""The runtime API for training scripts: context, metrics, checkpoints, stop requests; also works outside of cloudtrain.

    import cloudtrain_runtime as runtime

    run = runtime.context()                      # folders, ranks, inputs
    runtime.install()                            # SIGTERM (preemption, cancel, time limit) sets a flag from now on
    for step in range(start, steps):
        loss = train(step)
        runtime.log_metrics(step=step, loss=loss)
        if runtime.stop_requested():
            save(run.checkpoint_dir, step)
            runtime.exit_resumable()             # exit code 75: the next attempt resumes from there

The next attempt begins with runtime.latest_checkpoint(), the newest folder that is whole, or None. The Hugging Face
Trainer's and Accelerate's folders are known; what a script writes itself counts after complete_checkpoint(folder).
TrainerCheckpoints(trainer) saves and resumes for the Trainer and for TRL; ResumableSampler is for loops of one's own.

Standard library only; Python 3.9 on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

MARK = "::cloudtrain::"
MAX_BYTES = 8192  # of a marked line in UTF-8, its mark included
KINDS = ("metric", "checkpoint", "state", "usage", "world", "alarm", "result", "media", "evaluation")
EXIT_RESUMABLE = 75
INPUT = "CLOUDTRAIN_INPUT_"
_CLASSES = {"TrainerCheckpoints": "cloudtrain_trainer", "ResumableSampler": "cloudtrain_sampler"}

_stop = False


@dataclass(frozen=True)
class RunContext:
    """Who this process is in the run, and where its files are. Folders exist; `inputs` has names in lower case."""

    run_id: str
    attempt: int
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    checkpoint_dir: str  # belongs to the run: a later attempt finds what this one saved
    output_dir: str
    model_dir: str
    checkpoint_every_s: float | None = None
    checkpoint_every_steps: int | None = None
    checkpoint_keep: int | None = None
    epoch: int = 0  # which start of the run this is, as claimed in its output; 0 where it has none
    inputs: Mapping[str, str] = field(default_factory=dict)  # name -> path
    parallelism: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes what is written once."""
        return self.rank == 0

    def input(self, name: str) -> str:
        """Return the path of an input.

        Args:
            name: Its name in the job file.

        Returns:
            The path on this node, or the URI of an input with mode: stream.

        Raises:
            KeyError: The job has no such input; the message lists the names.
        """
        path = self.inputs.get(_lower(name))
        if path is None:
            raise KeyError(f"no input {name!r}; there are: {', '.join(sorted(self.inputs)) or 'none'}")
        return path


def context(environ: Mapping[str, str] | None = None) -> RunContext:
    """Return ranks, folders and inputs of this process. Outside of cloudtrain: one process with folders in ./runs/local.

    Args:
        environ: Environment variables to read; None for os.environ.

    Returns:
        The context. Its folders exist.
    """
    env = os.environ if environ is None else environ
    base = os.path.join(os.getcwd(), "runs", "local")

    def number(name: str, default: int) -> int:
        return int(env.get(name) or default)

    def maybe(name: str) -> float | None:
        return float(env[name]) if env.get(name) else None

    def folder(name: str, default: str) -> str:
        path = env.get(name) or os.path.join(base, default)
        if "://" not in path:
            os.makedirs(path, exist_ok=True)
        return path

    every_steps, keep = maybe("CLOUDTRAIN_CHECKPOINT_EVERY_STEPS"), maybe("CLOUDTRAIN_CHECKPOINT_KEEP")
    return RunContext(
        run_id=env.get("CLOUDTRAIN_RUN_ID") or "local",
        attempt=number("CLOUDTRAIN_ATTEMPT", 1),
        rank=number("RANK", 0),
        local_rank=number("LOCAL_RANK", 0),
        world_size=number("WORLD_SIZE", 1),
        local_world_size=number("LOCAL_WORLD_SIZE", 1),
        node_rank=number("NODE_RANK", number("GROUP_RANK", 0)),
        num_nodes=number("CLOUDTRAIN_NUM_NODES", 1),
        checkpoint_dir=folder("CLOUDTRAIN_CHECKPOINT_DIR", "checkpoints"),
        output_dir=folder("CLOUDTRAIN_OUTPUT_DIR", "outputs"),
        model_dir=folder("CLOUDTRAIN_MODEL_DIR", "model"),
        checkpoint_every_s=maybe("CLOUDTRAIN_CHECKPOINT_EVERY_S"),
        checkpoint_every_steps=None if every_steps is None else int(every_steps),
        checkpoint_keep=None if keep is None else int(keep),
        epoch=number("CLOUDTRAIN_EPOCH", 0),
        inputs={name[len(INPUT) :].lower(): path for name, path in env.items() if name.startswith(INPUT)},
        parallelism=json.loads(env.get("CLOUDTRAIN_PARALLELISM") or "{}"),
    )


def emit(kind: str, /, **data: Any) -> None:
    """Print one event of the run. Tensors and numpy scalars are sent as numbers, which waits for the device.

    Args:
        kind: One of KINDS.
        data: The event's values, which JSON can hold.

    Raises:
        ValueError: The event is longer than 8 KiB, or `kind` is unknown.
    """
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is not a kind of event; use one of {', '.join(KINDS)}")
    if "kind" in data:
        raise ValueError("an event cannot hold a value named kind")
    line = MARK + json.dumps({"kind": kind, **data}, separators=(",", ":"), ensure_ascii=False, default=_plain)
    size = len(line.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        hint = "write long values to a file in output_dir"
        raise ValueError(f"the event of the run has {size:,} bytes; at most {MAX_BYTES:,} are allowed; {hint}")
    # One write for text and end, so that threads and other writers to the same pipe cannot come in between.
    out = sys.stdout if sys.stdout is not None else sys.__stdout__
    if out is not None:
        out.flush()
        out.write(line + "\n")
        out.flush()


def log_metrics(*, step: int, **values: Any) -> None:
    """Report metrics of one step. Each rank that calls it has its own curves; by default rank 0 is shown.

    Args:
        step: The optimizer step.
        values: Numbers by name. `epoch` is not a metric, but a second X axis of the curves.

    Raises:
        ValueError: The line is longer than 8 KiB, or a value is not a number.
    """
    rank = {"_rank": context_rank} if (context_rank := _rank()) else {}
    emit("metric", step=int(step), **rank, **{name: float(value) for name, value in values.items()})


def log_image(name: str, image: Any, *, step: int) -> None:
    """Log an image of one step, as a file in `logged/` of output_dir. The console shows it.

    Args:
        name: Name of the series of images.
        image: A matplotlib figure, a PIL image, an array, or PNG or JPEG as bytes or as a path. An array is height x
            width, with 1, 3 or 4 channels last or first; floats are from 0 to 1.
        step: The optimizer step.

    Raises:
        ValueError: It is over 8 MiB, or an array of another shape. After 1,000 logged objects of a process the next ones
            are not logged.
        TypeError: It is not an image.
    """
    _media().log("image", name, image, step, context(), emit)


def log_text(name: str, text: Any, *, step: int) -> None:
    """Log a text of one step, such as a generated sample.

    Args:
        name: Name of the series of texts.
        text: The text, at most 8 MiB.
        step: The optimizer step.
    """
    _media().log("text", name, text, step, context(), emit)


def log_table(name: str, rows: Any, *, step: int, columns: Any = None) -> None:
    """Log a table of one step.

    Args:
        name: Name of the series of tables.
        rows: Lists of cells, dictionaries, or a pandas data frame.
        step: The optimizer step.
        columns: Names of the columns; None for those of the dictionaries or the data frame.
    """
    _media().log("table", name, rows, step, context(), emit, columns=columns)


def log_histogram(name: str, values: Any, *, step: int, bins: int = 30) -> None:
    """Log a histogram of the finite numbers in an array, a tensor or a list.

    Args:
        name: Name of the series of histograms.
        values: The numbers.
        step: The optimizer step.
        bins: Number of bins of equal width.
    """
    _media().log("histogram", name, values, step, context(), emit, bins=bins)


def __getattr__(name: str) -> Any:
    """Return a class that is in a file of its own: it costs only those jobs some milliseconds that use it."""
    if name in _CLASSES:
        import importlib

        return getattr(importlib.import_module(_CLASSES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _media() -> Any:
    import cloudtrain_media  # only here: it costs every job some milliseconds

    return cloudtrain_media


def _checkpoints() -> Any:
    import cloudtrain_script_checkpoints  # only here: it costs every job some milliseconds

    return cloudtrain_script_checkpoints


def _rank() -> int:
    """Return this process's rank, 0 where the variable is not a number."""
    rank = os.environ.get("RANK") or ""
    return int(rank) if rank.isdigit() else 0


def log_checkpoint(*, step: int, path: str, **data: Any) -> None:
    """Report a checkpoint that is complete, for the run's timeline. `complete_checkpoint` calls it.

    Args:
        step: The optimizer step.
        path: Its folder.
        data: More values of the event.
    """
    emit("checkpoint", step=int(step), path=str(path), **data)


def latest_checkpoint(folder: str | None = None) -> str | None:
    """Return the path of the newest complete checkpoint. Call it on rank 0 or on all ranks; it blocks while files are read.

    A checkpoint with a file COMPLETE is compared with its digests. In checkpoints of the Hugging Face Trainer and of
    Accelerate every file is checked for its end. Skipped checkpoints are named on standard error. In the run's own folder
    rank 0 records that this start resumes from there: what an earlier start completes later is never chosen.

    Args:
        folder: Where to search; None for the run's checkpoint_dir.

    Returns:
        The path, or None if there is no complete checkpoint.
    """
    path: str | None = _checkpoints().find_latest(context(), folder)
    return path


def complete_checkpoint(path: str, *, step: int) -> None:
    """Mark a folder as a complete checkpoint and report it; blocks until it is on the disk.

    Call it once, after all ranks have written their files, on the rank that called latest_checkpoint. The launcher then
    uploads the folder to the job's output, with the mark COMPLETE last.

    Args:
        path: The checkpoint's folder.
        step: The optimizer step.
    """
    _checkpoints().complete(path, int(step), emit)


def install() -> None:
    """Handle SIGTERM (preemption, cancel, time limit): it sets the flag of `stop_requested` instead of ending the process.

    Call it once, in the main thread, before the training loop.
    """
    signal.signal(signal.SIGTERM, _request_stop)


def stop_requested() -> bool:
    """Return whether the job is to stop: save a checkpoint, then call `exit_resumable`. It needs `install` first.

    Ranks may receive the signal some steps apart. Before a collective save, agree on the step: all-reduce the flag.

    Returns:
        True after SIGTERM.
    """
    return _stop


def exit_resumable() -> NoReturn:
    """Exit with code 75: the attempt has saved a checkpoint and can be resumed. It does not return."""
    sys.exit(EXIT_RESUMABLE)


def _request_stop(number: int, frame: Any) -> None:
    global _stop
    _stop = True


def _plain(value: Any) -> Any:
    """Return what a tensor, a numpy scalar or a path stands for."""
    if hasattr(value, "item"):
        return value.item()
    if hasattr(value, "__fspath__"):
        return os.fspath(value)
    raise TypeError(f"an event cannot hold a {type(value).__name__}")


def _lower(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name).lower()
