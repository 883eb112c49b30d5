"""Read what came with a training: a pickle with files beside it, whose tables and lists are files too.

arrays                      the memory of tensors and arrays (trainer/pickles)
tables/<number>.arrow       memory-mapped tables of the library datasets
lists/<number>.pkl, .ends   samples one after the other, each pickled by itself, and where each ends
"""

from __future__ import annotations

import io
import mmap
import operator
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..pickles.mapped import Arrays, Unpickler, mapped


class Files(Arrays):
    """The files beside a pickle. Each public method makes what a reference of its name refers to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stored: dict[int, Callable[[], Any]] = {}  # what maps the values of a parameter, by its `id`
        path = folder / "arrays"
        if path.exists():
            with open(path, "rb") as stream:
                super().__init__(stream)
        else:
            super().__init__(None)

    def parameter(self, entry: int, dtype: torch.dtype, shape: tuple[int, ...], learns: bool) -> nn.Parameter:
        """Return a parameter of the model without its values."""
        made = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), learns)
        self.stored[id(made)] = partial(self.tensor, entry, dtype, shape, None, False)
        return made

    def table(self, number: int) -> Any:
        from datasets.table import MemoryMappedTable

        return MemoryMappedTable.from_file(str(self.folder / "tables" / f"{number}.arrow"))

    def samples(self, number: int) -> SampleList:
        return SampleList(self, number)


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
        return Unpickler(io.BytesIO(self._samples[begin : self._ends[at]]), self._files).load()  # type: ignore[index]

    def __reduce__(
        self,
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:  # workers that are not forked map the files themselves
        return _sample_list, (self._files.folder, self._number)


def _sample_list(folder: Path, number: int) -> SampleList:
    return SampleList(Files(folder), number)


def _mapped(path: Path) -> mmap.mmap | None:
    if not path.stat().st_size:
        return None
    with open(path, "rb") as stream:
        return mapped(stream)


def _numbers(path: Path) -> Any:
    """Return the 64-bit numbers of a file, mapped too: there may be one for each of millions of samples."""
    found = _mapped(path)
    return () if found is None else memoryview(found).cast("q")
