"""The pickler of what a training sends: beside tensors and arrays, tables, lists and parameters are references to files.

The object itself is pickled, with its code: what it draws at random for a sample is still drawn on the rank.
A reference is a name and its arguments, a method of `Files` in entrypoints/trainer/data/mapped.py.
"""

from __future__ import annotations

import shutil
import sys
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cloudtrain.source.node_code import module

Pickler: Any = module("trainer.pickles.pickler").Pickler


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
        self.arrays = module("trainer.pickles.array_file").ArrayFile(str(folder / "arrays"))
        self._written = {"lists": 0, "tables": 0}

    def discard(self) -> None:
        """Delete the files."""
        self.arrays.discard()
        for kind in self._written:
            shutil.rmtree(self.folder / kind, ignore_errors=True)

    def new_path(self, kind: str, suffix: str) -> tuple[int, Path]:
        """Return the number and the path of a list's or a table's file."""
        number = self._written[kind]
        self._written[kind] += 1
        path = self.folder / kind / f"{number}{suffix}"
        path.parent.mkdir(exist_ok=True)
        return number, path


class PartsPickler(Pickler):  # type: ignore[misc]
    """Pickles to a stream, and to the files beside it."""

    SMALL = 1024

    def __init__(self, stream: Any, files: BesideFiles) -> None:
        super().__init__(stream, files.arrays, files.whole)
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
