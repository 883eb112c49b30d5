"""When a line proves a cause, and when it only speaks for one: what a verdict says without "probably".

A rule of verdictsigns.py finds a class by a few words; a proof is more: the type and the sentence as one library writes them,
at the end of the process that died first, where nothing else was said that speaks for another class. docs/watching.md has the
principles, tests/verdicts/corpus/doubtful a failure against each.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from cloudtrain import tracebacks
from cloudtrain.tracebacks import Raised
from cloudtrain.verdictrules import CONSEQUENCES, GENERAL, REASONS, Rule, first_match
from cloudtrain.verdictsentences import BESIDE, CODES, SENTENCES
from cloudtrain.verdictsigns import SIGNS

# Exit codes of an exception that nobody caught: Python's own, an abort while the process goes down, not told.
DIED = (1, 134, None)
_ANY = ("cuda-error", "platform-access")  # "CUDA error", "AccessDenied": said of more special causes too
_NAMED = {
    "timeout": re.compile(r"(?i)max_?run_?time|time ?limit|\btimeout\b|deadline"),
    "spot-loss": re.compile(r"(?i)preempt|\bspot\b|reclaim|interrupt"),
}
_PARSED = (2, None)  # of a parser of arguments, which ends without a traceback
_MANY = 400  # lines behind the last one: a message of many lines ends earlier

# Behind the last words of a process that died: a line of one that lived on.
_ALIVE = re.compile(
    r"^\s*(\{'\w+': -?\d|(epoch|step|iter(ation)?|global_step|loss|saving|saved)\b|\[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d"
    r"|\[?(INFO|DEBUG|WARNING)\b)"
    r"|\b(retrying|resum(ed|ing)|recovered|fall(ing|s)? back|continuing|trying again)\b",
    re.IGNORECASE,
)
_TRAVELS = re.compile(r"\b(multiprocess(ing)?|billiard|joblib|loky|cloudpickle|ray|dask|distributed|concurrent)[/\\]")
_EXCEPTION = re.compile(r"^[\w.]+(Error|Exception)(: |$)")


def in_log(label: str, texts: Sequence[str], at: int, exit_code: int | None) -> bool:
    """Return whether a line proves a class, among the lines of the rank that died first."""
    if not _among(SENTENCES, label, texts[at]) or not fits(label, texts[at], SIGNS):
        return False
    if any(_ALIVE.search(text) for text in texts[at + 1 : at + _MANY]):
        return False
    raised = tracebacks.find(texts)
    if not raised:  # an exception that Python did not print itself was caught, whatever came then
        return not _EXCEPTION.match(texts[at]) and exit_code in (_PARSED if label == "bad-argument" else DIED)
    chain = _last_chain(raised)
    own = next((one for one in chain if one.at == at), None)
    if own is None:
        return False
    said = [None if CONSEQUENCES.search(texts[one.at]) else first_match(SIGNS, texts[one.at]) for one in chain]
    behind = chain.index(own) + 1
    followed = all(one.direct or word == label for one, word in zip(chain[behind:], said[behind:], strict=True))
    # Where a handler breaks, what it was to handle is the cause.
    led = all(one.direct or before == label for one, before in zip(chain[1:behind], said, strict=False))
    if own.aside or exit_code not in DIED or not (followed and led) or not set(said) - GENERAL <= {label, None}:
        return False
    if label == "unpicklable" and not any(_TRAVELS.search(frame.file) for frame in own.frames):
        return False  # it was to be copied or saved, not to go to a process
    return not _is_own_word(own)


def beside(label: str, text: str, exit_code: int | None) -> bool:
    """Return whether what a kernel or a scheduler wrote proves a class; an OOM killer's word only where the rank was killed."""
    fits_code = label != "host-memory" or exit_code in (137, None)
    return fits_code and _among(BESIDE, label, text)


def in_reason(label: str, text: str, reason: str) -> bool:
    """Return whether a line of a platform's reason proves a class, and nothing of the reason speaks for another."""
    return _among(CODES, label, text) and fits(label, reason, REASONS)


def named(label: str, reason: str) -> bool:
    """Return whether a reason says itself what a state says: a job is requeued, and waits too long, for several causes."""
    return label in _NAMED and bool(_NAMED[label].search(reason)) and fits(label, reason, REASONS)


def fits(label: str, text: str, table: Sequence[Rule]) -> bool:
    """Return whether no rule of a table takes a line for another class, but for one whose words every such line has."""
    return not any(name not in (label, *_ANY) and pattern.search(text) for name, pattern in table)


def _among(table: Sequence[Rule], label: str, text: str) -> bool:
    return any(name == label and pattern.search(text) for name, pattern in table)


def _last_chain(raised: list[Raised]) -> list[Raised]:
    chain = [raised.pop()]
    while chain[0].chained and raised:
        chain.insert(0, raised.pop())
    return chain


def _is_own_word(one: Raised) -> bool:
    """Return whether the job's own code has chosen the words, or may have: where its text is not there."""
    here = one.innermost
    return here.is_mine and (not here.code or here.code.startswith(("raise ", "raise(", "assert ")))
