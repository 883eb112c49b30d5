"""cloudtrain fetch: results onto this machine."""

from __future__ import annotations

import os
from pathlib import Path

import click

from cloudtrain.backends.api import FETCHABLE
from cloudtrain.cli.view import options, runs, terminal
from cloudtrain.errors import BadRequest

PLACES = {
    "model": "$CLOUDTRAIN_MODEL_DIR",
    "outputs": "$CLOUDTRAIN_OUTPUT_DIR",
    "checkpoints": "$CLOUDTRAIN_CHECKPOINT_DIR",
}


@options.command()
@options.run_or_newest
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    required=True,
    type=click.Path(),
    help="Folder that gets model/, outputs/ and checkpoints/.",
)
@click.option("--what", multiple=True, type=click.Choice(FETCHABLE), help="Only this; may be repeated.")
@options.json_option
def command(run: str | None, output: str, what: tuple[str, ...], as_json: bool) -> int:
    """Copy a run's model, outputs and checkpoints into a folder.

    Without RUN it is the newest. They lie in model/, outputs/ and checkpoints/ below the folder; what is there already
    and equal is not copied again where the backend can tell.

    \b
    cloudtrain fetch -o out/
    cloudtrain fetch tiny-lm-26 -o out/ --what model
    """
    into = Path(output)
    if into.exists() and not into.is_dir():
        raise BadRequest(f"{into} is no folder", "name another one with -o")
    found = runs.find(run)
    status = found.refresh()
    found.fetch(into, what or FETCHABLE)
    got = {name: _contents(into / name) for name in (what or FETCHABLE)}
    if as_json:
        folders = {name: {"files": files, "size_bytes": size} for name, (files, size) in got.items()}
        terminal.print_json({"run_id": found.run_id, "into": str(into), "state": status.state.value, **folders})
        return 0
    for name, (files, size) in got.items():
        if files:
            terminal.say(f"{into / name}  {files} file{'s' * (files != 1)}, {runs.size(size)}")
    if not any(files for files, _ in got.values()):
        terminal.note(f"{found.run_id} has left no {' or '.join(got)}" + ("" if status.state.final else " yet"))
        terminal.note(f"  a script leaves them in {', '.join(PLACES[name] for name in got)}")
    elif not status.state.final:
        terminal.note(f"{found.run_id} is still {status.state}: this is what there was")
    return 0


def _contents(folder: Path) -> tuple[int, int]:
    """Return how many files a folder holds and their bytes."""
    count = size = 0
    for at, _, names in os.walk(folder):
        count += len(names)
        size += sum(os.lstat(os.path.join(at, name)).st_size for name in names)  # noqa: PTH118
    return count, size
