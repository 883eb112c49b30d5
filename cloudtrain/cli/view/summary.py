"""Print summaries of a submitted run and a run that ended, why it failed, and the commands to run next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.backends import registry
from cloudtrain.cli.view import planned, runs, terminal
from cloudtrain.events import State, Status
from cloudtrain.job.units import format_duration, format_number

if TYPE_CHECKING:
    from cloudtrain.diagnosis.verdict import Verdict
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.runs.run import Run

LONGEST = 400  # characters of a log line
MOST_METRICS = 5  # in one line
SIGNAL = 128  # exit codes above it: a process was ended by a signal


def print_submitted(run: Run, action: str) -> None:
    """Print the summary of a run that was just submitted, its id first."""
    plan = run.attempts[-1].plan
    planned.print_plan(plan, heading=f"{run.run_id}  {action} {planned.describe_target(plan)}")
    folder = str(run.store.home / "runs" / run.run_id) if registry.traits(plan.backend).in_place else ""
    terminal.print_pairs([("folder", folder)])


def print_next_commands(run_id: str, *names: str) -> None:
    """Print the commands that a user may run next."""
    terminal.print_pairs(next_rows(run_id, *names))


def next_rows(run_id: str, *names: str, options: str = "") -> list[tuple[str, str]]:
    """Return the rows of commands to run next; `options` are those of a longer try, or the evaluated run."""
    lines = {
        "follow": f"cloudtrain logs -f {run_id}",
        "logs": f"cloudtrain logs {run_id}",
        "show": f"cloudtrain show {run_id}",
        "cancel": f"cloudtrain cancel {run_id}",
        "fetch": f"cloudtrain fetch {run_id}",
        "metrics": f"cloudtrain metrics {run_id}",
        "resume": f"cloudtrain resume {run_id}",
        "rerun": f"cloudtrain rerun {run_id}",
        "rerun_fixed": f"cloudtrain rerun {run_id} --source .",
        "evaluate": f"cloudtrain eval {options} ..., with the same options",
        "resume_longer": f"cloudtrain resume {run_id} {options}",
        "rerun_longer": f"cloudtrain rerun {run_id} {options}".rstrip(),
    }
    return [("next" if not number else "", lines[name]) for number, name in enumerate(names)]


def print_end(run: Run, status: Status, last_lines: list[str], *, rank_name: str = "") -> None:
    """Print how a run ended: where its results are, or the last lines of the rank that failed first and the verdict."""
    if last_lines:
        terminal.print_lines("", f"--- the last lines of {rank_name} ---", *last_lines, "")
    line = f"{run.run_id}  {runs.describe_end(status, run.attempts)}" + (f": {status.reason}" if status.reason else "")
    terminal.print_lines(line, style=f"bold {runs.STYLES.get(status.state.value, '')}")
    if status.state is State.SUCCEEDED:
        terminal.print_pairs(
            [
                ("metrics", describe_unread(run)),
                ("metrics", describe_not_finite(run)),
                *location_rows(run),
                ("samples", _samples_location(run)),
                *not_kept_rows(run),
                *rows_after(run, status),
            ]
        )
        return
    terminal.print_pairs([*verdict_rows(run.verdict()), *not_kept_rows(run)])
    terminal.print_pairs(rows_after(run, status))


def describe_unread(run: Run) -> str:
    """Return up to where the log of a run that has ended is read, "" where it is read to its end."""
    if run.record.attached or not run.store.is_unread(run.run_id):
        return ""
    steps = [step for each in run.store.curves.last_steps(run.run_id).values() for step in each.values()]
    return "the log is still being read" + (f"; points so far are up to step {max(steps):,}" if steps else "")


def rows_after(run: Run, status: Status) -> list[tuple[str, str]]:
    """Return the rows of the commands to run after an end; after a success it is one command."""
    if status.state is State.SUCCEEDED:
        has_metrics = bool(run.store.curves.summary(run.run_id))
        return next_rows(run.run_id, "fetch" if _has_results(run) else "metrics" if has_metrics else "logs")
    from cloudtrain.runs.planning import advice

    names = next_after(run, status)
    options = advice.longer_options(run.store, run.run_id) if names[-1].endswith("_longer") else ""
    options = _evaluated_run(run) if names[-1] == "evaluate" else options
    return next_rows(run.run_id, *names, options=options)


def next_after(run: Run, status: Status) -> list[str]:
    """Return the names of the commands to run after an end that is no success."""
    if run.record.attached:
        return ["logs", "fetch"]
    from cloudtrain.runs.sending import retry

    again = "resume" if retry.has_checkpoint(run.store, run.run_id) else "rerun"
    if status.state is State.TIMED_OUT:
        is_limit = (verdict := run.verdict()) is not None and verdict.label == "timeout"
        return ["logs", f"{again}_longer" if is_limit else again]
    if status.state is State.FAILED and _evaluated_run(run):
        return ["logs", "evaluate"]  # its source was made for it: there is none here to correct
    from cloudtrain.diagnosis.verdict import OUTSIDE

    if status.state is State.FAILED:
        verdict, killed = run.verdict(), (status.exit_code or 0) > SIGNAL
        outside = verdict is not None and verdict.label in OUTSIDE
        if outside or (killed and again == "resume"):
            return ["logs", again, "rerun_fixed"]  # not by its own fault, or not surely
    return ["logs", "rerun_fixed" if status.state is State.FAILED else again]


def _evaluated_run(run: Run) -> str:
    """Return the id of the run that this one evaluates; "" where it is no evaluation."""
    from cloudtrain.history.evaluations import LABEL

    return str((run.record.job.get("labels") or {}).get(LABEL, ""))


def describe_not_finite(run: Run) -> str:
    """Return where the run's metrics became NaN or infinite; "" where they did not."""
    from cloudtrain.history import not_finite

    found = not_finite.find(run.store, run.run_id)
    more = f"; {len(found) - 1} more: cloudtrain metrics {run.run_id}" if len(found) > 1 else ""
    return found[0].sentence + more if found else ""


def describe_billing(attempts: Sequence[AttemptRecord]) -> str:
    """Describe the time of all attempts that the platform bills."""
    billed_attempts = [attempt for attempt in attempts if attempt.status.billable_s is not None]
    if not billed_attempts:
        return ""
    seconds = sum(attempt.status.billable_s or 0 for attempt in billed_attempts)
    return f"{format_duration(seconds)} of nodes' time, {seconds:,} s"


def location_rows(run: Run) -> list[tuple[str, str]]:
    """Return where the model and the outputs are; no row where only the platform knows it."""
    output = str(run.record.job.get("output") or "").removeprefix("file://").rstrip("/")
    folder = (Path(output) if output else run.store.home / "runs") / run.run_id
    if output and ("://" in output or not registry.traits(run.record.backend).writes_here):
        return [("model", f"{output}/{run.run_id}/model")]
    return [(name, str(folder / name)) for name in ("model", "outputs") if _has_files(folder / name)]


def last_metrics(run: Run) -> str:
    """Return the last values of a run's first metrics."""
    curves = run.store.curves.summary(run.run_id)
    values = ", ".join(f"{each.name} {format_number(each.last)}" for each in curves[:MOST_METRICS])
    more = f", {len(curves) - MOST_METRICS} more" if len(curves) > MOST_METRICS else ""
    return f"{values}{more} (step {max(each.step for each in curves):,})" if curves else ""


def _has_files(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def remarks(run: Run, what: str) -> list[str]:
    """Return what the newest attempt's nodes say of `not_kept` files or an `incomplete` log at their end."""
    newest = run.attempts[-1].attempt_id
    results = [event for event in run.store.events(run.run_id, "result") if event.attempt == newest]
    last = {event.node: str(event.data.get(what) or "") for event in results}
    texts = {node: text for node, text in last.items() if text}
    return [text if len(texts) == 1 else f"node {node}: {text}" for node, text in sorted(texts.items())]


def not_kept_rows(run: Run) -> list[tuple[str, str]]:
    """Return the rows about files that a run's script wrote where nothing keeps them, and the command that copies them."""
    texts = remarks(run, "not_kept")
    return [*(("not kept", text) for text in texts), *(("", text) for text in (workdir_command(run) if texts else []))]


def workdir_command(run: Run) -> list[str]:
    """Return the command that copies the script's working directory, in a list; [] where the backend cannot."""

    if run.record.attached or not registry.traits(run.record.backend).workdir:
        return []
    return [f"cloudtrain fetch {run.run_id} --what workdir copies the script's working directory"]


def _samples_location(run: Run) -> str:
    """Return where an evaluation's newest samples are: a file here, or one of what `cloudtrain fetch` copies."""
    if not _evaluated_run(run):
        return ""
    logged = [event.data for event in run.store.events(run.run_id, "media") if event.data.get("name") == "samples"]
    if not logged:
        return ""
    file = f"outputs/{logged[-1].get('file')}"
    here = run.store.home / "runs" / run.run_id / file
    return str(here) if here.is_file() else f"{file}, of what cloudtrain fetch copies"


def _has_results(run: Run) -> bool:
    """Return whether there may be something to fetch."""
    record = run.record
    folder = run.store.home / "runs" / run.run_id
    newest = run.attempts[-1].attempt_id
    ended = [event.data for event in run.store.events(run.run_id, "result") if event.attempt == newest]
    if ended and all(data.get("has_results") is False for data in ended):
        return False
    if not registry.traits(record.backend).in_place or record.job.get("output"):
        return True
    return any(_has_files(folder / name) for name in ("model", "outputs", "checkpoints"))


def verdict_rows(verdict: Verdict | None) -> list[tuple[str, str]]:
    """Return the labels and values of a verdict to print; empty for None, and where the reason states the cause."""
    if verdict is None or verdict.only_reason:
        return []
    excerpt = verdict.deciding if len(verdict.deciding) <= LONGEST else verdict.deciding[: LONGEST - 3] + "..."
    location = f"line {verdict.seq} of node {verdict.node}: " if verdict.where == "log" else ""
    return [
        ("why", f"{verdict.sentence} ({verdict.label})"),
        ("log", location + excerpt if location else ""),  # the reason is printed already
        *([("at", verdict.raised)] if verdict.raised else []),
        ("try", verdict.advice),
    ]
