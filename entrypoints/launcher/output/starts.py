"""Count the starts of a run in a folder that all of them use, so that one that was replaced ends.

    <run>/starts/00020001           start 1 of attempt 2; holds which process it is, at last ENDED

A machine that was given up for lost may be alive, and its script knows nothing of a newer attempt. Its launcher sees the
newer one's file here. Node 0 makes the file before the ranks start: only one start can make it. The newer start's ranks
begin when the older one's have ended. So the paths of the run's folders stay the same in every attempt: scripts write
them into their checkpoints (`best_model_checkpoint` of transformers).
"""

from __future__ import annotations

import os

from .. import fence, processes
from ..clock import SYSTEM, Clock
from ..errors import Refused

FOLDER = "starts"
MOST = 10_000  # starts of an attempt that can be told apart
ENDED = "ended"
BEAT_S = 5.0  # how often a start that runs touches its file
SILENT_S = 15.0  # a start that has not touched its file for so long counts as ended
OVERLAP_S = 90.0  # how long a newer start waits for an older one: NFS shows new files after 60 s at most (acdirmax)
LOOK_S = 0.1


class Starts:
    """This start of a run among the others in the run's folder."""

    def __init__(self, run: str, attempt: int, clock: Clock = SYSTEM) -> None:
        """Claim the next start of an attempt. Raises OSError, and Refused where a later attempt has begun."""
        self._folder = os.path.join(run, FOLDER)
        os.makedirs(self._folder, exist_ok=True)
        self._number = attempt * MOST
        self._clock, self._beat_at = clock, clock.monotonic()
        while True:
            newest = self._newest()
            if newest >= (attempt + 1) * MOST:
                raise Refused(f"attempt {newest // MOST} of this run has started: attempt {attempt} does not start")
            self._number = max(self._number, newest) + 1
            self._path = self._path_of(self._number)
            if fence.create(self._path, f"{_machine()} {os.getpid()} {processes.start_ticks(os.getpid())}"):
                return  # else another start was faster

    def await_earlier(self) -> str:
        """Wait until earlier starts have ended or are silent; return "" or which one still runs. Blocking.

        Raises OSError.
        """
        claimed_at, until = os.stat(self._path).st_mtime, self._clock.monotonic() + OVERLAP_S
        earlier = {
            number: _Beat(self._path_of(number), claimed_at, self._clock)
            for number in self._numbers()
            if number < self._number
        }
        while earlier := {number: beat for number, beat in earlier.items() if beat.runs()}:
            if self._clock.monotonic() >= until:
                return f"attempt {max(earlier) // MOST} of this run still runs, and both write to the same folders"
            self._clock.sleep(LOOK_S)
        return ""

    def beat(self) -> None:
        """Show that this start runs."""
        if self._clock.monotonic() - self._beat_at >= BEAT_S:
            self._beat_at = self._clock.monotonic()
            try:
                os.utime(self._path)
            except OSError:
                pass

    def end(self) -> None:
        """Record that all processes of this start have ended."""
        try:
            with open(self._path, "w") as file:
                file.write(ENDED)
        except OSError:
            pass

    def replaced(self) -> str:
        """Return why this start is to end, "" where none has begun after it."""
        newest = self._newest()
        if newest <= self._number:
            return ""
        which, own = newest // MOST, self._number // MOST
        later = f"attempt {which}" if which != own else f"a later launcher of attempt {own}"
        return f"{later} of this run has started and replaces this one, which ends"

    def _path_of(self, number: int) -> str:
        return os.path.join(self._folder, f"{number:08d}")

    def _newest(self) -> int:
        """Return the newest number that has been claimed, 0 where none can be read."""
        return max(self._numbers(), default=0)

    def _numbers(self) -> list[int]:
        try:
            return fence.numbers(os.listdir(self._folder), ending="")
        except OSError:
            return []


class _Beat:
    """What another start's file shows. Its times are compared with others of the same file system only."""

    def __init__(self, path: str, now: float, clock: Clock) -> None:
        self._path, self._at, self._clock = path, -1.0, clock
        self._offset_s = clock.monotonic() - now  # from the file system's clock to ours
        self._since = 0.0

    def runs(self) -> bool:
        """Return whether that start may still have processes."""
        try:
            with open(self._path) as file:  # opening it makes a network file system look again
                text, at = file.read(), os.fstat(file.fileno()).st_mtime
        except OSError:
            return False
        machine, _, process = text.partition(" ")
        if text == ENDED or (machine == _machine() and _is_dead(process)):
            return False
        if at != self._at:
            self._since = at + self._offset_s if self._at < 0 else self._clock.monotonic()
            self._at = at
        return self._clock.monotonic() - self._since < SILENT_S


def _machine() -> str:
    """Return what names this machine, or this container, as long as it runs."""
    try:
        return f"{processes.boot_id()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "?"


def _is_dead(process: str) -> bool:
    pid, _, started = process.partition(" ")
    return processes.HAS_PROC and pid.isdecimal() and str(processes.start_ticks(int(pid))) != started
