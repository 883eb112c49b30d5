"""The history's file and its journal: locks, identity, network file systems, what begins again after a repair.

`history.journal` has one line for each attempt, from which a lost row is made again. It is written behind the transaction
that stores the intent, and before anything is sent: an attempt that it does not name was never sent. A line is JSON, a
tab and the attempt's id.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from pathlib import Path
from types import FunctionType
from typing import IO, Any, NamedTuple, TypeVar

from cloudtrain.backends.api import Plan
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BadRequest, StoreError, UnknownRun
from cloudtrain.job.homes import IGNORE_ALL
from cloudtrain.job.units import format_time, now
from cloudtrain.nodes.files import MOST_REQUEST
from cloudtrain.nodes.process import describe
from cloudtrain.source import untrusted

# They have no shared memory for SQLite's WAL (https://sqlite.org/wal.html, read 2026-11-20).
NETWORK_FILE_SYSTEMS = frozenset({
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs", "fuse.sshfs", "fuse.gcsfuse",
    "fuse.s3fs",
})  # fmt: skip
T = TypeVar("T")
MOST_SHARED = 64 << 10  # bytes: SQLite makes its file of shared memory 32 KiB long, and longer by as much
_MOST_ID = 512  # bytes of the newest line of the journal that hold its id


class Repaired(StoreError):
    """The history was damaged and has been repaired: what was asked of it can be asked again."""


def lock(path: Path, exclusive: bool, most_s: float, clock: Clock = SYSTEM) -> IO[str]:
    """Keep others from creating or replacing the history, which SQLite does not guard; `exclusive` from opening it too.

    Returns the open file: closing it releases the lock. It is no generator: Ctrl-C could come between its lock and the
    `with` block. Waits at most `most_s` seconds, then raises StoreError.
    """
    deadline = clock.monotonic() + most_s
    file = path.open("w")
    try:
        while True:
            try:
                fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
                return file
            except BlockingIOError:
                if clock.monotonic() > deadline:
                    message = f"the history cannot be used: {path} is locked"
                    raise StoreError(message, describe_holders(path)) from None
                clock.sleep(0.005)
    except BaseException:
        file.close()
        raise


def describe_holders(*paths: Path) -> str:
    """Return which processes hold a lock on files, and what to do; "" where none of this machine is known to."""
    named = [describe(pid) for pid in find_holders(*paths)[:3]]
    return (
        f"held by {', '.join(named)}: wait for it, or end it (a stopped one continues with kill -CONT)" if named else ""
    )


def full_disk(folder: Path) -> str:
    """Return where the disk of a folder is mounted, if it has no room for a file of the history; else ""."""
    with suppress(OSError):
        about = os.statvfs(folder)
        if about.f_bavail * about.f_frsize < MOST_SHARED or (about.f_files and not about.f_favail):
            return str(next(each for each in (folder.absolute(), *folder.absolute().parents) if os.path.ismount(each)))
    return ""


def find_holders(*paths: Path) -> list[int]:
    """Return the PIDs that hold a lock on files which keeps others from writing, as /proc/locks lists them."""
    inodes = set()
    for path in paths:
        with suppress(OSError):
            found = path.stat()
            inodes.add(f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}")
    pids: dict[int, None] = {}
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()  # 1: FLOCK ADVISORY WRITE 4711 fe:00:131 0 EOF
            if len(words) == 8 and words[5] in inodes and "WRITE" in (words[3], words[1].replace("FLOCK", "WRITE")):
                pids[int(words[4])] = None
    return [pid for pid in pids if pid > 0]


def make_private(history: Path) -> None:
    """Let no other user read a history of ours and its home, whatever the umask.

    A folder with a .gitignore that is not ours, and a user's own home folder, hold more than the history: they stay as
    they are.
    """
    for suffix in ("", "-wal", "-shm", "-journal"):
        _close_to_others(Path(f"{history}{suffix}"))
    home = history.parent
    with suppress(OSError, UnicodeDecodeError):
        if home.stat().st_mode & 0o077 and (home / ".gitignore").read_text() == IGNORE_ALL and home != Path.home():
            _close_to_others(home)


def _close_to_others(path: Path) -> None:
    with suppress(OSError):  # absent, or on a file system without modes
        found = path.stat()
        if found.st_uid == os.geteuid() and found.st_mode & 0o077:
            path.chmod(stat.S_IMODE(found.st_mode) & ~0o077)


def identity(path: Path, *, content: bool = False) -> object:
    """Return what tells a file from one that has replaced it, with `content` from a changed one too; None without one."""
    try:
        found = path.stat()
        if not content:
            return found.st_dev, found.st_ino
        files = [Path(f"{path}{suffix}") for suffix in ("", "-wal")]
        return [(file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.exists()]
    except OSError:
        return None


def on_network(folder: Path) -> bool:
    """Return whether a folder is on a network file system; False where /proc/mounts is missing."""
    try:
        mounts = Path("/proc/mounts").read_text().splitlines()
        real = os.path.realpath(folder)
    except OSError:
        return False
    longest, kind = "", ""
    for line in mounts:
        point, name = line.split(" ", 3)[1:3]
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(longest):
            longest, kind = point, name
    return kind in NETWORK_FILE_SYSTEMS


def repaired(cls: type[T]) -> type[T]:
    """Let the public methods of a class that has a `database` begin again where they have met a damaged history.

    They raise StoreError for SQLite's errors.
    """

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                with self.database.translated_errors():
                    return method(self, *args, **kwargs)
            except Repaired:
                pass
            except (ValueError, TypeError, LookupError, BadRequest) as error:
                if isinstance(error, UnknownRun) or not self.database.repair(error):
                    raise
            with self.database.translated_errors():
                return method(self, *args, **kwargs)

        return call

    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType) and not name.startswith("_"):
            setattr(cls, name, wrap(method))
    return cls


class Entry(NamedTuple):
    """What is known of an attempt beside the history; `handle` only where the journal has it."""

    plan: Plan
    created_at: str
    identity: str = "restored"
    key: str | None = None
    parent: str | None = None
    handle: str | None = None


class Journal:
    """The journal below a home folder."""

    def __init__(self, home: Path, clock: Clock = SYSTEM) -> None:
        self.path, self._clock = home / "history.journal", clock

    def add(self, plan: Plan, **columns: str | None) -> None:
        """Append an attempt, with columns of its Entry; raises OSError."""
        text = json.dumps({"plan": plan.to_dict(), "created_at": now(self._clock), **columns}, separators=(",", ":"))
        self._append(text, plan.attempt_id)

    def _append(self, text: str, attempt_id: str) -> None:
        line = f"\n{text}\t{attempt_id}\n"  # a line that was not written whole ends before it
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line.encode("utf-8", "surrogatepass"))
        finally:
            os.close(file)

    def forget(self, run_id: str, newest: str) -> None:
        """Append that a run was deleted, with the id of the newest attempt of all others; raises OSError."""
        self._append(json.dumps({"removed": run_id}), newest)

    def removed(self) -> set[str]:
        """Return the ids of the runs that were deleted."""
        return {str(data["removed"]) for data in self._lines() if data.get("removed")}

    def newest(self) -> str:
        """Return the id of the attempt that was added last; "" where there is none."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_ID))
                line, end, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return ""
        return line.rpartition(b"\t")[2].decode("utf-8", "replace") if end else ""

    def entries(self) -> Iterator[Entry]:
        """Yield what is known of the attempts, the oldest first; lines that cannot be read are left out, and deleted runs."""
        found: dict[str, dict[str, Entry]] = {}  # run -> attempt
        for data in self._lines():
            if removed := data.get("removed"):
                found.pop(removed, None)
                continue
            try:
                entry = Entry(**data | {"plan": Plan.from_json(json.dumps(data["plan"]))})
            except (TypeError, KeyError, ValueError, BadRequest):
                continue
            found.setdefault(entry.plan.run_id, {})[entry.plan.attempt_id] = entry
        for entries in found.values():
            yield from entries.values()

    def _lines(self) -> Iterator[dict[str, Any]]:
        try:
            file = self.path.open(encoding="utf-8", errors="replace", newline="\n")
        except FileNotFoundError:
            return
        with file:
            for line in file:
                with suppress(ValueError):
                    data = json.loads(line.rpartition("\t")[0])
                    if isinstance(data, dict):
                        yield data


def entries_of_folders(runs: Path) -> Iterator[Entry]:
    """Yield what the folders of local runs say of their attempts, for a home that is older than its journal."""
    from cloudtrain.backends import registry
    from cloudtrain.backends.manifest import sent_record

    for path in sorted(runs.glob("*/a*/request.json")):
        run_id, number = path.parent.parent.name, path.parent.name[1:]
        try:
            request = json.loads(untrusted.read_file(path.parent, path.name, MOST_REQUEST))
            sent = sent_record(request["nodes"][0]["env"])
            about = sent["about"]
            plan = Plan(
                registry.DEFAULT, run_id, int(number), request, dict(about.get("bundle") or {}), sent["manifest"],
                {"name": run_id.rsplit("-", 3)[0], **(about.get("job") or {})}, registry.DEFAULT,
            )  # fmt: skip
            yield Entry(plan, format_time(path.stat().st_mtime))
        except (OSError, ValueError, TypeError, KeyError, LookupError, RecursionError, BadRequest):
            continue
