"""Where a run came from: its job, the request that was sent, the patch, and what differs from its parent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cloudtrain.console import history, shell, text, widgets
from cloudtrain.report import compare
from cloudtrain.report.compare import Difference
from cloudtrain.runs.run import Run


@dataclass(frozen=True)
class Origin:
    """What a run was made of."""

    parent: str | None
    known: bool  # whether the parent is in this history
    differences: Sequence[Difference]
    job: str
    request: str
    origin: dict[str, Any]


def _read(run: Run) -> Origin:
    record, newest = run.record, run.attempts[-1]
    known = record.parent is not None and run.store.get(record.parent) is not None
    found = compare.between(run.store, str(record.parent), run.run_id) if known else []
    job = {key: value for key, value in dict(record.job).items() if value not in (None, {}, [], "")}
    return Origin(
        record.parent,
        known,
        found,
        text.format_json(job),
        text.format_json(newest.plan.request),
        run.store.provenance(run.run_id),
    )


async def show(run_id: str) -> None:
    """Draw it."""
    from nicegui import ui

    found = await history.current().query_run(run_id, _read)
    with widgets.card("Job and plan"):
        hyperparameters = found.job
        if found.parent:
            shell.heading("Changes to its parent", 3)
            with ui.element("div").classes("ct-row"):
                if found.known:
                    ui.link(found.parent, f"/runs/{found.parent}")
                else:
                    ui.label(f"{text.clean(found.parent)} is not in this history").classes("ct-dim")
            if found.known:
                differences(found.differences, found.parent, run_id)
        with widgets.collapsible("Job"):
            widgets.preformatted(hyperparameters, name="Job")
        with widgets.collapsible("Request, as it was sent"):
            widgets.preformatted(found.request, name="Request")
        if patch := str(found.origin.get("text") or ""):
            with widgets.collapsible("Patch of the tree that was submitted"):
                widgets.preformatted(patch, name="Patch")
        if client := found.origin.get("client"):
            with widgets.collapsible("Provenance"):
                rows = [("commit", found.origin.get("commit")), ("bundle", found.origin.get("bundle"))]
                widgets.pairs([*rows, *((str(name), value) for name, value in client.items())])


def differences(rows: Sequence[Difference], first: str, second: str) -> None:
    """Draw what two runs differ in."""
    from nicegui import ui

    if not rows:
        ui.label("nothing differs").classes("ct-dim")
        return
    cells = [(row.section, row.path, _value(row.first), _value(row.second)) for row in rows if row.section != "request"]
    left = len(rows) - len(cells)
    heads = ("", "value", text.clean(first, 40), text.clean(second, 40))
    widgets.table(heads, cells, caption="Differences", looks={"": "ct-dim ct-wide"})
    if left:
        ui.label(f"and {left} values of the native request, which follow from these").classes("ct-dim ct-small")


def _value(value: object) -> str:
    return "–" if value is None else text.clean(value)
