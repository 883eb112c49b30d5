"""cloudtrain attach: add a run that was submitted elsewhere to the history."""

from __future__ import annotations

import click

from cloudtrain.cli.view import options, runs, summary, terminal


@options.command()
@click.argument("uri", metavar="URI")
@click.option("--all", "everything", is_flag=True, help="URI is a team's output: add all runs below it.")
@click.option("--again", is_flag=True, help="With --all, also read runs that had ended: they may have been resumed.")
@options.json_option
def command(uri: str, everything: bool, again: bool, as_json: bool) -> int:
    """Add a run that was submitted elsewhere to the history here.

    URI is the run's folder in its job's output: a path, s3:// or gs://. `show`, `logs` and `metrics` then work on it as on
    a run of your own. `cloudtrain attach URI` a second time reads what is new since then. The run cannot be cancelled or
    rerun from here. `cloudtrain resume` starts its next attempt here, with the job and the source in its output.

    With --all, URI is the `output` that the jobs of a team name. All runs below it are added, for `ls`, `costs` and the
    console. A second time it reads the new runs and those that had not ended. Nothing is written there.

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
            ("backend", summary.describe_target(attempts[-1].plan)),
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
            terminal.note(f"{done} of {total} runs read")

    found = attach_all(uri, runs.open_history().home, again=again, progress=progress)
    if as_json:
        terminal.print_json(found._asdict(), indent=2)
        return 0
    total = sum(map(len, found[:5]))
    terminal.print_lines(f"{total} runs below {uri}", style="bold")
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
    terminal.print_pairs([("next", "cloudtrain ls --columns user,state,took")])
    return 0
