"""What one rank said before it died: of its lines the one that decides, and the class it speaks for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cloudtrain.diagnosis import rules, tracebacks
from cloudtrain.diagnosis.signs import SIGNS
from cloudtrain.diagnosis.tracebacks import Raised
from cloudtrain.events import LogLine

STANDING = 40  # last lines of a rank among which a line may decide that belongs to no traceback
LONGEST = 2000  # characters of a line that are looked at
_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
PROGRESS = re.compile(r"^\s*(\{'\w+': -?\d|(epoch|step|iter(ation)?|INFO|\[INFO\]|DEBUG|global_step)\b)", re.IGNORECASE)


@dataclass
class Finding:
    label: str
    line: LogLine
    late: bool = False


def of_rank(lines: Sequence[LogLine]) -> Finding | None:
    """Return what decides among a rank's lines; `late` where it may be a consequence of another's death."""
    texts = [bare(line) for line in lines]
    found = _of_tracebacks(texts)
    standing = _standing(texts, found[1] if found else None)
    if found is None or (found[0] in ("vague", "consequence", "opaque") and standing):
        found = standing or found
    if found is None:
        return None
    label, at = found
    if label == "vague":
        label = _plain(texts[at])
    label, at = _explained(texts, label, at)
    if label == "opaque":
        return None
    return Finding(label, lines[at], label in rules.LATE or label == "consequence")


def bare(line: LogLine) -> str:
    """Return a line's text without colours and what torch puts in front of it."""
    return _ESCAPE.sub("", _PREFIX.sub("", line.text[:LONGEST])).rstrip()


def _of_tracebacks(texts: Sequence[str]) -> tuple[str, int] | None:
    """Return class and line of the last chain of tracebacks, unless it was survived."""
    raised = tracebacks.find(texts)
    found = _of_chain(texts, [one for one in raised if not one.aside] or raised)
    if found is None:
        return None
    asked = raised if _GONE.search(texts[found[1]]) else [one for one in raised if one.aside]
    asked = [one for one in asked if one.at < found[1]]
    if found[0] in ("opaque", "consequence", "worker-killed") and (child := _of_chain(texts, asked)):
        return child if child[0] not in ("opaque", "consequence", "worker-killed", "vague") else found
    return found


# A parent's word for a worker or rank that ended: why, that one may have said before.
_GONE = re.compile(
    r"DataLoader worker .* exited unexpectedly|ChildFailedError|ProcessExitedException|CalledProcessError"
)


def _of_chain(texts: Sequence[str], raised: list[Raised]) -> tuple[str, int] | None:
    """Return class and line of the last chain of some tracebacks, unless it was survived."""
    if not raised:
        return None
    chain = [raised.pop()]
    while chain[0].chained and raised:
        chain.insert(0, raised.pop())
    if any(PROGRESS.match(text) for text in texts[chain[-1].at + 1 :]):
        return None
    labelled = [(raised_label(texts, one), one) for one in chain]
    known = [(label, one.at) for label, one in labelled if label not in ("opaque", "consequence")]
    strong = [pair for pair in known if pair[0] not in rules.WEAK and pair[0] not in ("script-error", "vague")]
    weak = [pair for pair in known if pair[0] in rules.WEAK or pair[0] == "vague"]
    if strong:
        return strong[0]
    if weak and (weak[-1] == known[-1] or known[-1][0] == "script-error"):
        return next(pair for pair in weak if pair == weak[-1] or _is_quoted(texts, pair[1], weak[-1][1]))
    return known[-1] if known else (labelled[-1][0], chain[-1].at)


def _is_quoted(texts: Sequence[str], first: int, last: int) -> bool:
    """Return whether the last exception of a chain repeats what an earlier one said, and adds nothing."""
    said = texts[first].partition(": ")[2]
    return bool(said) and any(said in text for text in texts[last : last + 8])


def raised_label(texts: Sequence[str], one: Raised) -> str:
    """Return the class of an exception; `opaque` where no rule and no frame says anything."""
    text = texts[one.at]
    if rules.CONSEQUENCES.search(text):
        return "consequence"
    if re.match(r"(\w+\.)*Empty$|StopIteration|SystemExit", text):
        return "opaque"
    label = rules.first_match(SIGNS, text)
    if rules.VAGUE.search(text) and label != "collective-timeout":
        below = texts[one.at + 1 : one.at + 12]
        return "consequence" if any(rules.CONSEQUENCES.search(line) for line in below) else "vague"
    here = one.innermost
    if here.file.endswith("torch/nn/modules/module.py") and "object has no attribute" in text and len(one.frames) > 1:
        here = one.frames[-2]  # a module's own look-up: who asked is what counts
    raising = here.is_mine and here.code.startswith(("raise ", "raise(", "assert "))
    if label in ("missing-secret",) and text.startswith("KeyError") and "environ" not in here.code and here.is_mine:
        label = None
    if label == "disk-full" and one.shares:
        return "shared-memory"
    if label and not (raising and label in _OWN_WORDS):
        return label
    for more in texts[one.at + 1 : one.at + 8]:  # a message of several lines
        if not more.strip() or tracebacks.HEAD.search(more) or any(words in more for words in tracebacks.CHAINED):
            break
        if not raising and (said := rules.first_match(SIGNS, more)) and said not in ("signal", "missing-file"):
            return said
    own = one.mine is not None and not re.search(r"site-packages|dist-packages", here.file)
    bug = rules.BUGS.search(text) or not rules.ELSEWHERE.match(text)
    return "script-error" if raising or (own and bug) else "opaque"


# In a script's own `raise` such words are its own, and need not mean what a library means by them.
_OWN_WORDS = frozenset(
    ["shape-mismatch", "device-or-dtype", "parallel-config", "bad-argument", "wrong-version", "network"]
)


def _standing(texts: Sequence[str], at: int | None) -> tuple[str, int] | None:
    """Return class and line of what stands for itself at the end of a rank's lines: argparse, a shell, NCCL, an assertion."""
    begin = max(0, len(texts) - STANDING if at is None else at - STANDING)
    inside = {number for one in tracebacks.find(texts) for number in (one.at,) if number != at} if at is None else set()
    for number in range(begin, len(texts)):
        text = texts[number]
        if number == at or number in inside or not stands(text) or _is_call(texts, number):
            continue
        label = rules.first_match(SIGNS, text)
        if label and label not in _IN_TRACEBACKS:
            if any(PROGRESS.match(later) for later in texts[number + 1 :]) and label != "nan-loss":
                continue
            return label, number
    return None


def _is_call(texts: Sequence[str], number: int) -> bool:
    """Return whether a line is the text of a call in a traceback."""
    return number > 0 and texts[number][:1].isspace() and bool(tracebacks.FRAME.match(texts[number - 1]))


def _explained(texts: Sequence[str], label: str, at: int) -> tuple[str, int]:
    """Return class and line of what tells more of a GPU than its error does: why there is none, or that it is gone."""
    explains = _EXPLAINS.get(label)
    for number, text in enumerate(texts) if explains else ():
        if explains and explains.search(text) and (sign := rules.first_match(SIGNS, text)) in _OF_GPUS:
            return sign or label, number
    return label, at


_OF_GPUS = ("gpu-hardware", "cuda-version", "no-gpu")
_EXPLAINS = {
    "no-gpu": re.compile(r"Warning: CUDA initialization: "),
    "cuda-error": re.compile(r"^Unable to determine the device handle for GPU"),
}
# What may stand for itself: not a frame, not a warning that was survived.
_QUIET = re.compile(
    r"\b(warn(ing)?|retry(ing)?|skipp?ing|fallback|falling back|ignored?|attempt \d+|deprecat)", re.IGNORECASE
)
_LOUD = re.compile(r"NCCL WARN|^[\w./ -]+: error: |^Error: ")
_IN_TRACEBACKS = frozenset(
    ["missing-secret", "model-config", "bad-data", "script-error", "device-or-dtype", "wrong-version"]
)


def stands(text: str) -> bool:
    return bool(_LOUD.search(text)) or not (
        tracebacks.FRAME.match(text) or _QUIET.search(text) or rules.CONSEQUENCES.search(text)
    )


def _plain(text: str) -> str:
    """Return the class of a generic error that nothing explains."""
    if "device-side assert" in text or "error (59)" in text:
        return "index-range"
    return "cuda-error" if "CUDA error" in text or "cuda runtime error" in text else "consequence"
