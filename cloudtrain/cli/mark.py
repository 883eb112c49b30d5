"""cloudtrain mark: what people write to runs."""

from __future__ import annotations

from dataclasses import asdict

import click

from cloudtrain.cli.view import options, runs, terminal


@options.command()
@options.argument("run_ids", "RUN...", options.RUNS, nargs=-1, shell_complete=options.complete_runs)
@click.option(
    "--title",
    help="Set the title, which lists show. It replaces an earlier one, and '' removes it; the id does not change.",
)
@click.option("--note", help="Set the note. It replaces an earlier one, and '' removes it.")
@click.option("--tag", multiple=True, help="Add a tag; may be repeated.")
@click.option("--untag", multiple=True, metavar="TAG", help="Remove a tag; may be repeated.")
@click.option("--star/--no-star", default=None, help="Add or remove the star.")
@click.option(
    "--archive/--no-archive", default=None, help="Hide the run in `cloudtrain ls` and the console, or show it again."
)
@options.json_option
def command(
    run_ids: tuple[str, ...],
    title: str | None,
    note: str | None,
    tag: tuple[str, ...],
    untag: tuple[str, ...],
    star: bool | None,
    archive: bool | None,
    as_json: bool,
) -> int:
    """Set the title, note, tags or star of runs, or archive them.

    Without options it prints their title, note and tags. `cloudtrain ls is:archived` lists archived runs. `cloudtrain
    rm --ended` and `rm --older` keep runs with a star. `cloudtrain rm --older 30d` without a filter deletes archived
    runs too.

    \b
    cloudtrain mark tiny-lm-261125 --tag baseline --star
    cloudtrain mark tiny-lm-261125 --title "warmup 500" --note "diverged at step 900"
    """
    for run in [runs.find(run_id) for run_id in run_ids]:
        marks = run.mark(title=title, note=note, tag=tag, untag=untag, star=star, archive=archive)
        about = {"run_id": run.run_id, **asdict(marks)}
        if as_json:
            terminal.print_json(about)
            continue
        flags = [name for name in ("starred", "archived") if about[name]]
        terminal.print_lines(run.run_id)
        terminal.print_pairs(
            [("title", marks.title), ("note", marks.note), ("tags", ", ".join(marks.tags)), ("is", ", ".join(flags))]
        )
    return 0
