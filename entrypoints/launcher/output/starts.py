"""Count the starts of a run in a folder that all of them use, so that one that was replaced ends.

    <run>/starts/00020001           start 1 of attempt 2

A machine that was given up for lost may be alive, and its script knows nothing of a newer attempt. Its launcher sees the
newer one's file here. Node 0 makes the file before the ranks start: only one start can make it.
"""

from __future__ import annotations

import os

from ..errors import Refused

FOLDER = "starts"
MOST = 10_000  # starts of an attempt that can be told apart


class Starts:
    """This start of a run among the others in the run's folder."""

    def __init__(self, run: str, attempt: int) -> None:
        """Claim the next start of an attempt. Raises OSError, and Refused where a later attempt has begun."""
        self._folder = os.path.join(run, FOLDER)
        os.makedirs(self._folder, exist_ok=True)
        self._number = attempt * MOST
        while True:
            newest = self._newest()
            if newest >= (attempt + 1) * MOST:
                raise Refused(
                    f"attempt {newest // MOST} of this run has begun: attempt {attempt} does not begin any more"
                )
            self._number = max(self._number, newest) + 1
            try:
                with open(os.path.join(self._folder, f"{self._number:08d}"), "x"):
                    return
            except FileExistsError:  # another start was faster
                continue

    def replaced(self) -> str:
        """Return why this start is to end, "" where none has begun after it."""
        newest = self._newest()
        if newest <= self._number:
            return ""
        which, own = newest // MOST, self._number // MOST
        later = f"attempt {which}" if which != own else f"a later launcher of attempt {own}"
        return f"{later} of this run has begun: this one is replaced and ends"

    def _newest(self) -> int:
        """Return the newest number that has been claimed, 0 where none can be read."""
        try:
            return max((int(name) for name in os.listdir(self._folder) if name.isdigit()), default=0)
        except OSError:
            return 0
