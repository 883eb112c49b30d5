"""What tests of runs do between two looks: watch once, and leave what a killed submit leaves."""

from __future__ import annotations

from cloudtrain.runs.run import Run
from cloudtrain.runs.watching.watch import Watcher


def watch(run: Run) -> None:
    """What the detached watcher does, until nothing moves any more."""
    Watcher(run.store, run.run_id).refresh()


def newest(run: Run) -> str:
    return run.attempts[-1].attempt_id


def killed(submitter, job, dead, *, accepted: bool = False, sent: bool = False, key: str | None = None) -> str:
    """Leave what a submit leaves that was killed on its way: after the intent, after sending, or after accepting."""
    resolved = submitter.resolve(job)
    bundle = submitter.package(resolved)
    plan = submitter.plan_of(resolved, bundle, key)
    assert submitter.store.intend(plan, identity=plan.identity, owner=dead, key=key)
    if sent:
        handle = submitter.backend(resolved).submit(plan, bundle)
        if accepted:
            submitter.store.accept(plan.attempt_id, handle)
    return plan.run_id
