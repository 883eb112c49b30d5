"""cloudtrain report: write a run into one HTML file."""

from __future__ import annotations

from pathlib import Path

import click

from cloudtrain.cli.view import options, runs, terminal
from cloudtrain.errors import BadRequest
from cloudtrain.job.units import format_size


@options.command()
@options.run_or_newest
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="The file; default: RUN.html here."
)
@options.rank_option
@options.json_option
def command(run_id: str | None, output: Path | None, rank: int | None, as_json: bool) -> int:
    """Write a report on a run as one HTML file.

    The default RUN is the newest. The file has curves, hardware usage, provenance, job, plan and the logs of all nodes, and
    works offline. It needs plotly, which pip install 'cloudtrain[console]' installs.

    \b
    cloudtrain report tiny-lm-26 -o report.html
    """
    run = runs.find(run_id)
    run.refresh()
    path = output or Path(f"{run.run_id}.html")
    try:
        run.report(path, rank=rank)
    except OSError as error:
        raise BadRequest(f"{path} cannot be written: {error.strerror}", "choose another file with -o") from None
    size = path.stat().st_size
    if as_json:
        terminal.print_json({"run_id": run.run_id, "path": str(path), "size_bytes": size})
    else:
        terminal.print_lines(f"{path}  {format_size(size)}")
    return 0
