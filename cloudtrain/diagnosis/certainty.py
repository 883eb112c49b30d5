"""Decide whether a line proves its failure class or only suggests it: a verdict without proof says "probably".

A row of patterns.toml with `certain = true` has the whole message as one library writes it. It is proof only at the end of
the process that died first, and only if no other line suggests another class. docs/concepts/diagnosis.md has the principles;
tests/diagnosis/corpus/doubtful has a failure against each.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from cloudtrain.diagnosis import patterns
from cloudtrain.diagnosis.lines import is_line
from cloudtrain.diagnosis.tracebacks import Traceback, find_tracebacks, pop_last_chain

_LINES_AFTER = 400  # lines after the deciding one that are searched for signs that the process lived on
_EXCEPTION = re.compile(r"^[\w.]+(Error|Exception)(: |$)")


def is_proven_by_log(label: str, texts: Sequence[str], index: int, exit_code: int | None) -> bool:
    """Return whether a line proves a class, among the lines of the rank that died first."""
    text = texts[index]
    if patterns.is_contradicted("log", label, text):
        return False
    if any(is_line("alive", after) for after in texts[index + 1 : index + _LINES_AFTER]):
        return False
    tracebacks = find_tracebacks(texts)
    chain = pop_last_chain(tracebacks) if tracebacks else []
    traceback = next((traceback for traceback in chain if traceback.index == index), None)
    if not patterns.is_proven("log", label, text, above=texts[:index], exit_code=exit_code, traceback=traceback):
        return False
    if not chain:  # Python prints an exception that nothing caught: this one was caught
        return not _EXCEPTION.match(text)
    if traceback is None:  # beside a traceback: only where that one is generic
        generic = len(chain) == 1 and is_line("vague", texts[chain[0].index]) and not chain[0].survivable
        return generic and exit_code in (*patterns.UNCAUGHT, None)
    return not traceback.survivable and not _is_own_message(traceback) and _is_cause(label, texts, chain, traceback)


def is_proven_by_system(label: str, text: str, exit_code: int | None) -> bool:
    """Return whether a line of a kernel or a scheduler proves a class."""
    return patterns.is_proven("system", label, text, exit_code=exit_code)


def is_proven_by_reason(label: str, text: str, reason: str) -> bool:
    """Return whether a line of a platform's reason proves a class, and no line of the reason suggests another."""
    return patterns.is_proven("reason", label, text) and not patterns.is_contradicted("reason", label, reason)


def is_proven_by_state(label: str, reason: str) -> bool:
    """Return whether a reason confirms the class of a state: jobs are requeued, and wait too long, for several causes."""
    return patterns.is_proven("state", label, reason) and not patterns.is_contradicted("reason", label, reason)


def _is_cause(label: str, texts: Sequence[str], chain: Sequence[Traceback], traceback: Traceback) -> bool:
    """Return whether one traceback of a chain is the cause of the others."""
    messages = [texts[link.index] for link in chain]
    labels = [None if is_line("consequence", text) else patterns.classify("log", text) for text in messages]
    if not set(labels) - patterns.labels_with("general") <= {label, None}:
        return False
    after = chain.index(traceback) + 1
    if not all(link.direct or other == label for link, other in zip(chain[after:], labels[after:], strict=True)):
        return False
    # An exception handler that breaks, other than by its own `raise`, hides its cause: the exception that it handled.
    return all(
        link.direct or before == label or link.innermost.code.startswith("raise ")
        for link, before in zip(chain[1:after], labels, strict=False)
    )


def _is_own_message(traceback: Traceback) -> bool:
    """Return whether the job's own code wrote the message, or may have: its code is not in the log."""
    innermost = traceback.innermost
    return innermost.raises or (innermost.is_own_code and not innermost.code)
