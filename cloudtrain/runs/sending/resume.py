"""Start a run's next attempt (on its own target, with other limits, or on another target and layout), or its job once more.

An attached run resumes with the job and the source that its output has. Both were written elsewhere: they go to a platform
when a person resumes the run, and at no other time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cloudtrain.backends import registry
from cloudtrain.backends.api import Plan
from cloudtrain.backends.plan import ATTACHED
from cloudtrain.errors import BadRequest
from cloudtrain.events import State
from cloudtrain.job.job import Job
from cloudtrain.job.targets import config_files, resolve
from cloudtrain.nodes.process import Process
from cloudtrain.policy import apply
from cloudtrain.runs.planning import attempts, budgets
from cloudtrain.runs.planning.plan import Planner
from cloudtrain.runs.sending import handover, outcomes, retry, send
from cloudtrain.runs.sending.exactly_once import ExactlyOnce, Submitted
from cloudtrain.source import received

if TYPE_CHECKING:
    from cloudtrain.backends.plan import Plan
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.history.store import Store
    from cloudtrain.source.bundle import Bundle

# What a run is stays: what it trains, with which values, and what it is called.
CHANGES = (
    "limits", "resources", "num_nodes", "min_nodes", "processes_per_node", "parallelism", "options", "image", "env",
    "environment", "secrets", "inputs", "retry", "checkpoint", "distributed_env", "health",
)  # fmt: skip
_OF_ROLE = re.compile(r"roles\.[^.]+\.(num_nodes|processes_per_node|ready_timeout|restart)")
_PRICE = ("usd_per_hour", "priced_as")  # of a machine, in `resources`
LIVE = "cancel it on the machine that submitted it; a run without output for an hour is LOST and can be resumed here"


def send_next(
    store: Store,
    run_id: str,
    *,
    sets: Sequence[str],
    target: str | None,
    watch: bool,
    confirm: budgets.Confirm | None = None,
    force: bool = False,
) -> list[str]:
    """Plan and send the next attempt of a run that has ended; blocking. Returns notes on what changes, one line each.

    Raises:
        BadRequest: the run has not ended, has succeeded, a secret is missing, its cap is used up (CapReached), a budget is
            spent (OverBudget), or its checkpoints cannot be reached from the other target.
        BackendError: the platform refuses the attempt; the run is FAILED.
    """
    record = store.find(run_id)
    status, uri = record.status, record.attached
    if not status.state.final:
        hint = LIVE if uri else f"cloudtrain cancel {run_id} ends it"
        raise BadRequest(f"{run_id} is still {status.state}", hint)
    if status.state is State.SUCCEEDED:
        raise BadRequest(f"{run_id} has succeeded: there is nothing to resume", "cloudtrain rerun starts a new run")
    earlier = store.attempts(run_id)
    brought = bring(store, earlier[-1], uri) if uri else None
    plan, bundle, notes = plan_next(store, earlier, sets, target, force=force, brought=brought)
    backend = attempts.backend_of(plan, store.home, clock=store.clock)
    plan = retry.plan_after(store, backend, plan)
    send.preflight(plan, backend)
    if uri and confirm:
        confirm(describe(plan, uri))
    if files := config_files(Path.cwd()):
        notes += budgets.check(store, plan, files, confirm)
    notes.insert(0, describe_start(store, plan))

    def intent() -> bool:
        return store.next_attempt(plan, owner=Process.here(), resume=True)

    outcome = send.send_attempt(store, plan, backend, bundle, intent)
    if isinstance(outcome, outcomes.Refused) and not outcome.waiting:
        raise outcome.error
    if watch and outcome is not None:
        handover.start(store, plan)
    return notes


def send_copy(
    store: Store,
    run_id: str,
    *,
    sets: Sequence[str],
    source: str | None,
    key: str | None,
    watch: bool,
    confirm: budgets.Confirm | None = None,
    force: bool = False,
) -> tuple[Submitted, list[str]]:
    """Send a run's job once more, as a run of its own: over the stored bundle or over `source`; blocking. Returns notes too."""
    record = store.find(run_id)
    submitter = ExactlyOnce(record.target, home=store.home, watch=watch, confirm=confirm, force=force)
    submitter.earlier_policies = store.attempts(run_id)[-1].plan.policies
    data = dict(record.job) | ({"source": str(Path(source).resolve())} if source else {})
    resolved = submitter.resolve(Job.from_dict(data), sets)
    if source:
        bundle = submitter.package(resolved)
        plan = submitter.plan_of(resolved, bundle, key)
    else:
        bundle = attempts.stored_bundle(store.attempts(run_id)[0].plan, store.home)
        plan = submitter.plan_stored(resolved, bundle, key)
    return submitter.send_once(plan, bundle, key=key, parent=run_id), submitter.notes


def can_change(key: str) -> bool:
    """Return whether a later attempt may have another value of a key of the job."""
    return key.partition(".")[0] in CHANGES or _OF_ROLE.fullmatch(key) is not None


def plan_next(
    store: Store,
    earlier: Sequence[AttemptRecord],
    sets: Sequence[str] = (),
    target: str | None = None,
    *,
    force: bool = False,
    brought: Brought | None = None,
) -> tuple[Plan, Bundle, list[str]]:
    """Return the plan of the attempt after `earlier`, its bundle, and notes on what it changes; raises BadRequest.

    `brought` is what an attached run resumes with. Where more than limits change it is checked as a first plan is: its
    strategy, what a node would refuse, its memory.
    """
    newest = earlier[-1].plan
    if other := [text for text in sets if not can_change(text.partition("=")[0].strip())]:
        hint = f"cloudtrain rerun {newest.run_id} --set starts a new run"
        raise BadRequest(f"resume can change machines and limits, not {', '.join(other)}", hint)
    number = earlier[-1].number + 1
    if brought is None and target in (None, newest.target) and all(text.startswith("limits.") for text in sets):
        job = resolve(Job.from_dict(newest.job), sets).job if sets else None
        backend = attempts.backend_of(newest, store.home, clock=store.clock)
        plan, bundle = attempts.replan(newest, number, backend, store.home, earlier=earlier, job=job)
        plan = apply.check_stored(plan, backend, store.home, Path.cwd())
        return plan, bundle, _alone(newest, plan)
    planner = Planner(target or newest.target, home=store.home, force=force)
    planner.earlier_policies = newest.policies
    data, notes = _carried(earlier, planner.target or "", dict(brought.job if brought else newest.job))
    resolved = planner.resolve(Job.from_dict(data), sets)
    saved = retry.saved(store, newest.run_id)
    given = resolved.job.checkpoint
    in_folder = bool(retry.saved(store, newest.run_id, in_folder=True))
    carried = attempts.carry_checkpoints(given.model_dump(), resolved.backend, newest, in_folder)
    resolved.job = resolved.job.model_copy(update={"checkpoint": given.model_copy(update=carried)})
    bundle = brought.bundle if brought else attempts.stored_bundle(newest, store.home)
    plan = planner.plan_stored(resolved, bundle, earlier=earlier)
    notes += [note for note in plan.notes if note not in newest.notes]
    if saved and not attempts.reaches(plan, newest):
        raise BadRequest(
            f"the checkpoints of {newest.run_id} are in {attempts.place(newest)}, which {resolved.target} does not read",
            "to move a run, its job needs an output (a bucket or folder) that both targets can use",
        )
    if (
        saved
        and resolved.job.kept != ()
        and registry.traits(plan.backend).packs != registry.traits(newest.backend).packs
    ):
        notes.append(f"files that `keep` names are not copied to {resolved.target}; only checkpoints are")
    return plan, bundle, [*notes, *_left_out(earlier, plan), *_alone(newest, plan), *_layout(newest, plan)]


def describe_start(store: Store, plan: Plan) -> str:
    """Return the number of an attempt and what it begins from, as far as earlier attempts reported checkpoints."""
    if not retry.has_checkpoint(store, plan.run_id):
        missing = "uploaded" if store.events(plan.run_id, "checkpoint") else "saved"
        return f"attempt {plan.attempt} begins from the start: no checkpoint was {missing}"
    reported = [event.data for event in retry.checkpoints(store, plan.run_id)]
    # A file that is named by no step may be written over, as last.pt is.
    newest: Mapping[str, Any] = next(
        (data for data in reversed(reported) if "step" in data), next(reversed(reported), {})
    )
    step = f"step {newest['step']}" if "step" in newest else ""
    if kept := newest.get("kept"):
        where, _, name = str(kept).partition("/") if str(kept).startswith("{") else ("the script's folder", "", kept)
        return f"attempt {plan.attempt} finds {f'{step} in {where}: {name}' if step else f'{name} in {where}'}"
    text = f"{step}, the newest checkpoint that was reported," if step else "the newest checkpoint"
    name = f": {newest['written']}" if "written" in newest else ""
    return f"attempt {plan.attempt} resumes from {text} in {attempts.place(plan)}{name}"


def _carried(earlier: Sequence[AttemptRecord], target: str, data: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the job as it can be resolved for a target, and what of it does not go along.

    Where the run was before, its options, image and machines are those of that attempt. Elsewhere they are those of the
    first attempt, without what is of its own platform: attempts in between have left out what their platforms lack.
    The options of an attempt that was submitted elsewhere are those of another machine's target.
    """
    notes: list[str] = []
    own = [attempt.plan for attempt in earlier if not (attempt.handle or "").startswith(ATTACHED)]
    same = next((plan for plan in reversed(own) if plan.target == target), None)
    if same:
        written = (same.price or {}).get("source") == "resources.usd_per_hour"  # else it is the target's
        resources = {name: value for name, value in same.job["resources"].items() if written or name not in _PRICE}
        return data | {"options": same.job["options"], "image": same.job.get("image"), "resources": resources}, notes
    first = own[0] if own else earlier[-1].plan
    job = first.job if own else data
    options = {name: value for name, value in (job.get("options") or {}).items() if own and name != first.backend}
    data |= {"image": job.get("image"), "resources": dict(job.get("resources") or {}), "options": options}
    backend = resolve(Job.from_dict(data | {"options": {}}), target=target, backends=registry.Names()).backend
    kind, resources = registry.backend_class(backend), data["resources"]
    if resources.get("instance_type") and (
        "resources.instance_type" not in kind.traits.keys or backend != first.backend
    ):
        notes.append(f"{resources.pop('instance_type')} is a machine type of {first.target}: it is ignored on {target}")
    if data.get("image") and "image" not in kind.traits.keys:
        notes.append(f"target {target} uses no containers: the image {data.pop('image')} is ignored there")
    for name in _PRICE:  # of the other target's machines
        resources.pop(name, None)
    return data, notes


def _left_out(earlier: Sequence[AttemptRecord], plan: Plan) -> list[str]:
    """Return which options of another target of the same platform an attempt does not have."""
    newest = earlier[-1].plan
    if newest.backend != plan.backend or newest.target == plan.target:
        return []
    old, new = ((each.job.get("options") or {}).get(each.backend) or {} for each in (newest, plan))
    left = ", ".join(f"options.{plan.backend}.{name}" for name in old if name not in new)
    return [f"{left} of {newest.target} are not used on {plan.target}"] if left else []


def _alone(old: Plan, new: Plan) -> list[str]:
    """Return that an attempt has no other candidates any more."""
    alone = f"only {new.target} is tried: -t, --gpus and --set remove the other targets and accelerators of the job"
    return [alone] if old.candidates and not new.candidates else []


def _layout(old: Plan, new: Plan) -> list[str]:
    """Return what changes in the number of ranks."""
    before, after = (plan.manifest["nodes"] * plan.manifest["processes_per_node"] for plan in (old, new))
    if before == after:
        return []
    fixed = {"global_batch_size", "global_batch_tokens"} & new.job["hyperparameters"].keys()
    batch = (
        "the global batch stays"
        if fixed
        else "the effective batch size changes with it, unless the script divides the batch"
    )
    return [f"the world size was {before} and is {after}: {batch}"]


class Brought(NamedTuple):
    """The job of an attached run, with the output that it was attached from, and its source."""

    job: Mapping[str, Any]
    bundle: Bundle


def bring(store: Store, newest: AttemptRecord, uri: str) -> Brought:
    """Return what the next attempt of an attached run is made of; blocking. Raises BadRequest, BackendError."""
    plan, about = newest.plan, newest.plan.bundle
    if not plan.manifest.get("output") or plan.job.keys() == {"name"}:
        raise BadRequest(
            f"{plan.run_id} cannot be resumed from {uri}: its record has no job, or it is a copy",
            "attach <output>/<run id> itself",
        )
    data = registry.create_attached(store.home, store.clock).source(uri, str(about["source_sha256"]))
    if data is None:
        raise BadRequest(f"{uri} has no source of {plan.run_id}", "resume it from the machine that submitted it")
    try:
        job = Job.from_dict(plan.job)
        bundle = received.package(data, about, store.home / "bundles", trainer=job.runs_trainer, **job.exceptions)
    except BadRequest as error:
        raise BadRequest(f"the source at {uri} cannot be used: {error.message}", error.hint) from None
    return Brought({**plan.job, "output": plan.manifest["output"]}, bundle)


def describe(plan: Plan, uri: str) -> str:
    """Return what a person who resumes an attached run is asked about."""
    names = ", ".join(sorted(plan.manifest.get("secrets") or {}))
    secrets = f", and gets the secrets {names}" if names else ""
    return (
        f"{plan.run_id} was submitted from another machine: its job and source from {uri} run on {plan.target}{secrets}"
    )
