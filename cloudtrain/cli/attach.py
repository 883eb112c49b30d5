"""cloudtrain attach: add a run that was submitted elsewhere to the history."""

from __future__ import annotations

import click

from cloudtrain.cli.view import options, planned, runs, summary, terminal
from cloudtrain.job.units import format_count


@options.command()
@options.argument(
    "uri",
    "URI",
    "The folder of the run in its job's output (with --all the whole output): a path, s3://, gs:// or az://.",
)
@click.option("--all", "everything", is_flag=True, help="Add all runs below URI, a team's output.")
@click.option(
    "--again", is_flag=True, help="With --all, also read runs again that had ended: they may have been resumed since."
)
@options.json_option
def command(uri: str, everything: bool, again: bool, as_json: bool) -> int:
    """Add a run that was submitted elsewhere to the history here.

    `show`, `logs` and `metrics` then work on it as on a run of your own: each reads what is new in the attempts
    that attach found. Repeat attach to add an attempt that started later. An attached run cannot be cancelled or
    rerun from this computer, also when it has ended. Then `cloudtrain resume` can start its next attempt from here,
    with the job and the source in its output. attach writes nothing to the output.

    With --all, URI is the `output` in the job files of a team. All runs below it are added: all these commands,
    `ls`, `costs` and the console work on each. When you repeat it, it reads new runs, and those that had not ended.

    \b
    cloudtrain attach --all s3://bucket/runs
    cloudtrain attach s3://bucket/runs/tiny-lm-261120-101500-ab3d
    cloudtrain attach /shared/runs/tiny-lm-261120-101500-ab3d --json
    """
    from cloudtrain.runs.attach import attach

    if again and not everything:
        raise click.UsageError("--again works only together with --all")
    if everything:
        return _attach_all(uri, again, as_json)
    run = attach(uri, runs.open_history().home)
    if as_json:
        terminal.print_json(runs.shown_json(run), indent=2)
        return 0
    record, attempts = run.record, run.attempts
    origin = (
        f"attached from {record.attached}"
        if record.attached
        else "was submitted from this machine: it is already in the history"
    )
    status = runs.describe_end(record.status) if record.status.state.final else str(record.status.state)
    terminal.print_lines(f"{run.run_id}  {origin}", style="bold")
    terminal.print_pairs(
        [
            ("state", status),
            ("reason", record.status.reason),
            ("attempts", str(len(attempts))),
            ("backend", planned.describe_target(attempts[-1].plan)),
        ]
    )
    summary.print_next_commands(
        run.run_id, "show", "logs", "metrics", "fetch", *(["resume"] if record.status.failed else [])
    )
    return 0


def _attach_all(uri: str, again: bool, as_json: bool) -> int:
    from cloudtrain.runs.attach import attach_all

    def progress(done: int, total: int) -> None:
        if total > done:
            terminal.note(f"{done:,} of {format_count(total, 'run')} read")

    found = attach_all(uri, runs.open_history().home, again=again, progress=progress)
    if as_json:
        terminal.print_json(found._asdict(), indent=2)
        return 0
    total = sum(map(len, found[:5]))
    terminal.print_lines(f"{format_count(total, 'run')} below {uri}", style="bold")
    terminal.print_pairs(
        [
            ("new", str(len(found.added))),
            ("read again", str(len(found.updated))),
            ("by index", str(len(found.indexed)) if found.indexed else ""),
            ("had ended", str(len(found.ended))),
            (
                "from here",
                f"{len(found.own)}: submitted from this machine, or attached from elsewhere" if found.own else "",
            ),
            ("not read", str(len(found.unreadable)) if found.unreadable else ""),
        ]
    )
    for name, reason in list(found.unreadable.items())[:5]:
        terminal.note(f"{name}: {reason}")
    terminal.print_pairs([("next", "cloudtrain ls --columns user,took")])
    return 0
