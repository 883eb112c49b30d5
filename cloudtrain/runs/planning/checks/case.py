"""What a check of a plan is given, and what a script needs though nothing in its job says so."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import registry
from cloudtrain.source import world

if TYPE_CHECKING:
    from cloudtrain.backends.api import Backend, Plan
    from cloudtrain.errors import Problem
    from cloudtrain.job.job import Job
    from cloudtrain.source.texts import Texts

# In quotes, or as a shell's variable; not the SM_80 of a compiler's option.
_SM = re.compile(r"""["'${]SM_(?:[A-Z]\w*|(?=["']))""")
_AIP = re.compile(r"""["'${]AIP_(?:[A-Z]\w*|(?=["']))""")
_OPT_ML = re.compile(r"(?m)^(?![^\n]*SM_[A-Z])(?![^\S\n]*#)[^\n]*/opt/ml/\w")


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


def fit_script(job: Job, texts: Texts, backend: str) -> tuple[Job, list[str]]:
    """Return the job with what its script needs though nothing in the job says so, and notes on that."""
    changes: dict[str, Any] = {}
    notes: list[str] = []
    if job.trainer:
        return job, notes
    if not job.has_rank_env and texts.find(world.HINT):
        if why := world.why_needed(texts, job.env.get("PYTHONPATH", "").split(":")):
            changes["distributed_env"] = "always"
            notes.append(
                f"one process: RANK, WORLD_SIZE and MASTER_ADDR are set anyway, because {why} (distributed_env)"
            )
        elif other := world.first_need(texts):
            notes.append(f"{other}, but {texts.entry} does not load that file")
    own = registry.traits(backend).script_variables  # the platform sets them anyway
    if job.sm_env is None and own != "sm_env" and (found := texts.find(_SM)):
        changes["sm_env"] = True
        notes.append(
            f"{found.place} reads {found.text[1:]}: the SM_ variables are set, with the run's folders (sm_env)"
        )
    if job.aip_env is None and own != "aip_env" and (found := texts.find(_AIP)):
        changes["aip_env"] = True
        notes.append(
            f"{found.place} reads {found.text[1:]}: the AIP_ variables are set, with the run's folders (aip_env)"
        )
    if own != "sm_env" and (found := texts.find(_OPT_ML)):
        hint = "read SM_MODEL_DIR and similar variables, or pass {model_dir}"
        notes.append(f"{found.place} names a path below /opt/ml, which only SageMaker has: {hint}")
    return job.model_copy(update=changes), notes
