"""The page of all runs: filtered, paged and refreshed; select runs to compare them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from cloudtrain.cli.view import runs as run_view
from cloudtrain.console import history, lists, shell, text, widgets
from cloudtrain.console.pages.compare import MAX_RUNS
from cloudtrain.console.polling import poll
from cloudtrain.errors import CloudtrainError
from cloudtrain.events import State
from cloudtrain.history.records import RunRecord
from cloudtrain.history.store import Store
from cloudtrain.runs import asked
from cloudtrain.runs.run import Run

PAGE_SIZE = 50
ANY_TARGET = "any target"
STATES: dict[str, tuple[State, ...]] = {
    "any state": (),
    "live": tuple(state for state in State if not state.final),
    "succeeded": (State.SUCCEEDED,),
    "failed": (State.FAILED, State.LOST, State.TIMED_OUT),
    "cancelled or preempted": (State.CANCELLED, State.PREEMPTED),
}
HEADERS = (("choose", "ct-pick ct-silent"), ("run", ""), ("state", ""), ("created", "ct-whole ct-wide"),
         ("took", "ct-number ct-wide"), ("loss", "ct-number"), ("target", "ct-wide"))  # fmt: skip


@dataclass(frozen=True)
class RunQuery:
    """The filters and the offset of the table."""

    search: str = ""
    states: str = "any state"
    target: str = ANY_TARGET
    offset: int = 0


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    run_id: str
    state: State
    created: str
    took: str
    loss: str
    target: str


async def show(search: str = "") -> None:
    """Show the runs."""
    shell.heading("Runs")
    listing = Listing(RunQuery(search=search[:200]))
    await listing.show()
    poll([listing.refresh])


class Listing:
    """The table on one page."""

    def __init__(self, query: RunQuery) -> None:
        self._query = query
        self._chosen: dict[str, None] = {}  # run ids in the order of their selection
        self._shown: tuple[list[Row], int, str] = [], -1, ""

    async def show(self) -> None:
        """Draw the filters and the table."""
        from nicegui import ui

        runs_history = history.current()
        targets = await runs_history.query(lambda store: store.targets())
        with widgets.card(name="Filters"), ui.element("div").classes("ct-row"):
            search = ui.input(label="Search", value=self._query.search).props("outlined dense clearable debounce=250")
            search.classes("ct-grow").props("data-search").on_value_change(
                lambda e: self._change_query(search=(e.value or "")[:200])
            )
            ui.select(
                list(STATES), value="any state", label="State", on_change=lambda e: self._change_query(states=e.value)
            ).props("outlined dense").classes("ct-choice")
            if len(targets) > 1:
                options = {ANY_TARGET: ANY_TARGET} | {name: text.clean(name, 40) for name in targets}
                ui.select(
                    options, value=ANY_TARGET, label="Target", on_change=lambda e: self._change_query(target=e.value)
                ).props("outlined dense").classes("ct-choice")
            self._compare = widgets.button("Compare", self._open_comparison, "ct-first", "stacked_line_chart")
        with widgets.card(name="Runs"):
            self._empty = ui.element("div").classes("ct-empty")
            around = ui.element("div").classes("ct-scroll").props('tabindex="0" role="region" aria-label="Runs"')
            with around:
                self._table = lists.runs_table(HEADERS)
            self._table.on("choose", lambda event: self._choose(*event.args))
            self._region = around
            self._outages = ui.label("").classes("ct-dim ct-small").props('role="status"')
            with ui.element("div").classes("ct-row ct-foot"):
                self._newer = widgets.button("Newer", lambda: self._change_page(-PAGE_SIZE))
                self._older = widgets.button("Older", lambda: self._change_page(PAGE_SIZE))
                self._range_label = ui.label("").classes("ct-dim ct-small").props('role="status"')
        self._choose()
        await self.refresh()

    async def refresh(self) -> None:
        """Query the runs, and redraw the table when it has changed."""
        query = self._query
        shown = rows, total, outages = await history.current().query(lambda store: _rows(store, query))
        if query != self._query or shown == self._shown:
            return
        self._shown, self._outages.text = shown, outages
        self._draw(rows)
        begin, end = query.offset + 1, query.offset + len(rows)
        self._range_label.text = f"{begin:,} to {end:,} of {total:,}" if rows else ""
        self._newer.set_visibility(query.offset > 0)
        self._older.set_visibility(end < total)

    def _draw(self, rows: list[Row]) -> None:
        from nicegui import ui

        self._empty.set_visibility(not rows)
        self._region.set_visibility(bool(rows))
        self._empty.clear()
        if not rows:
            filtered = replace(self._query, offset=0) != RunQuery()
            with self._empty:
                ui.label("No run is like that." if filtered else "There are no runs yet.")
                if not filtered:
                    ui.label("cloudtrain submit train.py -f").classes("ct-mono")
        self._table.props["rows"] = tuple(self._cells(row) for row in rows)

    def _cells(self, row: Row) -> tuple[object, ...]:
        """Return the row of a run for runs.js."""
        link, box = f"/runs/{quote(row.run_id, safe='')}", f"compare {row.run_id}"
        chosen, look = row.run_id in self._chosen, widgets.state_class(row.state)
        return (row.run_id, link, box, chosen, row.state.value, look, row.created, row.took, row.loss, row.target)

    async def _change_query(self, **changes: Any) -> None:
        self._query = replace(self._query, offset=0, **changes)
        await self.refresh()

    async def _change_page(self, by: int) -> None:
        self._query = replace(self._query, offset=max(0, self._query.offset + by))
        await self.refresh()

    def _choose(self, run_id: str = "", chosen: bool = False) -> None:
        if run_id and chosen:
            self._chosen[run_id] = None
        else:
            self._chosen.pop(run_id, None)
        count = len(self._chosen)
        self._compare.text = f"Compare {count} runs" if count > 1 else "Compare"
        self._compare.set_enabled(1 < count <= MAX_RUNS)

    def _open_comparison(self) -> None:
        from nicegui import ui

        ui.navigate.to("/compare?runs=" + quote(",".join(self._chosen)))


def _rows(store: Store, query: RunQuery) -> tuple[list[Row], int, str]:
    """Return the rows of a page, the number of all matches, and which platforms do not answer; refreshes live runs."""
    target = None if query.target == ANY_TARGET else query.target
    criteria = {
        "words": query.search,
        "states": STATES[query.states],
        "target": target,
        "limit": PAGE_SIZE,
        "offset": query.offset,
    }
    records, total = store.page(**criteria)  # type: ignore[arg-type]
    unwatched = [
        record.run_id for record in records if not record.status.state.final and not store.watched(record.run_id)
    ]
    for run_id in unwatched:
        try:
            Run(run_id, store).refresh(lambda _: None)
        except CloudtrainError:
            continue  # the platform did not answer: the stored state is shown
    if unwatched:
        records, total = store.page(**criteria)  # type: ignore[arg-type]
    losses = store.curves.last([record.run_id for record in records])
    rows = [_row(record, losses.get(record.run_id)) for record in records]
    return rows, total, _outages(store, records)


def _outages(store: Store, records: list[RunRecord]) -> str:
    """Return a sentence for each target that does not answer, for the runs of a page."""
    outages: dict[str, str] = {}
    for record in records:
        if not record.status.state.final and (answer := asked.last(store.home, record.run_id)) and answer.error:
            outages.setdefault(record.target or record.backend, answer.outage)
    return "; ".join(f"{text.clean(target, 60)}: {text.clean(outage, 300)}" for target, outage in outages.items())


def _row(record: RunRecord, loss: Any) -> Row:
    status = record.status
    took = run_view.elapsed(status.started_at, status.ended_at) if status.started_at and status.ended_at else ""
    created = text.format_time(record.created_at).removesuffix(" UTC")
    last = f"{loss.last:.4g}" if loss else ""
    return Row(record.run_id, status.state, created, took, last, text.clean(record.target or record.backend, 60))
