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
_ANY = ("cuda-error", "platform-access")  # "CUDA error", "AccessDenied": said of more special causes too
_NAMED = {
    "timeout": re.compile(r"(?i)max_?run_?time|time ?limit|\btimeout\b|deadline"),
    "spot-loss": re.compile(r"(?i)preempt|\bspot\b|reclaim|interrupt"),
}
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
_PREEMPTION = re.compile(r"preemption: \d+/\d+ nodes are available.*")  # Kubernetes says so of every pod that waits
_NO_FILE = re.compile(r":/|'/(dev|proc|sys|run)/|secret|credential|token|'[\w.-]*key\b", re.IGNORECASE)
# What a package looks up of its own, or of a model or checkpoint whose folder it was given: that one may be torn.
_ITS_PART = re.compile(
    r"site-packages|dist-packages|/lib/python\d|\b(\w*config\.json|vocab\.\w+|merges\.txt)'"
    r"|\.cache/|\.triton/|torch_extensions|torchinductor|\.(tmp|lock|incomplete)\b"
    r"|checkpoint|global_step|\.(pt|pth|ckpt|bin|safetensors|distcp)'|\b(trainer_state|optimizer|scheduler|rng_state)"
)
_PROGRAM = re.compile(r": '[^/.']+'$")
_COMPILED = re.compile(r"(?i)(_c|_cpp|_ext|_ops?|_kernels?|_lib|_backend)$|cuda|hip$")
_SHARED_NAME = re.compile(r"/dev/shm|shared_memory|'/?(psm_|mp-|torch_\d|sem\.)|/pymp-")  # noqa: S108
# Behind a state_dict that does not fit: a parameter spread over the ranks, or the same model under a wrapper or another version,
# or with an option that sizes a layer.
_SAME_MODEL = re.compile(
    r"size mismatch for|torch\.Size\(\[0\]\)|\"(module|_orig_mod|_fsdp_wrapped_module|base_model)\.|position_ids"
)
_DEVICE = re.compile(r"'/(dev|proc|sys)/")
_METADATA = re.compile(r"host='(169\.254\.|metadata[.'])")  # who asks there looks for credentials
_USERS = re.compile(r"\b(?:Process \d+|this process) has [\d.]+ \w+ memory in use")
_AN_ERROR = re.compile(r"<class '[\w.]*(Error|Exception|Interrupt|Exit)'>")
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
    if first_match([rule for rule in SENTENCES if rule[0] == label], texts[at]) is None or not fits(
        label, texts[at], SIGNS
    ):
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
    if label == "checkpoint" and any(_SAME_MODEL.search(text) for text in texts[at + 1 : at + _MANY]):
        return False
    if label == "disk-full" and any("/dev/shm" in text or "shared memory" in text for text in texts):  # noqa: S108
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


def named(label: str, reason: str) -> bool:
    """Return whether a reason says itself what a state says: a job is requeued, and waits too long, for several causes."""
    return label in _NAMED and bool(_NAMED[label].search(reason)) and fits(label, reason, REASONS)


def fits(label: str, text: str, table: Sequence[Rule]) -> bool:
    """Return whether no rule of a table takes a line for another class, but for one whose words every such line has."""
    return not any(name not in (label, *_ANY) and pattern.search(text) for name, pattern in table)


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


def _not_shared(one: Raised, text: str) -> bool:
    """Not where processes share memory: there /dev/shm is full, or the parent is gone."""
    return not one.shares and not _SHARED_NAME.search(text)


def _in_own_code(one: Raised, text: str) -> bool:
    """Where a package's own code fails so, the package does not fit, whatever it says."""
    calls = [frame for frame in one.frames if not frame.file.startswith("<frozen importlib")]
    return not calls or not re.search("site-packages|dist-packages", calls[-1].file)


def _a_file(one: Raised, text: str) -> bool:
    """Not a program, a device, a secret or an object in a store: to miss one of those is another class."""
    return (
        _not_shared(one, text)
        and not _NO_FILE.search(text)
        and not _ITS_PART.search(text)
        and not (_PROGRAM.search(text) and "open" not in one.innermost.code)
        and not any("subprocess" in frame.file for frame in one.frames)
    )


def _forked(one: Raised, text: str) -> bool:
    """The system's refusal of memory without a size proves it only where a process was to be made."""
    return _not_shared(one, text) and ("Errno 12" not in text or "fork" in one.innermost.code)


def _of_the_gpu(one: Raised, text: str) -> bool:
    """Not the host's memory that CUDA pins, nor a GPU that others fill: perhaps the job's own ranks."""
    return len(_USERS.findall(text)) < 2 and not any(
        "pin_memory" in frame.file or "pin_memory" in frame.code for frame in one.frames
    )


def _a_module(one: Raised, text: str) -> bool:
    """Not a part of Python: a newer one lacks it, or it was not built; nor the compiled part of a package."""
    name = text.rpartition("'")[0].rpartition("'")[2]
    return (
        _in_own_code(one, text)
        and name not in sys.stdlib_module_names
        and name not in _REMOVED
        and not _COMPILED.search(name)
    )


def _to_a_process(one: Raised, text: str) -> bool:
    """Only where something was sent to a process; and of an exception that could not be sent, that one is the cause."""
    return any(_TRAVELS.search(frame.file) for frame in one.frames) and not _AN_ERROR.search(text)


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
    "permission": lambda one, text: _not_shared(one, text) and not _DEVICE.search(text),
    "unpicklable": _to_a_process,
    "network": lambda one, text: not _METADATA.search(text),
    "gpu-memory": _of_the_gpu,
    "host-memory": _forked,
    "missing-module": _a_module,
    "store-access": _of_store,
    "syntax-error": lambda one, text: one.innermost.is_mine and _in_own_code(one, text),
    "missing-secret": _from_environment,
}
