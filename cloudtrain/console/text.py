"""Clean text from outside for display: names, values and log lines become one line of limited length."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any

from cloudtrain.events import show_marks
from cloudtrain.job.units import format_number

LONGEST = 400  # characters of a value on a page
_JOINERS = "\u200c\u200d"  # of letters in some scripts, and of emoji
_ESCAPE = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)|\x1b[ -/]*[0-~]?")


def clean(value: object, longest: int = LONGEST) -> str:
    """Return a value as one line without escape sequences and control characters; direction marks are shown as \\u202e."""
    text = value if isinstance(value, str) else _to_text(value)
    if len(text) > 4 * longest:
        text = text[: 4 * longest]
    if not text.isprintable():
        text = _ESCAPE.sub("", text).replace("\t", "    ").replace("\n", " ⏎ ")
        text = show_marks(text)
        text = "".join(letter if letter.isprintable() or letter in _JOINERS else "�" for letter in text)
    return text if len(text) <= longest else text[: longest - 1] + "…"


def spreadsheet_cell(value: object) -> object:
    """Return a value for CSV; a text that begins with `=`, `+` or `@` would be a formula in a spreadsheet."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "@") else value


def _to_text(value: object) -> str:
    if isinstance(value, float):
        return format_number(value)
    return json.dumps(value, ensure_ascii=False, default=str)


def format_time(iso_time: str | None) -> str:
    """Format an ISO time in UTC without fractions, "" for None."""
    try:
        return f"{datetime.fromisoformat(iso_time).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" if iso_time else ""
    except ValueError:
        return clean(iso_time, 40)


def format_json(data: Any) -> str:
    """Return indented JSON."""
    return json.dumps(data, indent=2, ensure_ascii=True, default=str)
