"""What is said of a plan, of a run that was just submitted, and of its end: short, with the next commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cloudtrain.cli.view import runs, terminal
from cloudtrain.events import State, Status

if TYPE_CHECKING:
    from cloudtrain.backends.api import Plan
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.runs.run import Run


def of_plan(plan: Plan, *, head: str = "") -> None:
    """Print a plan in a few lines."""
    terminal.say(head or f"{plan.run_id}  would go to {place(plan)}", style="bold")
    terminal.pairs(
        [
            ("world", world(plan)),
            ("limit", f"{limit(plan)} (limits.max_runtime), {_attempts(plan)} (retry.max_attempts)"),
            ("runs", words(plan)),
            ("source", source(plan)),
            ("price", _price(plan)),
            *(("note", text) for text in plan.notes),
        ]
    )


def of_submitted(run: Run, how: str) -> None:
    """Print the id of a run first of all, then where it runs, its limits and what can be done with it."""
    plan = run.attempts[-1].plan
    of_plan(plan, head=f"{run.run_id}  {how} {place(plan)}")
    terminal.pairs([("folder", str(run.store.home / "runs" / run.run_id) if plan.backend == "local" else "")])


def next_commands(run_id: str, *names: str) -> None:
    """Print commands to go on with."""
    lines = {
        "follow": f"cloudtrain logs -f {run_id}",
        "logs": f"cloudtrain logs {run_id}",
        "show": f"cloudtrain show {run_id}",
        "cancel": f"cloudtrain cancel {run_id}",
        "fetch": f"cloudtrain fetch {run_id} -o out/",
        "metrics": f"cloudtrain metrics {run_id}",
        "resume": f"cloudtrain resume {run_id}",
        "mended": f"cloudtrain rerun {run_id} --source .",
        "rerun": f"cloudtrain rerun {run_id} --set limits.max_runtime=48h",
    }
    terminal.pairs([("next" if not number else "", lines[name]) for number, name in enumerate(names)])


def of_end(run: Run, status: Status, last: list[str], *, whose: str = "") -> None:
    """Print how a run ended: where its model lies, or the last lines of the rank that failed first and the reason."""
    if last:
        terminal.say("", f"--- the last lines of {whose} ---", *last, "")
    line = f"{run.run_id}  {runs.ended(status)}" + (f": {status.reason}" if status.reason else "")
    terminal.say(line, style=f"bold {runs.STYLES.get(status.state.value, '')}")
    if status.state is State.SUCCEEDED:
        terminal.pairs([("model", model(run))])
        next_commands(
            run.run_id,
            *(["fetch"] if _has_results(run) else []),
            *(["metrics"] if run.store.curves.summary(run.run_id) else []),
            "logs",
        )
        return
    from cloudtrain.cli.view import why

    terminal.pairs(why.rows(run.verdict()))
    if run.record.attached:
        next_commands(run.run_id, "logs", "fetch")
    elif status.state is State.TIMED_OUT:
        next_commands(run.run_id, "logs", "resume", "rerun")
    else:
        next_commands(run.run_id, "logs", "mended" if status.state is State.FAILED else "resume")


def billed(attempts: Sequence[AttemptRecord]) -> str:
    """Return what the platform bills for all attempts, in words; with a price that was known, what that comes to."""
    told = [attempt for attempt in attempts if attempt.status.billable_s is not None]
    if not told:
        return ""
    seconds = sum(attempt.status.billable_s or 0 for attempt in told)
    words = f"{runs.duration(seconds)} of nodes' time, {seconds:,} s"
    price = told[-1].plan.price
    if not price or "usd_per_hour" not in price:
        return words
    usd = sum(
        (attempt.status.billable_s or 0) / 3600 * float(price["usd_per_hour"]) / int(attempt.plan.manifest["nodes"])
        for attempt in told
    )
    return f"{words}: about {usd:.2f} USD at the price of {price['as_of']}"


def world(plan: Plan) -> str:
    """Return nodes x processes in words."""
    nodes, processes = int(plan.manifest["nodes"]), int(plan.manifest["processes_per_node"])
    gpus = int(plan.manifest.get("gpus_per_node") or 0)
    words = f"{_count(nodes, 'node')} x {_count(processes, 'process', 'processes')}"
    return words + (f", {_count(gpus, 'GPU')} each" if gpus else "")


def place(plan: Plan) -> str:
    """Return the target and its backend."""
    return plan.backend if plan.target in ("", plan.backend) else f"{plan.target} ({plan.backend})"


def limit(plan: Plan) -> str:
    """Return the longest time of an attempt in words."""
    return f"at most {runs.duration(float(plan.manifest['max_runtime_s']))}"


def _attempts(plan: Plan) -> str:
    return _count(int((plan.job.get("retry") or {}).get("max_attempts", 1)), "attempt")


def words(plan: Plan) -> str:
    """Return the command of a rank behind the interpreter, as a shell would read it."""
    import shlex

    argv = [str(word) for word in plan.manifest["argv"]]
    text = " ".join(shlex.quote(word) if word.isprintable() else repr(word) for word in argv)
    return text if len(text) <= 300 else text[:297] + "..."


def source(plan: Plan) -> str:
    """Return what is packaged: folder, files, size, commit."""
    bundle = plan.bundle
    commit = (
        f", commit {bundle['commit'][:12]}{' with changes' if bundle.get('dirty') else ''}"
        if bundle.get("commit")
        else ""
    )
    files = _count(int(bundle["files"]), "file")
    return f"{plan.job.get('source', '')} ({files}, {runs.size(bundle['size_bytes'])} packed{commit})"


def _price(plan: Plan) -> str:
    price: Any = plan.price
    if not price:
        return ""
    return f"{price.get('usd_per_hour')} USD an hour (as of {price.get('as_of')}, {price.get('source')})"


def model(run: Run) -> str:
    """Return where the model lies, when that is known without asking the platform."""
    record = run.record
    output = record.job.get("output")
    if output:
        return f"{str(output).rstrip('/')}/{run.run_id}/model"
    folder = run.store.home / "runs" / run.run_id / "model"
    return str(folder) if folder.is_dir() and any(folder.iterdir()) else ""


def _has_results(run: Run) -> bool:
    """Return whether there may be something to fetch."""
    record = run.record
    folder = run.store.home / "runs" / run.run_id
    if record.backend != "local" or record.job.get("output"):
        return True
    return any(
        (folder / name).is_dir() and any((folder / name).iterdir()) for name in ("model", "outputs", "checkpoints")
    )


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
