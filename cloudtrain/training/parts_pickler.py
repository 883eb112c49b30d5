"""The pickler of what travels: large tensors, arrays, tables and lists become references to files beside the pickle.

The object itself is pickled, with its code: what it draws at random for a sample is still drawn on the rank.
A reference is a name and its arguments, a method of `Files` in entrypoints/trainer/data/mapped.py.
"""

from __future__ import annotations

import pickle
import shutil
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import numpy
from numpy.lib.array_utils import byte_bounds

from cloudtrain.functions.packing import is_file
from cloudtrain.training.array_file import ArrayFile, bytes_of

SMALL = 1024  # bytes; what has fewer is in the pickle


class BesideFiles:
    """The files beside one pickle.

    Args:
        folder: where they are written.
        parameters: parameters of the model whose values are in files of their own, by the name of each.
        whole: the memory of parameters that are pickled, by address: no other may share it on a rank.
        lists: lists whose samples are read one by one, by `id`.
    """

    def __init__(
        self, folder: Path, parameters: Mapping[str, Any], whole: frozenset[int], lists: Mapping[int, Sequence[Any]]
    ) -> None:
        self.folder, self.whole, self.lists = folder, whole, lists
        self.parameters = {id(parameter): name for name, parameter in parameters.items()}
        self.arrays = ArrayFile(folder / "arrays")
        self._written = {"lists": 0, "tables": 0}

    def discard(self) -> None:
        """Delete the files."""
        self.arrays.abandon()
        for kind in ("arrays", *self._written):
            shutil.rmtree(self.folder / kind, ignore_errors=True)

    def new_path(self, kind: str, suffix: str) -> tuple[int, Path]:
        """Return the number and the path of a list's or a table's file."""
        number = self._written[kind]
        self._written[kind] += 1
        path = self.folder / kind / f"{number}{suffix}"
        path.parent.mkdir(exist_ok=True)
        return number, path


class PartsPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles to a stream, and to the files beside it."""

    def __init__(self, stream: Any, files: BesideFiles) -> None:
        import torch

        super().__init__(stream)
        self._files = files
        self._made: dict[int, int] = {}  # the number of each reference, by the `id` of its object
        self._kept: list[Any] = []  # those objects: an `id` is one object's as long as that lives
        self._refer: dict[type, Callable[[Any], Any]] = {
            torch.Tensor: self._tensor,
            torch.storage.TypedStorage: self._storage,
            numpy.ndarray: self._array,
            numpy.memmap: self._array,
            pickle.PickleBuffer: self._buffer,
        }
        if tables := sys.modules.get("datasets.table"):
            self._refer[tables.MemoryMappedTable] = self._table
        if files.lists:
            self._refer |= {list: self._list, tuple: self._list}

    def forget(self) -> None:
        """Let the next object be pickled as if nothing had been before it."""
        self.clear_memo()
        self._made, self._kept = {}, []

    def persistent_id(self, obj: Any) -> Any:
        if (refer := self._refer.get(type(obj))) is None:
            name = self._files.parameters.get(id(obj))
            return None if name is None else (name, tuple(obj.shape), obj.dtype, obj.requires_grad)
        if (number := self._made.get(id(obj))) is not None:
            return "again", number
        if (reference := refer(obj)) is not None:
            self._made[id(obj)] = len(self._kept)
            self._kept.append(obj)
        return reference

    def reducer_override(self, obj: Any) -> Any:
        import torch

        if isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta"):
            return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(4)  # type: ignore[no-untyped-call]
        if is_file(obj):
            raise pickle.PicklingError(f"an open file ({obj.name})")
        return super().reducer_override(obj)

    def _tensor(self, obj: Any) -> Any:
        import torch

        if obj.layout is not torch.strided or obj.is_nested or obj.is_quantized or obj.is_meta:
            return None
        if obj.is_conj() or obj.is_neg() or vars(obj) or obj._backward_hooks:
            return None
        shape, strides = tuple(obj.shape), obj.stride()
        span = (sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1) * obj.itemsize
        if max(obj.nbytes, span) < SMALL or not obj.nbytes or obj.untyped_storage().data_ptr() in self._files.whole:
            return "values", bytes(bytes_of(obj)), obj.dtype, shape, obj.requires_grad
        if obj.device.type == "cpu" and span <= 2 * obj.nbytes:
            entry = self._files.arrays.add_span(obj.data_ptr(), span, obj)
            return "tensor", entry, obj.dtype, shape, strides, obj.requires_grad
        return "tensor", self._files.arrays.add_values(obj), obj.dtype, shape, None, obj.requires_grad

    def _storage(self, obj: Any) -> Any:
        """Refer to the memory of a tensor of another kind, such as a subclass; torch pickles the rest of it."""
        memory = obj._untyped_storage
        if memory.device.type != "cpu" or memory.nbytes() < SMALL or memory.data_ptr() in self._files.whole:
            return None
        entry = self._files.arrays.add_span(memory.data_ptr(), memory.nbytes(), memory)
        return "storage", entry, memory.nbytes(), obj.dtype

    def _array(self, obj: numpy.ndarray[Any, Any]) -> Any:
        low, high = byte_bounds(obj)
        if obj.dtype.hasobject or max(obj.nbytes, high - low) < SMALL or not obj.nbytes:
            return None
        last = (obj.dtype, obj.shape, obj.strides, obj.flags.writeable, type(obj))
        if high - low <= 2 * obj.nbytes:
            return "array", self._files.arrays.add_span(low, high - low, obj), obj.ctypes.data - low, *last
        return "array", self._files.arrays.add_values(obj), 0, obj.dtype, obj.shape, None, *last[3:]

    def _buffer(self, obj: pickle.PickleBuffer) -> Any:
        raw = obj.raw()
        if raw.nbytes < SMALL:
            return None
        memory = numpy.frombuffer(raw, numpy.uint8)
        entry = self._files.arrays.add_span(memory.ctypes.data, memory.nbytes, memory)
        return "buffer", entry, raw.nbytes, raw.readonly

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
            pickler = PartsPickler(stream, self._files)
            for sample in obj:
                pickler.dump(sample)
                pickler.forget()
                ends.append(stream.tell())
        path.with_suffix(".ends").write_bytes(ends.tobytes())
        return "samples", number


def lists_of_samples(data: Any) -> dict[int, Sequence[Any]]:
    """Return the lists, by `id`, of which a dataset asks for a length and samples only: itself, and those that torch wraps."""
    from torch.utils import data as wrappers

    if type(data) in (list, tuple):
        return {id(data): data}
    if type(data) is wrappers.Subset:
        return lists_of_samples(data.dataset)
    if type(data) is wrappers.ConcatDataset:
        return {key: each for part in data.datasets for key, each in lists_of_samples(part).items()}
    return {}
