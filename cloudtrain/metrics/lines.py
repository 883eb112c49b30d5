"""Reads step, epoch and named numbers in an ordinary log line."""

from __future__ import annotations

import re
from typing import NamedTuple

from cloudtrain.metrics.dicts import to_number
from cloudtrain.metrics.names import Kind, clean_name, kind

MAX_LINE = 4096  # characters of a line that are read

_LEVELS = ("INFO", "DEBUG", "WARNING")
_LEVEL = re.compile(r".{0,120}?\b(?:INFO|DEBUG|WARNING)\b[^\w{*#(]*")
_HEAD = re.compile(  # `2026-05-18 16:04:46,338 - `, `[rank0]: [titan] `
    r"(?:\[?rank ?\d+\]?:? ?)?(?:\[[a-z]+\] ?)?(?:\[?\d{2,4}[-/]\d\d[-/\d]*[ T]\d\d:\d\d:\d\d[\d.,Z]*\]?[\s|:-]*)?"
)
_EVALUATION = re.compile(r"\W*(test|val|valid|validation|eval|evaluation|dev)\b(?! *[=:]? *\d)", re.IGNORECASE)
_STEP = re.compile(
    r"(?<![\w/.@-])(?:(global[_ ]?steps?|train[_ ]step|num_updates|total_timesteps)|"
    r"step|(steps)|iterations?|iters?|itr|updates?|batch|round|it)\b\s*+[:=#]?\s*+\[?\s*+(\d{1,18})(?:\s*/\s*(\d{1,18}))?"
    r"(?![\w%]|\.\d|,\d|\s*/\s*s\b)",
    re.IGNORECASE,
)
_EPOCH = re.compile(
    r"(?<![\w/.-])epoch(?:\(\w+\))?\s*+[:=#]?\s*+\[?\s*+(\d{1,9}(?:\.\d+)?)\s*(?:/\s*\d{1,9})?\]?"
    r"(?:\s*[:,|]?\s*\[?\s*(\d{1,12})\s*/\s*(\d{1,12})(?![\w.%]))?|"
    r"\btrain: (\d{1,9}) \[\s*(\d{1,12})/(\d{1,12})\b",  # timm
    re.IGNORECASE,
)
_FIRST = re.compile(r"\s*(?:\[(\d{1,12})\]\s|(\d{1,12}):\s)")  # of boosted trees
_PLACE = re.compile(r"(?:\[|━ )\s*(\d{1,12})\s*/\s*(\d{1,12})(?=[\s\](])")
_WORDS = r"[A-Za-z_][\w./@'-]*"
_NUMBER = r"[-+]?(?:\d+(?:,\d{3})*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|NaN|inf|Infinity)\b"
_FIELD = re.compile(
    rf"(?<![\w./@'\"-])({_WORDS}(?: {_WORDS}){{0,3}})(?: \([a-z ]+\))?(\s*[:=]\s*|\s{{1,12}})\(?({_NUMBER})%?"
    r"(?:/(\d+)(?![\w./]))?(?!\w|\.\w|,\d|:\d|/\d|-\d|\s*[*^<>&?]|\s*\+ )"
)
_CELL = re.compile(rf"\s*\|\s++([\w/@. -]*[\w/@.-])\s*+\|\s+({_NUMBER})\s*\|\s*$")  # a row of Stable Baselines' table
_ENDS = re.compile(r"\s*(?:$|[,;|)\](]|- |\s{2}|[A-Za-z_][\w./@-]*\s?[:=\s])")
_CODE = re.compile(
    r"(?:Namespace|Arguments|Config)\(|^\s*(?:File \"|assert\b|def |import |raise |usage:|>>> )|\w\([^)]*loss="
)


class Position(NamedTuple):
    """Where in the training a line stands; `local` where the step begins again with every epoch, None where not known."""

    step: int | None = None
    size: int = 0
    epoch: float | None = None
    local: bool | None = False


class Fields(NamedTuple):
    """The metrics of a line."""

    position: Position
    values: dict[str, float]
    is_evaluation: bool = False  # of an evaluation that counts its own batches


def parse_line(text: str) -> Fields:
    """Return step, epoch and metrics of a line; the metrics are empty where it holds none."""
    text = text[:MAX_LINE]
    if cell := _CELL.match(text):
        return _cell(cell[1], cell[2])
    start = _head(text)
    position = parse_position(text, start)
    evaluation = _EVALUATION.match(text, start)
    prefix = evaluation[1].lower() + "_" if evaluation else ""
    values: dict[str, float] = {}
    holds = False
    for match in _FIELD.finditer(text, start):
        name, separator, number, whole = match.groups()
        name = clean_name(name)
        sort = kind(name)
        if sort is Kind.SETTING or name in values:
            continue
        named, exact = not separator.isspace(), not number.lstrip("+-").isdigit()
        if not (named or exact or (sort is Kind.METRIC and _ENDS.match(text, match.end()))):
            continue
        if sort is Kind.OTHER and not (named and exact):
            continue
        value = to_number(number.replace(",", ""))
        if value is None or (whole and not float(whole)):
            continue
        holds = holds or sort is Kind.METRIC or (sort is Kind.WEAK and position.step is not None)
        values[_qualified(name, prefix)] = value / float(whole) if whole else value
    if not holds or _CODE.search(text):
        values = {}
    own = bool(prefix) and position.size > 0 and position.epoch is None
    return Fields(Position(epoch=position.epoch) if own else position, values, own)


def _head(text: str) -> int:
    """Return where the head of a log line ends: time, level, rank."""
    match = _LEVEL.match(text) if any(level in text for level in _LEVELS) else None
    match = match or _HEAD.match(text)
    return match.end() if match else 0


def parse_position(text: str, start: int = 0) -> Position:
    """Return step, size and epoch that a line names."""
    epoch: float | None = None
    step: int | None = None
    size = 0
    if ("poch" in text or "POCH" in text or "rain: " in text) and (match := _EPOCH.search(text, start)):
        epoch = float(match[1] or match[4])
        if match[2] or match[5]:
            step, size = int(match[2] or match[5]), int(match[3] or match[6])
    for match in _STEP.finditer(text, start):
        if match[1]:
            return Position(int(match[3]), 0, epoch)
        if step is None and not (match[2] and epoch is not None):  # beside an epoch these are its steps
            step, size = int(match[3]), int(match[4] or 0)
    if step is None and (match := _PLACE.search(text, start) or _FIRST.match(text, start)):
        step = int(match[1] or match[2])
        size = int(match[2] or 0) if match.re is _PLACE else 0
    return Position(step, size, epoch, None if epoch is not None and step is not None else False)


def _cell(name: str, number: str) -> Fields:
    sort, name, value = kind(name), clean_name(name), to_number(number)
    if name == "total_timesteps" and value is not None:
        return Fields(Position(int(value)), {})
    known = sort in (Kind.METRIC, Kind.WEAK, Kind.COMPANION) and value is not None
    return Fields(Position(), {name: value} if known and value is not None else {})


def _qualified(name: str, prefix: str) -> str:
    """Return a name with the part of the data that its line begins with, unless it names one itself."""
    return name if not prefix or name.startswith(("test", "val", "eval", "dev", "train")) else prefix + name
