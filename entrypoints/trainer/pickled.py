"""Train a pickled model: the script of `cloudtrain.DistributedTraining`.

    shipped/model/      a transformers model as save_pretrained wrote it; frozen.json names what is not trained
    shipped/data/       a dataset of the library datasets as save_to_disk wrote it; eval_data/ likewise
    shipped/arrays      the memory of parameters, large tensors and arrays of what is in parts.pkl; tables/, lists/ likewise
    shipped/parts.pkl   everything else, by cloudpickle: module, datasets, loss, optimizer, collate, communication hook
    cloudpickle/        the very version that wrote it

Data that is not sent is the job's input `data`, a folder that save_to_disk wrote. The training is train.py's.

A pickle is code. This one was made on the user's own machine and belongs to the source of the job, as a script does;
its digest is part of the bundle's. What goes back is safetensors alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Run as a script, from .cloudtrain/trainer: `trainer` and `runtime` lie one folder above, and nothing here is a name of its own.
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE), *(place for place in sys.path if place not in (HERE, os.path.dirname(HERE)))]

import train  # noqa: E402

from trainer.errors import Unsupported  # noqa: E402
from trainer.in_memory_arguments import parse_in_memory  # noqa: E402

if TYPE_CHECKING:
    from trainer.in_memory_arguments import InMemoryArguments

FOLDER = "shipped"


def main() -> int:
    return train.main(parse_in_memory, prepare)


def prepare(arguments: InMemoryArguments, inputs: Mapping[str, str]) -> Any:
    """Return the task of what came with the job."""
    from trainer.data.in_memory import make_task

    return make_task(unpacked(Path.cwd() / FOLDER, arguments, inputs), arguments.own_loss)


def unpacked(folder: Path, arguments: InMemoryArguments, inputs: Mapping[str, str]) -> dict[str, Any]:
    """Return what came with the job, by name; raises Unsupported where this Python cannot read it."""
    from trainer import in_memory_model

    parts: dict[str, Any] = {}
    if (folder / "parts.pkl").exists():
        here = f"{sys.version_info.major}.{sys.version_info.minor}"
        if arguments.python and arguments.python != here:
            raise Unsupported(
                f"the model was pickled with Python {arguments.python}, but this node runs {here}: use the same version on both"
            )
        sys.path.insert(0, str(folder.parent))  # where cloudpickle lies
        parts = in_memory_model.unpickled(folder, arguments.seed)
    if (folder / "model").is_dir():
        parts["model"] = in_memory_model.outlined(folder / "model", folder / "frozen.json", arguments.seed)
    for name in ("data", "eval_data"):
        if (path := Path(inputs.get(name) or folder / name)).is_dir():
            import datasets

            dataset = datasets.load_from_disk(str(path))
            parts[name] = dataset if dataset.format["type"] else dataset.with_format("torch")
    return parts


if __name__ == "__main__":
    sys.exit(main())
