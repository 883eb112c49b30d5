"""Why a run failed: from its end and the last lines of its log to one class, the line that decided, and what to change.

It reads what every backend can give and asks nobody. In this order: what a scheduler or kernel wrote, a state that says it
all, the platform's own sentence, and what the ranks said, that of the first to die first. Of what a rank said its last
traceback counts, of a chain the cause. Where nothing decides the verdict is `unknown`: none is better than a wrong one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from cloudtrain.diagnosis import certainty, rules, tracebacks
from cloudtrain.diagnosis.ranks import LONGEST, PROGRESS, STANDING, Finding, bare, of_rank, raised_label, stands
from cloudtrain.diagnosis.signs import SIGNS
from cloudtrain.diagnosis.tracebacks import Raised
from cloudtrain.events import EXIT_REFUSED, LogLine, State, Status

_BESIDE = ("slurmstepd", "srun", "kernel")  # who writes into a rank's log and is none
BEFORE = 100  # lines before the deciding one among which another may speak for another class
_BY_LAUNCHER = re.compile(r"^(node \d+: )?rank \d+ (exited with code|was killed by signal)")
_CODE = re.compile(r"\b(?:Exit Code:?|exit(?:ed with)?(?: a non-zero)?(?: status)?(?: code| of)?:?) ?(1[23]\d)\b")


class End(NamedTuple):
    """What is known of a run's end besides its log."""

    state: State
    exit_code: int | None
    reason: str
    by: str = ""  # script, launcher or platform, where somebody said so
    failed_rank: int | None = None  # the first rank to die


@dataclass(frozen=True)
class Verdict:
    """Why a run failed. `deciding` is as the job wrote it: to be cleaned before it is shown."""

    label: str  # a class of verdictrules.CLASSES
    what: str  # what happened, one clause
    deciding: str = ""  # the line that decided, "" where none did
    where: str = ""  # log or reason
    node: int | None = None  # where that line is in the log
    seq: int | None = None
    rank: int | None = None  # the first failing rank, where it can be known
    change: str = ""  # a change worth a try
    changes_results: bool = False  # whether it changes what is learned
    certain: bool = True  # False: what was said speaks for it and does not prove it
    raised: str = ""  # of an exception: where in the job's own code, file and line

    @property
    def sentence(self) -> str:
        """What happened, and on which rank; where that is not certain it says so."""
        head = "" if self.certain or self.label == "signal" else "probably "  # that one says itself what is not known
        return head + self.what + (f" (rank {self.rank})" if self.rank is not None else "")

    @property
    def advice(self) -> str:
        """The change that is suggested, marked where it changes results."""
        return self.change + (" (this changes the results)" if self.changes_results else "")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Verdict:
        return cls(**data)


def judge(end: End, lines: Iterable[LogLine]) -> Verdict:
    """Return the verdict on a run that did not succeed, from its end and what was kept of its log."""
    ranks: dict[int, list[LogLine]] = {}
    for line in lines:
        ranks.setdefault(line.rank, []).append(line)
    found = _judged(end, dict(ranks))
    if found.label == "unknown":
        return _last_words(found, end, ranks)
    rank, at = _place(found, ranks)
    one = next((one for one in tracebacks.find([bare(line) for line in ranks.get(rank, ())]) if one.at == at), None)
    return replace(found, certain=_is_certain(end, found, ranks), raised=_own_place(one))


def _place(found: Verdict, ranks: Mapping[int, Sequence[LogLine]]) -> tuple[int, int]:
    """Return the rank that said the deciding line, and which of its lines it is; -1 for none."""
    for rank, lines in ranks.items() if found.where == "log" else ():
        for at, line in enumerate(lines):
            if (line.node, line.seq) == (found.node, found.seq) and line.text[:LONGEST] == found.deciding:
                return rank, at
    return -1, -1


def _own_place(one: Raised | None) -> str:
    """Return where in the job's own code an exception was raised: file and line."""
    mine = one.mine if one else None
    return f"{mine.file.rpartition('/source/')[2]}, line {mine.line}" if mine else ""


def _last_words(found: Verdict, end: End, ranks: Mapping[int, Sequence[LogLine]]) -> Verdict:
    """Return a verdict that knows no cause with the exception that the first rank died of: no rule knows it, the reader may."""
    one = _own_exception(end, ranks)
    if one is None:
        return found
    line = ranks[-1 if end.failed_rank is None else end.failed_rank][one.at]
    what = "an exception that no rule here knows"
    return replace(
        found,
        what=what,
        deciding=line.text[:LONGEST],
        where="log",
        node=line.node,
        seq=line.seq,
        raised=_own_place(one),
    )


def _own_exception(end: End, ranks: Mapping[int, Sequence[LogLine]]) -> Raised | None:
    """Return the exception that the first rank died of, where no rule knows it and it is no consequence of another's death."""
    texts = [bare(line) for line in ranks.get(-1 if end.failed_rank is None else end.failed_rank, ())]
    raised = tracebacks.find(texts)
    if not raised or end.exit_code != 1 or any(PROGRESS.match(text) for text in texts[raised[-1].at :]):
        return None
    return raised[-1] if raised_label(texts, raised[-1]) == "opaque" else None


def _is_certain(end: End, found: Verdict, ranks: Mapping[int, Sequence[LogLine]]) -> bool:
    """Return whether the verdict is proven, on the rank that died first, and no rank said anything that speaks for another."""
    rank, at = _place(found, ranks)
    others = [other for number, lines in ranks.items() if number >= 0 and (other := of_rank(lines))]
    if found.where != "log" and end.state in _STATES:
        told = certainty.in_reason(found.label, found.deciding, end.reason)
        told = told or certainty.named(found.label, end.reason)
        return told and not {other.label for other in others} - {"consequence"}
    beside = found.where == "log" and (rank < 0 or found.deciding.startswith(_BESIDE))
    over = found.label in _STATES.values()  # a time that is over ends what had failed before, too
    vague = rules.GENERAL - {"script-error"} if (beside or found.where != "log") and not over else frozenset()
    rivals = {other.label for other in others if over or not other.late}
    if rivals - vague - {found.label, "consequence"}:
        return False
    if found.where != "log":
        return certainty.in_reason(found.label, found.deciding, end.reason)
    texts = [bare(line) for line in ranks[rank]]
    if beside:
        told = certainty.beside(found.label, texts[at], end.exit_code)
        return told or (end.exit_code == EXIT_REFUSED and certainty.in_log(found.label, texts, at, None))
    if (end.failed_rank is None and any(number not in (-1, rank) for number in ranks)) or end.failed_rank not in (
        None,
        rank,
    ):
        return False
    raised = {one.at for one in tracebacks.find(texts)}
    for number, text in enumerate(texts[max(0, at - BEFORE) :], max(0, at - BEFORE)):
        sign = rules.first_match(SIGNS, text) if stands(text) else None
        general = sign in rules.GENERAL and (
            number in raised or number > at
        )  # of the same chain, or of a longer message
        if sign not in (None, found.label) and not general:
            return False
    return certainty.in_log(found.label, texts, at, end.exit_code)


def _judged(end: End, ranks: dict[int, list[LogLine]]) -> Verdict:
    beside = [line for rank, rank_lines in ranks.items() for line in rank_lines[-STANDING:]]
    beside = ranks.get(-1, []) + [line for line in beside if line.rank >= 0]
    for line in beside:
        if (label := rules.first_match(rules.PLATFORM, line.text[:LONGEST])) and (
            line.rank < 0 or line.text.startswith(_BESIDE)
        ):
            return _verdict(label, line, end.failed_rank)
    said = [text for text in end.reason.split("\n") if text.strip() and not _BY_LAUNCHER.match(text)]
    if end.state in _STATES:
        label = _STATES[end.state]
        named = [text for text in said if rules.first_match(rules.REASONS, text) in (label, "stalled")]
        label = "stalled" if any("limits.stall" in text for text in named) else label
        return _by_reason(label, (named or said or [""])[0], None)
    refused = ranks.get(-1, []) if end.by == "launcher" or end.exit_code == EXIT_REFUSED else []
    for text in said:
        if text.startswith("AlgorithmError"):
            continue  # what stands behind it is a piece of the script's own words, which the log has in whole
        if "cannot be installed" in text and (found := _installing(refused)):
            return _verdict(found.label, found.line, None)
        if end.by == "launcher" and (label := rules.first_match(rules.OURS, text[:LONGEST])):
            return _by_reason(label, text, None)
        if label := rules.first_match(rules.REASONS, text[:LONGEST]):
            return _by_reason(label, text, None)
    ranks.pop(-1, None) if not refused else None
    if found := _of_ranks(end, ranks):
        return _verdict(found.label, found.line, found.line.rank if found.line.rank >= 0 else end.failed_rank)
    if end.exit_code == EXIT_REFUSED:
        for line in reversed(ranks.get(-1 if end.failed_rank is None else end.failed_rank, ())):
            if label := rules.first_match(rules.OURS, line.text[:LONGEST]):
                return _verdict(label, line, end.failed_rank)
    for text in said:
        for part in re.split(r'(?:ErrorMessage|error:|Error:) "|\\n', text):
            if label := rules.first_match(SIGNS, part[:LONGEST]):
                return _by_reason(label, text, None)
    return _by_signal(end, ranks) or _unknown(end, ranks)


_STATES = {State.TIMED_OUT: "timeout", State.PREEMPTED: "spot-loss", State.LOST: "lost-node"}


def _of_ranks(end: End, ranks: Mapping[int, Sequence[LogLine]]) -> Finding | None:
    """Return what decides among what the ranks said: the first to die, unless it only tells of another's death."""
    first = of_rank(ranks.get(end.failed_rank, ())) if end.failed_rank is not None else None
    if first and not first.late:
        return first
    silent = end.failed_rank is not None and end.failed_rank >= 0 and first is None
    if silent and _signal_of(end) not in (None, "SIGABRT"):
        return None  # killed without a word: what others say is that it is gone
    others = [found for rank, lines in ranks.items() if rank != end.failed_rank and (found := of_rank(lines))]
    causes = [found for found in others if not found.late]
    if silent and end.by == "script":
        causes = [found for found in causes if found.label not in ("script-error", "network")]
    if causes:
        return min(causes, key=lambda found: found.line.at)
    if first is None and end.failed_rank is not None and _own_exception(end, ranks):
        return None  # it had a cause of its own, which no rule knows: what came late came of that
    known = [found for found in [first, *others] if found and found.label != "consequence"]
    return known[0] if known else None


def _installing(lines: Sequence[LogLine]) -> Finding | None:
    """Return what decides in a package installer's output: a tool that is missing is the cause of what pip says."""
    found: Finding | None = None
    for line in lines:
        label = rules.first_match(SIGNS, line.text[:LONGEST])
        if label is None or "cannot be installed" in line.text:
            continue
        if label in ("toolchain", "network", "disk-full", "permission", "missing-module", "binary-mismatch"):
            return Finding(label, line)
        if label == "requirements-conflict" and (found is None or "Could not find a version" in found.line.text):
            found = Finding(label, line)
    return found


def _signal_of(end: End) -> str | None:
    """Return the name of the signal that ended the run, or None."""
    import signal

    code = end.exit_code
    if code is None and (told := _CODE.search(end.reason)):
        code = int(told[1])
    try:
        return signal.Signals(code - 128).name if code is not None and 128 < code < 160 else None
    except ValueError:
        return None


def _of_another(lines: Sequence[LogLine]) -> bool:
    """Return whether a rank's last lines tell of another's death."""
    return any(rules.CONSEQUENCES.search(line.text[:LONGEST]) for line in lines[-STANDING:])


def _by_signal(end: End, ranks: Mapping[int, Sequence[LogLine]]) -> Verdict | None:
    name = _signal_of(end)
    if name is None or (
        name == "SIGABRT" and _of_another(ranks.get(-1 if end.failed_rank is None else end.failed_rank, ()))
    ):
        return None
    what = f"a process died of {name}, and nothing says why"
    found = _by_reason("signal", end.reason.split("\n")[0], end.failed_rank, what)
    return replace(found, change=rules.SENT[name]) if name in rules.SENT else found


def _unknown(end: End, ranks: Mapping[int, Sequence[LogLine]]) -> Verdict:
    told = any(_of_another(lines) for lines in ranks.values())
    return Verdict("unknown", rules.CLASSES["unknown"].what, rank=None if told else end.failed_rank)


def _verdict(label: str, line: LogLine, rank: int | None) -> Verdict:
    if label == "consequence":
        return Verdict("unknown", rules.CLASSES["unknown"].what)
    about = rules.CLASSES[label]
    return Verdict(
        label, about.what, line.text[:LONGEST], "log", line.node, line.seq, rank, about.change, about.changes_results
    )


def _by_reason(label: str, text: str, rank: int | None, what: str = "") -> Verdict:
    about = rules.CLASSES[label]
    return Verdict(
        label, what or about.what, text[:LONGEST], "reason", None, None, rank, about.change, about.changes_results
    )


def end_of(status: Status, result: Mapping[str, Any] | None) -> End:
    """Return a run's end from its status and its launcher's result event, None where there is none."""
    told = result or {}
    rank = told.get("failed_rank")
    by = str(told.get("by") or ("script" if _BY_LAUNCHER.match(status.reason) else "platform"))
    return End(status.state, status.exit_code, status.reason, by, rank if isinstance(rank, int) else None)
