"""cloudtrain cancel: end runs and stop their processes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from cloudtrain.cli.view import follow, options, runs, terminal
from cloudtrain.errors import BadRequest, CloudtrainError, UnknownRun

if TYPE_CHECKING:
    from cloudtrain.events import Status
    from cloudtrain.runs.run import Run

SHOWN = 5  # runs that a message names


@options.command()
@options.argument("run_ids", "[RUN]...", options.RUNS, nargs=-1, shell_complete=options.complete_runs)
@click.option(
    "--key",
    metavar="KEY",
    help="Cancel the run that `submit --key KEY` started from this machine; with --job, from any machine. Jobs of different "
    "names can have the same key: when several of these runs have not ended, none is cancelled (exit code 2). Cancel each by "
    "its id.",
)
@click.option(
    "--job",
    metavar="JOB",
    type=click.Path(),
    help="With --key: the job file of the run. When the history here has no such run, the platforms of its targets are asked.",
)
@options.target_option_with("With --job: the target that the run was submitted to. Default: the job's own target.")
@options.take_over_option
@click.option("-y", "--yes", is_flag=True, help="Do not ask before runs that wait for these runs are cancelled too.")
@options.json_option_with("Print a JSON object for each run: run_id, state, and whether the end is `confirmed`.")
def command(
    run_ids: tuple[str, ...],
    key: str | None,
    job: str | None,
    target: str | None,
    take_over: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Cancel runs, and stop all their processes, containers and pods.

    Give one RUN or several, or --key: without both it is refused and cancels nothing (exit code 2). It waits up to
    10 seconds for the platform to confirm. The request is stored: when the platform does not answer now, the
    background watcher (a cloudtrain process on this computer) cancels the run later. Ctrl-C ends the waiting only.
    The exit code is 0 also when the end is not confirmed yet. A run that has already ended does not change, with
    exit code 0. Stored files and checkpoints stay, and `cloudtrain resume` can continue the run.

    Runs that wait for one of these runs (`submit --after`) are cancelled too. When there are such runs, it asks
    first at a terminal; the answer no cancels no run at all. Without a terminal, as in CI, it does not ask and
    cancels them too. With --json at a terminal, such a cancel needs -y.
    """
    from cloudtrain.runs.planning import upstream

    if (job and key is None) or (target and not job):
        raise click.UsageError("--job needs --key, and --target needs --job")
    if key is not None:
        run_ids = (*run_ids, _of_job(key, job, target) if job else _of_key(key))
    if not run_ids:
        live = _live()
        message = f"name a run, or --key{_describe(live)}"
        if len(live) == 1:
            raise BadRequest(message, f"cloudtrain cancel {live[0]}")
        raise click.UsageError(message)
    runs_to_cancel = [runs.find(run_id) for run_id in run_ids]  # a wrong id raises before anything is cancelled
    live = [run.run_id for run in runs_to_cancel if not run.record.status.state.final]
    for run in runs_to_cancel if not take_over else ():
        if run.run_id in live:
            run.check_home("cancelled")
    if waiting := upstream.waiting(runs.open_history(), live):
        sentence = f"{', '.join(waiting)} would be cancelled too, because they wait for runs that you cancel"
        if sys.stdin.isatty() and sys.stderr.isatty():
            terminal.confirmer(yes=yes, as_json=as_json, verb="cancel", done="cancelled")(sentence)
        terminal.note(sentence.replace("would be", "will be"))
    code = 0
    for run in runs_to_cancel:
        try:
            sentence, status = follow.cancel(run)
        except CloudtrainError as error:
            if len(runs_to_cancel) == 1:
                raise
            terminal.note(f"error: {run.run_id}: {error.message}")
            code = code or error.exit_code
            continue
        if as_json:
            terminal.print_json(
                {**runs.submitted_json(run), "state": status.state.value, "confirmed": status.state.final}
            )
        else:
            terminal.print_lines(sentence + _describe_resume(run, status))
    return code


def _describe_resume(run: Run, status: Status) -> str:
    """Return which command continues a cancelled run, and from where; "" where none does."""
    from cloudtrain.events import State
    from cloudtrain.runs.sending import retry

    if status.state is not State.CANCELLED or run.record.attached or run.attempts[-1].handle is None:
        return ""
    does = "continues it from its newest checkpoint"
    if not retry.has_checkpoint(run.store, run.run_id):
        does = "starts it from the beginning, as no checkpoint was reported"
    return f"; cloudtrain resume {run.run_id} {does}"


def _live() -> list[str]:
    """Return the newest runs that can be cancelled; one more than SHOWN where there are more."""
    from cloudtrain.events import State

    live = [state for state in State if not state.final]
    return [record.run_id for record in runs.open_history().runs(limit=SHOWN + 1, states=live)]


def _describe(found: Sequence[str]) -> str:
    """Return the runs that can be cancelled as the end of a sentence."""
    more = " and more (cloudtrain ls)" if len(found) > SHOWN else ""
    return f"; these have not ended: {', '.join(found[:SHOWN])}{more}" if found else "; no run here is live"


def _of_job(key: str, job: str, target: str | None) -> str:
    """Return the run of a job's key, added to this history if only its platform knows it; raises UnknownRun for none."""
    from cloudtrain.runs.submit import Submitter

    submitter = Submitter(target)
    plan, _ = submitter.plan_job(job, (), key)
    if submitter.store.get(plan.run_id) is None and not submitter.adopt_key(plan, key):
        where = plan.target or plan.backend
        raise UnknownRun(f"no run here or on {where} has the key {key} and the job {job}", "check the key and --target")
    return plan.run_id


def _of_key(key: str) -> str:
    """Return the run of a key in this history, the one that has not ended; raises UnknownRun for none, or several."""
    from cloudtrain.runs.planning.plan import run_id

    ending = run_id("", key)
    store = runs.open_history()
    found = [name for name in store.names() if name.endswith(ending)]
    if not found:
        raise UnknownRun(
            f"no run here has the key {key}", "another machine may have submitted it: name its job file with --job JOB"
        )
    live = [name for name in found if not store.find(name).status.state.final]
    if len(live) > 1:  # a key counts for jobs of one name
        raise UnknownRun(
            f"{len(live)} runs that have not ended have the key {key}: {', '.join(live[:SHOWN])}",
            "cancel each by its id",
        )
    return (live or found)[0]
