"""Pickle a model, its data and the user's functions as functions are: modules of the user's own by value, arrays in a file.

Tables and lists of samples are files too. A parameter is in the file of arrays; on a rank it is on the meta device until the
strategy reads this rank's part (entrypoints/trainer/in_memory_model.py).
The object itself is pickled, with its code: what it draws at random for a sample is still drawn on the rank.
A reference is a name and its arguments, a method of `Files` in entrypoints/trainer/data/mapped.py.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudtrain.functions.modules import by_value
from cloudtrain.functions.packing import write
from cloudtrain.source.node_code import module

FEW = 100  # samples; of a longer list each is read by itself
DATA = ("data", "eval_data")
Pickler: Any = module("trainer.pickles.pickler").Pickler


def own_kind(model: Any) -> str:
    """Return which parameter of a model is no plain one, so that all are pickled with their values; "" where none is."""
    import torch

    for name, parameter in model.named_parameters():
        if type(parameter) is not torch.nn.Parameter or parameter.layout != torch.strided:
            return f"{name} is a {type(parameter).__name__} of its own kind"
    return ""


def dump(parts: Mapping[str, Any], folder: Path) -> int:
    """Pickle the parts; return how many bytes of the pickle each rank holds in memory.

    Args:
        parts: what is pickled, by name.
        folder: where `parts.pkl` is written, and beside it the memory of large tensors and arrays.

    Raises:
        BadRequest: a part cannot be pickled, or there is no room for it.
    """
    path, model = folder / "parts.pkl", parts.get("model")
    own = [] if model is None or own_kind(model) else model.parameters()
    lists = {key: each for name in DATA for key, each in lists_of_samples(parts.get(name)).items()}
    files = Files(folder, frozenset(map(id, own)), lists)
    with by_value(), open(path, "wb") as stream:
        write(parts, stream, folder / "arrays", lambda *to: PartsPickler(to[0], to[1], files), lambda: parts)
    return path.stat().st_size


@dataclass(frozen=True)
class Files:
    """What is in files beside a pickle."""

    folder: Path  # where they are written
    parameters: frozenset[int]  # of the model whose values are beside the pickle, by `id`
    lists: Mapping[int, Sequence[Any]]  # whose samples are read one by one, by `id`

    def new_path(self, kind: str, suffix: str) -> tuple[int, Path]:
        """Return the number and the path of a list's or a table's file."""
        place = self.folder / kind
        place.mkdir(exist_ok=True)
        number = len([*place.glob(f"*{suffix}")])
        return number, place / f"{number}{suffix}"


class PartsPickler(Pickler):  # type: ignore[misc]
    """Pickles to a stream, to the file of arrays and to the files beside it."""

    SMALL = 1024

    def __init__(self, stream: Any, arrays: Any, files: Files) -> None:
        super().__init__(stream, arrays)
        self._files = files
        if tables := sys.modules.get("datasets.table"):
            self.refer[tables.MemoryMappedTable] = self._table
        if files.lists:
            self.refer |= {list: self._list, tuple: self._list}
        if files.parameters:
            self.refer[sys.modules["torch"].nn.Parameter] = self._parameter

    def _parameter(self, obj: Any) -> Any:
        """Refer to the values of a parameter of the model: each by itself, also where several share memory here."""
        if id(obj) not in self._files.parameters:
            return None
        return "parameter", self.arrays.add_values(obj), obj.dtype, tuple(obj.shape), obj.requires_grad

    def _table(self, obj: Any) -> Any:
        import pyarrow  # type: ignore[import-untyped]

        number, path = self._files.new_path("tables", ".arrow")
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, obj.table.schema) as writer:
            writer.write_table(obj.table)
        return "table", number

    def _list(self, obj: Sequence[Any]) -> Any:
        """Write the samples of a list one after the other, each pickled by itself."""
        if id(obj) not in self._files.lists:
            return None
        number, path = self._files.new_path("lists", ".pkl")
        ends = array("q")
        with open(path, "wb") as stream:
            pickler = PartsPickler(stream, self.arrays, self._files)
            for sample in obj:
                pickler.dump(sample)
                pickler.forget()
                ends.append(stream.tell())
        path.with_suffix(".ends").write_bytes(ends.tobytes())
        return "samples", number


def lists_of_samples(data: Any) -> dict[int, Sequence[Any]]:
    """Return the long lists, by `id`, that a dataset asks for samples only: itself, and those that torch wraps."""
    from torch.utils import data as wrappers

    if type(data) in (list, tuple):
        return {id(data): data} if len(data) > FEW else {}
    if type(data) is wrappers.Subset:
        return lists_of_samples(data.dataset)
    if type(data) is wrappers.ConcatDataset:
        return {key: each for part in data.datasets for key, each in lists_of_samples(part).items()}
    return {}
