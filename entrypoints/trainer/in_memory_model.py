"""Models that came with the job without values: each rank reads its part of every parameter from safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from . import collectives, pretrained
from .data.mapped import Files
from .errors import Unsupported
from .pickles.mapped import Unpickler
from .weights import Recorder, Weights


def unpickled(folder: Path, seed: int) -> dict[str, Any]:
    """Return what was pickled, by name; the model's parameters are on the meta device, their values in a file.

    The pickle was made on the user's machine and belongs to the job's source.
    """
    if (folder / "weights").exists():
        raise Unsupported(
            "an older version of cloudtrain has sent this model, and this one does not read it: resume the run on the machine "
            "that submitted it, or call train_distributed again"
        )
    files = Files(folder)
    with open(folder / "parts.pkl", "rb") as stream:
        parts: dict[str, Any] = Unpickler(stream, files).load()
    if files.stored:
        parts["model"].initial_weights = Weights.of(parts["model"], Recorder(), seed, files.stored)
    return parts


def outlined(folder: Path, frozen: Path, seed: int) -> Any:
    """Return a model that `save_pretrained` wrote, without values, or whole where a line of the log says why."""
    import transformers

    [name] = json.loads((folder / "config.json").read_text("utf-8"))["architectures"]
    kind: Any = getattr(transformers, name)
    try:
        recorder = Recorder()
        files = pretrained.find(str(folder))
        config = pretrained.config(str(folder), {})
        with recorder.recording():
            model = kind._from_config(config, dtype=getattr(config, "dtype", None) or torch.float32)
        stored = files.match(model, mismatched=False)
        pretrained.add_generation_config(model, str(folder))
        values = Weights.of(model, recorder, seed, stored)
        if values.unknown:
            raise pretrained.Whole(f"its files have no {values.unknown[0]}")
        model.initial_weights = values
    except pretrained.Whole as reason:
        if collectives.rank() == 0:
            print(f"each rank loads the whole model before it is sharded: {reason}", flush=True)
        model = kind.from_pretrained(folder)
    for name in json.loads(frozen.read_text("utf-8")) if frozen.exists() else ():
        model.get_parameter(name).requires_grad_(False)
    return model
