"""What a run can be in, which states are final, and the exit codes of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """The life of a run or an attempt.

    QUEUED -> STARTING -> RUNNING -> SUCCEEDED | FAILED | TIMED_OUT | PREEMPTED | LOST
                             └─> STOPPING -> CANCELLED

    For an attempt every state below the arrows' ends is final. A run whose attempt ends PREEMPTED or LOST goes on
    with another attempt while retries are left, and is in that state itself only when none are.
    """

    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    PREEMPTED = "PREEMPTED"
    TIMED_OUT = "TIMED_OUT"
    LOST = "LOST"

    @property
    def final(self) -> bool:
        return self in FINAL


FINAL = frozenset(
    {State.SUCCEEDED, State.FAILED, State.CANCELLED, State.PREEMPTED, State.TIMED_OUT, State.LOST},
)

# Exit codes of the launcher inside a job (design: the exit-code contract).
EXIT_RESUMABLE = 75  # checkpointed and left on request
EXIT_REFUSED = 78  # refused before training

# What `submit --wait`, `--follow` and `wait` exit with when the run has no code of its own to pass on.
CLI_EXIT = {
    State.SUCCEEDED: 0,
    State.CANCELLED: 130,
    State.TIMED_OUT: 124,
    State.PREEMPTED: EXIT_RESUMABLE,
    State.LOST: 69,
}


@dataclass(frozen=True)
class Status:
    """A run's or attempt's state at one moment; times are UTC, ISO 8601."""

    state: State
    exit_code: int | None = None  # the script's own; None while it runs or when nobody knows
    reason: str = ""
    started_at: str | None = None
    ended_at: str | None = None
    url: str | None = None
    billable_s: int | None = None  # what the platform bills, the seconds of all nodes together
    event: str = ""  # of retry.on_events, where the state does not say it: capacity

    @property
    def failed(self) -> bool:
        """Whether it has ended, neither well nor because a person wanted it: such an end has a verdict."""
        return self.state.final and self.state not in (State.SUCCEEDED, State.CANCELLED)

    @property
    def cli_exit_code(self) -> int:
        """What the command line exits with: 0, the script's own code, or the state's."""
        if self.state in CLI_EXIT:
            return CLI_EXIT[self.state]
        return self.exit_code if self.exit_code else 1
