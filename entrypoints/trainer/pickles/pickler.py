"""Pickle by cloudpickle, with large tensors and arrays as references to a file beside the pickle.

A reference is a name and its arguments, a method of `Arrays` in mapped.py. Tensors of a GPU become tensors of the CPU.
Without numpy everything is in the pickle.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle

from .array_file import ArrayFile, bytes_of

_FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)


class Pickler(cloudpickle.Pickler):
    """Pickles to a stream, and to the file beside it.

    Args:
        stream: where the pickle is written.
        arrays: the file beside it.
    """

    SMALL = 1 << 16  # bytes; what has fewer is in the pickle

    def __init__(self, stream: Any, arrays: ArrayFile) -> None:
        super().__init__(stream)
        self.arrays = arrays
        self._made: dict[int, int] = {}  # the number of each reference, by the `id` of its object
        self._kept: list[Any] = []  # those objects: an `id` is one object's as long as that lives
        self.refer: dict[type, Callable[[Any], Any]] = {}
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if numpy is not None:
            self.refer |= {numpy.ndarray: self._array, numpy.memmap: self._array, pickle.PickleBuffer: self._buffer}
        if numpy is not None and torch is not None:
            self.refer |= {torch.Tensor: self._tensor, torch.storage.TypedStorage: self._storage}

    def forget(self) -> None:
        """Let the next object be pickled as if nothing had been before it."""
        self.clear_memo()
        self._made, self._kept = {}, []

    def persistent_id(self, obj: Any) -> Any:
        if (refer := self.refer.get(type(obj))) is None:
            return None
        if (number := self._made.get(id(obj))) is not None:
            return "again", number
        if (reference := refer(obj)) is not None:
            self._made[id(obj)] = len(self._kept)
            self._kept.append(obj)
        return reference

    def reducer_override(self, obj: Any) -> Any:
        if is_on_gpu(obj):
            return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(4)
        if isinstance(obj, _FILES) and obj not in (
            sys.stdout,
            sys.stderr,
        ):  # cloudpickle would send a text file's content
            raise pickle.PicklingError(f"an open file ({obj.name})")
        return super().reducer_override(obj)

    def _tensor(self, obj: Any) -> Any:
        import torch

        if obj.layout is not torch.strided or obj.is_nested or obj.is_quantized or obj.is_meta:
            return None
        if obj.is_conj() or obj.is_neg() or vars(obj) or obj._backward_hooks:
            return None
        shape, strides = tuple(obj.shape), obj.stride()
        span = (sum((size - 1) * stride for size, stride in zip(shape, strides)) + 1) * obj.itemsize  # noqa: B905 - Python 3.9
        if max(obj.nbytes, span) < self.SMALL or not obj.nbytes:
            return "values", bytes(bytes_of(obj)), obj.dtype, shape, obj.requires_grad
        if obj.device.type == "cpu" and span <= 2 * obj.nbytes:
            entry = self.arrays.add_span(obj.data_ptr(), span, obj)
            return "tensor", entry, obj.dtype, shape, strides, obj.requires_grad
        return "tensor", self.arrays.add_values(obj), obj.dtype, shape, None, obj.requires_grad

    def _storage(self, obj: Any) -> Any:
        """Refer to the memory of a tensor of another kind, such as a subclass; torch pickles the rest of it."""
        memory = obj._untyped_storage
        if memory.device.type != "cpu" or memory.nbytes() < self.SMALL:
            return None
        entry = self.arrays.add_span(memory.data_ptr(), memory.nbytes(), memory)
        return "storage", entry, memory.nbytes(), obj.dtype

    def _array(self, obj: Any) -> Any:
        import numpy

        bounds = numpy.byte_bounds if numpy.__version__[:2] == "1." else numpy.lib.array_utils.byte_bounds
        low, high = bounds(obj)
        if obj.dtype.hasobject or max(obj.nbytes, high - low) < self.SMALL or not obj.nbytes:
            return None
        last = (obj.dtype, obj.shape, obj.strides, obj.flags.writeable, type(obj))
        if high - low <= 2 * obj.nbytes:
            return "array", self.arrays.add_span(low, high - low, obj), obj.ctypes.data - low, *last
        return "array", self.arrays.add_values(obj), 0, obj.dtype, obj.shape, None, *last[3:]

    def _buffer(self, obj: pickle.PickleBuffer) -> Any:
        import numpy

        raw = obj.raw()
        if raw.nbytes < self.SMALL:
            return None
        memory = numpy.frombuffer(raw, numpy.uint8)
        entry = self.arrays.add_span(memory.ctypes.data, memory.nbytes, memory)
        return "buffer", entry, raw.nbytes, raw.readonly


def is_on_gpu(obj: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta")
