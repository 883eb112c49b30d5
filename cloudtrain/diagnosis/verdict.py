"""What is known of a run's end, and the verdict on it: a failure class, the line that decided, and what to change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from cloudtrain.events import State, Status

LAUNCHER_REASON = re.compile(r"^(node \d+: )?rank \d+ (exited with code|was killed by signal)")
# Classes of failures that the source does not cause: the same source can succeed in the next attempt.
OUTSIDE = frozenset(
    (
        "spot-loss",
        "capacity",
        "quota",
        "lost-node",
        "bad-node",
        "gpu-hardware",
        "network",
        "image-pull",
        "platform-fault",
    )
)
_EXIT_CODE = re.compile(r"\b(?:Exit Code:?|exit(?:ed with)?(?: a non-zero)?(?: status)?(?: code| of)?:?) ?(1[23]\d)\b")


class End(NamedTuple):
    """How a run ended, as far as known without its log."""

    state: State
    exit_code: int | None
    reason: str
    by: str = ""  # who ended it: script, launcher or platform; "" if not known
    failed_rank: int | None = None  # the first rank to die

    @classmethod
    def from_status(cls, status: Status, result: Mapping[str, Any] | None) -> End:
        """Return a run's end from its status and its launcher's result event, None if there is none."""
        event = result or {}
        rank = event.get("failed_rank")
        by = str(event.get("by") or ("script" if LAUNCHER_REASON.match(status.reason) else "platform"))
        return cls(status.state, status.exit_code, status.reason, by, rank if isinstance(rank, int) else None)

    @property
    def rank_or_launcher(self) -> int:
        """The rank whose log counts: the first to die, or the launcher's (-1) where none is known."""
        return -1 if self.failed_rank is None else self.failed_rank

    @property
    def signal(self) -> str | None:
        """The name of the signal that ended the run, or None."""
        import signal

        code = self.exit_code
        if code is None and (match := _EXIT_CODE.search(self.reason)):
            code = int(match[1])
        try:
            return signal.Signals(code - 128).name if code is not None and 128 < code < 160 else None
        except ValueError:
            return None


@dataclass(frozen=True)
class Verdict:
    """Why a run failed. `deciding` is as the job wrote it: clean it before you show it."""

    label: str  # a class of classes.toml
    what: str  # what happened, one clause
    deciding: str = ""  # the line that decided, "" where none did
    where: str = ""  # log or reason
    node: int | None = None  # node and number of that line in the log
    seq: int | None = None
    rank: int | None = None  # the first rank that failed, if known
    change: str = ""  # a change worth a try
    changes_results: bool = False  # whether that change changes what the model learns
    certain: bool = True  # False: the line suggests the class and does not prove it
    raised: str = ""  # where the job's own code raised the exception: file and line

    @property
    def sentence(self) -> str:
        """What happened, and on which rank; "probably" where that is not certain."""
        # A signal's sentence says that the cause is unknown; a traceback that names the job's own code is a fact.
        stated = self.certain or self.label == "signal" or (self.label == "script-error" and self.raised)
        head = "" if stated else "probably "
        return head + self.what + (f" (rank {self.rank})" if self.rank is not None else "")

    @property
    def only_reason(self) -> bool:
        """Whether the run's reason states the cause, and the verdict adds nothing to it."""
        return self.label == "unknown" and self.where == "reason"

    @property
    def advice(self) -> str:
        """The suggested change, marked where it changes the results."""
        return self.change + (" (this changes the results)" if self.changes_results else "")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Verdict:
        return cls(**data)
