"""cloudtrain fit: show on which GPUs a training fits."""

from __future__ import annotations

from functools import partial

from cloudtrain.backends import machines
from cloudtrain.backends.api import Plan
from cloudtrain.cli.view import options, terminal
from cloudtrain.cli.view.jobs import parse_job_words
from cloudtrain.errors import BadRequest, page
from cloudtrain.forecast import devices, fit, layout
from cloudtrain.runs.planning import fit_check
from cloudtrain.runs.planning.plan import Planner


@options.command()
@partial(
    options.job_options,
    gpus="GPUs of a node to try, several separated by commas: A100-80GB:8,H100:8. "
    "Default: the job's own GPUs; if it names none, one GPU of each type that cloudtrain knows.",
    args="Arguments of SCRIPT or of --module. They do not change the result.",
    target="Use the options of this backend or target of cloudtrain.toml. Nothing runs there. Default: the job's own target.",
)
@options.json_option
def command(words: options.JobWords, target: str | None, as_json: bool) -> int:
    """Show on which GPUs a training fits, and how to use less memory.

    It works for the shared trainer (cloudtrain's own training program, `trainer: true`), and for a job file with a
    `fit` section. A script alone does not name its model. It is refused (exit code 2), unless --set gives
    fit.model, fit.batch and fit.sequence. It prints how much memory the training needs on one GPU, and the settings
    that lower it. Nothing is run or packaged, and no network is used. The exit code is 0, whether the training fits
    or not.

    \b
    cloudtrain fit job.yaml
    cloudtrain fit job.yaml --gpus A100-80GB:8,H100:8,L4:4
    """
    given = words.gpus.split(",") if words.gpus else []
    first = parse_job_words(words._replace(gpus=given[0] if given else None))
    if isinstance(first, Plan):
        raise BadRequest(
            "fit takes a job file or script, not a plan: `cloudtrain plan` has already checked the memory",
            "give the job file: cloudtrain fit job.yaml",
        )
    planner = Planner(target)
    if not given:
        own = planner.resolve(first.job, first.sets).job
        own, _ = machines.with_gpus(own, machines.find_node(own.resources.instance_type or ""))
        gpus = own.resources.accelerators if own.resources.gpus else None
        given = gpus if isinstance(gpus, list) else [gpus] if gpus else [f"{name}:1" for name in devices.SIZES]
    found: dict[str, fit.Fit] = {}
    for gpus in given:
        settings = [text for text in first.sets if not text.startswith("resources.accelerators=")]
        job = planner.resolve(first.job, (*settings, f"resources.accelerators={gpus}")).job
        job = layout.freeze(job)[0] if job.parallelism.strategy == "auto" else job
        known = fit_check.training_of(job, job.parallelism.model_dump(mode="json"), job.main_nodes, job.processes)
        if known is None:
            raise BadRequest(
                "the job does not describe its model",
                "add fit: {model: ..., batch: ..., sequence: ...} to the job file",
            )
        if isinstance(known, str):
            raise BadRequest(known, f"name a folder with a config.json, or a model of {page('fit')}")
        found[gpus] = fit.answer(known, job.resources.accelerator or "GPU", max(job.processes, job.resources.gpus))
    if as_json:
        terminal.print_json({gpus: answer.to_dict() for gpus, answer in found.items()})
        return 0
    rows = [
        (gpus, f"{answer.memory / fit.GIB:.1f}" if answer.memory else "?", f"{answer.low / fit.GIB:.1f}",
         f"{answer.high / fit.GIB:.1f}", answer.answer)
        for gpus, answer in found.items()
    ]  # fmt: skip
    terminal.print_table(
        ("gpus", "GiB each", "needs from", "to", "answer"), rows, right=("GiB each", "needs from", "to")
    )
    gpus, shown = next(iter(found.items()))
    terminal.print_lines("", f"allocated on one GPU of {gpus}, where it is highest ({shown.where}):")
    terminal.print_pairs((name, f"{size / fit.GIB:8.2f} GiB") for name, size in shown.terms.items())
    terminal.print_pairs([("not measured", ", ".join(shown.open)), ("less", shown.hint.replace("; ", "\n"))])
    return 0
