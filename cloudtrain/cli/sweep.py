"""cloudtrain sweep: start sweeps, look at them, and change them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cloudtrain.cli.view import options, terminal
from cloudtrain.cli.view.failures import INTERRUPTED
from cloudtrain.job.units import format_count

if TYPE_CHECKING:
    from cloudtrain.history.trials import SweepRecord, TrialRecord
    from cloudtrain.sweeps.sweep import Sweep

EXIT_CODES = {"SUCCEEDED": 0, "CANCELLED": 130}


class _Group(click.Group):
    """A group whose first word is one of its commands, or the file of a sweep to start."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help", "--debug"):
            args = ["start", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=True)
@click.option("--debug", is_flag=True, hidden=True, expose_value=False)
def command() -> None:
    """Run a job many times with different hyperparameters.

    `cloudtrain sweep FILE` is short for `cloudtrain sweep start FILE`: its options, such as -t, --key and --wait,
    are in `cloudtrain sweep start --help-all`. Each trial is a run. The background watcher, a cloudtrain process on
    this computer, starts the trials; without --wait this command returns at once.

    \b
    cloudtrain sweep sweep.yaml -t prod
    cloudtrain sweep show
    cloudtrain sweep best > best.yaml
    """


@command.command("start", cls=options.Command)
@options.argument(
    "file",
    "FILE",
    "A sweep file with the keys of W&B sweeps, in which `job` names a job file or `program` a script. Or a job file with a key "
    "`sweep`, which holds these keys without `job`; plan and submit refuse such a file.",
    type=click.Path(),
)
@options.target_option
@click.option(
    "--key",
    metavar="KEY",
    help="Idempotency key: starting again with the same key returns the same sweep. Another FILE is refused.",
)
@click.option(
    "--wait",
    is_flag=True,
    help="Wait until the sweep has ended. A trial that fails is run once more. The exit code is 0 when a trial has succeeded and "
    "the sweep has ended: all its trials have ended, the `budget` of FILE is used, or a trial has reached `target` of the "
    "metric. It is 1 when none has succeeded, or more than max_failed (a key of FILE) trials failed twice. It is 130 when "
    "the sweep was stopped. Ctrl-C ends the waiting only, also with exit code 130, and the sweep continues.",
)
@options.json_option
def start(file: str, target: str | None, key: str | None, wait: bool, as_json: bool) -> int:
    """Start a sweep; `cloudtrain sweep FILE` is short for it.

    The job is planned and packaged once, so that all trials run the same source. No question is asked about the
    cost: run_cap and budget in FILE limit it. Each call starts a new sweep, unless --key is given.
    """
    from cloudtrain.job.job import read
    from cloudtrain.sweeps.sweep import begin

    document, folder = read(file)
    keys = dict(document.value)
    section = keys.pop("sweep", None)
    sweep = begin(section, folder, job=keys, target=target, key=key) if section else begin(
        document.value, folder, target=target, key=key
    )  # fmt: skip
    for text in sweep.file.notes:
        terminal.note(f"note: {text}")
    if not wait:
        if as_json:
            terminal.print_json(_json(sweep))
        else:
            terminal.print_lines(f"{sweep.sweep_id}  is started", f"  look  cloudtrain sweep show {sweep.sweep_id}",
                                 f"  end   cloudtrain sweep stop {sweep.sweep_id}")  # fmt: skip
        return 0
    return _wait(sweep, as_json)


def _wait(sweep: Sweep, as_json: bool) -> int:
    try:
        record = sweep.wait()
    except KeyboardInterrupt:
        terminal.note(f"\n{sweep.sweep_id} continues; look with  cloudtrain sweep show {sweep.sweep_id}")
        return INTERRUPTED
    if as_json:
        terminal.print_json(_json(sweep))
    else:
        terminal.print_lines(f"{sweep.sweep_id}  {record.state}: {record.reason}")
        _print_best(sweep)
    return EXIT_CODES.get(record.state, 1)


@command.command("ls", cls=options.Command)
@click.option(
    "-n",
    "--limit",
    default=20,
    show_default=True,
    type=click.IntRange(1, 10_000),
    help="List at most this many sweeps.",
)
@options.json_option
def list_sweeps(limit: int, as_json: bool) -> int:
    """List sweeps, the newest first."""
    from cloudtrain.history.trials import SweepHistory
    from cloudtrain.job.targets import home
    from cloudtrain.sweeps.sweep import Sweep

    sweeps = [Sweep.find(record.sweep_id) for record in SweepHistory(home()).sweeps(limit)]
    for sweep in sweeps:
        sweep.ensure_driven()
    if as_json:
        terminal.print_json([_json(sweep) for sweep in sweeps])
    elif sweeps:
        rows = [_row(sweep) for sweep in sweeps]
        terminal.print_table(("sweep", "state", "trials", "live", "best", "reason"), rows, right=("trials", "live", "best"),
                             spare=("reason",))  # fmt: skip
    else:
        terminal.print_lines("there are no sweeps yet; cloudtrain sweep FILE starts one")
    return 0


def _row(sweep: Sweep) -> tuple[str, ...]:
    record, trials, best = sweep.record, sweep.trials, sweep.best
    live = sum(not trial.ended for trial in trials)
    value = f"{best.result[0]:.6g}" if best and best.result else ""
    return (sweep.sweep_id, record.state, str(len(trials)), str(live), value, record.reason)


SWEEP = "Id of the sweep, as `cloudtrain sweep ls` prints it. Its first characters are enough if no other id begins with them."
_named = options.argument("sweep_id", "SWEEP", SWEEP)
_named_or_newest = options.argument("sweep_id", "[SWEEP]", f"{SWEEP} Default: the newest sweep.")


@command.command("show", cls=options.Command)
@_named_or_newest
@options.json_option
def show(sweep_id: str | None, as_json: bool) -> int:
    """Show a sweep: its state, its best trial, and all trials."""
    from cloudtrain.sweeps.standing import describe_spent

    sweep = _find(sweep_id)
    if as_json:
        terminal.print_json(_json(sweep))
        return 0
    record, file = sweep.record, sweep.file
    searched = [parameter.name for parameter in file.searched]
    terminal.print_lines(f"{sweep.sweep_id}  {record.state}" + (f": {record.reason}" if record.reason else ""))
    _print_best(sweep)
    if used := describe_spent(sweep.spent):
        terminal.print_lines(f"  spent: {used}")
    if shares := _importance(sweep):
        terminal.print_lines("  importance: " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items()))
    names = [metric.name for metric in file.metrics]
    rows = [_trial_row(trial, searched, len(names)) for trial in sweep.trials]
    if rows:
        terminal.print_table(
            ("trial", "state", *names, *searched, "run", "note"), rows, right=("trial", *names, *searched),
            spare=("note",),
        )  # fmt: skip
    return 0


def _trial_row(trial: TrialRecord, searched: list[str], metrics: int) -> tuple[str, ...]:
    from cloudtrain.sweeps.sweep import format_value

    values = [f"{value:.6g}" for value in trial.result] if trial.result else [""] * metrics
    params = [format_value(trial.params.get(name)) for name in searched]
    repeats = f"repeats trial {trial.retry_of}" if trial.retry_of else ""
    failed = trial.reason if trial.state and trial.state.final and trial.state.value != "SUCCEEDED" else ""
    note = trial.stopped or "; ".join(text for text in (repeats, failed) if text)
    state = "deleted" if trial.deleted else trial.state or "not sent"
    return (str(trial.number), state, *values, *params, trial.run_id or "", note)


def _print_best(sweep: Sweep) -> None:
    if best := sweep.best:
        use = "its run was deleted" if best.deleted else f"cloudtrain fetch {best.run_id} -o best"
        terminal.print_lines(f"  best: {sweep.best_text}", f"        {use}")
    if deleted := sum(trial.deleted for trial in sweep.trials):
        terminal.print_lines(f"  deleted: {format_count(deleted, 'run')}; their results are kept here")


def _change(name: str, help: str, how: str) -> None:
    """Add a command that asks one method of a sweep for a change."""

    @_named
    @options.json_option
    def change(sweep_id: str, as_json: bool) -> int:
        sweep = _find(sweep_id)
        getattr(sweep, name)()
        return _changed(sweep, as_json, how)

    command.command(name, cls=options.Command, help=help)(change)


_change(
    "stop",
    "Stop a sweep and cancel its running trials.\n\nIt returns at once; the background watcher, which it starts where none runs, "
    "cancels the trials. Results of trials that have ended stay. stop refuses a sweep that has ended (exit code 2). "
    "`cloudtrain sweep extend` continues a stopped sweep.",
    "will be stopped",
)
_change(
    "pause",
    "Pause a sweep: start no new trials; running trials continue.\n\nRunning trials still cost. `cloudtrain sweep resume` "
    "continues the sweep. `cloudtrain sweep start --wait` waits while it is paused. A sweep that is paused or has ended is "
    "refused (exit code 2).",
    "is paused",
)
_change("resume", "Resume a paused sweep.\n\nAny other sweep is refused (exit code 2).", "continues")


@command.command("extend", cls=options.Command)
@_named
@click.option("--trials", required=True, metavar="N", type=click.IntRange(1), help="Number of trials to add.")
@options.json_option
def extend(sweep_id: str, trials: int, as_json: bool) -> int:
    """Raise the number of trials of a sweep.

    A sweep that has ended or was stopped continues, with the added trials and those of its budget that have not
    run. It ends again at once where its goal was reached, its hours or USD are used, more than max_failed trials
    have failed twice, or no trial can have a result. Each call adds N more. A sweep whose file limits only hours or
    USD is refused (exit code 2).
    """
    sweep = _find(sweep_id)
    sweep.extend(trials)
    return _changed(sweep, as_json, f"runs {trials} trials more")


@command.command("rerun-failed", cls=options.Command)
@_named
@options.json_option
def rerun_failed(sweep_id: str, as_json: bool) -> int:
    """Start failed trials once more, each as a new run.

    While a sweep runs, each failed trial is repeated once. This command repeats the trials of which both runs have
    failed. A second call repeats only those that have failed again since.
    """
    sweep = _find(sweep_id)
    count = sweep.rerun_failed()
    return _changed(
        sweep, as_json, f"repeats {format_count(count, 'trial')}" if count else "has no trial that failed twice"
    )


@command.command("best", cls=options.Command)
@_named_or_newest
@options.json_option
def best(sweep_id: str | None, as_json: bool) -> int:
    """Print the best trial's job file.

    Without any trial that has SUCCEEDED the exit code is 2. `cloudtrain submit` takes the file:

    \b
    cloudtrain sweep best > best.yaml
    cloudtrain submit best.yaml
    """
    from cloudtrain.errors import BadRequest
    from cloudtrain.sweeps.send import job_of_trial

    sweep = _find(sweep_id)
    found = sweep.best
    if found is None:
        deleted = sum(trial.deleted for trial in sweep.trials)
        more = f"; {format_count(deleted, 'run')} of it were deleted" if deleted else " yet"
        raise BadRequest(f"no trial of {sweep.sweep_id} has a result{more}", f"cloudtrain sweep show {sweep.sweep_id}")
    job = job_of_trial(sweep.file, found.params)
    if as_json:
        terminal.print_json({"run": found.run_id, "result": found.result, "params": dict(found.params), "job": job})
    else:
        import yaml

        terminal.print_raw(
            yaml.safe_dump({key: value for key, value in job.items() if value}, sort_keys=False).rstrip()
        )
    return 0


def _importance(sweep: Sweep) -> dict[str, float]:
    from cloudtrain.errors import MissingExtra

    try:
        return sweep.importance
    except MissingExtra as error:
        terminal.note(f"note: {error}")
        return {}


def _find(sweep_id: str | None) -> Sweep:
    from cloudtrain.sweeps.sweep import Sweep

    sweep = Sweep.find(sweep_id)
    sweep.ensure_driven()
    return sweep


def _changed(sweep: Sweep, as_json: bool, how: str) -> int:
    if as_json:
        terminal.print_json(_json(sweep))
    else:
        terminal.print_lines(f"{sweep.sweep_id}  {how}")
    return 0


def _json(sweep: Sweep) -> dict[str, Any]:
    record: SweepRecord = sweep.record
    found = sweep.best
    return {
        "sweep_id": sweep.sweep_id,
        "state": record.state,
        "reason": record.reason,
        "created_at": record.created_at,
        "ended_at": record.ended_at,
        "metrics": [metric.name for metric in sweep.file.metrics],
        "best": _trial_json(found) if found else None,
        "importance": _importance(sweep),
        "spent": {"hours": (used := sweep.spent).hours, "usd": used.usd},
        "trials": [_trial_json(trial) for trial in sweep.trials],
    }


def _trial_json(trial: TrialRecord) -> dict[str, Any]:
    return {
        "number": trial.number,
        "run_id": trial.run_id,
        "state": trial.state,
        "params": dict(trial.params),
        "result": trial.result,
        "target": trial.target,
        "deleted": trial.deleted,
        "retry_of": trial.retry_of,
        "stopped": trial.stopped,
    }
