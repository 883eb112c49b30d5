"""What a check of a plan is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloudtrain.backends.api import Backend, Plan
    from cloudtrain.errors import Problem
    from cloudtrain.job.job import Job
    from cloudtrain.source.texts import Texts


@dataclass(frozen=True)
class Case:
    """A planned job.

    Attributes:
        job: as it is planned, with what its script needs.
        plan: with the backend's own notes; not checked by policies yet.
        source: what the source's files hold, read when a check looks at it.
        backend: that made the plan.
        found: what the planner found out while it made the plan.
        policies: notes on what policies have set.
    """

    job: Job
    plan: Plan
    source: Texts
    backend: Backend
    found: Sequence[str | Problem] = ()
    policies: Sequence[str] = ()

    @property
    def command(self) -> str:
        """The text of the job's shell, or its words joined by spaces."""
        return self.job.run or " ".join(self.job.argv())

    @property
    def gpus(self) -> int:
        """GPUs of a node, as the backend gives them."""
        return int(self.plan.manifest.get("gpus_per_node") or 0)
