"""What a training script may say to cloudtrain, and ask it. Everything also works outside of cloudtrain.

    import cloudtrain_runtime as runtime

    run = runtime.context()                      # folders, ranks, inputs
    runtime.install()                            # SIGTERM (preemption, cancel, time limit) sets a flag from now on
    for step in range(start, steps):
        loss = train(step)
        runtime.log_metrics(step=step, loss=loss)
        if runtime.stop_requested():
            save(run.checkpoint_dir, step)
            runtime.exit_resumable()             # exit code 75: the next attempt goes on from there

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
KINDS = ("metric", "checkpoint", "state", "usage", "world", "alarm", "result")
EXIT_RESUMABLE = 75
INPUT = "CLOUDTRAIN_INPUT_"

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
        """Return the path of an input by the name in the job file; raises KeyError with the known names."""
        found = self.inputs.get(_lower(name))
        if found is None:
            raise KeyError(f"no input {name!r}; there are: {', '.join(sorted(self.inputs)) or 'none'}")
        return found


def context(environ: Mapping[str, str] | None = None) -> RunContext:
    """Return this process's place, from the environment; outside of cloudtrain one process in ./runs/local."""
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
    """Print one event of the run; raises ValueError when it is over 8 KiB or of no known kind.

    Tensors and numpy scalars are sent as the number they hold, which waits for the device.
    """
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no kind of event; there are {', '.join(KINDS)}")
    if "kind" in data:
        raise ValueError("an event cannot hold a value named kind")
    line = MARK + json.dumps({"kind": kind, **data}, separators=(",", ":"), ensure_ascii=False, default=_plain)
    size = len(line.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        hint = "put long values into a file in output_dir"
        raise ValueError(f"the event has {size:,} bytes, {MAX_BYTES:,} are possible; {hint}")
    # One write for text and end, so that threads and other writers to the same pipe cannot come in between.
    out = sys.stdout if sys.stdout is not None else sys.__stdout__
    if out is not None:
        out.flush()
        out.write(line + "\n")
        out.flush()


def log_metrics(*, step: int, **values: Any) -> None:
    """Report metrics of one step: numbers by name. Call it on the ranks whose numbers are wanted, usually rank 0."""
    emit("metric", step=int(step), **{name: float(value) for name, value in values.items()})


def log_checkpoint(*, step: int, path: str, **data: Any) -> None:
    """Report that a checkpoint is complete."""
    emit("checkpoint", step=int(step), path=str(path), **data)


def install() -> None:
    """Let SIGTERM ask for a stop instead of ending the process; to be called in the main thread."""
    signal.signal(signal.SIGTERM, _request_stop)


def stop_requested() -> bool:
    """Return whether this process was asked to save and leave. The ranks may hear of it some steps apart: agree on it
    (all-reduce the flag) before a collective save."""
    return _stop


def exit_resumable() -> NoReturn:
    """Leave with the exit code that means: saved, and may be resumed."""
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
