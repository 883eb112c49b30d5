"""Whether two submissions are of the same job: by the identity of their plans, or by `--key`.

The run of a key may have been submitted by another machine or CI: the platforms of the job are asked for it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from cloudtrain.backends import registry
from cloudtrain.backends.plan import job_on
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BadRequest, StoreError
from cloudtrain.runs.planning import candidates

if TYPE_CHECKING:
    from pathlib import Path

    from cloudtrain.backends.api import Backend, Plan
    from cloudtrain.history.records import RunRecord

JOB_LABEL, SOURCE_LABEL = "job-digest", "source-digest"  # of a run with a key: known without a history
DIGITS = 16  # hexadecimal, of a sha256
_SHOWN = 6  # differing values that a message names


def same(stored: Plan, plan: Plan) -> bool:
    """Return whether a stored plan, which an older version may have made, is of the same job as a new one."""
    if stored.identity == plan.identity:
        return True
    from cloudtrain.job.job import Job

    try:
        job = Job.from_dict(stored.job).to_dict()  # with the fields that are new since
    except BadRequest:
        return False
    return replace(stored, job=job).identity == plan.identity


def labels(job: Mapping[str, Any], source_sha256: str, backend: str, target: str) -> dict[str, str]:
    """Return the labels by which a platform itself can tell what the run of a key was made of."""
    text = json.dumps([job_on(job, backend), backend, target], sort_keys=True)
    return {JOB_LABEL: hashlib.sha256(text.encode()).hexdigest()[:DIGITS], SOURCE_LABEL: source_sha256[:DIGITS]}


def refuse(record: RunRecord, first: Plan, plan: Plan, bundles: Path) -> NoReturn:
    """Raise BadRequest: the run of this key is of another job, source or target, and which is named.

    `bundles` is the folder of packaged sources: files that differ are named where both packages are still there.
    """
    old, new = (dict(_leaves(job_on(each.job, each.backend))) for each in (first, plan))
    paths = [path for path in sorted(old.keys() | new.keys()) if old.get(path) != new.get(path)]
    differing = [*paths[:_SHOWN], *([f"{len(paths) - _SHOWN} more"] if len(paths) > _SHOWN else [])]
    if first.bundle.get("source_sha256") != plan.bundle.get("source_sha256"):
        files = _differing_files(first, plan, bundles)
        more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
        differing.append(f"the source ({', '.join(files[:_SHOWN])}{more})" if files else "the source")
    if (first.backend, first.target) != (plan.backend, plan.target):
        differing.append(f"the target ({first.target or first.backend}, now {plan.target or plan.backend})")
    _refuse(str(record.key), record.run_id, differing)


def check_labels(key: str, plan: Plan, kept: Mapping[str, str]) -> None:
    """Raise BadRequest where the labels that a platform kept of a key's run are not those of this plan."""
    names = {JOB_LABEL: "the job's digest", SOURCE_LABEL: "the source's digest"}
    mine = plan.job["labels"]
    differing = [
        f"{name} ({kept[label]}, now {mine[label]})"
        for label, name in names.items()
        if label in kept and kept[label] != mine[label]
    ]
    if differing:
        _refuse(key, plan.run_id, differing)


def _refuse(key: str, run_id: str, differing: list[str]) -> NoReturn:
    raise BadRequest(
        f"the key {key!r} is already used by run {run_id}, whose job differs in {', '.join(differing) or 'its older format'}",
        "use another --key, or undo the change of the job",
    )


def _differing_files(first: Plan, second: Plan, bundles: Path) -> list[str]:
    """Return the files of the user that differ between two plans; empty where a package is gone."""
    from cloudtrain.source import differences
    from cloudtrain.source.bundle import Bundle

    old, new = (Bundle.stored(bundles, str(plan.bundle["sha256"])) for plan in (first, second))
    try:
        return list(differences.find(old, new)) if old and new else []
    except StoreError:
        return []


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


class Found(NamedTuple):
    """An attempt that a platform has: which candidate's platform, and its handle there."""

    candidate: int
    handle: str


class KeySearch(NamedTuple):
    """What all platforms of a job answered: `attempts[0]` is the first attempt, None one that no platform has."""

    bases: Sequence[Plan]
    clients: Sequence[Backend]
    attempts: Sequence[Found | None]

    @property
    def newest(self) -> int:
        """The number of the newest attempt that a platform has; 0 where there is none."""
        return max((number for number, found in enumerate(self.attempts, 1) if found), default=0)

    def check_labels(self, key: str) -> None:
        """Raise BadRequest where the newest attempt was made of another job or source."""
        found = self.attempts[self.newest - 1]
        assert found is not None
        backend = self.clients[found.candidate]
        if (labels := backend.labels(found.handle)) is not None:
            check_labels(key, self.bases[found.candidate], labels)


def search(plan: Plan, home: Path, clock: Clock = SYSTEM) -> KeySearch:
    """Look for all attempts of a plan's run on the platforms of all its candidates; blocking. Raises BackendError.

    An attempt that was refused for lack of machines left nothing there: the later ones are looked for as well.
    """
    bases = candidates.bases(plan)
    clients = [registry.create_for(base, home, clock) for base in bases]
    attempts: list[Found | None] = []
    expected = len(bases) * int((plan.job.get("retry") or {}).get("max_attempts") or 1)
    while len(attempts) < expected or attempts[-1] is not None:
        name = f"{plan.run_id}-a{len(attempts) + 1}"
        asked = ((at, client.find(name)) for at, client in enumerate(clients))
        attempts.append(next((Found(at, handle) for at, handle in asked if handle is not None), None))
    return KeySearch(bases, clients, attempts)
