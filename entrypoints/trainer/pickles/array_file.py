"""Write the memory of large tensors and arrays to one file, which its readers map instead of holding a copy.

First come regions of memory, each byte once, also where several arrays are views of the same memory. Then, as 64-bit
numbers: where in it each entry begins, and how many entries there are. It is read by mapped.py.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Iterator
from typing import Any

ALIGNED = 64  # bytes; the start of a region keeps the place of its memory within 16, which allocators align to
PIECE = 1 << 22  # bytes that are copied at a time


class ArrayFile:
    """The entries of one file. Spans of memory are written at the end, when it is known which of them overlap."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._places = array("q")
        self._begins, self._ends, self._entries = array("q"), array("q"), array("q")  # of each span
        self._owners: list[Any] = []
        self._stream: Any = None

    def add_span(self, address: int, size: int, owner: Any) -> int:
        """Return the entry of a span of memory, which its owner holds until the file is written."""
        entry = self._new_entry(-1)
        self._begins.append(address)
        self._ends.append(address + size)
        self._entries.append(entry)
        self._owners.append(owner)
        return entry

    def add_values(self, values: Any) -> int:
        """Return the entry of an array's or a tensor's values in their order, which are written now, piece by piece."""
        entry = self._new_entry(self._begin(0))
        for piece in _pieces(values):
            self._stream.write(bytes_of(piece))
        return entry

    def discard(self) -> None:
        """Delete the file."""
        if self._stream is not None:
            self._stream.close()
            os.unlink(self._path)

    def close(self) -> bool:
        """Write the spans and the places of all entries; return whether there are any, and with it the file."""
        if self._places:
            self._write_spans()
            self._begin(0)
            self._stream.write(self._places.tobytes() + array("q", [len(self._places)]).tobytes())
            self._stream.close()
        return bool(self._places)

    def _new_entry(self, place: int) -> int:
        self._places.append(place)
        return len(self._places) - 1

    def _begin(self, address: int) -> int:
        """Return where the next region begins in the file."""
        if self._stream is None:
            self._stream = open(self._path, "wb")  # noqa: SIM115 - closed by close
        end = self._stream.tell()
        begin: int = -(-end // ALIGNED) * ALIGNED + address % 16
        self._stream.write(bytes(begin - end))
        return begin

    def _write_spans(self) -> None:
        """Write each byte that a span has once, and regions in the order of their first entries."""
        if not self._begins:
            return
        import ctypes

        import numpy

        begins, ends = numpy.frombuffer(self._begins, numpy.int64), numpy.frombuffer(self._ends, numpy.int64)
        order = numpy.argsort(begins, kind="stable")
        reach = numpy.maximum.accumulate(ends[order])
        heads = numpy.flatnonzero(numpy.r_[True, begins[order][1:] >= reach[:-1]])  # what overlaps nothing before it
        tails = numpy.r_[heads[1:], len(order)]
        for region in numpy.argsort(numpy.minimum.reduceat(order, heads), kind="stable"):
            spans = order[heads[region] : tails[region]]
            start, stop = int(begins[spans[0]]), int(reach[tails[region] - 1])
            place = self._begin(start)
            for at in range(start, stop, PIECE):
                self._stream.write(ctypes.string_at(at, min(PIECE, stop - at)))
            for span in spans:
                self._places[self._entries[span]] = place + int(begins[span]) - start


def _pieces(values: Any) -> Iterator[Any]:
    """Yield the values of an array or a tensor in their order, at most PIECE bytes at a time."""
    if values.nbytes <= PIECE or not values.ndim:
        yield values
        return
    rows = PIECE // (values.nbytes // len(values))
    for at in range(0, len(values), max(rows, 1)):
        yield from [values[at : at + rows]] if rows else _pieces(values[at])


def bytes_of(values: Any) -> memoryview:
    """Return the bytes of an array's or a tensor's values, in their order."""
    import numpy

    torch = sys.modules.get("torch")
    if torch is not None and isinstance(values, torch.Tensor):
        flat = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    else:
        flat = numpy.ascontiguousarray(values).reshape(-1).view(numpy.uint8)
    return memoryview(flat)
