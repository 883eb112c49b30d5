"""The GPUs of a host that several users share: a lock for each, and a queue for them, first come, first served.

    cloudtrain-gpu-lock-<uuid>           locked by the supervisor that uses the GPU, and by its ranks
    cloudtrain-gpu-queue                 locked for an instant by who reads or changes the queue
    cloudtrain-gpu-queue-<since>-<hex>   a place in the queue, locked by the supervisor that waits

The locks are the kernel's (flock): they end with their processes, however these end. The files are empty and may only be
read, so a user locks those of others and can damage nothing by them. Who does not ask here can still use any GPU.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from ..clock import SYSTEM, Clock

# All may write there, none but root may remove what others have made. /tmp last: some hosts clear it after ten days.
FOLDERS = ("/run/lock", "/tmp")
BUSY_S = 5.0  # how long the queue may be in use by others before a look at it is given up
_PLACE = re.compile(r"cloudtrain-gpu-queue-\d{20}-[0-9a-f]{8}")


class GpuQueue:
    """One job's place in the queue of a host, and afterwards its GPUs."""

    def __init__(self, folder: str | None = None, clock: Clock = SYSTEM) -> None:
        self.folder, self._clock = folder or find_folder(), clock
        self.place = 0  # 1 is the first; 0 before the first look
        self.free: list[str] = []  # what the first could have had at the last look
        self.locks: list[int] = []  # descriptors, one for each GPU that was taken
        self._ticket: tuple[str, int] | None = None

    def advance(
        self, count: int, gpus: Sequence[str], filled: Callable[[], Mapping[str, str]], shared: bool = False
    ) -> list[str] | None:
        """Return `count` of these GPUs, locked, once all before it in the queue have theirs; None until then.

        Args:
            gpus: UUIDs, the preferred ones first.
            filled: returns those that programs outside of the queue use; called by the first of the queue alone.
            shared: whether other processes of this attempt are to `join_in`.
        """
        with self._queue() as entered:
            if not entered:
                return None
            if self._ticket is None or not os.path.exists(self._ticket[0]):
                self._join()
            self.place = 1 + self._waiting().index(os.path.basename(self._ticket[0]))  # type: ignore[index]
        if self.place > 1:
            return None
        busy = filled()
        with self._queue() as entered:
            if not entered:
                return None
            self.free = self._lock([gpu for gpu in gpus if gpu not in busy])
            taken = self.free[:count] if len(self.free) >= count else []
            for descriptor in self.locks[len(taken) :]:
                os.close(descriptor)
            del self.locks[len(taken) :]
            for descriptor in self.locks if shared else ():
                fcntl.flock(descriptor, fcntl.LOCK_SH)  # no other job asks for it meanwhile: the queue is held
            if taken:
                self.leave()
        return taken or None

    def take_rest(self, least: int, gpus: Sequence[str]) -> list[str]:
        """Return all of these GPUs that no job holds, locked; none where they are fewer, or where others wait for them."""
        with self._queue() as entered:
            if not entered or self._waiting():
                return []
            taken = self._lock(gpus)
            if len(taken) < least:
                self.release()
                return []
        return taken

    def join_in(self, gpus: Sequence[str]) -> list[str]:
        """Lock GPUs that another process of this attempt holds as `shared`, and return them; raises OSError."""
        for gpu in gpus:
            self.locks.append(open_lock(self._lock_file(gpu)))
            fcntl.flock(self.locks[-1], fcntl.LOCK_SH | fcntl.LOCK_NB)
        return list(gpus)

    def _lock_file(self, gpu: str) -> str:
        return os.path.join(self.folder, f"cloudtrain-gpu-lock-{re.sub(r'[^A-Za-z0-9-]', '_', gpu)}")

    def leave(self) -> None:
        """Give the place in the queue up."""
        if self._ticket is not None:
            path, descriptor = self._ticket
            self._ticket = None
            with suppress(FileNotFoundError):
                os.unlink(path)
            os.close(descriptor)

    def release(self) -> None:
        """Free the GPUs."""
        while self.locks:
            os.close(self.locks.pop())

    @contextmanager
    def _queue(self) -> Iterator[bool]:
        """Hold the queue; gives False where others held it for BUSY_S."""
        descriptor = open_lock(os.path.join(self.folder, "cloudtrain-gpu-queue"))
        try:
            deadline = self._clock.monotonic() + BUSY_S
            while not (entered := _try_lock(descriptor)) and self._clock.monotonic() < deadline:
                self._clock.sleep(0.01)
            yield entered
        finally:
            os.close(descriptor)

    def _join(self) -> None:
        joined_ns = int(self._clock.monotonic() * 1e9)  # of one clock for all users
        name = f"cloudtrain-gpu-queue-{joined_ns:020d}-{os.urandom(4).hex()}"
        path = os.path.join(self.folder, name)
        descriptor = open_lock(path)
        _try_lock(descriptor)
        self.leave()
        self._ticket = path, descriptor

    def _waiting(self) -> list[str]:
        """Return the places whose processes live, the first one first; those that our own dead have left are removed."""
        waiting = []
        for name in sorted(filter(_PLACE.fullmatch, os.listdir(self.folder))):
            path = os.path.join(self.folder, name)
            if self._ticket is not None and path == self._ticket[0]:
                waiting.append(name)
                continue
            try:
                descriptor = open_lock(path, make=False)
            except OSError:
                continue  # not a place that a supervisor has made
            try:
                if not _try_lock(descriptor):
                    waiting.append(name)
                elif os.fstat(descriptor).st_uid == os.geteuid():
                    os.unlink(path)
            finally:
                os.close(descriptor)
        return waiting

    def _lock(self, gpus: Sequence[str]) -> list[str]:
        """Lock those of these GPUs that no job holds, and return them; their descriptors are in `locks`."""
        taken = []
        for gpu in gpus:
            try:
                descriptor = open_lock(self._lock_file(gpu))
            except OSError:
                continue  # whoever made it keeps this GPU from all
            if _try_lock(descriptor):
                taken.append(gpu)
                self.locks.append(descriptor)
            else:
                os.close(descriptor)
        return taken


def find_folder(folders: Sequence[str] = FOLDERS) -> str:
    """Return the folder of the locks: the same for all users of a host; raises OSError."""
    for folder in folders:
        try:
            found = os.lstat(folder)
        except OSError:
            continue
        if stat.S_ISDIR(found.st_mode) and found.st_uid == 0 and found.st_mode & 0o1007 == 0o1007:
            return folder
    raise OSError(
        errno.EACCES, f"root must own {' or '.join(folders)}, with mode 1777: cloudtrain keeps its GPU locks there"
    )


def open_lock(path: str, make: bool = True) -> int:
    """Open a file to lock it, made where it is absent; raises OSError for a link, a pipe, or a file that holds something."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        if not make:
            raise
        _make(path)
        descriptor = os.open(path, flags)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size:
        os.close(descriptor)
        raise OSError(errno.EPERM, "it is not a lock file of cloudtrain: its owner or root must remove it", path)
    return descriptor


def _make(path: str) -> None:
    """Make an empty file that all may read from its first moment on, whatever the umask."""
    half = os.path.join(os.path.dirname(path), f".cloudtrain-gpu-{os.urandom(8).hex()}")
    descriptor = os.open(half, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o444)
    try:
        os.fchmod(descriptor, 0o444)
        with suppress(FileExistsError):
            os.link(half, path)  # unlike a rename it replaces nothing: another process may have made it
    finally:
        os.close(descriptor)
        os.unlink(half)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
