"""Match a line of text against the failure classes and message patterns in classes.toml and patterns.toml."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from cloudtrain.diagnosis.lines import LONGEST, join, parse
from cloudtrain.diagnosis.tracebacks import Traceback

TABLES = ("log", "system", "launcher", "reason", "state")
# Exit codes of an exception that nothing caught: Python's own, and an abort while the interpreter shuts down.
UNCAUGHT = (1, 134)
# Text that every line of these classes has, and lines of more special classes too: "CUDA error", "AccessDenied".
_SHARED_TEXT = ("cuda-error", "platform-access")


@dataclass(frozen=True)
class FailureClass:
    """A class of failures: one table of classes.toml, which describes the fields."""

    cause: str
    fix: str = ""
    changes_results: bool = False
    general: bool = False
    late: bool = False
    often_handled: bool = False
    ambiguous_in_raise: bool = False
    only_in_traceback: bool = False
    fixes: Mapping[str, str] = field(default_factory=dict)  # by signal
    cases: Sequence[Mapping[str, Any]] = ()

    def of(self, text: str) -> FailureClass:
        """Return the class in the words for one message."""
        for case in self.cases:
            if re.search(case["pattern"], text):
                return replace(self, **{name: value for name, value in case.items() if name != "pattern"})
        return self


@dataclass(frozen=True)
class Pattern:
    """The messages of one class: one row of patterns.toml, which describes the fields."""

    label: str
    regex: re.Pattern[str]
    certain: bool
    unless: re.Pattern[str] | None = None
    unless_above: re.Pattern[str] | None = None
    calls: re.Pattern[str] | None = None
    own_code: bool = False
    exit_codes: tuple[int, ...] = ()  # empty: any

    def proves(self, text: str, above: Sequence[str], exit_code: int | None, traceback: Traceback | None) -> bool:
        """Return whether a line proves the class: the row is certain, the line matches, and every condition holds."""
        text = text[:LONGEST]
        if not self.certain or not self.regex.search(text) or (self.unless and self.unless.search(text)):
            return False
        if self.exit_codes and exit_code not in (*self.exit_codes, None):
            return False
        if self.unless_above and any(self.unless_above.search(line[:LONGEST]) for line in above):
            return False
        frames = traceback.frames[-2:] if traceback else []
        if self.calls and not any(self.calls.search(f"{frame.file}: {frame.code}"[:LONGEST]) for frame in frames):
            return False
        return not (self.own_code and traceback and traceback.ends_in_package)


@cache
def classes() -> Mapping[str, FailureClass]:
    """Return the failure classes by label."""
    return {label: FailureClass(**fields) for label, fields in parse("classes.toml").items()}


@cache
def labels_with(flag: str) -> frozenset[str]:
    """Return the labels of the classes that have a flag, such as `general`."""
    return frozenset(label for label, failure_class in classes().items() if getattr(failure_class, flag))


@cache
def tables() -> Mapping[str, Sequence[Pattern]]:
    """Return the rows of each table of patterns.toml, in order."""
    return {name: [_compile_row(name, row) for row in parse("patterns.toml")[name]] for name in TABLES}


def classify(table: str, text: str) -> str | None:
    """Return the class of the first row of a table that matches a line, or None."""
    return next((row.label for row in tables()[table] if row.regex.search(text[:LONGEST])), None)


def is_proven(
    table: str,
    label: str,
    text: str,
    *,
    above: Sequence[str] = (),
    exit_code: int | None = None,
    traceback: Traceback | None = None,
) -> bool:
    """Return whether a row of a table proves that a line is of a class."""
    return any(row.label == label and row.proves(text, above, exit_code, traceback) for row in tables()[table])


def is_contradicted(table: str, label: str, text: str) -> bool:
    """Return whether a row of another class matches a text."""
    return any(row.label not in (label, *_SHARED_TEXT) and row.regex.search(text[:LONGEST]) for row in tables()[table])


def _compile_row(table: str, row: Mapping[str, Any]) -> Pattern:
    conditions = {name: join(row[name]) for name in ("unless", "unless_above") if name in row}
    if "calls" in row:
        conditions["calls"] = re.compile(row["calls"])
    return Pattern(
        row["class"],
        join(row["patterns"], re.IGNORECASE if row.get("ignore_case") else 0),
        row["certain"],
        **conditions,
        own_code=row.get("own_code", False),
        exit_codes=tuple(row.get("exit_codes", UNCAUGHT if table == "log" else ())),
    )
