"""What the suite sees of this machine: its processes, and texts that a secret may have become. Linux; elsewhere nothing."""

from __future__ import annotations

import base64
import gzip
import json
import os
import stat
import tempfile
import threading
import urllib.parse
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Seen(NamedTuple):
    """A process as /proc shows it; those of containers and network namespaces on this machine are among them."""

    pid: int
    argv: bytes
    environ: bytes

    def __str__(self) -> str:
        return f"{self.pid}: {self.argv.replace(bytes(1), b' ').decode('utf-8', 'replace')[:200]}"


def processes() -> Iterator[Seen]:
    """Yield the other processes of this machine that we may look at."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            argv, environ, then = ((entry / name).read_bytes() for name in ("cmdline", "environ", "cmdline"))
        except OSError:
            continue  # it has ended, or is another user's
        if (
            argv == then and int(entry.name) != os.getpid()
        ):  # otherwise it is starting a program: the next look has both
            yield Seen(int(entry.name), argv, environ)


def forms(secret: str) -> list[bytes]:
    """Return the ways in which a secret may be written down: as it is, and in JSON, base64 and a URL."""
    plain = secret.encode()
    shifted = [base64.b64encode(bytes(n) + plain)[4 * (n > 0) : -4] for n in range(3)]
    return [plain, json.dumps(secret)[1:-1].encode(), *shifted, urllib.parse.quote(secret).encode()]


def below(folder: Path) -> Iterator[Path]:
    """Yield a file or folder and all below it but what is gone meanwhile, as all of a process's /proc/PID/root may be."""
    yield folder
    for place, folders, files in os.walk(folder):
        yield from (Path(place, name) for name in (*folders, *files))


def files_with(needles: Iterable[bytes], folders: Iterable[Path]) -> list[str]:
    """Return the files below some folders that hold one of the texts; gzip archives are opened."""
    found = []
    for path in sorted({path for folder in folders for path in below(folder)}):
        try:
            data = path.read_bytes() if path.is_file() else b""
            data += gzip.decompress(data) if data[:2] == b"\x1f\x8b" else b""
        except (OSError, EOFError):
            continue  # it is gone, or still being written
        if any(needle in data or needle in os.fsencode(path) for needle in needles):
            found.append(str(path))
    return found


def files_at_the_top() -> Iterator[Path]:
    """Yield the files in folders where programs leave things: for temporary files, the user's own, the working directory."""
    usual = ("/tmp", "/dev/shm")  # noqa: S108 - they are read
    for folder in {Path(tempfile.gettempdir()), Path.home(), Path.cwd(), *map(Path, usual)}:
        yield from (path for path in folder.glob("*") if path.is_file())


def is_open(path: Path) -> bool:
    """Return whether everybody may write a file or folder; not one that is gone, nor a link."""
    with suppress(OSError):
        return bool(path.lstat().st_mode & stat.S_IWOTH) and not path.is_symlink()
    return False


class ProcessSearch(threading.Thread):
    """Searches the command lines and environments of all processes for a secret, over and over, until it is stopped.

    Args:
        needles: The texts to search for.
        rank: A text in the command line of the job's own ranks, whose environment may hold the secret.
    """

    def __init__(self, needles: list[bytes], rank: bytes) -> None:
        super().__init__(daemon=True)
        self.needles, self.rank = needles, rank
        self.done = threading.Event()
        self.found: set[str] = set()
        self.folders: set[Path] = set()  # of the ranks: where they run, and what their variables name

    def run(self) -> None:
        while not self.done.is_set():
            for seen in processes():
                self._look(seen)
            self.done.wait(0.02)

    def _look(self, seen: Seen) -> None:
        is_rank = self.rank in seen.argv
        if any(needle in seen.argv for needle in self.needles):
            self.found.add(f"in the command line of {seen}")
        if not is_rank and any(needle in seen.environ for needle in self.needles):
            self.found.add(f"in the environment of {seen}")
        if is_rank:
            root = Path(f"/proc/{seen.pid}/root")
            for variable in seen.environ.split(b"\0"):
                name, _, value = variable.partition(b"=")
                if name in (b"CLOUDTRAIN_NODE_DIR", b"CLOUDTRAIN_RUN_DIR"):
                    self.folders.add(root / os.fsdecode(value).lstrip("/"))

    def __enter__(self) -> ProcessSearch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.join()
