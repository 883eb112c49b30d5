"""Reads step, epoch and named numbers in an ordinary log line."""

from __future__ import annotations

import re
from typing import NamedTuple

from cloudtrain.metrics.dicts import to_number
from cloudtrain.metrics.names import Kind, clean_name, kind, read_name

MAX_LINE = 4096  # characters of a line that are read

_LEVELS = ("INFO", "DEBUG", "WARNING")
_LEVEL = re.compile(r".{0,120}?\b(?:INFO|DEBUG|WARNING)\b[^\w{*#(]*")
_HEAD = re.compile(  # `2026-05-18 16:04:46,338 - `, `[rank0]: [titan] `
    r"(?:\[?rank ?\d+\]?:? ?)?(?:\[[a-z]+\] ?)?(?:\[?\d{2,4}[-/]\d\d[-/\d]*[ T]\d\d:\d\d:\d\d[\d.,Z]*\]?[\s|:-]*)?"
)
_EVALUATION = re.compile(r"\W*(test|val|valid|validation|eval|evaluation|dev)\b(?! *(?:[=:] *)?\d)", re.IGNORECASE)
_STEP = re.compile(
    r"(?=[bginrstu])(?<![\w/.@-])(?:(global[_ ]?steps?|train[_ ]step|num_updates|total_timesteps)|"
    r"step|(steps)|timesteps?|iterations?|iters?|itr|updates?|batch|round|it)\b"
    r"[\s:=#]*+(?:\.{2,3} ?\()?\[?\s*+(\d{1,18})(?:\s*/\s*(\d{1,18}))?"
    r"(?![\w%]|\.\d|,\d|\s*/\s*s\b)",
    re.IGNORECASE,
)
_EPISODE = re.compile(r"\b(?:n_)?episode(?: num)?\b[\s:=#]*+(\d{1,18})(?![\w%]|\.\d|,\d)", re.IGNORECASE)
_EPOCH = re.compile(
    r"(?<![\w/.-])epoch(?:\(\w+\))?\s*+[:=#]?\s*+\[?\s*+(\d{1,9}(?:\.\d+)?)\s*(?:/\s*\d{1,9})?\]?"
    r"(?:\s*[:,|]?\s*\[?\s*(\d{1,12})\s*/\s*(\d{1,12})(?![\w.%]))?|"
    r"\btrain: (\d{1,9}) \[\s*(\d{1,12})/(\d{1,12})\b",  # timm
    re.IGNORECASE,
)
_FIRST = re.compile(r"\s*(?:\[(\d{1,12})\]\s|(\d{1,12}):\s|\((\d{1,12})/\d{1,12}\)\s)")  # of boosted trees, of a bar
_HEADER = re.compile(  # begins a line that names only a position, for the lines below it
    r"[\W_]*(?:(?:global|training|learning|train)[_ ])?(?:epoch|step|iteration|iter|batch|episode|round)\b",
    re.IGNORECASE,
)
_PLACES = re.compile(r"\[(\d{1,9})(?:/\d{1,9})?\]\s?\[(\d{1,12})/(\d{1,12})\]")  # epoch, step
_CONFIGURATION = re.compile(
    r"\W*(?:\w{1,20} ){0,2}(?:hyper[-_ ]?param(?:eter)?s?|hparams|config(?:uration)?s?|settings|arguments|args|options|flags)"
    r"\s*[:=]",
    re.IGNORECASE,
)
_PLACE = re.compile(r"(?:\[|━ )\s*(\d{1,12})\s*/\s*(\d{1,12})(?=[\s\](])")
_WORDS = r"[A-Za-z_][\w./@'-]*+"
_NUMBER = r"[-+]?(?:\d+(?:,\d{3})*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|NaN|inf|Infinity)\b"
_FIELD = re.compile(
    rf"(?<![\w./@'\"-])({_WORDS}(?: {_WORDS}){{0,3}})(?: \([a-z ]+\))?(\s*[:=]\s*|\s{{1,12}})(?:\(|\[(?=[\d.eE+-]{{1,24}}\]))?"
    rf"({_NUMBER})%?"
    r"(?:/(\d+)(?![\w./]))?(?!\w|\.\w|,\d|:\d|/\d|-\d|\s*[*^<>&?]|\s*\+ | (?:m?s|min|sec|seconds|minutes|h|hours)\b)"
)
_CELL = re.compile(rf"\s*\|\s++([\w/@. -]*[\w/@.-])\s*+\|\s+({_NUMBER})\s*\|\s*$")  # a row of Stable Baselines' table
_ENDS = re.compile(r"\s*(?:$|[,;|)\](]|- |\s{2}|[A-Za-z_][\w./@-]*\s?[:=\s])")
_CODE = re.compile(r"\s*(?:File \"|assert\b|def |import |raise |usage:|>>> )")
_CALL = re.compile(r"(?:Namespace|Arguments|Config)\(|\w\([^)]*loss=")


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
    holds, settings = False, 0
    for match in _FIELD.finditer(text, start):
        words, separator, number, whole = match.groups()
        sort, name, short = read_name(words)
        if sort is Kind.SETTING:
            settings += 1
            continue
        named, exact = not separator.isspace(), not number.lstrip("+-").isdigit()
        if not (named or exact or (sort is Kind.METRIC and _ENDS.match(text, match.end()))):
            continue
        if sort is Kind.OTHER and not (named and exact):
            continue
        if name is not short and _goes_on(text, match.start()):
            name = short
        value = to_number(number.replace(",", ""))
        if name in values or value is None or (whole and not float(whole)):
            continue
        holds = holds or sort is Kind.METRIC or (sort is Kind.WEAK and position.step is not None)
        values[_qualified(name, prefix)] = value / float(whole) if whole else value
    if (
        not holds
        or _CODE.match(text)
        or ("(" in text and _CALL.search(text))
        or _is_configuration(text, start, position, settings, len(values))
    ):
        values = {}
    own = bool(prefix) and position.size > 0 and position.epoch is None
    return Fields(Position(epoch=position.epoch) if own else position, values, own)


def is_header(text: str) -> bool:
    """Return whether a line begins with a position, which then holds for the lines below it."""
    return _HEADER.match(text, _head(text)) is not None


def _goes_on(text: str, at: int) -> bool:
    """Return whether a word stands before this place: what begins here is the rest of a sentence."""
    return at > 1 and text[at - 1] == " " and text[at - 2].isalpha()


def _is_configuration(text: str, start: int, position: Position, settings: int, others: int) -> bool:
    """Return whether a line prints what a training was started with."""
    if position.step is not None or position.epoch is not None:
        return False
    return (settings > 2 and settings > others) or _CONFIGURATION.match(text, start) is not None


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
    if step is None:
        step, size, epoch = _rare_position(text, start, epoch)
    return Position(step, size, epoch, None if epoch is not None and step is not None else False)


def _rare_position(text: str, start: int, epoch: float | None) -> tuple[int | None, int, float | None]:
    """Return step, size and epoch of a line that names no step by a word for it."""
    if epoch is None and "][" in text and (match := _PLACES.search(text, start)):
        return int(match[2]), int(match[3]), float(match[1])
    if match := _PLACE.search(text, start):
        return int(match[1]), int(match[2] or 0), epoch
    if match := _FIRST.match(text, start):
        return int(match[match.lastindex or 1]), 0, epoch
    if epoch is None and "pisode" in text and (match := _EPISODE.search(text, start)):
        return int(match[1]), 0, epoch
    return None, 0, epoch


def _cell(name: str, number: str) -> Fields:
    sort, name, value = kind(name), clean_name(name), to_number(number)
    if name == "total_timesteps" and value is not None:
        return Fields(Position(int(value)), {})
    known = sort in (Kind.METRIC, Kind.WEAK, Kind.COMPANION) and value is not None
    return Fields(Position(), {name: value} if known and value is not None else {})


def _qualified(name: str, prefix: str) -> str:
    """Return a name with the part of the data that its line begins with, unless it names one itself."""
    return name if not prefix or name.startswith(("test", "val", "eval", "dev", "train")) else prefix + name
