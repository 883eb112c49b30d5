"""Pickle a model, its data and the user's functions as functions are: modules of the user's own by value, arrays in a file.

Parameters, tables and lists of samples are files too. A parameter is written beside the pickle tensor by tensor (shipping.py);
on a rank it is on the meta device until the strategy reads this rank's part (entrypoints/trainer/in_memory_model.py).
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


def stored_parameters(model: Any) -> tuple[dict[str, Any], str]:
    """Return the parameters that are written as files, by name, and why they are pickled instead where they are.

    Either all or none of a model's parameters are written.
    """
    import torch

    kinds = module("trainer.tensor_files").DTYPES
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if type(parameter) is not torch.nn.Parameter or parameter.layout != torch.strided:
            return {}, f"{name} is a {type(parameter).__name__} of its own kind"
        if parameter.dtype not in kinds:
            return {}, f"safetensors files have no {str(parameter.dtype).removeprefix('torch.')}, the type of {name}"
    memory = [each.untyped_storage().data_ptr() for each in parameters.values() if each.numel()]
    if len(set(memory)) < len(memory):
        return {}, "several of its parameters share memory"
    return parameters, ""


def dump(parts: Mapping[str, Any], folder: Path, stored: Mapping[str, Any]) -> int:
    """Pickle the parts; return how many bytes of the pickle each rank holds in memory.

    Args:
        parts: what is pickled, by name.
        folder: where `parts.pkl` is written, and beside it the memory of large tensors and arrays.
        stored: parameters of the model, by name, of which only name, shape and type are pickled.

    Raises:
        BadRequest: a part cannot be pickled, or there is no room for it.
    """
    path, whole = folder / "parts.pkl", _pickled_parameters(parts.get("model"), stored)
    lists = {key: each for name in DATA for key, each in lists_of_samples(parts.get(name)).items()}
    files = Files(folder, {id(each): name for name, each in stored.items()}, frozenset(whole), lists)
    with by_value(), open(path, "wb") as stream:
        write(parts, stream, folder / "arrays", lambda *to: PartsPickler(to[0], to[1], files), lambda: parts)
    return path.stat().st_size - sum(whole.values())


def _pickled_parameters(model: Any, stored: Mapping[str, Any]) -> dict[int, int]:
    """Return the sizes of the parameters that are pickled with their values, by the address of their memory."""
    import torch

    if model is None or stored:
        return {}
    own = [each for each in model.parameters() if each.layout == torch.strided]
    return {each.untyped_storage().data_ptr(): each.nbytes for each in own}


@dataclass(frozen=True)
class Files:
    """What is in files beside a pickle."""

    folder: Path  # where they are written
    parameters: Mapping[int, str]  # of the model whose values are in files of their own: `id` -> name
    whole: frozenset[int]  # the memory of parameters that are pickled, by address: no other may share it on a rank
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
        super().__init__(stream, arrays, files.whole)
        self._files = files
        if tables := sys.modules.get("datasets.table"):
            self.refer[tables.MemoryMappedTable] = self._table
        if files.lists:
            self.refer |= {list: self._list, tuple: self._list}

    def persistent_id(self, obj: Any) -> Any:
        if (name := self._files.parameters.get(id(obj))) is not None:
            return name, tuple(obj.shape), obj.dtype, obj.requires_grad
        return super().persistent_id(obj)

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
