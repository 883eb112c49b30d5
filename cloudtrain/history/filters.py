"""The filter language of run lists, as SQL: `state:failed label.team=vision hp.lr>=1e-3 metric.loss<0.5 since:7d words`.

All terms of a filter must hold. A term is `FIELD OPERATOR VALUE` or a word, which is a part of a run's id, title, note or tag.
`-` before a term negates it. `a,b` means either, `*` any text, and quotes keep blanks.
`name~/^lm-[0-9]+$/` is a regular expression.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TypeVar

from cloudtrain.backends.plan import ATTACHED
from cloudtrain.clock import SYSTEM
from cloudtrain.errors import BadRequest
from cloudtrain.events import State
from cloudtrain.history.columns import WITHIN, Column, find_column
from cloudtrain.history.database import placeholders
from cloudtrain.job.units import duration_s, format_time

T = TypeVar("T")
STATES: dict[str, tuple[State, ...]] = {
    "live": tuple(state for state in State if not state.final),
    "ended": tuple(state for state in State if state.final),
    **{state.value.lower(): (state,) for state in State},
}
FLAGS = {
    "starred": "+run_id IN (SELECT run_id FROM marks WHERE starred)",
    "archived": "+run_id IN (SELECT run_id FROM marks WHERE archived)",
    "attached": f"substr(identity, 1, {len(ATTACHED)}) = '{ATTACHED}'",
}
FIELDS = ("after", "backend", "before", "cost", "created", "ended", "exit", "gpus", "hp.", "is", "label.", "metric.", "name",
          "note", "run", "since", "started", "state", "step", "system.", "tag", "target", "title", "took", "user")  # fmt: skip
_PART = r'(?:"[^"]*"|[^\s"])'
_TERM = re.compile(
    rf'(?P<negated>-?)(?P<field>[A-Za-z](?:"[^"]*"|[^\s":=<>!~])*)(?P<op>!=|<=|>=|[:=<>~])(?P<value>{_PART}*)'
)
_WORD = re.compile(rf"(?P<negated>-?)(?P<value>{_PART}+)")
_LIKE = "LIKE ? ESCAPE '!'"
MOST_CHARS, MOST_REPEATS = 200, 3  # of a regular expression
EXPRESSION = "name~/^lm-[0-9]+$/"


class FilterError(BadRequest):
    """A filter that cannot be read; `at` is the place of the mistake, from 0."""

    def __init__(self, at: int, message: str, hint: str = "") -> None:
        super().__init__(f"filter, character {at + 1}: {message}", hint)
        self.at = at


def where(text: str) -> tuple[str, list[object]]:
    """Return a filter as an SQL condition over the table `runs` and its values; raises FilterError.

    Archived runs are left out, unless the filter names `is:archived`.
    """
    named = re.search(r"(?<!\S)-?is:\S*archived", text)
    wheres, values = [] if named else [f"NOT {FLAGS['archived']}"], list[object]()
    sources, source_values = [], list[object]()  # queries of ids, each in the order of its ids
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        match = _TERM.match(text, at) or _WORD.match(text, at)
        if not match or (match.end() < len(text) and not text[match.end()].isspace()):
            raise FilterError(at, "a quote is not closed", 'write `field="two words"`')
        parts = match.groupdict()
        sql, found = _term(parts, match) if "field" in parts else _words(_unquoted(parts["value"]))
        at = match.end()
        if not parts["negated"] and sql.startswith(WITHIN):
            sources.append(sql.removeprefix(WITHIN).removesuffix(")"))
            source_values += found
            continue
        wheres.append(f"NOT coalesce({sql}, 0)" if parts["negated"] else sql)
        values += found
    if sources:  # SQLite merges ordered queries: a set of 100,000 ids for each of them would take three times as long
        wheres.append(f"{WITHIN}SELECT * FROM ({' INTERSECT '.join(sources)} ORDER BY 1 LIMIT -1))")
    return " AND ".join(f"({each})" for each in wheres) or "1", [*values, *source_values]


def fields_of(text: str) -> list[str]:
    """Return the fields that the terms of a filter name."""
    return [_unquoted(match["field"]) for match in _terms(text)]


def values_of(text: str, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return field and value of the terms `FIELD:VALUE` with these fields, each alternative alone."""
    terms = [(_unquoted(match["field"]), match) for match in _terms(text) if match["op"] in (":", "=")]
    return [(field, _unquoted(each)) for field, match in terms if field in names for each in _split(match["value"])]


def _terms(text: str) -> Iterator[re.Match[str]]:
    at = 0
    while at < len(text):
        match = _TERM.match(text, at)
        if match:
            yield match
        found = match or _WORD.match(text, at)
        at = found.end() if found else at + 1


def _term(parts: dict[str, str], match: re.Match[str]) -> tuple[str, list[object]]:
    """Return one `FIELD OPERATOR VALUE` as SQL."""
    field, op = _unquoted(parts["field"]), {":": "="}.get(parts["op"], parts["op"])
    value_at = match.start("value")
    options = [_unquoted(each) for each in _split(parts["value"])]
    if not options:
        raise FilterError(value_at, f"{field} has no value", f"write {field}:VALUE")
    if field in ("since", "after", "before"):
        _only(op, ("=",), field, match)
        return f"created_at {'<' if field == 'before' else '>='} ?", [_moment(options[0], value_at)]
    if field == "state":
        _only(op, ("=", "!="), field, match)
        states = [state.value for each in options for state in _one_of(STATES, each.lower(), value_at, "state")]
        return f"state {'NOT ' if op == '!=' else ''}IN ({placeholders(states)})", [*states]
    if field == "is":
        _only(op, ("=", "!="), field, match)
        flags = " OR ".join(_one_of(FLAGS, each, value_at, "one of these") for each in options)
        return f"{'NOT ' if op == '!=' else ''}({flags})", []
    if field == "tag":
        _only(op, ("=", "!=", "~"), field, match)
        return _tags(options, op)
    column = find_column(field)
    if column is None or column.sql is None:
        hint = closest(field, FIELDS) or f"the fields are {', '.join(FIELDS)}"
        raise FilterError(match.start("field"), f"unknown field {field!r}", hint)
    return _comparison(column, op, options, value_at)


def _comparison(column: Column, op: str, options: Sequence[str], at: int) -> tuple[str, list[object]]:
    """Return a comparison of a column with one value or with any of several."""
    if op in ("=", "!=", "~"):
        found = [_equal(column, op, option, at) for option in options]
        sql, values = " OR ".join(each for each, _ in found), [value for _, value in found]
        negated = "NOT " if op == "!=" else ""
        return f"{negated}{column.within(sql)}", [*column.values, *values]
    value: object = options[0]
    if column.kind in ("time", "seconds"):
        value = _moment(options[0], at) if column.kind == "time" else _seconds(options[0], at)
    elif column.kind != "text":
        value = _number(options[0], at)
    return column.within(f"{column.number} {op} ?"), [*column.values, value]


def _check_expression(option: str, at: int) -> None:
    """Refuse a regular expression that could take long: an address that somebody else has written may hold one."""
    text = option[1:-1]
    try:
        re.compile(text)
    except re.error as error:
        raise FilterError(at, f"{option} is not a regular expression: {error}", EXPRESSION) from None
    single = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "x", text[:MOST_CHARS]).replace(
        "(?:", "("
    )  # escapes and classes are a letter
    if len(text) > MOST_CHARS or len(re.findall(r"[*+?{]", single)) > MOST_REPEATS or re.search(r"\)[*+?{]", single):
        why = f"it has over {MOST_CHARS} characters, over {MOST_REPEATS} of * + ? {{, or a group that is repeated"
        raise FilterError(at, f"{option} could take long: {why}", EXPRESSION)


def _equal(column: Column, op: str, option: str, at: int) -> tuple[str, object]:
    if op == "~" and len(option) > 2 and option[0] == option[-1] == "/":
        _check_expression(option, at)
        return f"{column.text} REGEXP ?", option[1:-1]
    if op == "~":
        return f"{column.text} {_LIKE}", f"%{_escaped(option)}%"
    if column.kind in ("number", "seconds"):
        return f"{column.number} = ?", (_seconds if column.kind == "seconds" else _number)(option, at)
    if column.kind == "value":  # `1e-3` finds 0.001 as well
        try:
            return f"{column.number} = ?", float(option)
        except ValueError:
            pass
    if "*" in option:
        return f"{column.text} GLOB ?", re.sub(r"([\[?])", r"[\1]", option)
    return f"{column.text} = ?", option


def _tags(options: Sequence[str], op: str) -> tuple[str, list[object]]:
    test = " OR ".join(f"tag.value {_LIKE if op == '~' else '= ?'}" for _ in options)
    values = [f"%{_escaped(each)}%" if op == "~" else each for each in options]
    select = f"SELECT marks.run_id FROM marks, json_each(marks.tags) AS tag WHERE {test}"
    return f"+run_id {'NOT ' if op == '!=' else ''}IN ({select})", [*values]


def _words(words: str) -> tuple[str, list[object]]:
    """Return the condition for a part of an id, or of what a person wrote to a run."""
    like = f"%{_escaped(words)}%"
    marked = f"SELECT run_id FROM marks WHERE title {_LIKE} OR note {_LIKE} OR tags {_LIKE}"
    return f"(run_id {_LIKE} OR +run_id IN ({marked}))", [like] * 4


def _only(op: str, allowed: Sequence[str], field: str, match: re.Match[str]) -> None:
    if op not in allowed:
        raise FilterError(
            match.start("op"), f"the field {field} cannot be compared with {op!r}", f"write {field}:VALUE"
        )


def _one_of(known: Mapping[str, T], name: str, at: int, what: str) -> T:
    if name not in known:
        hint = closest(name, known) or f"write {', '.join(known)}"
        raise FilterError(at, f"{name!r} is not a {what}", hint)
    return known[name]


def closest(name: str, known: Iterable[str]) -> str:
    """Return the question whether another name was meant, "" where none is close."""
    import difflib  # of a wrong filter alone: each `ls` would pay for it

    close = difflib.get_close_matches(name, list(known), 1, 0.5)
    return f"did you mean {close[0]}?" if close else ""


def _number(text: str, at: int) -> float:
    try:
        return float(text)
    except ValueError:
        raise FilterError(at, f"{text!r} is not a number", "write 0.5 or 1e-3") from None


def _seconds(text: str, at: int) -> float:
    try:
        return float(duration_s(text))
    except ValueError as error:
        raise FilterError(at, f"{text!r} is not a duration", str(error)) from None


def _moment(text: str, at: int) -> str:
    """Return a time: a date, or how long ago (7d, 12h)."""
    try:
        return format_time(datetime.fromisoformat(text).astimezone())
    except ValueError:
        pass
    try:
        return format_time(SYSTEM.now() - duration_s(text))
    except ValueError:
        raise FilterError(at, f"{text!r} is not a time", "write 7d, 12h or 2026-11-23") from None


def _split(text: str) -> Iterator[str]:
    """Yield the alternatives `a,b`; a comma in quotes is a part of the text."""
    yield from (found[0] for found in re.finditer(r'(?:"[^"]*"|[^,"])+', text))


def _unquoted(text: str) -> str:
    return text.replace('"', "")


def _escaped(text: str) -> str:
    return "".join("!" + letter if letter in "%_!" else letter for letter in text)
