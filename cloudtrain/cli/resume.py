"""cloudtrain resume: start a run's next attempt from its newest checkpoint."""

from __future__ import annotations

from cloudtrain.cli.view import options, runs, terminal
from cloudtrain.cli.view.follow import Begun, begin


@options.command()
@options.run_named
@options.target_option_with(f"{options.WHERE} The default is the target of the newest attempt.")
@options.sets_option_with(
    "Change one of the run's keys, as in --set limits.max_cost=80USD; this one counts all attempts. May be repeated; the last "
    "value of a key counts."
)
@options.layout
@options.force_option
@options.take_over_option
@options.ending_options
def command(
    run_id: str,
    target: str | None,
    sets: tuple[str, ...],
    gpus: str | None,
    nodes: str | None,
    processes: str | None,
    force: bool,
    take_over: bool,
    ending: options.Ending,
) -> int:
    """Start a run's next attempt from its newest checkpoint.

    The run keeps its id and its source: changed files need `cloudtrain rerun --source`. The newest complete
    checkpoint of any of its attempts is used. Without any checkpoint the run starts from the beginning. A run that
    is queued, starting or running, or that has succeeded, is refused (exit code 2). A cancelled run can be resumed.
    With -f the log of the new attempt is followed.

    \b
    cloudtrain resume tiny-lm-261125 -t lab --processes 4

    With -t it resumes on another target, which must be able to read the run's output. --set can change these keys:
    limits, resources, num_nodes, min_nodes, processes_per_node, parallelism, options, image, env, environment,
    secrets, inputs, retry, checkpoint, distributed_env, health. Of a role: num_nodes, processes_per_node, ready_timeout and
    restart, as in roles.server.num_nodes. The changes stay for all later attempts, retries and the
    next `resume` included. Changes of the key `options` count only for attempts on the same target. Other values,
    such as hyperparameters, need a new run: `cloudtrain rerun`.
    """
    from cloudtrain.cli.view.jobs import layout_settings

    run = runs.find(run_id)
    changes = (*sets, *layout_settings(gpus, nodes, processes))

    def start() -> Begun:
        confirm = terminal.confirmer(yes=ending.yes, as_json=ending.as_json)
        run.resume(sets=changes, target=target, confirm=confirm, force=force, take_over=take_over)
        return Begun(run, "resumed on", after=f"{run.attempts[-1].number}/")

    return begin(run.store, start, ending)
