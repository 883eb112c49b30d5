"""cloudtrain eval: evaluate the model of a run."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from cloudtrain.cli.view import options, runs, terminal
from cloudtrain.cli.view.follow import Begun, begin

if TYPE_CHECKING:
    from cloudtrain.runs.run import Run


@options.command()
@options.run_named
@click.option(
    "--data",
    metavar="FILE",
    help="Texts, conversations or labelled texts: a txt, jsonl, csv or parquet file, here or in a bucket.",
)
@click.option("--tasks", metavar="NAME[,NAME]", multiple=True, help="Tasks of lm-evaluation-harness; may be repeated.")
@click.option(
    "--include-path", metavar="DIR", help="A folder with YAML files of your own tasks. It is uploaded with the job."
)
@click.option(
    "--prompt",
    "prompts",
    metavar="TEXT",
    multiple=True,
    help="Let the model continue a text, or answer it if RUN has task: chat, and log the result; may be repeated.",
)
@click.option("--every-checkpoint", is_flag=True, help="Evaluate the run's checkpoints too, each at its step.")
@click.option(
    "--limit", metavar="N", type=click.IntRange(1), help="Use only the first N samples of the data and of each task."
)
@options.target_option_with(f"{options.WHERE} The default is the target of RUN.")
@options.sets_option_with(
    "Set a value of the evaluation's job, as in --set resources.accelerators=L4:1; may be repeated."
)
@click.option("--key", metavar="KEY", help="A name for this evaluation: starting it again returns the same run.")
@options.force_option
@partial(options.ending_options, of="evaluation")
def command(
    run_id: str,
    data: str | None,
    tasks: tuple[str, ...],
    include_path: str | None,
    prompts: tuple[str, ...],
    every_checkpoint: bool,
    limit: int | None,
    target: str | None,
    sets: tuple[str, ...],
    key: str | None,
    force: bool,
    ending: options.Ending,
) -> int:
    """Evaluate the model of a run, in a job of its own.

    Give --data, --tasks, --prompt, or several of them. The job runs on the target of RUN, or on the one of --target. If
    RUN has not ended, the job starts once RUN has SUCCEEDED; a RUN that has failed is refused. Once the job has
    SUCCEEDED, its results are metrics of RUN: `eval/test/loss` for test.jsonl, `eval/arc_easy/acc` for a task.
    Evaluating again replaces results of the same name and step, also with another --limit. Each call starts another
    job; calls with the same --key start one. With -f and --wait the exit code is the evaluation's, not the one of RUN.

    \b
    cloudtrain eval tiny-lm-261125 --data test.jsonl --wait
    cloudtrain eval tiny-lm-261125 --data test.jsonl --every-checkpoint
    cloudtrain eval tiny-lm-261125 --tasks arc_easy,hellaswag -t prod
    cloudtrain ls "metric.eval/test/loss<2.5" --columns metric.eval/test/loss
    """
    evaluated = runs.find(run_id)
    confirm = terminal.confirmer(yes=ending.yes, as_json=ending.as_json)
    names = [name for text in tasks for name in text.split(",") if name]

    def start() -> Begun:
        run = evaluated.evaluate(
            data,
            tasks=names,
            include_path=include_path,
            prompts=prompts,
            every_checkpoint=every_checkpoint,
            limit=limit,
            target=target,
            sets=sets,
            key=key,
            confirm=confirm,
            force=force,
        )
        return Begun(run, "was already submitted to" if run.adopted else "submitted to")

    code = begin(evaluated.store, start, ending)
    if (ending.follow or ending.wait) and code == 0 and not ending.as_json:
        _print_results(evaluated)
    return code


def _print_results(run: Run) -> None:
    """Print the newest results of all evaluations of a run."""
    from cloudtrain.history.evaluations import PREFIX

    rows = [
        (summary.name, f"{summary.last:.6g}", str(summary.step))
        for summary in run.store.curves.summary(run.run_id)
        if summary.name.startswith(PREFIX)
    ]
    terminal.print_lines("", f"{run.run_id}  evaluations")
    terminal.print_table(("metric", "value", "step"), rows, right=("value", "step"))
