"""Diagnose why a run failed: a failure class, the line that decided, and what to change.

Reads the run's end and the last lines of its log; asks no platform. Sources, in this order: lines of a scheduler or kernel,
a state that names the class itself, the platform's reason, and the ranks' logs, that of the first rank to die in front. Of a
rank's log the last traceback counts, of a chain of tracebacks the cause. Where nothing decides, the verdict is `unknown`:
no verdict is better than a wrong one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from cloudtrain.diagnosis import certainty, patterns
from cloudtrain.diagnosis.lines import LONGEST, is_line
from cloudtrain.diagnosis.ranks import (
    LAST_LINES,
    Finding,
    classify_exception,
    clean_text,
    diagnose_rank,
    may_decide,
    went_on,
)
from cloudtrain.diagnosis.tracebacks import Traceback, find_tracebacks
from cloudtrain.diagnosis.verdict import LAUNCHER_REASON, End, Verdict
from cloudtrain.events import EXIT_REFUSED, LogLine, State

_REFUSAL = re.compile(r"(?:[\w-]+\.py|cloudtrain\.function): \S")  # of trainer/errors.py and functions/call.py
_LEFT_EARLY = re.compile(r"; [\w, ]+ had ended with 0$", re.MULTILINE)  # as entrypoints/launcher/world/outcome.py says
_LINES_BEFORE = 100  # lines before the deciding one that may contradict it
_REASON_PARTS = re.compile(r'(?:ErrorMessage|error:|Error:) "|\\n')
_STATES = {State.TIMED_OUT: "timeout", State.PREEMPTED: "spot-loss", State.LOST: "lost-node"}
_CAUSES_OF_PIP_ERRORS = ("toolchain", "network", "disk-full", "permission", "missing-module", "binary-mismatch")

Ranks = Mapping[int, Sequence[LogLine]]


def judge(end: End, lines: Iterable[LogLine]) -> Verdict:
    """Return the verdict on a run that did not succeed, from its end and the last lines of its log."""
    ranks: dict[int, list[LogLine]] = {}
    for line in lines:
        ranks.setdefault(line.rank, []).append(line)
    verdict = _diagnose(end, dict(ranks))
    if verdict.label == "unknown":
        return verdict if verdict.where else _add_unknown_exception(verdict, end, ranks)
    if verdict.label == "refused":
        return verdict  # the entrypoint's own sentence: nothing is guessed
    rank, index = _find_deciding_line(verdict, ranks)
    tracebacks = find_tracebacks([clean_text(line) for line in ranks.get(rank, ())])
    traceback = next((traceback for traceback in tracebacks if traceback.index == index), None)
    return replace(verdict, certain=_is_certain(end, verdict, ranks), raised=_format_own_frame(traceback))


def _diagnose(end: End, ranks: dict[int, list[LogLine]]) -> Verdict:
    """Return the first verdict that one of the sources gives; `unknown` if none does."""
    system_lines = ranks.get(-1, []) + [
        line
        for rank, lines in ranks.items()
        if rank >= 0
        for line in lines[-LAST_LINES:]
        if is_line("by_system", line.text)
    ]
    for line in system_lines:
        if label := patterns.classify("system", line.text[:LONGEST]):
            return _from_line(label, line, end.failed_rank)
    reasons = [text for text in end.reason.split("\n") if text.strip() and not LAUNCHER_REASON.match(text)]
    if end.state in _STATES:
        return _from_state(_STATES[end.state], reasons)
    launcher_lines = ranks.get(-1, []) if end.by == "launcher" or end.exit_code == EXIT_REFUSED else []
    if verdict := _from_reasons(end, reasons, launcher_lines):
        return verdict
    if not launcher_lines:
        ranks.pop(-1, None)
    refusal = _from_refusal(end, ranks)
    if refusal and not patterns.classify("log", refusal.deciding):
        return refusal  # it says more than a library's lines above it, such as those of its retries
    finding = _first_cause(end, ranks)
    if _LEFT_EARLY.search(end.reason) and _misses_other_rank(finding, end, ranks):
        return replace(_from_reason("left-early", end.reason.split("\n")[0]), rank=end.failed_rank)
    if finding:
        rank = finding.line.rank if finding.line.rank >= 0 else end.failed_rank
        return _from_line(finding.label, finding.line, rank)
    for line in reversed(ranks.get(end.rank_or_launcher, ())) if end.exit_code == EXIT_REFUSED else ():
        if label := patterns.classify("launcher", line.text[:LONGEST]):
            return _from_line(label, line, end.failed_rank)
    for text in reasons:
        for part in _REASON_PARTS.split(text):
            if label := patterns.classify("log", part[:LONGEST]):
                return _from_reason(label, text)
    if verdict := _from_signal(end, ranks) or refusal:
        return verdict
    if end.by == "launcher" and reasons:
        return state_reason(reasons[0])
    return _unknown(None if any(map(_follows_other_rank, ranks.values())) else end.failed_rank)


def state_reason(text: str) -> Verdict:
    """Return the verdict on an end whose reason states the cause, where no class of failures describes it."""
    return Verdict("unknown", "the reason states the cause", text[:LONGEST], "reason")


def _from_state(label: str, reasons: Sequence[str]) -> Verdict:
    """Return the verdict of a state that names the class itself."""
    named = {text: patterns.classify("reason", text) for text in reasons}
    label = next((name for name in named.values() if name in ("stalled", "bad-node")), label)
    matching = [text for text in reasons if named[text] == label]
    if late := [text for text in reasons if patterns.classify("launcher", text[:LONGEST]) == "capacity"]:
        label, matching = "capacity", late
    return _from_reason(label, (matching or reasons or [""])[0])


def _from_reasons(end: End, reasons: Sequence[str], launcher_lines: Sequence[LogLine]) -> Verdict | None:
    """Return the verdict of the first line of a reason that decides."""
    for text in reasons:
        if text.startswith("AlgorithmError"):
            continue  # SageMaker quotes a part of the script's output, which the log has in full
        built = patterns.classify("launcher", text[:LONGEST]) == "build-requirement"  # said by our launcher, not by pip
        if "cannot be installed" in text and not built and (finding := _diagnose_pip(launcher_lines)):
            return _from_line(finding.label, finding.line, None)
        if end.by == "launcher" and (label := patterns.classify("launcher", text[:LONGEST])):
            return _from_reason(label, text)
        if label := patterns.classify("reason", text[:LONGEST]):
            return _from_reason(label, text)
    return None


def _first_cause(end: End, ranks: Ranks) -> Finding | None:
    """Return the deciding line among all ranks: the first rank's to die, unless it follows from another's death."""
    first = diagnose_rank(ranks.get(end.failed_rank, ())) if end.failed_rank is not None else None
    if first and not first.late:
        return first
    silent = end.failed_rank is not None and end.failed_rank >= 0 and first is None
    if silent and end.signal not in (None, "SIGABRT"):
        return None  # killed without a message: the other ranks only report that it is gone
    others = [finding for rank, lines in ranks.items() if rank != end.failed_rank and (finding := diagnose_rank(lines))]
    causes = [finding for finding in others if not finding.late]
    if silent and end.by == "script":
        causes = [finding for finding in causes if finding.label not in ("script-error", "network")]
    if causes:
        return min(causes, key=lambda finding: finding.line.at)
    if first is None and end.failed_rank is not None and _unknown_exception(end, ranks):
        return None  # it died of an exception that no pattern matches: what came later followed from that
    return next((finding for finding in [first, *others] if finding and finding.label != "consequence"), None)


def _diagnose_pip(lines: Sequence[LogLine]) -> Finding | None:
    """Return the deciding line of a package installer's output: a missing tool is the cause of pip's own errors."""
    conflict: Finding | None = None
    for line in lines:
        label = patterns.classify("log", line.text[:LONGEST])
        if label is None or "cannot be installed" in line.text:
            continue
        if label in _CAUSES_OF_PIP_ERRORS:
            return Finding(label, line)
        if label == "requirements-conflict" and (conflict is None or "Could not find a version" in conflict.line.text):
            conflict = Finding(label, line)
    return conflict


def _follows_other_rank(lines: Sequence[LogLine]) -> bool:
    """Return whether a rank's last lines report another rank's death."""
    return any(is_line("consequence", line.text[:LONGEST]) for line in lines[-LAST_LINES:])


def _misses_other_rank(finding: Finding | None, end: End, ranks: Ranks) -> bool:
    """Return whether all that a rank says of its death is that another one has gone."""
    if finding is None:
        return _follows_other_rank(ranks.get(end.rank_or_launcher, ()))
    return finding.late or finding.label in ("network", "crash-at-exit")


def _from_signal(end: End, ranks: Ranks) -> Verdict | None:
    """Return the verdict on a process that a signal ended, where nothing says why."""
    if end.signal is None or (end.signal == "SIGABRT" and _follows_other_rank(ranks.get(end.rank_or_launcher, ()))):
        return None
    verdict = _from_reason("signal", end.reason.split("\n")[0])
    fix = patterns.classes()["signal"].fixes.get(end.signal, verdict.change)
    what = f"a process was killed by {end.signal}; the log and the platform do not say why"
    return replace(verdict, what=what, rank=end.failed_rank, change=fix)


def _from_refusal(end: End, ranks: Ranks) -> Verdict | None:
    """Return the verdict on a refusal by the shared trainer, the evaluation or the script of functions."""
    for line in reversed(ranks.get(end.rank_or_launcher, ())) if end.exit_code == EXIT_REFUSED else ():
        if _REFUSAL.match(line.text):
            label = patterns.classify("launcher", line.text[:LONGEST]) or "refused"
            return _from_line(label, line, end.failed_rank)
    return None


def _unknown(rank: int | None = None) -> Verdict:
    return Verdict("unknown", patterns.classes()["unknown"].cause, rank=rank)


def _from_line(label: str, line: LogLine, rank: int | None) -> Verdict:
    if label == "consequence":
        return _unknown()
    verdict = _from_reason(label, line.text)
    return replace(verdict, where="log", node=line.node, seq=line.seq, rank=rank)


def _from_reason(label: str, text: str) -> Verdict:
    about = patterns.classes()[label].of(text[:LONGEST])
    return Verdict(
        label,
        about.cause,
        text[:LONGEST],
        "reason",
        change=about.fix,
        changes_results=about.changes_results,
    )


def _add_unknown_exception(verdict: Verdict, end: End, ranks: Ranks) -> Verdict:
    """Return an `unknown` verdict with the exception, or else the last line, that ended the first rank."""
    traceback = _unknown_exception(end, ranks)
    if traceback is None:
        last = _last_words(end, ranks)
        return _with_line(verdict, last, "the script ended itself, and this is its last line") if last else verdict
    line = ranks[end.rank_or_launcher][traceback.index]
    verdict = _with_line(verdict, line, "an exception that cloudtrain does not recognize")
    return replace(verdict, raised=_format_own_frame(traceback))


def _with_line(verdict: Verdict, line: LogLine, what: str) -> Verdict:
    return replace(verdict, what=what, deciding=line.text[:LONGEST], where="log", node=line.node, seq=line.seq)


def _last_words(end: End, ranks: Ranks) -> LogLine | None:
    """Return the last line of a rank that ended itself with 1, as `sys.exit("text")` does; None where it says no cause."""
    lines = [line for line in ranks.get(end.failed_rank or 0, ()) if line.text.strip()][-LAST_LINES:]
    texts = [clean_text(line) for line in lines]
    if end.exit_code != 1 or end.by != "script" or end.failed_rank is None or not texts or find_tracebacks(texts):
        return None
    others = ("alive", "progress", "warning", "consequence")
    return None if any(is_line(kind, texts[-1]) for kind in others) else lines[-1]


def _unknown_exception(end: End, ranks: Ranks) -> Traceback | None:
    """Return the exception that ended the first rank, if no pattern matches it and it does not follow from another rank."""
    texts = [clean_text(line) for line in ranks.get(end.rank_or_launcher, ())]
    tracebacks = find_tracebacks(texts)
    if not tracebacks or end.exit_code != 1 or went_on(texts[tracebacks[-1].index :]):
        return None
    return tracebacks[-1] if classify_exception(texts, tracebacks[-1]) == "opaque" else None


def _find_deciding_line(verdict: Verdict, ranks: Ranks) -> tuple[int, int]:
    """Return the rank that wrote the deciding line, and the line's index among the rank's lines; -1 for none."""
    for rank, lines in ranks.items() if verdict.where == "log" else ():
        for index, line in enumerate(lines):
            if (line.node, line.seq) == (verdict.node, verdict.seq) and line.text[:LONGEST] == verdict.deciding:
                return rank, index
    return -1, -1


def _format_own_frame(traceback: Traceback | None) -> str:
    """Return where in the job's own code an exception was raised: file and line."""
    frame = traceback.own_frame if traceback else None
    return f"{frame.file.rpartition('/source/')[2]}, line {frame.line}" if frame else ""


def _is_certain(end: End, verdict: Verdict, ranks: Ranks) -> bool:
    """Return whether the verdict is proven, on the rank that died first, and no line of any rank contradicts it."""
    label, in_log = verdict.label, verdict.where == "log"
    findings = [finding for rank, lines in ranks.items() if rank >= 0 and (finding := diagnose_rank(lines))]
    if not in_log and end.state in _STATES:
        proven = certainty.is_proven_by_reason(label, verdict.deciding, end.reason)
        proven = proven or certainty.is_proven_by_state(label, end.reason)
        return proven and {finding.label for finding in findings} <= {"consequence"}
    rank, index = _find_deciding_line(verdict, ranks)
    by_system = in_log and (rank < 0 or is_line("by_system", verdict.deciding))
    general = patterns.labels_with("general")
    agreeing = {label, "consequence"}
    if label in _STATES.values():  # a job that failed before its time was over is ended by that, too
        rivals = {finding.label for finding in findings}
    else:
        rivals = {finding.label for finding in findings if not finding.late}
        agreeing |= general - {"script-error"} if by_system or not in_log else set()
    if rivals - agreeing:
        return False
    if not in_log:
        return certainty.is_proven_by_reason(label, verdict.deciding, end.reason)
    texts = [clean_text(line) for line in ranks[rank]]
    if by_system:
        return certainty.is_proven_by_system(label, texts[index], end.exit_code) or (
            end.exit_code == EXIT_REFUSED and certainty.is_proven_by_log(label, texts, index, None)
        )
    if end.failed_rank is None:
        first_to_die = not set(ranks) - {-1, rank}
    else:
        first_to_die = end.failed_rank == rank
    if not first_to_die or _is_contradicted(label, texts, index):
        return False
    return certainty.is_proven_by_log(label, texts, index, end.exit_code)


def _is_contradicted(label: str, texts: Sequence[str], index: int) -> bool:
    """Return whether a line of the same rank, near the deciding one or after it, suggests another class."""
    exceptions = {traceback.index for traceback in find_tracebacks(texts)}
    for number in range(max(0, index - _LINES_BEFORE), len(texts)):
        other = patterns.classify("log", texts[number]) if may_decide(texts[number]) else None
        if other in (None, label):
            continue
        # A general class does not contradict in the same chain of tracebacks, or in the rest of a longer message.
        if other not in patterns.labels_with("general") or (number <= index and number not in exceptions):
            return True
    return False
