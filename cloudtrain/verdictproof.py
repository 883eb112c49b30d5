"""When a line proves a cause, and when it only speaks for one: what a verdict says without "probably".

A rule of verdictsigns.py finds a class by a few words; a proof is more: the type and the sentence as one library writes them,
at the end of the process that died first, where nothing else was said that speaks for another class. docs/watching.md has the
principles, tests/verdicts/corpus/doubtful a failure against each.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence

from cloudtrain import tracebacks
from cloudtrain.tracebacks import Raised
from cloudtrain.verdictrules import CONSEQUENCES, GENERAL, REASONS, VAGUE, Rule, first_match
from cloudtrain.verdictsentences import BESIDE, CODES, SENTENCES
from cloudtrain.verdictsigns import SIGNS

DIED = (
    1,
    134,
    None,
)  # exit codes of an exception that nobody caught: Python's own, an abort while the process goes down, not told
_MANY = 400  # lines behind the last one: a message of many lines ends earlier

# Behind the last words of a process that died: a line of one that lived on.
_ALIVE = re.compile(
    r"^\s*(\{'\w+': -?\d|(epoch|step|iter(ation)?|global_step)\b|\[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d|\[?(INFO|DEBUG|WARNING)\b)"
    r"|\b(retrying|resum(ed|ing)|recovered|fall(ing|s)? back|continuing|trying again)\b",
    re.IGNORECASE,
)
_PREEMPTION = re.compile(r"preemption: \d+/\d+ nodes are available.*")  # Kubernetes says so of every pod that waits
_NO_FILE = re.compile(r"://|'/(dev|proc|sys|run)/|secret|credential|token|'[\w.-]*key\b", re.IGNORECASE)
_UNREACHED = re.compile(r"\(from versions: none\)|connection broken by|Retrying \(Retry\(|Could not fetch URL")
_REMOVED = frozenset(
    {
        "asynchat",
        "asyncore",
        "cgi",
        "crypt",
        "distutils",
        "imp",
        "nntplib",
        "pipes",
        "pkg_resources",
        "smtpd",
        "telnetlib",
    }
)
_SHARED = re.compile(r"multiprocessing[/\\]|shared_memory|/dev/shm")


def in_log(label: str, texts: Sequence[str], at: int, exit_code: int | None) -> bool:
    """Return whether a line proves a class, among the lines of the rank that died first."""
    if first_match([rule for rule in SENTENCES if rule[0] == label], texts[at]) is None or not fits(
        label, texts[at], SIGNS
    ):
        return False
    if any(_ALIVE.search(text) for text in texts[at + 1 : at + _MANY]):
        return False
    if label == "requirements-conflict" and any(_UNREACHED.search(text) for text in texts[:at]):
        return False  # what cannot be reached is not found either
    raised = tracebacks.find(texts)
    if not raised:
        return exit_code != 137 or label == "host-memory"
    chain = _last_chain(raised)
    own = next((one for one in chain if one.at == at), None)
    if own is None:  # beside a traceback: only where that one says nothing of its own
        return bool(VAGUE.search(texts[chain[-1].at])) and len(chain) == 1
    said = [None if CONSEQUENCES.search(texts[one.at]) else first_match(SIGNS, texts[one.at]) for one in chain]
    behind = chain.index(own) + 1
    followed = all(one.direct or word == label for one, word in zip(chain[behind:], said[behind:], strict=True))
    if own.thread or exit_code not in DIED or not followed or not set(said) - GENERAL <= {label, None}:
        return False
    return not _is_own_word(own) and _FITS.get(label, _always)(own, texts[at])


def beside(label: str, text: str, exit_code: int | None) -> bool:
    """Return whether what a kernel or a scheduler wrote proves a class."""
    pattern, codes = BESIDE.get(label, (None, ()))
    return bool(pattern and pattern.search(text)) and (not codes or exit_code in codes)


def in_reason(label: str, text: str, reason: str) -> bool:
    """Return whether a line of a platform's reason proves a class, and nothing of the reason speaks for another."""
    code = first_match([rule for rule in CODES if rule[0] == label], _PREEMPTION.sub("", text))
    return code is not None and fits(label, _PREEMPTION.sub("", reason), REASONS)


def fits(label: str, text: str, table: Sequence[Rule]) -> bool:
    """Return whether no rule of a table takes a line for another class, but for one that is more general."""
    return not any(name != label and name not in GENERAL and pattern.search(text) for name, pattern in table)


def _last_chain(raised: list[Raised]) -> list[Raised]:
    chain = [raised.pop()]
    while chain[0].chained and raised:
        chain.insert(0, raised.pop())
    return chain


def _is_own_word(one: Raised) -> bool:
    """Return whether the job's own code has chosen the words."""
    return one.innermost.is_mine and one.innermost.code.startswith(("raise ", "raise(", "assert "))


def _always(one: Raised, text: str) -> bool:
    return True


def _not_shared(one: Raised, text: str) -> bool:
    """Not where processes share memory: there /dev/shm is full, or the parent is gone."""
    return not _SHARED.search(text) and not any(_SHARED.search(frame.file) for frame in one.frames)


def _in_own_code(one: Raised, text: str) -> bool:
    """Where a package's own code fails so, the package does not fit, whatever it says."""
    calls = [frame for frame in one.frames if not frame.file.startswith("<frozen importlib")]
    return not calls or not re.search("site-packages|dist-packages", calls[-1].file)


def _a_file(one: Raised, text: str) -> bool:
    """Not a program, a device, a secret or an object in a store: to miss one of those is another class."""
    return (
        _not_shared(one, text)
        and not _NO_FILE.search(text)
        and not any("subprocess" in frame.file for frame in one.frames)
    )


def _forked(one: Raised, text: str) -> bool:
    """The system's refusal of memory without a size proves it only where a process was to be made."""
    return _not_shared(one, text) and ("Errno 12" not in text or "fork" in one.innermost.code)


def _a_module(one: Raised, text: str) -> bool:
    """Not a part of Python: a newer one lacks it, or it was not built."""
    name = text.rpartition("'")[0].rpartition("'")[2]
    return _in_own_code(one, text) and name not in sys.stdlib_module_names and name not in _REMOVED


def _of_store(one: Raised, text: str) -> bool:
    """Credentials that are missing are those of a store only where a store was asked."""
    return "redentials" not in text or any(
        re.search(r"\bs3|s3fs|gcsfs|storage|bucket", frame.file + frame.code) for frame in one.frames
    )


def _from_environment(one: Raised, text: str) -> bool:
    """A missing key is a missing secret only where the environment was asked."""
    return not text.startswith("KeyError") or any(
        frame.file.endswith(("<frozen os>", "/os.py")) or "environ" in frame.code for frame in one.frames[-2:]
    )


_FITS: dict[str, Callable[[Raised, str], bool]] = {
    "disk-full": _not_shared,
    "missing-file": _a_file,
    "permission": _not_shared,
    "host-memory": _forked,
    "missing-module": _a_module,
    "store-access": _of_store,
    "syntax-error": lambda one, text: one.innermost.is_mine and _in_own_code(one, text),
    "missing-secret": _from_environment,
}
