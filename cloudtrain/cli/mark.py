"""cloudtrain mark: what people write to runs."""

from __future__ import annotations

from dataclasses import asdict

import click

from cloudtrain.cli.view import options, runs, terminal


@options.command()
@click.argument("run_ids", nargs=-1, required=True, metavar="RUN...", shell_complete=options.complete_runs)
@click.option("--title", help="Set a title, shown in lists; the id does not change.")
@click.option("--note", help="Replace the note.")
@click.option("--tag", multiple=True, help="Add a tag; may be repeated.")
@click.option("--untag", multiple=True, metavar="TAG", help="Remove a tag; may be repeated.")
@click.option("--star/--no-star", default=None, help="Add or remove the star.")
@click.option("--archive/--no-archive", default=None, help="Hide the run in lists, or show it again.")
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
    """Write a title, a note or tags to runs, star or archive them.

    Without options it prints the current values. `cloudtrain ls is:archived` lists archived runs.

    \b
    cloudtrain mark tiny-lm-26 --tag baseline --star
    cloudtrain mark tiny-lm-26 --title "warmup 500" --note "diverged at step 900"
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
