"""Write what arrives from elsewhere below one folder, never outside it: names, links and kinds are those of a stranger.

Fetches, archives and inputs all use this, on a node and, by cloudtrain's source/node_code.py, on the user's machine.
Each folder on the way is opened with O_NOFOLLOW from the one above it. Linux has openat2 for that, macOS has not, and
component by component is as safe.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    from typing import IO, Any

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe in the place of a file blocks nothing
MODES = 0o775  # no setuid, no setgid, nothing that everybody may write
PIECE = 1 << 20
MOST_LINKS = 40  # that Linux follows on the way to one file


class Unsafe(Exception):
    """A name or link leads out of the folder, or something is neither file, folder nor link: one sentence."""


class FolderWriter:
    """Writes below a folder, which is made; a context, at whose good end the links are made. Threads may share it.

    Files and links replace what has their name, whole and at once, but for a folder that is not empty (OSError). Files and
    links that stand where a folder must be are removed. The folder itself may be a link: its owner chose it.

    Links that lead out are left out, and so are those that could after a later arrival. In a `new` folder that gets nothing
    else they raise Unsafe at the end, and the caller deletes the folder.
    """

    def __init__(self, path: str | os.PathLike[str], new: bool = False) -> None:
        os.makedirs(path, exist_ok=True)
        self._real = os.path.realpath(path)
        self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._new = new
        self._links: dict[str, str] = {}
        self.left_out: list[str] = []

    def __enter__(self) -> FolderWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._make_links()
        finally:
            os.close(self._root)

    def folder(self, name: str) -> None:
        """Make a folder."""
        self._links.pop(name, None)
        with self._within(_parts(name), make=True):
            pass

    @contextmanager
    def write(self, name: str, mode: int | None = None, mtime_ns: int | None = None) -> Iterator[IO[bytes]]:
        """Open a file that gets its name, as much of the mode as it may have, and its time when the block ends well."""
        with self._beside(name) as (at, base):
            self._links.pop(name, None)
            part = _new_name()
            try:
                fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | FILE, 0o666, dir_fd=at)
                with open(fd, "wb") as file:
                    yield file
                    file.flush()
                    if mode is not None:
                        os.fchmod(fd, mode & MODES | stat.S_IRUSR)
                    if mtime_ns is not None:
                        os.utime(fd, ns=(mtime_ns, mtime_ns))
                _place(part, base, at)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(part, dir_fd=at)

    def link(self, name: str, target: str) -> None:
        """Make a link at the end, so that nothing that arrives with it is written through it."""
        if not _fits(target) or not _parts(name) or (self._new and target[0] == "/"):
            raise Unsafe(f"the link {name!r} leads out of the folder")
        self._links[name] = target

    def stat(self, name: str) -> os.stat_result | None:
        """Return what is known of a file, None where there is none, or something else."""
        try:
            with self._beside(name, make=False) as (at, base):
                about = os.stat(base, dir_fd=at, follow_symlinks=False)
        except OSError:
            return None
        return about if stat.S_ISREG(about.st_mode) else None

    def has(self, name: str, size: int, mtime_ns: int) -> bool:
        """Return whether there is a file of that size and time."""
        about = self.stat(name)
        return about is not None and (about.st_size, about.st_mtime_ns) == (size, mtime_ns)

    def opener(self, name: str, flags: int) -> int:
        """Open a file in its place, for Python's `open`; with O_CREAT what is no file of its own is replaced."""
        with self._beside(name, make=bool(flags & (os.O_WRONLY | os.O_RDWR))) as (at, base):
            if flags & os.O_CREAT and not flags & os.O_EXCL:
                with suppress(FileNotFoundError):
                    about = os.stat(base, dir_fd=at, follow_symlinks=False)
                    if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
                        os.unlink(base, dir_fd=at)
            return _regular(os.open(base, flags | FILE, 0o666, dir_fd=at), name)

    def move(self, name: str, to: str) -> None:
        """Give a file below the folder another name."""
        with self._beside(name, make=False) as (at, base), self._beside(to) as (there, target):
            _place(base, target, at, there)

    def names(self, folder: str) -> Iterator[tuple[str, str]]:
        """Yield the names of the files and links below a folder, each with a link's target, "" for a file."""
        for at, folders, files, fd in os.fwalk(folder, dir_fd=self._root):
            for base in [*folders, *files]:
                about = os.stat(base, dir_fd=fd, follow_symlinks=False)
                if not stat.S_ISDIR(about.st_mode):
                    is_link = stat.S_ISLNK(about.st_mode)
                    yield f"{at}/{base}", os.readlink(base, dir_fd=fd) if is_link else ""

    def remove(self, name: str) -> None:
        """Remove a file or link, where there is one."""
        with suppress(FileNotFoundError), self._beside(name, make=False) as (at, base):
            os.unlink(base, dir_fd=at)

    @contextmanager
    def _beside(self, name: str, make: bool = True) -> Iterator[tuple[int, str]]:
        *folders, base = _parts(name)
        with self._within(folders, make) as at:
            yield at, base

    @contextmanager
    def _within(self, parts: list[str], make: bool) -> Iterator[int]:
        at = self._root
        try:
            for part in parts:
                above, at = at, _enter(at, part, make)
                if above != self._root:
                    os.close(above)
            yield at
        finally:
            if at != self._root:
                os.close(at)

    def _make_links(self) -> None:
        for name, target in self._links.items():
            if any(name[:at] in self._links for at, letter in enumerate(name) if letter == "/"):
                raise Unsafe(f"{name!r} is below a link")
            if not (self._new or is_inner(name, target)):
                self.left_out.append(name)
                continue
            with self._beside(name) as (at, base):
                if not self._new and self._leads_out(name):
                    self.left_out.append(name)
                    continue
                part = _new_name()
                os.symlink(target, part, dir_fd=at)
                try:
                    _place(part, base, at)
                except OSError:
                    os.unlink(part, dir_fd=at)
                    raise
        for name in self._links if self._new else ():
            if self._leads_out(name):
                raise Unsafe(f"the link {name!r} leads out of the folder")

    def _leads_out(self, name: str) -> bool:
        """Return whether following a link, and those that it meets on the disk, leaves the folder."""
        at, todo, met = name.split("/")[:-1], self._links[name].split("/")[::-1], 0
        while todo and met < MOST_LINKS:
            part = todo.pop()
            if part == "..":
                if not at:
                    return True
                at.pop()
            elif part not in ("", "."):
                at.append(part)
                try:
                    target = os.readlink("/".join([self._real, *at]))
                except OSError:
                    continue  # it is no link
                if target.startswith("/"):
                    return True
                at.pop()
                todo += target.split("/")[::-1]
                met += 1
        return False


def is_inner(name: str, target: str) -> bool:
    """Return whether a link stays inside whatever its neighbours are and become: `..` stands first in it, or nowhere."""
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = next((at for at, part in enumerate(parts) if part != ".."), len(parts))
    return not target.startswith("/") and up <= name.count("/") and ".." not in parts[up:]


def unpack(archive: tarfile.TarFile, into: FolderWriter) -> None:
    """Unpack an archive as its members come; raises Unsafe, also for a device. Owners and old copies of a name are lost."""
    for member in archive:
        name = "/".join(part for part in member.name.split("/") if part not in ("", "."))
        if member.name.startswith("/"):
            raise Unsafe(f"the name {member.name!r} leads out of the folder")
        if member.isdir():
            if name:
                into.folder(name)
        elif member.issym():
            into.link(name, member.linkname)
        elif member.isreg() or member.islnk():
            source: Any = archive.extractfile(member) if member.isreg() else _earlier(into, member)
            with source, into.write(name, member.mode, int(member.mtime * 1e9)) as file:
                shutil.copyfileobj(source, file, PIECE)
        else:
            raise Unsafe(f"{member.name!r} is neither file, folder nor link")


def _earlier(into: FolderWriter, member: tarfile.TarInfo) -> IO[bytes]:
    """Open the file that a hard link of an archive names: it has come already."""
    name = "/".join(part for part in member.linkname.split("/") if part not in ("", "."))
    if member.linkname.startswith("/") or into.stat(name) is None:
        raise Unsafe(f"the hard link {member.name!r} names no file of the archive")
    return open(name, "rb", opener=into.opener)


def _parts(name: str) -> list[str]:
    """Return the parts of a relative name; raises Unsafe."""
    parts = name.split("/")
    if not _fits(name) or not {"", ".", ".."}.isdisjoint(parts):
        raise Unsafe(f"the name {name!r} leads out of the folder")
    return parts


def _fits(text: str) -> bool:
    """Return whether a text can be a path."""
    try:
        return bool(text) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def _enter(at: int, part: str, make: bool) -> int:
    """Open a folder in another one; with `make` it is made, and what is no folder is removed for it."""
    try:
        return os.open(part, FOLDER, dir_fd=at)
    except OSError as error:
        if not make or error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
    with suppress(OSError):  # nothing is there, or another thread has made the folder
        os.unlink(part, dir_fd=at)
    with suppress(FileExistsError):
        os.mkdir(part, dir_fd=at)
    return os.open(part, FOLDER, dir_fd=at)


def _place(part: str, base: str, at: int, there: int | None = None) -> None:
    """Rename a file or link; an empty folder of its name is replaced too."""
    there = at if there is None else there
    try:
        os.replace(part, base, src_dir_fd=at, dst_dir_fd=there)
    except IsADirectoryError:
        os.rmdir(base, dir_fd=there)
        os.replace(part, base, src_dir_fd=at, dst_dir_fd=there)


def _regular(fd: int, name: str) -> int:
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "it is not a regular file", name)


def _new_name() -> str:
    return f".cloudtrain-part-{os.urandom(8).hex()}"
