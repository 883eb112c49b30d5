"""When a line proves a cause, and when it only speaks for one: what a verdict says without "probably".

A rule of signs.py finds a class by a few words; a proof is more: the type and the sentence as one library writes them,
at the end of the process that died first, where nothing else was said that speaks for another class. docs/watching.md has the
principles, tests/diagnosis/corpus/doubtful a failure against each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from cloudtrain.diagnosis import tracebacks
from cloudtrain.diagnosis.rules import CONSEQUENCES, GENERAL, REASONS, VAGUE, Rule, first_match
from cloudtrain.diagnosis.sentences import BESIDE, CODES, SENTENCES, STATES
from cloudtrain.diagnosis.signs import SIGNS
from cloudtrain.diagnosis.tracebacks import Raised

# Exit codes of an exception that nobody caught: Python's own, an abort while the process goes down, not told.
DIED = (1, 134, None)
_ANY = ("cuda-error", "platform-access")  # "CUDA error", "AccessDenied": said of more special causes too
# What stands for itself, without a traceback, ends with a code of its own: a parser's, a shell's.
_ALONE: dict[str, tuple[int | None, ...]] = {"bad-argument": (2, None), "permission": (126, None)}
_MANY = 400  # lines behind the last one: a message of many lines ends earlier

# Behind the last words of a process that died: a line of one that lived on.
_ALIVE = re.compile(
    r"^\s*(\{'\w+': -?\d|(epoch|step|iter(ation)?|global_step|loss|saving|saved)\b|\[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d"
    r"|\[?(INFO|DEBUG|WARNING)\b)"
    r"|\b(retrying|resum(ed|ing)|recovered|fall(ing|s)? back|continuing|trying again)\b",
    re.IGNORECASE,
)
_NO_FILE = re.compile(r":/|'/(dev|proc|sys|run)/|secret|credential|token|'[\w.-]*key\b", re.IGNORECASE)
# What a package looks up of its own, or of a model or checkpoint whose folder it was given: that one may be torn.
_ITS_PART = re.compile(
    r"site-packages|dist-packages|/lib/python\d|\b(\w*config\.json|vocab\.\w+|merges\.txt)'"
    r"|\.cache/|\.triton/|torch_extensions|torchinductor|\.(tmp|lock|incomplete)\b"
    r"|checkpoint|global_step|\.(pt|pth|ckpt|bin|safetensors|distcp)'|\b(trainer_state|optimizer|scheduler|rng_state)"
)
_PROGRAM = re.compile(r": '[^/.']+'$")
_COMPILED = re.compile(r"(?i)(_c|_cpp|_ext|_ops?|_kernels?|_lib|_backend)$|cuda|hip$")
_DEVICE = re.compile(r"'/(dev|proc|sys)/")
_METADATA = re.compile(r"host='(169\.254\.|metadata[.'])")  # who asks there looks for credentials
_USERS = re.compile(r"\b(?:Process \d+|this process) has [\d.]+ \w+ memory in use")
_UNREACHED = re.compile(r"\(from versions: none\)|connection broken by|Retrying \(Retry\(|Could not fetch URL")
_REMOVED = frozenset(
    {
        "ConfigParser",
        "Queue",
        "StringIO",
        "Tkinter",
        "asynchat",
        "asyncore",
        "cPickle",
        "cStringIO",
        "cgi",
        "crypt",
        "distutils",
        "imp",
        "nntplib",
        "pipes",
        "pkg_resources",
        "smtpd",
        "telnetlib",
        "urllib2",
        "urlparse",
    }
)
_TRAVELS = re.compile(r"\b(multiprocess(ing)?|billiard|joblib|loky|cloudpickle|ray|dask|distributed|concurrent)[/\\]")
_EXCEPTION = re.compile(r"^[\w.]+(Error|Exception)(: |$)")


def in_log(label: str, texts: Sequence[str], at: int, exit_code: int | None) -> bool:
    """Return whether a line proves a class, among the lines of the rank that died first."""
    if not _among(SENTENCES, label, texts[at]) or not fits(label, texts[at], SIGNS):
        return False
    if any(_ALIVE.search(text) for text in texts[at + 1 : at + _MANY]):
        return False
    if label == "requirements-conflict" and any(_UNREACHED.search(text) for text in texts[:at]):
        return False  # what cannot be reached is not found either
    raised = tracebacks.find(texts)
    if not raised:  # an exception that Python did not print itself was caught, whatever came then
        return not _EXCEPTION.match(texts[at]) and exit_code in _ALONE.get(label, DIED)
    chain = _last_chain(raised)
    own = next((one for one in chain if one.at == at), None)
    if own is None:  # beside a traceback: only where that one says nothing of its own
        vague = bool(VAGUE.search(texts[chain[-1].at])) and len(chain) == 1
        return vague and not chain[-1].aside and exit_code in DIED
    said = [None if CONSEQUENCES.search(texts[one.at]) else first_match(SIGNS, texts[one.at]) for one in chain]
    behind = chain.index(own) + 1
    followed = all(one.direct or word == label for one, word in zip(chain[behind:], said[behind:], strict=True))
    # A handler that breaks, other than one that says it in its own words: what it was to handle is the cause.
    led = all(
        one.direct or before == label or one.innermost.code.startswith("raise ")
        for one, before in zip(chain[1:behind], said, strict=False)
    )
    if own.aside or exit_code not in DIED or not (followed and led) or not set(said) - GENERAL <= {label, None}:
        return False
    return not _is_own_word(own) and _FITS.get(label, _always)(own, texts[at])


def beside(label: str, text: str, exit_code: int | None) -> bool:
    """Return whether what a kernel or a scheduler wrote proves a class; an OOM killer's word only where the rank was killed."""
    fits_code = label != "host-memory" or exit_code in (137, None)
    return fits_code and _among(BESIDE, label, text)


def in_reason(label: str, text: str, reason: str) -> bool:
    """Return whether a line of a platform's reason proves a class, and nothing of the reason speaks for another."""
    return _among(CODES, label, text) and fits(label, reason, REASONS)


def named(label: str, reason: str) -> bool:
    """Return whether a reason says itself what a state says: a job is requeued, and waits too long, for several causes."""
    return _among(STATES, label, reason) and fits(label, reason, REASONS)


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


def _always(one: Raised, text: str) -> bool:
    return True


def _in_own_code(one: Raised, text: str) -> bool:
    """Where a package's own code fails so, the package does not fit, whatever it says."""
    calls = [frame for frame in one.frames if not frame.file.startswith("<frozen importlib")]
    return not calls or not re.search("site-packages|dist-packages", calls[-1].file)


def _a_file(one: Raised, text: str) -> bool:
    """Not a program, a device, a secret, an object in a store or a part of what a package reads: to miss one is another class."""
    return (
        not _NO_FILE.search(text)
        and not _ITS_PART.search(text)
        and not (_PROGRAM.search(text) and "open" not in one.innermost.code)
    )


def _of_the_gpu(one: Raised, text: str) -> bool:
    """Not where others fill the GPU: perhaps the job's own ranks."""
    return len(_USERS.findall(text)) < 2


def _a_module(one: Raised, text: str) -> bool:
    """Not a part of Python, which a newer one lacks; nor the compiled part of a package, which was not built."""
    name = text.rpartition("'")[0].rpartition("'")[2]
    return _in_own_code(one, text) and name not in _REMOVED and not _COMPILED.search(name)


def _to_a_process(one: Raised, text: str) -> bool:
    """Only where something was sent to a process."""
    return any(_TRAVELS.search(frame.file) for frame in one.frames)


def _from_environment(one: Raised, text: str) -> bool:
    """A missing key is a missing secret only where the environment was asked."""
    return not text.startswith("KeyError") or any(
        frame.file.endswith(("<frozen os>", "/os.py")) or "environ" in frame.code for frame in one.frames[-2:]
    )


_FITS: dict[str, Callable[[Raised, str], bool]] = {
    "missing-file": _a_file,
    "permission": lambda one, text: not _DEVICE.search(text),
    "unpicklable": _to_a_process,
    "network": lambda one, text: not _METADATA.search(text),
    "gpu-memory": _of_the_gpu,
    "missing-module": _a_module,
    "missing-secret": _from_environment,
}
