"""The origin of a run: its job, the native request, the patch, and the differences from its parent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cloudtrain.console import history, shell, text, widgets
from cloudtrain.errors import UnknownRun
from cloudtrain.history.trials import SweepHistory
from cloudtrain.report import compare
from cloudtrain.report.compare import Difference
from cloudtrain.runs.run import Run


@dataclass(frozen=True)
class Origin:
    """The origin of a run, as the page shows it."""

    parent: str | None
    parent_exists: bool  # in this history
    of_sweep: bool  # the parent is a sweep of this history
    differences: Sequence[Difference]
    job: str
    request: str
    provenance: dict[str, Any]


def _read_origin(run: Run) -> Origin:
    record, newest = run.record, run.attempts[-1]
    parent_exists = record.parent is not None and run.store.get(record.parent) is not None
    parent_differences = compare.between(run.store, str(record.parent), run.run_id) if parent_exists else []
    job = {key: value for key, value in dict(record.job).items() if value not in (None, {}, [], "")}
    return Origin(
        record.parent,
        parent_exists,
        record.parent is not None and not parent_exists and _is_sweep(run, record.parent),
        parent_differences,
        text.format_json(job),
        text.format_json(newest.plan.request),
        run.store.provenance(run.run_id),
    )


def _is_sweep(run: Run, text: str) -> bool:
    try:
        return SweepHistory(run.store.home).find(text).sweep_id == text
    except UnknownRun:
        return False


async def show(run_id: str) -> None:
    """Draw it."""
    from nicegui import ui

    origin = await history.current().query_run(run_id, _read_origin)
    with widgets.card("Job and plan"):
        hyperparameters = origin.job
        if origin.parent:
            shell.heading("Changes to its parent", 3)
            with ui.element("div").classes("ct-row"):
                if origin.parent_exists:
                    ui.link(origin.parent, f"/runs/{origin.parent}")
                elif origin.of_sweep:
                    ui.label("a trial of")
                    ui.link(origin.parent, f"/sweeps/{origin.parent}")
                else:
                    ui.label(f"{text.clean(origin.parent)} is not in this history").classes("ct-dim")
            if origin.parent_exists:
                differences(origin.differences, origin.parent, run_id)
        with widgets.collapsible("Job"):
            widgets.preformatted(hyperparameters, name="Job")
        with widgets.collapsible("Request to the platform, as sent"):
            widgets.preformatted(origin.request, name="Request")
        if patch := str(origin.provenance.get("text") or ""):
            with widgets.collapsible("Patch of the tree that was submitted"):
                widgets.preformatted(patch, name="Patch")
        if client := origin.provenance.get("client"):
            with widgets.collapsible("Provenance"):
                rows = [("commit", origin.provenance.get("commit")), ("bundle", origin.provenance.get("bundle"))]
                widgets.pairs([*rows, *((str(name), value) for name, value in client.items())])


def differences(rows: Sequence[Difference], first: str, second: str) -> None:
    """Draw the differences between two runs."""
    from nicegui import ui

    if not rows:
        ui.label("nothing differs").classes("ct-dim")
        return
    cells = [(row.section, row.path, _value(row.first), _value(row.second)) for row in rows if row.section != "request"]
    left = len(rows) - len(cells)
    heads = ("", "value", text.clean(first, 40), text.clean(second, 40))
    widgets.table(heads, cells, caption="Differences", looks={"": "ct-dim ct-wide"})
    if left:
        ui.label(f"and {left} values of the platform request, which result from these changes").classes(
            "ct-dim ct-small"
        )


def _value(value: object) -> str:
    return "–" if value is None else text.clean(value)
