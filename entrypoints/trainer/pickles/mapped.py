"""Read a pickle whose large tensors and arrays are in a file beside it: mapped, so that no reader holds a copy of them.

The mapping is private: what a reader changes in place is its own, as it was with a copy.
"""

from __future__ import annotations

import mmap
import pickle
import sys
from typing import IO, Any

# Not reserved: a private mapping may be larger than memory. Python names the flag from 3.13 on.
_FLAGS = mmap.MAP_PRIVATE | (0x4000 if sys.platform == "linux" else 0)


class Unpickler(pickle.Unpickler):
    """Makes what the pickle refers to; each once."""

    def __init__(self, stream: IO[bytes], arrays: Arrays) -> None:
        super().__init__(stream)
        self._arrays = arrays
        self._made: list[Any] = []

    def persistent_load(self, pid: Any) -> Any:
        kind, first, *rest = pid
        if kind == "again":
            return self._made[first]
        self._made.append(made := getattr(self._arrays, kind)(first, *rest))
        return made


class Arrays:
    """The file beside a pickle. Each public method makes what a reference of its name refers to.

    Args:
        stream: the open file that array_file.py wrote; None where there is none.
    """

    def __init__(self, stream: IO[bytes] | None) -> None:
        self._memory: Any = None if stream is None else mapped(stream)
        if stream is not None:
            view = memoryview(self._memory)
            [count] = view[-8:].cast("q")
            self._places = view[-8 * count - 8 : -8].cast("q")

    def tensor(self, entry: int, dtype: Any, shape: Any, strides: Any, learns: bool) -> Any:
        import torch

        if strides is None:
            flat = self._bytes(entry, torch.Size(shape).numel() * dtype.itemsize)
            return flat.view(dtype).reshape(shape).requires_grad_(learns)
        last = sum((size - 1) * stride for size, stride in zip(shape, strides))  # noqa: B905 - Python 3.9
        flat = self._bytes(entry, (last + 1) * dtype.itemsize)
        return flat.view(dtype).as_strided(shape, strides).requires_grad_(learns)

    def values(self, content: bytes, dtype: Any, shape: Any, learns: bool) -> Any:
        import torch

        if not content:
            return torch.empty(shape, dtype=dtype, requires_grad=learns)
        flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return flat.view(dtype).reshape(shape).requires_grad_(learns)

    def storage(self, entry: int, size: int, dtype: Any) -> Any:
        import torch

        return torch.storage.TypedStorage(
            wrap_storage=self._bytes(entry, size).untyped_storage(), dtype=dtype, _internal=True
        )

    def array(self, entry: int, offset: int, dtype: Any, shape: Any, strides: Any, writeable: bool, kind: Any) -> Any:
        import numpy

        made: Any = numpy.ndarray(shape, dtype, self._memory, self._places[entry] + offset, strides)
        made.flags.writeable = writeable
        return made if kind is numpy.ndarray else made.view(kind)

    def buffer(self, entry: int, size: int, readonly: bool) -> memoryview:
        begin = self._places[entry]
        view = memoryview(self._memory)[begin : begin + size]
        return view.toreadonly() if readonly else view

    def _bytes(self, entry: int, size: int) -> Any:
        import torch

        if not size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._memory, dtype=torch.uint8, offset=self._places[entry], count=size)


def mapped(stream: IO[bytes]) -> mmap.mmap:
    """Map a whole file, privately."""
    return mmap.mmap(stream.fileno(), 0, flags=_FLAGS, prot=mmap.PROT_READ | mmap.PROT_WRITE)
