"""The page of all runs: a page of the history at a time, filtered where it lies, live; some are chosen to compare."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from cloudtrain.cli.view import runs as words
from cloudtrain.console import history, lists, shell, text, widgets
from cloudtrain.console.pages.compare import MOST
from cloudtrain.console.polling import poll
from cloudtrain.errors import CloudtrainError
from cloudtrain.events import State
from cloudtrain.history.records import RunRecord
from cloudtrain.history.store import Store
from cloudtrain.runs.run import Run

ROWS = 50
ANY = "any target"
STATES: dict[str, tuple[State, ...]] = {
    "any state": (),
    "live": tuple(state for state in State if not state.final),
    "succeeded": (State.SUCCEEDED,),
    "failed": (State.FAILED, State.LOST, State.TIMED_OUT),
    "cancelled or preempted": (State.CANCELLED, State.PREEMPTED),
}
HEADS = (("choose", "ct-pick ct-silent"), ("run", ""), ("state", ""), ("created", "ct-whole ct-wide"),
         ("took", "ct-number ct-wide"), ("loss", "ct-number"), ("target", "ct-wide"))  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """Which runs are shown."""

    words: str = ""
    states: str = "any state"
    target: str = ANY
    offset: int = 0


@dataclass(frozen=True)
class Row:
    """A run as the table shows it."""

    run_id: str
    state: State
    created: str
    took: str
    loss: str
    target: str


async def show(search: str = "") -> None:
    """Show the runs."""
    shell.heading("Runs")
    listing = Listing(Asked(words=search[:200]))
    await listing.show()
    poll([listing.refresh])


class Listing:
    """The table of one page."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._chosen: dict[str, None] = {}  # run ids, in the order in which they were chosen
        self._rows: list[Row] = []
        self._total = -1

    async def show(self) -> None:
        """Draw it."""
        from nicegui import ui

        runs_history = history.current()
        targets = await runs_history.query(lambda store: store.targets())
        with widgets.card(name="Filters"), ui.element("div").classes("ct-row"):
            search = ui.input(label="Search", value=self._asked.words).props("outlined dense clearable debounce=250")
            search.classes("ct-grow").props("data-search").on_value_change(
                lambda e: self._ask(words=(e.value or "")[:200])
            )
            ui.select(
                list(STATES), value="any state", label="State", on_change=lambda e: self._ask(states=e.value)
            ).props("outlined dense").classes("ct-choice")
            if len(targets) > 1:
                options = {ANY: ANY} | {name: text.clean(name, 40) for name in targets}
                ui.select(options, value=ANY, label="Target", on_change=lambda e: self._ask(target=e.value)).props(
                    "outlined dense"
                ).classes("ct-choice")
            self._compare = widgets.button("Compare", self._go, "ct-first", "stacked_line_chart")
        with widgets.card(name="Runs"):
            self._none = ui.element("div").classes("ct-empty")
            around = ui.element("div").classes("ct-scroll").props('tabindex="0" role="region" aria-label="Runs"')
            with around:
                self._table = lists.runs_table(HEADS)
            self._table.on("choose", lambda event: self._choose(*event.args))
            self._around = around
            with ui.element("div").classes("ct-row ct-foot"):
                self._newer = widgets.button("Newer", lambda: self._turn(-ROWS))
                self._older = widgets.button("Older", lambda: self._turn(ROWS))
                self._told = ui.label("").classes("ct-dim ct-small").props('role="status"')
        self._choose()
        await self.refresh()

    async def refresh(self) -> None:
        """Ask for the runs, and draw what has changed."""
        asked = self._asked
        rows, total = await history.current().query(lambda store: _rows(store, asked))
        if asked != self._asked or (rows == self._rows and total == self._total):
            return
        self._rows, self._total = rows, total
        self._draw()
        begin, end = asked.offset + 1, asked.offset + len(rows)
        self._told.text = f"{begin:,} to {end:,} of {total:,}" if rows else ""
        self._newer.set_visibility(asked.offset > 0)
        self._older.set_visibility(end < total)

    def _draw(self) -> None:
        from nicegui import ui

        self._none.set_visibility(not self._rows)
        self._around.set_visibility(bool(self._rows))
        self._none.clear()
        if not self._rows:
            filtered = replace(self._asked, offset=0) != Asked()
            with self._none:
                ui.label("No run is like that." if filtered else "There are no runs yet.")
                if not filtered:
                    ui.label("cloudtrain submit train.py -f").classes("ct-mono")
        self._table.props["rows"] = tuple(self._cells(row) for row in self._rows)

    def _cells(self, row: Row) -> tuple[object, ...]:
        """Return a run as runs.js draws it."""
        link, box = f"/runs/{quote(row.run_id, safe='')}", f"compare {row.run_id}"
        chosen, look = row.run_id in self._chosen, widgets.state_class(row.state)
        return (row.run_id, link, box, chosen, row.state.value, look, row.created, row.took, row.loss, row.target)

    async def _ask(self, **changes: Any) -> None:
        self._asked = replace(self._asked, offset=0, **changes)
        await self.refresh()

    async def _turn(self, by: int) -> None:
        self._asked = replace(self._asked, offset=max(0, self._asked.offset + by))
        await self.refresh()

    def _choose(self, run_id: str = "", chosen: bool = False) -> None:
        if run_id and chosen:
            self._chosen[run_id] = None
        else:
            self._chosen.pop(run_id, None)
        count = len(self._chosen)
        self._compare.text = f"Compare {count} runs" if count > 1 else "Compare"
        self._compare.set_enabled(1 < count <= MOST)

    def _go(self) -> None:
        from nicegui import ui

        ui.navigate.to("/compare?runs=" + quote(",".join(self._chosen)))


def _rows(store: Store, asked: Asked) -> tuple[list[Row], int]:
    """Return the runs of a page as the table shows them; those that nobody watches any more are brought up to date."""
    target = None if asked.target == ANY else asked.target
    find = {
        "words": asked.words,
        "states": STATES[asked.states],
        "target": target,
        "limit": ROWS,
        "offset": asked.offset,
    }
    found, total = store.page(**find)  # type: ignore[arg-type]
    lost = [record.run_id for record in found if not record.status.state.final and not store.watched(record.run_id)]
    for run_id in lost:
        try:
            Run(run_id, store).refresh()
        except CloudtrainError:
            continue  # what cannot be reached stays as it was
    if lost:
        found, total = store.page(**find)  # type: ignore[arg-type]
    losses = store.curves.last([record.run_id for record in found])
    return [_row(record, losses.get(record.run_id)) for record in found], total


def _row(record: RunRecord, loss: Any) -> Row:
    status = record.status
    took = words.elapsed(status.started_at, status.ended_at) if status.started_at and status.ended_at else ""
    created = text.format_time(record.created_at).removesuffix(" UTC")
    last = f"{loss.last:.4g}" if loss else ""
    return Row(record.run_id, status.state, created, took, last, text.clean(record.target or record.backend, 60))
