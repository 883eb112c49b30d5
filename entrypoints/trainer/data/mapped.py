"""Read a pickle whose large tensors, arrays and lists are files beside it: mapped, so that no rank holds a copy of them.

    arrays/memory.bin, arrays/places.bin    the memory of tensors and arrays; written by cloudtrain/training/array_file.py
    tables/<number>.arrow                   memory-mapped tables of the library datasets
    lists/<number>.pkl, .ends               samples one after the other, each pickled by itself, and where each ends

The mapping is private: what a rank changes in place is its own, as it was with a copy.
"""

from __future__ import annotations

import io
import mmap
import operator
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

# Not reserved: a private mapping may be larger than memory. Python names the flag from 3.13 on.
_FLAGS = mmap.MAP_PRIVATE | (0x4000 if sys.platform == "linux" else 0)


class PartsUnpickler(pickle.Unpickler):
    """Makes what the pickle refers to; each once."""

    def __init__(self, stream: IO[bytes], files: Files) -> None:
        super().__init__(stream)
        self._files = files
        self._made: list[Any] = []
        self._parameters: dict[str, nn.Parameter] = {}

    def persistent_load(self, pid: Any) -> Any:
        kind, first, *rest = pid
        if isinstance(first, tuple):
            return self._parameter(*pid)
        if kind == "again":
            return self._made[first]
        self._made.append(made := getattr(self._files, kind)(first, *rest))
        return made

    def _parameter(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, learns: bool) -> nn.Parameter:
        """Return a parameter of the model without its values."""
        if name not in self._parameters:
            self._parameters[name] = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), learns)
        return self._parameters[name]


class Files:
    """The files beside a pickle. Each public method makes what a reference of its name refers to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._memory = _mapped(folder / "arrays" / "memory.bin")
        self._places = _numbers(folder / "arrays" / "places.bin")

    def tensor(
        self, entry: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...] | None, learns: bool
    ) -> torch.Tensor:
        if strides is None:
            flat = self._bytes(entry, torch.Size(shape).numel() * dtype.itemsize)
            return flat.view(dtype).reshape(shape).requires_grad_(learns)
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        flat = self._bytes(entry, (last + 1) * dtype.itemsize)
        return flat.view(dtype).as_strided(shape, strides).requires_grad_(learns)

    def values(self, content: bytes, dtype: torch.dtype, shape: tuple[int, ...], learns: bool) -> torch.Tensor:
        if not content:
            return torch.empty(shape, dtype=dtype, requires_grad=learns)
        flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return flat.view(dtype).reshape(shape).requires_grad_(learns)

    def storage(self, entry: int, size: int, dtype: torch.dtype) -> Any:
        return torch.storage.TypedStorage(
            wrap_storage=self._bytes(entry, size).untyped_storage(), dtype=dtype, _internal=True
        )

    def array(
        self, entry: int, offset: int, dtype: Any, shape: tuple[int, ...], strides: Any, writeable: bool, kind: Any
    ) -> Any:
        import numpy

        made: Any = numpy.ndarray(shape, dtype, self._memory, self._places[entry] + offset, strides)
        made.flags.writeable = writeable
        return made if kind is numpy.ndarray else made.view(kind)

    def buffer(self, entry: int, size: int, readonly: bool) -> memoryview:
        begin = self._places[entry]
        view = memoryview(self._memory)[begin : begin + size]  # type: ignore[arg-type]
        return view.toreadonly() if readonly else view

    def table(self, number: int) -> Any:
        from datasets.table import MemoryMappedTable

        return MemoryMappedTable.from_file(str(self.folder / "tables" / f"{number}.arrow"))

    def samples(self, number: int) -> SampleList:
        return SampleList(self, number)

    def _bytes(self, entry: int, size: int) -> torch.Tensor:
        return torch.frombuffer(self._memory, dtype=torch.uint8, offset=self._places[entry], count=size)


class SampleList(Sequence[Any]):
    """A list whose samples are read where they are asked for."""

    def __init__(self, files: Files, number: int) -> None:
        self._files, self._number = files, number
        path = files.folder / "lists" / f"{number}.pkl"
        self._samples, self._ends = _mapped(path), _numbers(path.with_suffix(".ends"))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[operator.index(index)]
        begin = self._ends[at - 1] if at else 0
        return PartsUnpickler(io.BytesIO(self._samples[begin : self._ends[at]]), self._files).load()  # type: ignore[index]

    def __reduce__(
        self,
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:  # workers that are not forked map the files themselves
        return _sample_list, (self._files.folder, self._number)


def _sample_list(folder: Path, number: int) -> SampleList:
    return SampleList(Files(folder), number)


def _mapped(path: Path) -> mmap.mmap | None:
    if not path.exists():
        return None
    with open(path, "rb") as stream:
        return mmap.mmap(stream.fileno(), 0, flags=_FLAGS, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _numbers(path: Path) -> Any:
    """Return the 64-bit numbers of a file, mapped too: there may be one for each of millions of samples."""
    mapped = _mapped(path)
    return () if mapped is None else memoryview(mapped).cast("q")
