"""cloudtrain resume: start a run's next attempt from its newest checkpoint."""

from __future__ import annotations

import click

from cloudtrain.cli.view import options, runs
from cloudtrain.cli.view.follow import Begun, begin


@options.command()
@options.run_named
@click.option("--set", "sets", metavar="KEY=VALUE", multiple=True, help="Change a limit: limits.max_cost=80USD.")
@options.ending_options
@options.json_option
def command(run_id: str, sets: tuple[str, ...], follow: bool, wait: bool, on_interrupt: str, as_json: bool) -> int:
    """Start a run's next attempt from its newest checkpoint.

    The same run under the same id, from the newest complete checkpoint of any of its attempts. A run that continues or
    has succeeded is refused. With -f only the new attempt's log is followed.
    """
    options.check_exclusive(follow, wait)
    run = runs.find(run_id)

    def start() -> Begun:
        run.resume(sets=sets)
        return Begun(run, "resumed on", after=f"{run.attempts[-1].number}/")

    return begin(run.store, start, follow=follow, wait=wait, on_interrupt=on_interrupt, as_json=as_json)
