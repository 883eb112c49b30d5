"""Regular expressions of our own code, found by its syntax trees, and texts on which each of them backtracks most."""

from __future__ import annotations

import ast
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
REPEATS = (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT)
USES = {"match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer"}
_USE = re.compile(rf"\b(\w+)\.({'|'.join(sorted(USES))})\(")
_ANY = [*"a1 x-.:/=,_A\t[\"'eE+|%(){}]<>#@*\n&;~^$!?\\", *map(chr, range(256))]


class Found(NamedTuple):
    """A pattern: its module and the name that holds it, or the function that uses it; how; None where only a call knows it."""

    place: str
    use: str
    pattern: re.Pattern[Any] | None


def find_patterns(package: str) -> Iterator[Found]:
    """Yield each pattern that a module of a package gives to `re`, as it stands there."""
    sys.modules.setdefault("cloudtrain_fence", import_module("entrypoints.launcher.fence"))  # as a bundle has it
    texts = {path: path.read_text("utf-8") for path in sorted((ROOT / package).rglob("*.py"))}
    everywhere = _uses("\n".join(texts.values()))
    for path, text in texts.items():
        calls = list(_calls(ast.parse(text), "")) if "re." in text else []
        if not calls:
            continue
        here = _uses(text)
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        names = vars(import_module(module))
        for call, holder in calls:
            used = (here if holder.startswith("_") else everywhere).get(holder, set())
            use = call.func.attr if call.func.attr != "compile" else next(iter(used)) if len(used) == 1 else "search"
            yield Found(f"{module}:{holder}", use, _evaluated(call, names))


def _uses(text: str) -> dict[str, set[str]]:
    """Return which functions of patterns a text calls, by the name before the dot."""
    found: dict[str, set[str]] = {}
    for holder, use in _USE.findall(text):
        found.setdefault(holder, set()).add(use)
    return found


def _calls(node: ast.AST, holder: str) -> Iterator[tuple[Any, str]]:
    for child in ast.iter_child_nodes(node):
        inner = holder
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = child.name
        elif isinstance(node, ast.Module) and isinstance(child, ast.Assign) and isinstance(child.targets[0], ast.Name):
            inner = child.targets[0].id
        elif isinstance(child, ast.Call) and _is_of_re(child.func):
            yield child, holder
        yield from _calls(child, inner)


def _is_of_re(function: ast.expr) -> bool:
    is_attribute = isinstance(function, ast.Attribute) and function.attr in {*USES, "compile"}
    return is_attribute and ast.unparse(function.value) == "re"


def _evaluated(call: Any, names: dict[str, Any]) -> re.Pattern[Any] | None:
    flags = [keyword.value for keyword in call.keywords if keyword.arg == "flags"]
    at = {"compile": 1, "sub": 4, "subn": 4, "split": 3}.get(call.func.attr, 2)
    flags += call.args[at : at + 1]
    try:
        values = [eval(compile(ast.Expression(part), "", "eval"), names) for part in (call.args[0], *flags[:1])]
    except NameError:
        return None
    return values[0] if isinstance(values[0], re.Pattern) else re.compile(*values)


def is_repeating(pattern: re.Pattern[Any]) -> bool:
    """Return whether a pattern repeats something without a bound; the time of all others is linear."""
    return any(True for _ in _codes(_parse(pattern)))


def _codes(items: Any) -> Iterator[Any]:
    for code, value in items:
        if code in REPEATS and value[1] > 1000:
            yield code
        for part in _parts(code, value):
            yield from _codes(part)


def _parts(code: Any, value: Any) -> list[Any]:
    if code is op.BRANCH:
        return list(value[1])
    if code is op.ATOMIC_GROUP:
        return [value]
    return [part for part in value if isinstance(part, parser.SubPattern)] if isinstance(value, tuple) else []


def _parse(pattern: re.Pattern[Any]) -> Any:
    text = pattern.pattern.decode("latin-1") if isinstance(pattern.pattern, bytes) else pattern.pattern
    return parser.parse(text, pattern.flags & ~re.UNICODE)


def attacks(pattern: re.Pattern[Any], length: int) -> Iterator[Any]:
    """Yield texts of about this length: a start of a match, one of its parts again and again, and an end that fails."""
    seen = dict.fromkeys([("", character, "\0") for character in "a1 ."])
    seen |= dict.fromkeys(_pumps(_parse(pattern), ""))
    for head, body, tail in seen:
        text = head + body * (length // len(body) + 1)
        text = text[: length - len(tail)] + tail
        yield text.encode("latin-1", "replace") if isinstance(pattern.pattern, bytes) else text


def _pumps(items: Sequence[Any], head: str) -> Iterator[tuple[str, str, str]]:
    """Yield head, repeated part and tail for each place of a pattern."""
    at = head
    for number, (code, value) in enumerate(items):
        parts = _parts(code, value)
        if code in REPEATS:
            for choice in range(3):
                if body := _text(parts[0], choice):
                    after = _text(items[number + 1 :], choice)[:20]
                    yield from ((at, body, "\0"), (at, body, ""), ("", at[-200:] + body, "\0"), ("", body, "\0"))
                    yield (at, body + after, "\0")
        for part in parts:
            yield from _pumps(part, at)
        at += _one(code, value, 1)
        if at:
            yield ("", at[-300:], "\0")


def _text(items: Sequence[Any], choice: int) -> str:
    return "".join(_one(code, value, choice) for code, value in items)


def _one(code: Any, value: Any, choice: int) -> str:
    """Return a text that one part of a pattern matches."""
    if code is op.LITERAL:
        return chr(value)
    if code in (op.NOT_LITERAL, op.IN, op.ANY):
        fitting = _fitting(code, tuple(value) if code is op.IN else value)
        return fitting[choice % len(fitting)] if fitting else "a"
    if code is op.BRANCH:
        return _text(value[1][choice % len(value[1])], choice)
    if code is op.SUBPATTERN:
        return _text(value[3], choice)
    if code is op.ATOMIC_GROUP:
        return _text(value, choice)
    if code in REPEATS:
        return _text(value[2], choice) * min(max(value[0], choice % 2 if value[1] > 1 else 0), 50)
    return ""


@cache
def _fitting(code: Any, value: Any) -> list[str]:
    members = list(value) if code is op.IN else [(op.LITERAL, value)] if code is op.NOT_LITERAL else []
    negated = code is not op.IN or members[0][0] is op.NEGATE
    return [character for character in _ANY if negated != any(_fits(member, character) for member in members)]


def _fits(member: Any, character: str) -> bool:
    code, value = member
    if code is op.LITERAL:
        return value == ord(character)
    if code is op.RANGE:
        return value[0] <= ord(character) <= value[1]
    if code is op.CATEGORY:
        letter = str(value).rpartition("_")[2][0].lower()
        return bool(re.match("\\" + (letter.upper() if "_NOT_" in str(value) else letter), character))
    return False


def takes_longer(call: Callable[[Any], object], text: Any, cap_s: float) -> bool:
    """Return whether a call takes more CPU time than this; it is ended then."""

    def end(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, end)
    started = time.process_time()
    try:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, cap_s)
            call(text)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)  # the signal may come in this very call
    except TimeoutError:
        return True
    finally:
        signal.signal(signal.SIGVTALRM, before)
    return time.process_time() - started > cap_s


def grows_faster(call: Callable[[Any], object], text: Any, quarter: Any) -> bool:
    """Return whether a call's CPU time grows faster than its text: over 8 times from a quarter of it to the whole."""

    def best(given: Any) -> float:
        took = []
        for _ in range(3):
            started = time.process_time()
            call(given)
            took.append(time.process_time() - started)
        return min(took)

    return best(text) > 8 * best(quarter)
