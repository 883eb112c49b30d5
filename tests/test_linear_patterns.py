"""No text that a user wrote, or that his program printed, makes one of our regular expressions take for ever.

Each expression is given texts made of its own parts. What takes over CAP_S of CPU time is measured again on a quarter
of the text: a busy machine may be slow, but only what is not linear grows by more than the text. END_S needs no proof.
A text that is cut before it is searched may take time that grows with its square, but not END_S.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from cloudtrain.diagnosis import lines
from cloudtrain.diagnosis import patterns as diagnosis
from cloudtrain.diagnosis.lines import LONGEST
from cloudtrain.events import REASON_CHARS
from cloudtrain.job.job import Job
from cloudtrain.job.rules import find_keys
from cloudtrain.metrics.lines import MAX_LINE
from cloudtrain.report.nearest import MOST_CHARS
from cloudtrain.source import secrets
from entrypoints.launcher.masks import Masks
from tests.patterns import Found, attacks, find_patterns, grows_faster, is_repeating, takes_longer

LENGTH = 20_000
CAP_S = 0.03
END_S = 1.0
PATH = 4096  # bytes of a path, by the kernel

# Their texts are cut, by our code or by the system that they come from, before they are searched.
CUT = {
    "cloudtrain.metrics.lines:": MAX_LINE,
    "cloudtrain.metrics.steps:": MAX_LINE,
    "cloudtrain.report.nearest:": MOST_CHARS,
    "cloudtrain.backends.records:_is_simple": 300,
    "cloudtrain.runs.watching.ending:LATE_NODES": REASON_CHARS,
    "cloudtrain.history.event_files:": PATH,
    "cloudtrain.history.filters:_check_expression": 200,
    "entrypoints.launcher.credentials:_any_name": 255,
    "entrypoints.trainer.saved:": 255,
    "diagnosis": LONGEST,
}
# Their texts are no user's.
OTHERS = {
    "cloudtrain.simulators.": "requests of tests",
    "cloudtrain.cli.view.terminal:_TOKEN": "what json.dumps wrote: every quote in it is closed",
    "cloudtrain.backends.kubernetes.admission:_regex": "a rule of policy.toml, by who is bound by it",
    "entrypoints.launcher.world.cluster:expand_hosts": "Slurm's list of nodes",
}
# Only a call knows the pattern.
MADE = {
    "cloudtrain.backends.sagemaker.limits:_check_text": "AWS's own patterns, each with the length that it allows",
    "cloudtrain.backends.vertex.request:_custom_job": "patterns of names, matched whole",
    "cloudtrain.console.form:": "patterns of names, matched at the start",
    "cloudtrain.diagnosis.patterns:": "patterns.toml: all_patterns() adds them",
    "cloudtrain.diagnosis.lines:": "patterns.toml: all_patterns() adds them",
    "cloudtrain.history.filters:_check_expression": "an expression of a filter, compiled only",
    "cloudtrain.history.database:_matches": "an expression of a filter, which has few repeats, on 200 characters",
    "cloudtrain.job.configedit:": "a key of the user's own cloudtrain.toml, matched at the start of a line",
    "cloudtrain.job.fields:_metric": "`metrics` of a job, compiled only",
    "cloudtrain.job.launchers:": "an option's name, followed by characters that exclude each other",
    "cloudtrain.metrics.parser:__init__": "`metrics` of a job: its own expressions, on lines that the launcher cuts at 64 kB",
    "cloudtrain.report.sections:_WORTH": "words of a metric's name; one has an ending of letters",
    "cloudtrain.simulators.": "requests of tests",
    "entrypoints.launcher.credentials:_matches": "PATTERNS and HEADS: all_patterns() adds them",
    "entrypoints.launcher.masks:": "one class of characters",
    "entrypoints.launcher.output.keep_patterns:": "`keep` of a job as a pattern of paths",
    "entrypoints.trainer.peaks:": "names of GPUs in a table",
    "entrypoints.trainer.pretrained:": "names of parameters in a table",
}


@cache
def all_patterns() -> list[Found]:
    """Return the patterns in calls of `re`, and those of tables that such a call compiles."""
    return [*find_patterns("cloudtrain"), *find_patterns("entrypoints"), *_of_tables()]


def _of_tables() -> Iterator[Found]:
    for form in (*secrets.credentials().PATTERNS, *secrets.credentials().HEADS):
        yield Found(f"entrypoints.launcher.credentials:{form.kind}", "search", re.compile(form.form))
    for table, rows in diagnosis.tables().items():
        for row in rows:
            for pattern in filter(None, (row.regex, row.unless, row.unless_above, row.calls)):
                yield Found(f"diagnosis {table} {row.label}", "search", pattern)
    for kind, pattern in lines._line_kinds().items():
        yield Found(f"diagnosis lines {kind}", "search", pattern)


def _of(found: Found, table: dict[str, Any]) -> Any:
    return next((value for start, value in table.items() if found.place.startswith(start)), None)


def _call(found: Found) -> Callable[[Any], object]:
    pattern = found.pattern
    assert pattern is not None
    whole = {"match": pattern.match, "fullmatch": pattern.fullmatch}
    return whole.get(found.use) or (lambda text: sum(1 for _ in pattern.finditer(text)))


def _slow(found: Found, length: int) -> str:
    """Return the start of a text on which a pattern is not linear, or an empty text."""
    call = _call(found)
    assert found.pattern is not None
    for text, quarter in zip(attacks(found.pattern, length), attacks(found.pattern, length // 4), strict=True):
        if not takes_longer(call, text, CAP_S):
            continue
        if takes_longer(call, text, END_S) or (length == LENGTH and grows_faster(call, text, quarter)):
            return repr(text[:60])
    return ""


@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.long) for number in range(1, 12))])
def test_every_pattern_is_linear(number: int) -> None:
    slow = []
    ours = [found for found in all_patterns() if not found.place.startswith("diagnosis")]
    of_lines = [found for found in all_patterns() if found.place.startswith("diagnosis")]
    for found in [*(ours if number == 0 else ()), *of_lines[number::12]]:
        if found.pattern is None or _of(found, OTHERS) or not is_repeating(found.pattern):
            continue
        if text := _slow(found, min(LENGTH, _of(found, CUT) or LENGTH)):
            slow.append(f"{found.place} {found.use} {found.pattern.pattern[:100]!r}: {text}")
    assert not slow, "\n".join(slow)


def test_patterns_that_only_a_call_knows_are_listed() -> None:
    unknown = [found for found in all_patterns() if found.pattern is None]
    assert [found.place for found in unknown if not _of(found, MADE)] == []
    assert [start for start in MADE if not any(found.place.startswith(start) for found in unknown)] == []


@pytest.mark.parametrize(
    ("pattern", "use"), [(r"[a-z]+://", "search"), (r"(a+)+b", "match"), (r"\s*:?\s*\d", "search")]
)
def test_the_attack_finds_what_is_not_linear(pattern: str, use: str) -> None:
    assert _slow(Found("seeded", use, re.compile(pattern)), LENGTH)
    assert not _slow(Found("seeded", "match", re.compile(r"[a-z]+://")), LENGTH)


def test_a_job_with_long_values_is_checked_soon() -> None:
    texts = ["a" * 200_000, "aB3/" * 50_000, "\\'" * 100_000, "a://b:" * 33_000, "${" * 100_000]
    env = {f"N{number}_TOKEN": text for number, text in enumerate(texts)}
    job = {"name": "j", "entrypoint": "t.py", "args": texts, "env": env, "hyperparameters": {"a": texts}}
    assert not takes_longer(lambda job: find_keys(Job(**job)), job, 20.0)
    assert not takes_longer(lambda text: Masks().hide(text), texts[1], 20.0)
    hydra = {**job, "arg_style": "hydra", "hyperparameters": dict(zip("abcde", texts, strict=True))}
    assert not takes_longer(lambda job: Job(**job).argv(), hydra, 20.0)
