"""cloudtrain rerun: start a new run of the same job."""

from __future__ import annotations

import click

from cloudtrain.cli.view import options, runs, terminal
from cloudtrain.cli.view.follow import Begun, begin


@options.command()
@options.run_named
@options.sets_option
@click.option(
    "--source", metavar="DIR", type=click.Path(), help="Package this folder instead of using the run's source."
)
@click.option(
    "--key", metavar="KEY", help="Idempotency key: repeating the command with the same key returns the same new run."
)
@options.force_option
@options.ending_options
def command(
    run_id: str,
    sets: tuple[str, ...],
    source: str | None,
    key: str | None,
    force: bool,
    ending: options.Ending,
) -> int:
    """Start a new run of the same job.

    The new run has the source and the values with which RUN was submitted, except what --source and --set replace.
    Values that a `resume --set` of RUN changed are not taken over. The new run goes to the target of RUN's newest
    attempt. RUN does not change; the new run has an id of its own and names RUN as its parent. Each call starts a
    new run, unless --key is given.

    \b
    cloudtrain rerun tiny-lm-261125 --set hyperparameters.learning_rate=1e-4 -f
    cloudtrain rerun tiny-lm-261125 --source .
    """
    parent = runs.find(run_id)
    confirm = terminal.confirmer(yes=ending.yes, as_json=ending.as_json)

    def start() -> Begun:
        return Begun(parent.rerun(sets=sets, source=source, key=key, confirm=confirm, force=force), "submitted to")

    return begin(parent.store, start, ending)
