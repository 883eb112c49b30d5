"""cloudtrain show: show a run, or with --origin every value of a job and where it was set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cloudtrain.backends import registry
from cloudtrain.backends.api import Plan
from cloudtrain.cli.view import options, planned, provenance, runs, summary, terminal, timeline
from cloudtrain.errors import BadRequest
from cloudtrain.events import State

if TYPE_CHECKING:
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.runs.run import Run


@options.command()
@options.argument(
    "run_or_job",
    "[RUN|JOB]",
    f"{options.RUN} {options.NEWEST} With --origin: a job file or script; default: job.yaml in this folder.",
    shell_complete=options.complete_runs,
)
@click.option(
    "--patch",
    is_flag=True,
    help="Print the uncommitted changes that were submitted, for git apply; "
    "standard error names each file that the patch lacks, and why (for example too large).",
)
@click.option("--requirements", is_flag=True, help="Print the packages installed on node 0, as pip freeze does.")
@click.option("--health", is_flag=True, help="Print what was measured on each node before the ranks started.")
@click.option(
    "--origin", is_flag=True, help="Show every value of a job file or script, defaults too, and where it was set."
)
@options.target_option_with(f"With --origin only. {options.WHERE} The default is the job's own target.")
@options.sets_option_with(
    "With --origin only: set a value of the job, as in --set hyperparameters.lr=1e-4; may be repeated."
)
@options.verbose_option
@options.json_option
def command(
    run_or_job: str | None,
    patch: bool,
    requirements: bool,
    health: bool,
    origin: bool,
    target: str | None,
    sets: tuple[str, ...],
    verbose: bool,
    as_json: bool,
) -> int:
    """Show a run: its state, attempts, times and job.

    --verbose also prints what it was made of, its whole job and the launcher's manifest. With --origin it shows a job file
    instead of a run: all its values, defaults included, each with the file and line that set it. The exit code is 0
    also for a failed run.

    \b
    cloudtrain show
    cloudtrain show tiny-lm-261125 --json
    cloudtrain show tiny-lm-261125 --patch | git apply
    cloudtrain show job.yaml --origin -t prod
    """
    if origin:
        return _print_origins(run_or_job, target, sets, as_json)
    if target or sets:
        raise click.UsageError("--target and --set need --origin")
    run = runs.find(run_or_job)
    if patch:
        return provenance.print_patch(run)
    run.refresh(lambda _: None)  # where there is no answer, it is printed below
    if requirements:
        return provenance.print_requirements(run)
    if health:
        from cloudtrain.cli.view.health import print_health

        return print_health(run, as_json)
    if as_json:
        terminal.print_json(runs.shown_json(run), indent=2)
    else:
        _print_run(run, verbose)
    return 0


def _print_run(run: Run, verbose: bool) -> None:
    from cloudtrain.runs import progress
    from cloudtrain.runs.planning import candidates, spend

    record, attempts = run.record, run.attempts
    status, plan = record.status, attempts[-1].plan
    failed = status.exit_code is not None and status.exit_code != 0
    described = runs.describe_end(status, attempts) if status.state.final else runs.describe_live(run.store, record)
    terminal.print_lines(f"{run.run_id}  {described}", style=f"bold {runs.STYLES.get(status.state.value, '')}")
    terminal.print_pairs(
        [
            ("reason", status.reason if status.state.final else ""),
            ("platform", run.unanswered()),
            ("watcher", _lacking(run)),
            *summary.verdict_rows(run.verdict()),
            ("exit code", str(status.exit_code) if failed else ""),
            ("metrics", summary.describe_unread(run)),
            ("metrics", summary.describe_not_finite(run)),
            ("metrics", summary.last_metrics(run)),
            *summary.location_rows(run),
            *summary.not_kept_rows(run),
            *(summary.rows_after(run, status) if status.state.final else ()),
            ("attached", f"from {record.attached}" if record.attached else ""),
            ("backend", planned.describe_target(plan)),
            ("world", planned.describe_nodes(plan)),
            ("limit", planned.describe_limit(plan)),
            ("attempts", _describe_used(run, attempts[-1])),
            ("not tried", candidates.describe_left_out(plan.candidates)),
            *(("runs", each) for each in planned.describe_commands(plan)),
            ("source", planned.describe_source(plan)),
            ("parent", record.parent or ""),
            *runs.chain_rows(run),
            ("key", record.key or ""),
            ("handle", "" if record.attached else attempts[-1].handle or _unaccepted_state(attempts[-1])),
            ("page", status.url or ""),
            ("created", runs.describe_time(record.created_at)),
            ("started", runs.describe_time(status.started_at)),
            ("ended", runs.describe_time(status.ended_at)),
            ("progress", found.line if (found := progress.of_run(run.store, attempts)) else ""),
            ("forecast", progress.describe_forecast(attempts, run.store.home)),
            ("spent", planned.in_currency(spend.describe_run(attempts, run.store.home))),
            ("cap", planned.in_currency(spend.describe_cap(attempts, run.store.home))),
            ("billed", summary.describe_billing(attempts)),
            *(("warning", text) for text in summary.remarks(run, "incomplete")),
        ]
    )
    timeline.print_timeline(run)
    if verbose:
        provenance.print_provenance(run)
        terminal.print_lines("", "job")
        job = record.job.items()
        terminal.print_pairs((key, _inline(value)) for key, value in job if key not in _SHOWN_ABOVE)
        planned.print_manifest(plan)


def _describe_used(run: Run, newest: AttemptRecord) -> str:
    """Return how many attempts of those that the job allows are used; "" where there is one and no other is allowed."""
    from cloudtrain.runs.sending import retry

    most = int((newest.plan.job.get("retry") or {}).get("max_attempts", 1))
    used = retry.rounds(run.store, newest.plan, newest.status)[0]
    if most == used == 1 or run.record.attached:
        return ""
    return f"{used} of {most} (retry.max_attempts)" if used <= most else f"{used} (retry.max_attempts is {most})"


def _lacking(run: Run) -> str:
    """Return which variables of its shell a run's watcher does not have, and how it gets them; "" for none."""
    stored = run.store.environments([run.run_id]).get(run.run_id)
    if stored is None or not stored.lacking or run.record.status.state.final:
        return ""
    return (
        f"a next attempt needs {', '.join(stored.lacking)}, which the watcher does not have:"
        " any cloudtrain command from a shell that has it hands it over"
    )


def _unaccepted_state(attempt: AttemptRecord) -> str:
    from cloudtrain.runs.planning import upstream
    from cloudtrain.runs.sending import outcomes

    if attempt.status.state is State.CANCELLED:
        return "not sent"
    if attempt.status.state.final:
        return "refused"
    if upstream.is_held(attempt):
        return "not sent yet"
    if attempt.unanswered_since is None:
        return "not accepted yet"
    if outcomes.is_unsent(attempt):
        return f"not sent yet (tries: {attempt.tries})"
    return f"unknown since {attempt.unanswered_since[:19]}Z (tries without an answer: {attempt.tries})"


def _inline(value: object) -> str:
    """Return a value of the job on one line, without empty parts."""
    if isinstance(value, dict):
        inner = {key: _inline(item) for key, item in value.items() if item is not None and item != {} and item != []}
        return ", ".join(
            f"{key}: {{{text}}}" if isinstance(value[key], dict) else f"{key}: {text}" for key, text in inner.items()
        )
    return "" if value in (None, "", []) else _text(value)


_SHOWN_ABOVE = ("name", "source", "entrypoint", "args", "num_nodes", "target", "processes_per_node", "after")


def _print_origins(argument: str | None, target: str | None, sets: tuple[str, ...], as_json: bool) -> int:
    from cloudtrain.cli.view.jobs import parse_job_words
    from cloudtrain.job import targets

    job_input = parse_job_words(options.JobWords(argument, sets=sets))
    if isinstance(job_input, Plan):
        raise BadRequest(
            "--origin needs a job file: a plan does not record where its values were set",
            "give the job file instead of the plan",
        )
    resolved = targets.resolve(job_input.job, job_input.sets, target=target, backends=registry.names())
    data = resolved.job.to_dict() | {"options": {resolved.backend: dict(resolved.options)}, "target": resolved.target}
    script = "" if isinstance(job_input.job, Path) else "the script"
    rows = [
        (path, _value_at(data, path), script if script and origin == "Job" else origin)
        for path, origin in sorted(resolved.origins.items())
    ]
    if as_json:
        terminal.print_json(
            [{"path": path, "value": value, "origin": origin} for path, value, origin in rows], indent=2
        )
    else:
        terminal.print_table(("value", "", "from"), [(path, _text(value), origin) for path, value, origin in rows])
    return 0


def _value_at(data: object, path: str) -> object:
    """Return the value at a dotted path; keys may contain dots."""
    if not path:
        return data
    if isinstance(data, dict):
        for key, inner in data.items():
            if path == key or path.startswith((f"{key}.", f"{key}[")):
                return _value_at(inner, path[len(key) :].lstrip("."))
    if isinstance(data, list) and path.startswith("["):
        index, _, rest = path[1:].partition("]")
        return _value_at(data[int(index)], rest.lstrip(".")) if index.isdigit() and int(index) < len(data) else None
    return None


def _text(value: object) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
