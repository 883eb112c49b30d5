"""The runs that a job names: those that it waits for (`after`), and those whose results are its inputs.

    <home>/inputs/<run>/model      what was copied to this machine, until the run is removed

A path of this machine, a bucket, and a folder of the same target are read where they are. The place and the digest are
stored in the job: a rerun refuses results that have changed since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import registry
from cloudtrain.backends.api import Paths
from cloudtrain.errors import BadJob, BadRequest, CloudtrainError, Problem
from cloudtrain.events import State
from cloudtrain.runs.planning import attempts, fetched

if TYPE_CHECKING:
    from cloudtrain.backends.plan import Plan
    from cloudtrain.history.records import AttemptRecord, RunRecord
    from cloudtrain.history.store import Store
    from cloudtrain.job.job import Job
    from cloudtrain.job.sections import Input

FOLDER = "inputs"  # of the home
HELD = ""  # the owner of an attempt that no process sends


def locate(job: Job, backend: str, options: Mapping[str, Any], home: Path) -> Job:
    """Return a job whose inputs have a place and a digest; blocking where one names a run. Raises BadJob."""
    from cloudtrain.history.store import Store

    store, found, problems = Store(home), dict(job.inputs), []
    for name, item in job.inputs.items():
        if item.run:
            try:
                found[name] = _find(item, store, backend, options, job.after)
            except CloudtrainError as error:
                problems.append(Problem(error.message, f"inputs.{name}.run", error.hint))
    if problems:
        raise BadJob(job.located(problems))
    return job.model_copy(update={"inputs": found})


def describe_input(item: Mapping[str, Any]) -> str:
    """Return whose results an input is, where they are, and their digest, for a person."""
    digest = f", sha256 {item['sha256'][:12]}" if item.get("sha256") else ", digest unknown"
    return f"{item.get('what') or 'model'} of {item['run']}: {item['uri']}{digest}"


def _find(item: Input, store: Store, backend: str, options: Mapping[str, Any], after: Sequence[str]) -> Input:
    what = item.what or "model"
    run = store.find(item.run)
    waits = run.run_id in after and not run.status.state.final  # it is found again when the job is sent
    if not waits:
        _check_state(run, what)
    plans = [attempt.plan for attempt in store.attempts(run.run_id) if waits or attempt.handle is not None]
    if not plans:
        raise BadRequest(f"{run.run_id} was never accepted by {run.backend}: it has no {what}")
    copy = store.home / FOLDER / run.run_id
    uri, packer = _place(run, plans[-1], what, backend, options), None
    if not uri and not _is_here(backend):
        own = attempts.backend_of(plans[-1], store.home, clock=store.clock)
        uri = own.packed(plans[-1], what)
        packer = own if uri else None
    if not uri and _is_here(backend):
        if not waits:
            fetched.fetch(store, run, copy, [what.partition("/")[0]])
        uri = str(copy / what)
    if not uri:
        raise BadRequest(
            f"{what} of {run.run_id} is stored on {run.target}, and a job on {backend} cannot read it there",
            "give that run an output in a bucket that both read, or run this job on local, which copies it",
        )
    digest = None
    if not waits:
        digest = packer.packed_digest(uri) if packer else _digest(uri, backend, store.home)
    if digest == "":
        raise BadRequest(
            f"{run.run_id} has no {what}: there is nothing at {uri}",
            f"cloudtrain fetch {run.run_id} copies the results that it has",
        )
    if item.sha256 and digest and item.uri == uri and digest != item.sha256:
        raise BadRequest(
            f"the {what} of {run.run_id} has changed: its sha256 was {item.sha256[:12]}, it is {digest[:12]}",
            "submit the job file again to use the new files",
        )
    return item.model_copy(update={"run": run.run_id, "what": what, "uri": uri, "sha256": digest})


def _check_state(run: RunRecord, what: str) -> None:
    """Raise BadRequest for results that may change, or are only a part."""
    state = run.status.state
    if not state.final:
        raise BadRequest(
            f"{run.run_id} is still {state}",
            f"write after: [{run.run_id}] to start this job when that run has SUCCEEDED",
        )
    if run.status.failed and not what.startswith("checkpoints"):
        hint = "use what: checkpoints for its checkpoints, or uri for any other folder"
        raise BadRequest(
            f"{run.run_id} has ended {state}, so its {what} may be incomplete and are not taken as an input", hint
        )


def _place(run: RunRecord, plan: Plan, what: str, backend: str, options: Mapping[str, Any]) -> str:
    """Return where a run's results are and the target reads them, "" where they must be copied."""
    if registry.traits(plan.backend).packs:  # the service packs the model, and names checkpoints in its own way
        return ""
    output = attempts.output(plan)
    base = run.attached or (f"{output}/{plan.run_id}" if "://" in output else _run_folder(plan, output))
    folder = f"{base.removeprefix('file://').rstrip('/')}/{what}"
    if "://" in folder:
        return f"{folder}/"
    if run.attached or registry.traits(plan.backend).writes_here:
        return folder if _is_here(backend) else ""
    same = plan.backend == backend and (plan.job.get("options") or {}).get(backend, {}) == dict(options)
    single = registry.traits(backend).shared_files or len(options.get("hosts", ())) == 1
    known = folder.startswith(("/", "~/"))  # ~ is the home on the host, which the node replaces
    return folder if same and known and (output or single) else ""


def _is_here(backend: str) -> bool:
    """Return whether the nodes of a backend read the paths of this machine."""
    return registry.traits(backend).paths is Paths.HERE


def _run_folder(plan: Plan, output: str) -> str:
    """Return the folder of a run's results on its nodes, as its request has it."""
    nodes = plan.request.get("nodes")
    env = (nodes[0] if isinstance(nodes, list) else plan.request).get("env") or {}
    return str(plan.request.get("run_dir") or env.get("CLOUDTRAIN_RUN_DIR") or f"{output}/{plan.run_id}")


def _digest(uri: str, backend: str, home: Path) -> str | None:
    """Return the digest of a place that this machine can read, "" where nothing is there; None for another machine's."""
    if "://" not in uri and not _is_here(backend):
        return None
    folder, _, name = uri.rstrip("/").rpartition("/")
    return registry.create_attached(home).digest(folder, name)


def resolve(job: Job, home: Path) -> Job:
    """Return a job whose `after` has whole ids; raises BadJob for a run that is not there or has not succeeded."""
    from cloudtrain.history.store import Store

    store, ids, problems = Store(home), [], []
    for at, text in enumerate(job.after):
        try:
            run = store.find(text)
        except CloudtrainError as error:
            problems.append(Problem(error.message, f"after[{at}]", error.hint))
            continue
        ids.append(run.run_id)
        if run.status.state.final and run.status.state is not State.SUCCEEDED:
            message = f"{run.run_id} has ended {run.status.state}: this job would never start"
            problems.append(Problem(message, f"after[{at}]", f"cloudtrain resume {run.run_id} starts its next attempt"))
        elif run.attached and not run.status.state.final:
            message = f"{run.run_id} was submitted from another machine, so its end is unknown on this machine"
            problems.append(Problem(message, f"after[{at}]", f"cloudtrain wait {run.run_id} waits for it"))
    if problems:
        raise BadJob(job.located(problems))
    return job.model_copy(update={"after": list(dict.fromkeys(ids))})


def waits_for(store: Store, plan: Plan) -> str:
    """Return the reason for which a run is held, "" where all runs before it have succeeded."""
    states = {
        run_id: run.status.state if (run := store.get(run_id)) else None for run_id in plan.job.get("after") or ()
    }
    open_runs = [f"{run_id} ({state or 'removed'})" for run_id, state in states.items() if state is not State.SUCCEEDED]
    return f"waits for {', '.join(open_runs)}" if open_runs else ""


def waiting(store: Store, run_ids: Sequence[str]) -> list[str]:
    """Return the live runs that wait for some runs, and those that wait for them in turn."""
    known = dict.fromkeys(run_ids, False)
    queue = list(known)
    for run_id in queue:
        for record in store.dependents(run_id):
            if record.run_id not in known and not record.status.state.final:
                known[record.run_id] = True
                queue.append(record.run_id)
    return [run_id for run_id, waits in known.items() if waits]


def is_held(attempt: AttemptRecord) -> bool:
    """Return whether nothing of an attempt was sent, because it waits for other runs."""
    if not attempt.plan.job.get("after") or attempt.number > 1:
        return False
    unsent = attempt.handle is None and not attempt.status.state.final
    return unsent and attempt.owner == HELD and attempt.unanswered_since is None
