"""Reads step, epoch and named numbers in an ordinary log line."""

from __future__ import annotations

import re
from typing import NamedTuple

from cloudtrain.metrics.dicts import to_number
from cloudtrain.metrics.names import Kind, clean_name, kind, read_name

MAX_LINE = 4096  # characters of a line that are read
MOST_FORMS = 512  # forms of lines that are remembered
_DIGITS = bytes.maketrans(b"123456789", b"000000000")

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


Span = tuple[int, int]  # where a number stands in a line


class Place(NamedTuple):
    """Where a line's step, size and epoch stand in it; `local` as in Position."""

    step: Span | None
    size: Span | None
    epoch: Span | None
    local: bool | None

    def position(self, text: str) -> Position:
        """Return the numbers of a line."""
        step, size, epoch, local = self
        return Position(
            int(text[step[0] : step[1]]) if step else None,
            int(text[size[0] : size[1]]) if size else 0,
            float(text[epoch[0] : epoch[1]]) if epoch else None,
            local,
        )


class Fields(NamedTuple):
    """The metrics of a line."""

    position: Position
    values: dict[str, float]
    is_evaluation: bool = False  # of an evaluation that counts its own batches


class Form(NamedTuple):
    """A line whatever its digits are: where its numbers stand, so that the next line like it is only sliced."""

    words: list[tuple[int, int, str]]  # names that hold digits: a line with other ones has another form
    place: Place
    found: list[
        tuple[str, str, bool, Span, Span | None]
    ]  # name, with its prefix, marks metrics, number, what divides it
    settings: int
    is_refused: bool  # code, a call or a configuration
    is_evaluation: bool

    def fits(self, text: str) -> bool:
        """Return whether a line with the same text but for its digits has this form."""
        return all(text[begin:end] == word for begin, end, word in self.words)

    def fields(self, text: str) -> Fields:
        """Return step, epoch and metrics of a line of this form."""
        position = self.place.position(text)
        values: dict[str, float] = {}
        holds = False
        for name, qualified, marks, (begin, end), whole in self.found:
            if name in values:
                continue
            value = float(text[begin:end].replace(",", ""))
            if whole:
                divisor = float(text[whole[0] : whole[1]])
                if not divisor:
                    continue
                value /= divisor
            holds = holds or marks
            values[qualified] = value
        unplaced = position.step is None and position.epoch is None
        if not holds or self.is_refused or (unplaced and self.settings > 2 and self.settings > len(values)):
            values = {}
        own = self.is_evaluation and position.size > 0 and position.epoch is None
        return Fields(Position(epoch=position.epoch) if own else position, values, own)


_forms: dict[bytes, Form] = {}  # by the line with 0 for each digit


def parse_line(text: str) -> Fields:
    """Return step, epoch and metrics of a line; the metrics are empty where it holds none."""
    text = text[:MAX_LINE]
    key = text.encode("utf-8", "surrogatepass").translate(_DIGITS)
    form = _forms.get(key)
    if form is None or not form.fits(text):
        if cell := _CELL.match(text):
            return _cell(cell[1], cell[2])
        if len(_forms) >= MOST_FORMS:
            _forms.clear()
        form = _forms[key] = _read_form(text)
    return form.fields(text)


def _read_form(text: str) -> Form:
    start = _head(text)
    place = _find_place(text, start)
    evaluation = _EVALUATION.match(text, start)
    prefix = evaluation[1].lower() + "_" if evaluation else ""
    words: list[tuple[int, int, str]] = []
    found: list[tuple[str, str, bool, Span, Span | None]] = []
    settings = 0
    for match in _FIELD.finditer(text, start):
        printed, separator, number, _ = match.groups()
        if any(map(str.isdigit, printed)):
            words.append((*match.span(1), printed))
        sort, name, short = read_name(printed)
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
        marks = sort is Kind.METRIC or (sort is Kind.WEAK and place.step is not None)
        found.append((name, _qualified(name, prefix), marks, match.span(3), _span(match, 4)))
    refused = (
        _CODE.match(text) is not None
        or ("(" in text and _CALL.search(text) is not None)
        or (place.step is None and place.epoch is None and _CONFIGURATION.match(text, start) is not None)
    )
    return Form(words, place, found, settings, refused, bool(prefix))


def is_header(text: str) -> bool:
    """Return whether a line begins with a position, which then holds for the lines below it."""
    return _HEADER.match(text, _head(text)) is not None


def _goes_on(text: str, at: int) -> bool:
    """Return whether a word stands before this place: what begins here is the rest of a sentence."""
    return at > 1 and text[at - 1] == " " and text[at - 2].isalpha()


def _head(text: str) -> int:
    """Return where the head of a log line ends: time, level, rank."""
    match = _LEVEL.match(text) if any(level in text for level in _LEVELS) else None
    match = match or _HEAD.match(text)
    return match.end() if match else 0


def parse_position(text: str, start: int = 0) -> Position:
    """Return step, size and epoch that a line names."""
    return _find_place(text, start).position(text)


def _find_place(text: str, start: int) -> Place:
    epoch: Span | None = None
    step: Span | None = None
    size: Span | None = None
    if ("poch" in text or "POCH" in text or "rain: " in text) and (match := _EPOCH.search(text, start)):
        epoch, step, size = _span(match, 1, 4), _span(match, 2, 5), _span(match, 3, 6)
    for match in _STEP.finditer(text, start):
        if match[1]:
            return Place(match.span(3), None, epoch, False)
        if step is None and not (match[2] and epoch is not None):  # beside an epoch these are its steps
            step, size = match.span(3), _span(match, 4)
    if step is None:
        step, size, epoch = _rare_place(text, start, epoch)
    return Place(step, size, epoch, None if epoch is not None and step is not None else False)


def _rare_place(text: str, start: int, epoch: Span | None) -> tuple[Span | None, Span | None, Span | None]:
    """Return where step, size and epoch stand in a line that names no step by a word for it."""
    if epoch is None and "][" in text and (match := _PLACES.search(text, start)):
        return match.span(2), match.span(3), match.span(1)
    if match := _PLACE.search(text, start):
        return match.span(1), match.span(2), epoch
    if match := _FIRST.match(text, start):
        return match.span(match.lastindex or 1), None, epoch
    if epoch is None and "pisode" in text and (match := _EPISODE.search(text, start)):
        return match.span(1), None, epoch
    return None, None, epoch


def _span(match: re.Match[str], *groups: int) -> Span | None:
    """Return where the first of these groups that has matched stands."""
    return next((match.span(group) for group in groups if match[group] is not None), None)


def _cell(name: str, number: str) -> Fields:
    sort, name, value = kind(name), clean_name(name), to_number(number)
    if name == "total_timesteps" and value is not None:
        return Fields(Position(int(value)), {})
    known = sort in (Kind.METRIC, Kind.WEAK, Kind.COMPANION) and value is not None
    return Fields(Position(), {name: value} if known and value is not None else {})


def _qualified(name: str, prefix: str) -> str:
    """Return a name with the part of the data that its line begins with, unless it names one itself."""
    return name if not prefix or name.startswith(("test", "val", "eval", "dev", "train")) else prefix + name
