"""Reads dictionaries that a script has printed, as Python or as JSON, and the number in a printed value."""

from __future__ import annotations

import json
import math
import re
from ast import literal_eval
from typing import Any

_DIFFERS = re.compile(r"\\|NaN|Infinity")  # what JSON reads otherwise than Python
# A dictionary of which Python cannot read all is read piece by piece; a string or object without an end goes to the last.
MAX_ROW = 8192  # characters of such a dictionary
_PIECE = re.compile(r"""[()\[\]{},]|'[^'\\]*(?:\\.[^'\\]*)*'?|"[^"\\]*(?:\\.[^"\\]*)*"?|[^()\[\]{},'"]+""", re.DOTALL)
_ENTRY = re.compile(r"\s*'([^'\\]+)':\s*(\S.*)", re.DOTALL)
_WRAPPED = re.compile(  # tensor(1.2, device='cuda:0', grad_fn=<...>), np.float64(1.2), Array(1.2, dtype=float32)
    r"(?:(?:np|numpy|torch)\.)?(?:tensor|[aA]rray|b?float\d*|longdouble|u?int\d+)"
    r"\(\s*([-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf))\s*[,)]"
)


def parse_dict(text: str) -> dict[Any, Any]:
    """Return what a printed dictionary holds; values that cannot be read are left out."""
    if not _DIFFERS.search(text) and ('"' not in text or "'" not in text):
        row = _json(text.replace("'", '"'))  # a tenth of the time
        if row is not None:
            return row
    row = _literal(text)
    if row is None and text.startswith('{"'):
        row = _json(text)
    return _readable(text[:MAX_ROW]) if row is None else row


def to_number(raw: Any) -> float | None:
    """Return a finite or non-finite float, or None where there is not a number (transformers 5 prints strings)."""
    if isinstance(raw, bool):
        return None
    try:
        value = float(raw)
    except (TypeError, ValueError, OverflowError):
        wrapped = _WRAPPED.match(raw) if isinstance(raw, str) else None
        return to_number(wrapped[1]) if wrapped else None
    return value if not math.isnan(value) else math.nan


def _literal(text: str) -> dict[Any, Any] | None:
    try:
        row = literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _json(text: str) -> dict[Any, Any] | None:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _readable(text: str) -> dict[Any, Any]:
    """Return the text of every value of a printed dictionary that stands by itself between two commas."""
    row, depth, parts = {}, 0, list[str]()
    for piece in _PIECE.findall(text):
        depth += (piece in ("(", "[", "{")) - (piece in (")", "]", "}"))
        if depth == 0 or (depth == 1 and piece == ","):
            if match := _ENTRY.fullmatch("".join(parts)):
                row[match[1]] = match[2].strip().strip("'\"")
            parts = []
            if depth == 0:
                break
        elif depth > 1 or piece != "{" or parts:
            parts.append(piece)
    return row
