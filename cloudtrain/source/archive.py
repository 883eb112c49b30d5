"""The archive of a bundle: one small, fixed subset of pax tar, so that the same files are the same bytes everywhere.

Regular files and symbolic links, sorted by the caller; owner 0, time 0, no folders (they follow from the paths). A pax
record stands only where the old header cannot hold a path, a target or a size. Written here rather than by tarfile,
whose bytes are not promised to stay the same between versions of Python. Reading is strict: whatever `Writer` cannot
have written is refused, so that a hostile archive has little to try.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from cloudtrain.errors import StoreError

LINK = 0o120000  # the mode of a symbolic link, as git writes it
MAX_BYTES = 64 << 30  # of an archive when it is unpacked
PIECE = 1 << 20  # bytes in memory at a time
_BLOCK = 512
_ZEROS = bytes(_BLOCK)
_MAX_PAX = 1 << 20
_MAX_OCTAL = 8**11 - 1
_TAIL = b"ustar\x0000" + bytes(64) + b"0000000\0" * 2 + bytes(167)  # magic, no owner's names, no device, no prefix
END = _ZEROS * 2
FORMAT = b"cloudtrain archive 1\n"  # another one as soon as the same files give other bytes


class Entry(NamedTuple):
    """One member: `mode` is 0o644, 0o755 or LINK; `target` is a link's."""

    path: str
    size: int
    mode: int
    target: str = ""


def header(entry: Entry) -> bytes:
    """Return the blocks that precede a member's bytes."""
    name, target = entry.path.encode(), entry.target.encode()
    size = 0 if entry.mode == LINK else entry.size
    records = b""
    if len(name) > 100 or not name.isascii():
        records += _record(b"path", name)
        name = entry.path.encode("ascii", "replace")[:100]
    if len(target) > 100 or not target.isascii():
        records += _record(b"linkpath", target)
        target = entry.target.encode("ascii", "replace")[:100]
    if size > _MAX_OCTAL:
        records += _record(b"size", b"%d" % size)
    kind, mode = (b"2", 0o777) if entry.mode == LINK else (b"0", entry.mode)
    block = _block(name, mode, size if size <= _MAX_OCTAL else 0, kind, target)
    if not records:
        return block
    extension = _block(b"././@PaxHeader", 0o644, len(records), b"x", b"")
    return extension + records + padding(len(records)) + block


def padding(size: int) -> bytes:
    """Return the zeros behind a member of that size."""
    return bytes(-size % _BLOCK)


def leads_out(path: str, links: Mapping[str, str]) -> bool:
    """Return whether following a link, and the links that it meets, leaves the tree; absolute targets always do."""
    at = path.split("/")  # its folders are real ones
    todo, steps = [at.pop()], 0
    while todo:
        name = todo.pop()
        if name == "..":
            if not at:
                return True
            at.pop()
            continue
        if name in ("", "."):
            continue
        at.append(name)
        target = links.get("/".join(at))
        if target is None:
            continue
        steps += 1
        if target.startswith("/"):
            return True
        if steps > 64:  # a ring of links leads nowhere
            return False
        at.pop()
        todo += reversed(target.split("/"))
    return False


def extract(stream: IO[bytes], into: Path, update: Callable[[bytes], object]) -> None:
    """Unpack a gzipped archive into an empty folder; `update` receives the unpacked bytes.

    Raises StoreError for anything that `header` and `padding` do not write, and for a name or link that leads out of
    the folder. Links are made last, so that nothing is ever written through one.
    """
    reader = _Reader(stream, update)
    made = {""}
    links: dict[str, str] = {}
    while (entry := _next(reader)) is not None:
        parts = entry.path.split("/")
        if not {"", ".", ".."}.isdisjoint(parts) or "\0" in entry.path:
            raise StoreError(f"the archive holds the path {entry.path!r}")
        parent = "/".join(parts[:-1])
        if parent not in made:
            os.makedirs(into / parent, exist_ok=True)  # noqa: PTH103
            made.add(parent)
        if entry.mode == LINK:
            if links.setdefault(entry.path, entry.target) != entry.target:
                raise StoreError(f"the archive holds {entry.path!r} twice")
        else:
            _write(reader, f"{into}/{entry.path}", entry)
    for path, target in links.items():
        if leads_out(path, links):
            raise StoreError(f"the archive holds the link {path!r}, which leads out of it")
        os.symlink(target, f"{into}/{path}")  # noqa: PTH211
    reader.finish()


def _write(reader: _Reader, path: str, entry: Entry) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, entry.mode)
    try:
        os.fchmod(fd, entry.mode)  # the umask may have taken bits away
        left = entry.size
        while left:
            piece = reader.read(min(left, PIECE))
            left -= len(piece)
            while piece:
                piece = piece[os.write(fd, piece) :]
    finally:
        os.close(fd)
    if entry.size % _BLOCK:
        reader.read(-entry.size % _BLOCK)


def _next(reader: _Reader) -> Entry | None:
    block = reader.read(_BLOCK)
    if block == _ZEROS:
        if reader.read(_BLOCK) != _ZEROS:
            raise StoreError("the archive is cut off")
        return None
    kind, path, mode, size, target = _parse(block)
    extra: dict[bytes, bytes] = {}
    if kind == b"x":
        if size > _MAX_PAX:
            raise StoreError("the archive has a header that is too long")
        extra = _records(reader.read(size))
        reader.read(-size % _BLOCK)
        kind, path, mode, size, target = _parse(reader.read(_BLOCK))
    try:
        name, to = extra.get(b"path", path).decode(), extra.get(b"linkpath", target).decode()
        size = int(extra.get(b"size", size))
    except ValueError:
        raise StoreError("the archive has a damaged header") from None
    if kind == b"2":
        return Entry(name, len(extra.get(b"linkpath", target)), LINK, to)
    if kind != b"0" or mode not in (0o644, 0o755):
        raise StoreError(f"the archive holds {name!r}, which is neither a plain file nor a link")
    if not 0 <= size <= MAX_BYTES:
        raise StoreError(f"the archive holds {name!r} with {size:,} bytes")
    return Entry(name, size, mode)


def _parse(block: bytes) -> tuple[bytes, bytes, int, int, bytes]:
    try:
        checksum, mode, size = int(block[148:154], 8), int(block[100:107], 8), int(block[124:135], 8)
    except ValueError:
        raise StoreError("the archive has a damaged header") from None
    if block[257:] != _TAIL or checksum != sum(block) - sum(block[148:156]) + 256:
        raise StoreError("the archive has a header that cloudtrain does not write")
    return block[156:157], block[:100].rstrip(b"\0"), mode, size, block[157:257].rstrip(b"\0")


def _block(name: bytes, mode: int, size: int, kind: bytes, target: bytes) -> bytes:
    head = b"%b%07o\x000000000\x000000000\0%011o\x0000000000000\0" % (name.ljust(100, b"\0"), mode, size)
    tail = kind + target.ljust(100, b"\0") + _TAIL
    return b"%b%06o\0 %b" % (head, sum(head) + sum(tail) + 256, tail)


def _record(key: bytes, value: bytes) -> bytes:
    """Return `LENGTH key=value\\n`, where LENGTH counts its own digits too."""
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    length = rest + len(str(length))
    return b"%d %b=%b\n" % (length, key, value)


def _records(data: bytes) -> dict[bytes, bytes]:
    records = {}
    while data:
        digits, space, _ = data[:16].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        key, equals, value = data[len(digits) + 1 : length].partition(b"=")
        if not space or not equals or value[-1:] != b"\n" or key not in (b"path", b"linkpath", b"size"):
            raise StoreError("the archive has a damaged header")
        records[key] = value[:-1]
        data = data[length:]
    return records


class _Inflate:
    """What isal's decompressor does, by the standard library."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(31)
        self._full = False  # what was asked for last was given whole: more of it may be inside

    def decompress(self, data: bytes, max_length: int) -> bytes:
        piece = self._inflate.decompress(self._inflate.unconsumed_tail + data, max_length)
        self._full = len(piece) == max_length
        return piece

    @property
    def needs_input(self) -> bool:
        return not (self._full or self._inflate.eof or self._inflate.unconsumed_tail)

    @property
    def eof(self) -> bool:
        return self._inflate.eof

    @property
    def unused_data(self) -> bytes:
        return self._inflate.unused_data


class _Reader:
    """Unpacks gzip as it is read, never more than a piece ahead, and never beyond MAX_BYTES."""

    def __init__(self, stream: IO[bytes], update: Callable[[bytes], object]) -> None:
        self._inflate: Any
        self._error: type[Exception]
        try:
            from isal import igzip_lib

            self._inflate = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
            self._error = igzip_lib.error  # type: ignore[assignment]  # its stub says otherwise
        except ImportError:  # a node has Python alone (nodes/agent.py)
            self._inflate, self._error = _Inflate(), zlib.error
        self._stream, self._update = stream, update
        self._buffer, self._at, self._total = b"", 0, 0

    def read(self, size: int) -> bytes:
        """Return exactly that many bytes."""
        while len(self._buffer) - self._at < size:
            piece = self._piece()
            if not piece:
                raise StoreError("the archive ends too early")
            self._buffer = self._buffer[self._at :] + piece
            self._at = 0
        self._at += size
        return self._buffer[self._at - size : self._at]

    def finish(self) -> None:
        """Make sure that nothing follows."""
        if self._at != len(self._buffer) or self._piece() or self._inflate.unused_data or self._stream.read(1):
            raise StoreError("the archive has data after its end")

    def _piece(self) -> bytes:
        piece = b""
        while not piece and not self._inflate.eof:
            raw = self._stream.read(PIECE // 4) if self._inflate.needs_input else b""
            if self._inflate.needs_input and not raw:
                return b""
            try:
                piece = self._inflate.decompress(raw, PIECE)
            except self._error as error:
                raise StoreError(f"the archive is damaged: {error}") from None
        self._total += len(piece)
        if self._total > MAX_BYTES:
            raise StoreError(f"the archive unpacks to more than {MAX_BYTES:,} bytes")
        self._update(piece)
        return piece
