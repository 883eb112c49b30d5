"""Find the line of one rank's log that decides why it died, and the failure class of that line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cloudtrain.diagnosis import patterns
from cloudtrain.diagnosis.lines import LONGEST, is_line
from cloudtrain.diagnosis.tracebacks import CHAINED, FRAME, HEAD, Traceback, find_tracebacks, pop_last_chain
from cloudtrain.events import LogLine

LAST_LINES = 40  # of a rank, among which a line outside of a traceback may decide
_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_NO_ERROR = re.compile(r"(\w+\.)*Empty$|StopIteration|SystemExit")
# Labels inside this module beside the classes: "vague" for a generic error, "consequence" of another rank's death,
# "opaque" for an exception that no pattern and no frame explains.
_UNDECIDED = ("vague", "consequence", "opaque")
# Lines that explain an error of the GPU: why there is none, or that it is gone.
_GPU_CLASSES = ("gpu-hardware", "cuda-version", "no-gpu")
_GPU_EXPLANATIONS = {
    "no-gpu": re.compile(r"Warning: CUDA initialization: "),
    "cuda-error": re.compile(r"^Unable to determine the device handle for GPU"),
}


@dataclass
class Finding:
    """The deciding line of a rank and its class; `late` where it may be a consequence of another rank's death."""

    label: str
    line: LogLine
    late: bool = False


def diagnose_rank(lines: Sequence[LogLine]) -> Finding | None:
    """Return the deciding line among a rank's lines, or None."""
    texts = [clean_text(line) for line in lines]
    decision = _decide_by_tracebacks(texts)
    single_line = _decide_by_single_line(texts, decision[1] if decision else None)
    if decision is None or decision[0] in _UNDECIDED:
        decision = single_line or decision
    if decision is None:
        return None
    label, index = decision
    if label == "vague":
        label = _classify_vague(texts[index])
    label, index = _explain_gpu_error(texts, label, index)
    if label == "opaque":
        return None
    return Finding(label, lines[index], label in patterns.labels_with("late") or label == "consequence")


def clean_text(line: LogLine) -> str:
    """Return a line's text without colours and without torch's rank prefix."""
    return _ESCAPE.sub("", _PREFIX.sub("", line.text[:LONGEST])).rstrip()


def classify_exception(texts: Sequence[str], traceback: Traceback) -> str:
    """Return the class of an exception; `opaque` where no pattern and no frame explains it."""
    text = texts[traceback.index]
    if is_line("consequence", text):
        return "consequence"
    if _NO_ERROR.match(text):
        return "opaque"
    label = patterns.classify("log", text)
    if is_line("vague", text) and label != "collective-timeout":
        below = texts[traceback.index + 1 : traceback.index + 12]
        return "consequence" if any(is_line("consequence", line) for line in below) else "vague"
    frame = traceback.innermost
    if (
        frame.file.endswith("torch/nn/modules/module.py")
        and "object has no attribute" in text
        and len(traceback.frames) > 1
    ):
        frame = traceback.frames[-2]  # the attribute lookup of nn.Module: its caller counts
    if label == "missing-secret" and text.startswith("KeyError") and frame.is_own_code and "environ" not in frame.code:
        label = None
    if label == "disk-full" and traceback.shares_memory:
        return "shared-memory"
    if label and not (frame.raises and label in patterns.labels_with("ambiguous_in_raise")):
        return label
    for line in texts[traceback.index + 1 : traceback.index + 8]:  # a message of several lines
        if not line.strip() or HEAD.search(line) or any(phrase in line for phrase in CHAINED):
            break
        other = None if frame.raises else patterns.classify("log", line)
        if other and other not in ("signal", "missing-file"):
            return other
    own_code = traceback.own_frame is not None and not frame.is_in_package
    bug = is_line("bug", text) or not is_line("system_error", text)
    return "script-error" if frame.raises or (own_code and bug) else "opaque"


def may_decide(text: str) -> bool:
    """Return whether a line may decide: it is no frame of a traceback, no warning and no consequence."""
    if is_line("error", text):
        return True
    return not (FRAME.match(text) or is_line("warning", text) or is_line("consequence", text))


def went_on(texts: Sequence[str]) -> bool:
    """Return whether lines show that the training went on."""
    return any(is_line("progress", text) for text in texts)


def _decide_by_tracebacks(texts: Sequence[str]) -> tuple[str, int] | None:
    """Return class and line of the last chain of tracebacks, unless it was handled."""
    tracebacks = find_tracebacks(texts)
    decision = _decide_by_chain(
        texts, [traceback for traceback in tracebacks if not traceback.survivable] or tracebacks
    )
    if decision is None:
        return None
    label, index = decision
    if label not in ("opaque", "consequence", "worker-killed"):
        return decision
    worker_gone = is_line("worker_gone", texts[index])
    earlier = [link for link in tracebacks if link.index < index and (worker_gone or link.survivable)]
    cause = _decide_by_chain(texts, earlier)
    return cause if cause and cause[0] not in (*_UNDECIDED, "worker-killed") else decision


def _decide_by_chain(texts: Sequence[str], tracebacks: Sequence[Traceback]) -> tuple[str, int] | None:
    """Return class and line of the last chain of some tracebacks, unless it was handled."""
    if not tracebacks:
        return None
    chain = pop_last_chain(list(tracebacks))
    if went_on(texts[chain[-1].index + 1 :]):
        return None
    decisions = [(classify_exception(texts, traceback), traceback.index) for traceback in chain]
    classified = [decision for decision in decisions if decision[0] not in ("opaque", "consequence")]
    often_handled = patterns.labels_with("often_handled") | {"vague"}
    weak = [decision for decision in classified if decision[0] in often_handled]
    strong = [decision for decision in classified if decision[0] not in often_handled | {"script-error"}]
    if strong:
        return strong[0]
    if weak and (weak[-1] == classified[-1] or classified[-1][0] == "script-error"):
        return next(decision for decision in weak if _is_repeated(texts, decision[1], weak[-1][1]))
    return (classified or decisions)[-1]


def _is_repeated(texts: Sequence[str], first: int, last: int) -> bool:
    """Return whether the last exception of a chain is this one, or repeats its message."""
    message = texts[first].partition(": ")[2]
    return first == last or (bool(message) and any(message in text for text in texts[last : last + 8]))


def _decide_by_single_line(texts: Sequence[str], decided: int | None) -> tuple[str, int] | None:
    """Return class and line of a message outside of a traceback near the end: argparse, a shell, NCCL, an assertion."""
    begin = max(0, (len(texts) if decided is None else decided) - LAST_LINES)
    skipped = {traceback.index for traceback in find_tracebacks(texts)} if decided is None else {decided}
    for index in range(begin, len(texts)):
        text = texts[index]
        if index in skipped or not may_decide(text) or _is_code_of_frame(texts, index):
            continue
        label = patterns.classify("log", text)
        if not label or label in patterns.labels_with("only_in_traceback"):
            continue
        if label == "nan-loss" or not went_on(texts[index + 1 :]):
            return label, index
    return None


def _is_code_of_frame(texts: Sequence[str], index: int) -> bool:
    """Return whether a line is the code below a frame of a traceback."""
    return index > 0 and texts[index][:1].isspace() and bool(FRAME.match(texts[index - 1]))


def _explain_gpu_error(texts: Sequence[str], label: str, index: int) -> tuple[str, int]:
    """Return class and line of the first message that explains an error of the GPU, or the error's own."""
    explanation = _GPU_EXPLANATIONS.get(label)
    for number, text in enumerate(texts) if explanation else ():
        if explanation and explanation.search(text) and (cause := patterns.classify("log", text)) in _GPU_CLASSES:
            return cause or label, number
    return label, index


def _classify_vague(text: str) -> str:
    """Return the class of a generic error that no other line explains."""
    if "device-side assert" in text or "error (59)" in text:
        return "index-range"
    return "cuda-error" if "CUDA error" in text or "cuda runtime error" in text else "consequence"
