"""A fake backend that keeps submitted plans in memory and ends them on command.

For tests of code that submits, in this process only: `Submitter("memory", watch=False)` after `MemoryBackend.install()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from cloudtrain.backends import registry
from cloudtrain.backends.api import FETCHABLE, Backend, Paths, Plan, TimeLimit, Traits
from cloudtrain.backends.manifest import Manifest
from cloudtrain.backends.traits import HONOURED
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.events import LogLine, State, Status
from cloudtrain.job import rules
from cloudtrain.job.units import now

if TYPE_CHECKING:
    from pydantic import BaseModel

    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle


@dataclass
class SubmittedAttempt:
    """One submitted attempt: its plan, and the status, log and images that the test sets."""

    plan: Plan
    status: Status = field(default_factory=lambda: Status(State.RUNNING, started_at=now()))
    lines: list[LogLine] = field(default_factory=list)
    cancels: int = 0
    images: dict[int, str] = field(default_factory=dict)  # returned by `images`


class MemoryBackend(Backend):
    """Keeps attempts in memory; each one is RUNNING until `finish` or `cancel`."""

    name = "memory"
    poll_s = 0.01
    traits = Traits(Paths.NODES, dict.fromkeys([*rules.platform_keys(), *rules.SHARED_KEYS], HONOURED))
    attempts: ClassVar[dict[str, SubmittedAttempt]] = {}  # by attempt id, which is the handle

    def __init__(self, options: Mapping[str, Any], workdir: Path, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self.workdir = workdir

    @classmethod
    def install(cls) -> None:
        """Register the backend as `memory` in this process, and forget all attempts."""
        registry.BUILT_IN[cls.name] = (f"{cls.__module__}:{cls.__name__}", None)
        cls.attempts.clear()

    @classmethod
    def say(cls, handle: str, *texts: str, node: int = 0, rank: int = 0) -> None:
        """Add lines to an attempt's log."""
        attempt = cls.attempts[handle]
        for text in texts:
            seq = sum(line.node == node for line in attempt.lines)
            attempt.lines.append(LogLine(now(), node, rank, seq, text, str(len(attempt.lines) + 1)))

    @classmethod
    def finish(
        cls,
        handle: str,
        state: State = State.SUCCEEDED,
        exit_code: int | None = None,
        reason: str = "",
        **more: Any,  # billable_s, event
    ) -> None:
        """End an attempt."""
        started = cls.attempts[handle].status.started_at
        cls.attempts[handle].status = Status(state, exit_code, reason, started, now(), **more)

    @classmethod
    def options(cls) -> type[BaseModel]:
        from pydantic import create_model

        return create_model("MemoryOptions", __config__={"extra": "forbid"})

    @classmethod
    def output_is_here(cls, options: Mapping[str, Any]) -> bool:
        return True

    def plan(self, job: Job, bundle: Bundle, run_id: str, attempt: int = 1) -> Plan:
        manifest = Manifest.of(job, run_id, attempt)
        return Plan.of(self.name, job, bundle, manifest.to_dict(), {"argv": list(manifest.argv)})

    def time_limit(self, plan: Plan) -> TimeLimit:
        return TimeLimit.of_launcher(plan)

    def submit(self, plan: Plan, bundle: Bundle) -> str:
        self.attempts.setdefault(plan.attempt_id, SubmittedAttempt(plan))
        return plan.attempt_id

    def find(self, attempt_id: str) -> str | None:
        return attempt_id if attempt_id in self.attempts else None

    def status(self, handle: str) -> Status:
        attempt = self.attempts.get(handle)
        return attempt.status if attempt else Status(State.LOST, reason="it was never submitted")

    def logs(self, handle: str, *, follow: bool = False, after: str | None = None) -> Iterator[LogLine]:
        position = int(after or 0)
        while handle in self.attempts:
            ended = self.status(handle).state.final
            while position < len(lines := self.attempts[handle].lines):
                position += 1
                yield lines[position - 1]
            if not follow or ended:
                return

    def images(self, handle: str) -> dict[int, str]:
        return dict(self.attempts[handle].images)

    def cancel(self, handle: str) -> None:
        attempt = self.attempts.get(handle)
        if attempt:
            attempt.cancels += 1
            if not attempt.status.state.final:
                self.finish(handle, State.CANCELLED)

    def fetch(self, handle: str, into: Path, what: tuple[str, ...] = FETCHABLE) -> Path:
        """Write the attempt's log to outputs/said below `into`; no file where the log is empty."""
        (into / "outputs").mkdir(parents=True, exist_ok=True)
        if "outputs" in what and (lines := self.attempts[handle].lines):
            (into / "outputs" / "said").write_text("\n".join(line.text for line in lines))
        return into
