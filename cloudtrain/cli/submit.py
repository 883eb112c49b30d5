"""cloudtrain submit: submit a job file, a script or a plan."""

from __future__ import annotations

import click

from cloudtrain.backends.api import Plan
from cloudtrain.cli.view import options, runs, terminal
from cloudtrain.cli.view.follow import Begun, begin
from cloudtrain.cli.view.jobs import parse_job_words
from cloudtrain.errors import BadRequest


@options.command()
@options.job_options
@options.ending_options
@click.option(
    "--key",
    metavar="KEY",
    help="Idempotency key; submitting the same job again with this key returns the same run, also from another machine, "
    "and when it has ended. The same key with a changed job, source or target is refused (exit code 2). "
    "A key counts for one job name: a job of another name with the same key is another run.",
)
@click.option(
    "--new", is_flag=True, help="Start a second run even though an earlier submit of this job was interrupted."
)
@click.option(
    "--adopt",
    is_flag=True,
    help="Finish the interrupted submit and return its run; also when it is older than 15 minutes. If its run has failed, "
    "return that run as it is and start nothing.",
)
@click.option(
    "--after",
    metavar="RUN",
    multiple=True,
    help="Start the job only after this run has SUCCEEDED; its id or the beginning of it. May be repeated, for several runs. "
    "If RUN ends otherwise, after its last attempt, the job is cancelled. "
    "The background watcher of this computer starts the job.",
)
@options.force_option
def command(
    words: options.JobWords,
    target: str | None,
    ending: options.Ending,
    key: str | None,
    new: bool,
    adopt: bool,
    after: tuple[str, ...],
    force: bool,
) -> int:
    """Submit a job file, a script or a plan.

    A script needs no job file: the current folder is packaged when it contains the script, directly or in a
    subfolder. Otherwise the script's git repository is packaged, or else the folder of the script. `cloudtrain
    submit -- PROGRAM ...` packages the current folder and runs the program once on each node; a job.yaml there is
    not used. In place of JOB, submit also takes a plan that `cloudtrain plan -o plan.json` wrote. A plan is sent
    unchanged: options that would change it, such as -t, --set and --key, are refused.

    Without -f and --wait the command ends when the platform has accepted the job. Ctrl-C ends this command with exit
    code 130, and a run that was submitted continues (see --on-interrupt). Once a submit has printed its run, the same
    command starts a second run, unless both have the same --key. A plan that is submitted again returns its run.

    A submit is interrupted when it ends before it has printed its run: a lost connection, a killed terminal, Ctrl-C
    during the upload. The next submit of the same job (with the same --set and arguments), source and target
    finishes that submission and starts no second run. If the interrupted submit is older than 15 minutes, or its
    run has failed, it is refused and nothing is sent (exit code 2). Then add --adopt to finish it and take its run,
    or --new to start a second one. `cloudtrain resume` starts the next attempt of a failed run.

    \b
    cloudtrain submit train.py -f -- --lr 1e-4
    cloudtrain submit -m package.train -- --lr 1e-4
    cloudtrain submit -- torchrun --nproc-per-node 2 train.py
    cloudtrain submit job.sbatch -t cluster
    cloudtrain submit job.yaml -t prod --set hyperparameters.lr=1e-4
    cloudtrain submit job.yaml --wait --key "$CI_COMMIT" --on-interrupt cancel
    cloudtrain submit plan.json
    """
    from cloudtrain.runs.submit import Submitter

    if new and adopt:
        raise click.UsageError("--new and --adopt cannot be combined")
    job_input = parse_job_words(words)
    if isinstance(job_input, Plan) and (target or key or new or adopt or after):
        hint = "pass them to cloudtrain plan"
        raise BadRequest(
            "a plan is submitted unchanged: --target, --key, --new, --adopt and --after cannot be combined with it",
            hint,
        )
    submitter = Submitter(target, confirm=terminal.confirmer(yes=ending.yes, as_json=ending.as_json), force=force)

    def start() -> Begun:
        if isinstance(job_input, Plan):
            run = submitter.submit_plan(job_input)
        else:
            run = submitter.submit(job_input.job, sets=job_input.sets, key=key, new=new, adopt=adopt, after=after)
        if not run.adopted:
            return Begun(run, "submitted to")
        if run.record.acknowledged:
            return Begun(run, "was already submitted to")
        if isinstance(job_input, Plan) or key:
            return Begun(run, "is continued on")
        since = f"submitted at {run.record.created_at[:19]}Z, its submit did not finish"
        terminal.note(
            f"the same job as {run.run_id}, {since}: continued, not started twice; use --new to start another run"
        )
        return Begun(run, "is continued on")

    store = runs.print_warnings_at_exit(submitter.store)
    return begin(store, start, ending)
