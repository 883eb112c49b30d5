"""A note of a plan: a sentence for people, and the fact in it that cloudtrain itself acts on."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Fact(StrEnum):
    """What a note says, where cloudtrain shows, drops or replaces the note for it."""

    NO_GPUS = "the job requests no GPUs"
    WAIT_UNLIMITED = "the platform itself does not end a wait after limits.max_wait"
    WAIT_OVERRULED = "another setting ends the wait, not limits.max_wait"


class Note(str):
    """A text of `Plan.notes` with a fact; a plan that was read from JSON has the text alone."""

    fact: Fact | None

    def __new__(cls, text: str, fact: Fact | None = None) -> Note:
        note = super().__new__(cls, text)
        note.fact = fact
        return note


def say(notes: Iterable[str], *facts: Fact) -> bool:
    """Return whether any of the notes says one of the facts."""
    return any(getattr(note, "fact", None) in facts for note in notes)


def without(notes: Iterable[str], *facts: Fact) -> list[str]:
    """Return the notes that say none of the facts."""
    return [note for note in notes if not say([note], *facts)]
