"""Rows of files and hub datasets in one Arrow table on disk, memory-mapped: memory does not grow with them.

Documents are read in the order of their hashes, and no format gives a row without those before it. The first process of a
machine writes the table. Its file is deleted once the others have mapped it too, and takes room until the last one ends.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .. import collectives
from ..clock import SYSTEM
from ..errors import Unsupported
from .row_files import Document, whole_text

NEVER = "none"
BATCH_BYTES = 1 << 22  # of texts in a record batch
LEFT_S = 86_400.0  # a file unchanged for so long was left by a process that was killed
_COLUMNS = ("key", "place", "file", "label", "text")

Read = Callable[[], Iterable[Document]]


def default_folder() -> str:
    """Return the folder of this user's cache."""
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "cloudtrain", "tokens")


class Documents(Sequence[Document]):
    """Documents of a table in the order of the hashes of their names.

    Args:
        table: of `table_of`.
        order: rows of the table; None: the order of the hashes.
    """

    def __init__(self, table: Any, order: Any = None) -> None:
        import numpy as np

        self.table, self._columns = table, [table[name] for name in _COLUMNS]
        if order is None:
            hashes = bytearray()
            for batch in table.select(["key"]).to_batches():
                for key in batch[0].to_pylist():
                    hashes += hashlib.sha256(key).digest()[:16]
            halves = np.frombuffer(bytes(hashes), ">u8").reshape(-1, 2)
            order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: equal names stay in the order of the table
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Documents(self.table, self.order[index])
        row = int(self.order[index])
        key, place, file, label = (_decoded(column[row].as_py()) for column in self._columns[:-1])
        read = partial(whole_text, file) if file else partial(self._text, row)
        return Document(key, read, label, place, file)

    def _text(self, row: int) -> str:
        return _decoded(self._columns[-1][row].as_py())  # type: ignore[no-any-return]


def table_of(read: Read, folder: str = NEVER) -> Any:
    """Return documents as a table; collective.

    They are in memory where no file can be written, and a line of the log says so.

    Args:
        read: gives the documents, each time from the first one on.
        folder: the token cache, in which the file is while it is written; "" is the user's. `none`: a temporary folder.

    Raises:
        Unsupported: the package pyarrow is not installed, or a row is wrong.
    """
    try:
        import pyarrow
    except ImportError:
        raise Unsupported("texts and rows need the package pyarrow (pip install pyarrow)") from None
    base = Path(tempfile.gettempdir() if folder == NEVER else folder or default_folder())
    group = collectives.own_group()
    path, error = collectives.from_leader(partial(_written, read, base), group)
    if path is None:
        print(f"the rows are in memory: {base}: {error}", flush=True)
        sink = pyarrow.BufferOutputStream()
        _write(read(), sink)
        return pyarrow.ipc.open_file(sink.getvalue()).read_all()
    table = pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()
    collectives.every_rank(None, group)
    collectives.from_leader(partial(path.unlink, missing_ok=True), group)
    return table


def _written(read: Read, base: Path) -> tuple[Path | None, str]:
    """Return the file with the documents; None, and why, where it cannot be written."""
    import pyarrow

    path = None
    try:
        base.mkdir(parents=True, exist_ok=True)
        for left in base.glob("rows-*.arrow"):
            if SYSTEM.now() - left.stat().st_mtime > LEFT_S:
                left.unlink(missing_ok=True)
        handle, name = tempfile.mkstemp(".arrow", "rows-", base)
        os.close(handle)
        path = Path(name)
        with pyarrow.OSFile(name, "wb") as sink:
            _write(read(), sink)
        return path, ""
    except BaseException as error:
        if path is not None:
            path.unlink(missing_ok=True)  # on a disk that may be full
        if isinstance(error, OSError):  # one of the data's files is raised when they are read again
            return None, error.strerror or str(error)
        raise


def _write(documents: Iterable[Document], sink: Any) -> None:
    import pyarrow

    schema = pyarrow.schema([(name, pyarrow.binary()) for name in _COLUMNS])
    with pyarrow.ipc.new_file(sink, schema) as writer:
        rows, size = list[list[Any]](), 0
        for each in documents:
            text = None if each.file else _encoded(each.read())
            rows.append([*map(_encoded, (each.key, each.place, each.file, each.label)), text])
            size += len(text or "") + 100
            if size > BATCH_BYTES:
                writer.write_batch(_batch(rows, schema))
                rows, size = [], 0
        writer.write_batch(_batch(rows, schema))


def _batch(rows: list[list[Any]], schema: Any) -> Any:
    import pyarrow

    columns = zip(*rows, strict=True) if rows else [()] * len(_COLUMNS)
    return pyarrow.record_batch([pyarrow.array(column, pyarrow.binary()) for column in columns], schema=schema)


def _encoded(text: str | None) -> bytes | None:
    """Return the bytes of a text, which may have parts of characters: names of files that are no UTF-8."""
    return None if text is None else text.encode("utf-8", "surrogatepass")


def _decoded(raw: bytes | None) -> Any:
    return None if raw is None else raw.decode("utf-8", "surrogatepass")
