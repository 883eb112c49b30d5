"""Which attempts this process is sending just now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_NOW: set[str] = set()


@contextmanager
def sending(attempt_id: str) -> Iterator[None]:
    """Mark an attempt as being sent by a thread of this process, from before its intent is stored.

    Its owner lives, and yet it is this process: without the mark another thread that looks at the run would take the
    attempt for one of its own that was interrupted, and send it a second time.
    """
    _NOW.add(attempt_id)
    try:
        yield
    finally:
        _NOW.discard(attempt_id)


def is_being_sent(attempt_id: str) -> bool:
    """Return whether a thread of this process is sending an attempt."""
    return attempt_id in _NOW
