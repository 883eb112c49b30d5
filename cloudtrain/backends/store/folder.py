"""The files below a folder of this machine, which others may have written."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from cloudtrain.backends.store.files import MOST_NAMES, NAME, Files, NotRead, bounded, digest_names, report
from cloudtrain.errors import BackendError
from cloudtrain.source import untrusted
from cloudtrain.source.folder_writer import copy_tree
from cloudtrain.source.node_code import module


class Folder(Files):
    """A folder of this machine; links in it are not followed, and `may_be_link` says whether it may be one itself."""

    def __init__(self, path: Path, may_be_link: bool = True) -> None:
        self._path = path = path.resolve() if ".." in path.parts else path
        self.uri = str(path)
        self._root, self._prefix = (path, "") if may_be_link else (path.parent, path.name)

    def folders(self) -> Iterator[str]:
        count = 0
        try:
            with os.scandir(self._path) as entries:
                for count, entry in enumerate(entries):
                    if count >= MOST_NAMES:
                        report(NotRead(f"only the first {MOST_NAMES:,} entries of {self._path} are read"))
                        return
                    if entry.is_dir(follow_symlinks=False):
                        yield entry.name
        except OSError as error:
            raise BackendError(f"{self._path} cannot be listed: {error.strerror}") from None

    def sizes(self, below: str) -> dict[str, int]:
        return {
            name: about.st_size if stat.S_ISREG(about.st_mode) else -1
            for name, about in self._files(below)
            if NAME.fullmatch(name)
        }

    def digest(self, below: str) -> str:
        return digest_names(
            (name, self._content(f"{below}/{name}", about))
            for name, about in self._files(below)
            if stat.S_ISREG(about.st_mode) or stat.S_ISLNK(about.st_mode)
        )

    def _files(self, below: str) -> Iterator[tuple[str, os.stat_result]]:
        try:
            yield from untrusted.walk(self._root, self._below(below), MOST_NAMES)
        except OSError as error:
            hint = "if you trust it, give the folder that the link leads to" if self._path.is_symlink() else ""
            raise NotRead(f"{self._path / below} cannot be listed: {error.strerror}", hint) from None

    def _below(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _content(self, name: str, about: os.stat_result) -> str:
        path, below = self._path / name, self._below(name)
        try:
            if stat.S_ISLNK(about.st_mode):
                return f"-> {path.readlink()}"
            hasher = hashlib.sha256()
            with open(untrusted.open_file(self._root, below), "rb", buffering=0) as file:
                left = os.fstat(file.fileno()).st_size  # it may grow for ever
                while piece := file.read(min(left, 1 << 20)):
                    hasher.update(piece)
                    left -= len(piece)
            return hasher.hexdigest()
        except OSError as error:
            raise NotRead(f"{path} cannot be read: {error.strerror}") from None

    def read(self, name: str, most: int) -> bytes | None:
        try:
            data = untrusted.read_file(self._root, self._below(name), most + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise NotRead(f"{self._path / name} cannot be read: {error.strerror}") from None
        return bounded([data], most, str(self._path / name))

    def add(self, name: str, data: bytes | Path) -> bool:
        try:
            with suppress(FileNotFoundError):  # a link there belongs to others: it is neither followed nor replaced
                os.close(untrusted.open_folder(self._root, self._below(name.rpartition("/")[0])))
            with (
                module("launcher.folder_writer").FolderWriter(self._root) as writer,
                open(self._below(name), "xb", opener=writer.opener) as file,
            ):
                file.write(data if isinstance(data, bytes) else data.read_bytes())
        except FileExistsError:
            return False
        except OSError as error:
            raise BackendError(f"{self._path / name} cannot be written: {error.strerror}") from None
        return True

    def bring(self, below: str, into: Path, named: Callable[[str], str] = str) -> None:
        try:
            os.close(untrusted.open_folder(self._root, self._below(below)))
        except OSError:
            return
        copy_tree(self._path / below, into, named=named)
