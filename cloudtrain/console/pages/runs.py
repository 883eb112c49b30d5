"""The page of all runs: a filter, columns, groups, views; select runs to compare, star, tag or archive them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import quote

from cloudtrain.console import history, lists, runrows, shell, widgets
from cloudtrain.console.pages.compare import MAX_RUNS
from cloudtrain.console.pages.run import sure_to_cancel
from cloudtrain.console.polling import poll
from cloudtrain.console.runrows import PAGE_SIZE
from cloudtrain.errors import BadRequest, CloudtrainError
from cloudtrain.history import marks, table
from cloudtrain.history.store import Store
from cloudtrain.history.table import Query
from cloudtrain.job.units import format_count
from cloudtrain.runs.run import Run

LONGEST = 1000  # characters of a filter


async def show(filter: str = "", sort: str = "", columns: str = "", group: str = "", offset: int = 0) -> None:
    """Show the runs."""
    shell.heading("Runs")
    listing = Listing(Query(filter[:LONGEST], sort, columns, group), max(0, offset))
    await listing.show()
    poll([listing.refresh])


class Listing:
    """The table on one page."""

    def __init__(self, query: Query, offset: int) -> None:
        self._query, self._offset = query, offset
        self._chosen: dict[str, None] = {}  # run ids in the order of their selection
        self._sweeps: set[str] = set()  # whose runs were chosen by their row
        self._shown = runrows.Shown((), (), -1)
        self._known: tuple[object, ...] | None = None

    async def show(self) -> None:
        """Draw the filter, the choices and the table."""
        from nicegui import ui

        # Back to an earlier sort or view. The link that skips to the content changes the hash alone.
        ui.add_head_html("<script>window.onpopstate = () => location.hash || location.reload()</script>")
        names, views = await history.current().query(lambda store: (table.names(store), marks.views(store)))
        columns = list(dict.fromkeys([*self._query.names, *names]))
        with widgets.card(name="Filters"):
            with ui.element("div").classes("ct-row"):
                self._filter = ui.input(label="Filter", value=self._query.filter, autocomplete=[])
                self._filter.props("outlined dense clearable debounce=250 spellcheck=false autocapitalize=off")
                self._filter.classes("ct-grow").props("data-search").on_value_change(self._change_filter)
                self._compare = widgets.button("Compare", self._open_comparison, "ct-first", "stacked_line_chart")
            self._problem = ui.label("").classes("ct-wrong").props('role="status"')
            with ui.element("div").classes("ct-row ct-foot"):
                self._columns = ui.select(
                    columns, value=self._query.names, label="Columns", multiple=True, with_input=True,
                    on_change=lambda e: self._change_columns(e.value or ()),
                ).props("outlined dense clearable").classes("ct-grow")  # fmt: skip
                self._group = ui.select(
                    columns, value=self._query.group or None, label="Group by", with_input=True,
                    on_change=lambda e: self._change(group=e.value or ""),
                ).props("outlined dense clearable").classes("ct-choice")  # fmt: skip
                self._views = ui.select(list(views), label="View", on_change=self._open_view)
                self._views.props("outlined dense").classes("ct-choice")
                widgets.button("Save view", self._save_view)
                self._csv = widgets.button("CSV", self._export)
            with ui.element("div").classes("ct-row ct-foot") as marking:
                self._count_label = ui.label("").props('role="status"')
                self._all = widgets.button("Choose all", self._choose_all)
                widgets.button("Choose none", lambda: self._choose([*self._chosen, *self._sweeps], False))
                tag = ui.input(label="Tag").props("outlined dense").classes("ct-choice")
                widgets.button("Add tag", lambda: self._mark(lambda: {"tag": [tag.value or ""]}))
                widgets.button("Remove tag", lambda: self._mark(lambda: {"untag": [(tag.value or "").strip()]}))
                widgets.button("Star", lambda: self._mark(lambda: {"star": True}))
                widgets.button("Remove star", lambda: self._mark(lambda: {"star": False}))
                widgets.button("Cancel runs", self._cancel, "ct-danger")
                widgets.button("Resume runs", lambda: self._each("resumed", Run.resume))
                widgets.button("Archive", lambda: self._mark(lambda: {"archive": True}))
                widgets.button("Restore", lambda: self._mark(lambda: {"archive": False}))
                words = ui.input(label="Title or note").props("outlined dense").classes("ct-grow")
                widgets.button("Set title", lambda: self._mark(lambda: {"title": words.value or ""}))
                widgets.button("Set note", lambda: self._mark(lambda: {"note": words.value or ""}))
            self._marking = marking
        with widgets.card(name="List of runs") as self._card:
            self._empty = ui.element("div").classes("ct-empty")
            around = ui.element("div").classes("ct-scroll").props('tabindex="0" role="region" aria-label="Runs"')
            with around:
                self._table = lists.runs_table()
            self._table.on("choose", lambda event: self._choose(*event.args))
            self._table.on("sort", lambda event: self._sort(event.args))
            self._region = around
            self._outages = ui.label("").classes("ct-dim ct-small").props('role="status"')
            with ui.element("div").classes("ct-row ct-foot"):
                self._newer = widgets.button("Newer", lambda: self._change_page(-PAGE_SIZE))
                self._older = widgets.button("Older", lambda: self._change_page(PAGE_SIZE))
                self._range_label = ui.label("").classes("ct-dim ct-small").props('role="status"')
        self._show_chosen()
        await self.refresh()

    async def refresh(self) -> None:
        """Query the runs, and redraw the table when it has changed."""
        query, offset, shown, known = self._query, self._offset, self._shown, self._known

        def read(store: Store) -> tuple[tuple[object, ...], runrows.Shown]:
            now = (query, offset, runrows.changed(store))
            return now, (shown if now == known and not shown.live else runrows.read(store, query, offset))

        try:
            now, found = await history.current().query(read)
        except BadRequest as error:
            self._problem.text = shell.format_error(error)
            return
        if query != self._query or offset != self._offset:
            return
        self._problem.text, self._known = "", now
        if found != shown or now[:2] != (known or ())[:2]:  # another sort may show the same rows
            self._shown = found
            self._draw(found)

    def _draw(self, shown: runrows.Shown) -> None:
        from nicegui import ui

        self._outages.text = shown.outages
        self._empty.set_visibility(not shown.lines)
        self._region.set_visibility(bool(shown.lines))
        self._empty.clear()
        if not shown.lines:
            with self._empty:
                ui.label("No run matches the filter." if self._query.filter else "There are no runs yet.")
                if not self._query.filter:
                    ui.label("cloudtrain submit train.py -f").classes("ct-mono")
        self._table.props["heads"] = tuple(
            (head.text, head.look, head.column, self._direction(head.column)) for head in shown.heads
        )
        self._show_chosen()
        if not self._query.names and not self._query.group:
            self._columns.set_value(self._columns_shown())  # a chosen one is added to them
        begin, end = self._offset + 1, self._offset + len(shown.lines)
        counted = (
            f"{format_count(shown.total, 'run')} in {format_count(len(shown.lines), 'group')}"
            if self._query.group
            else ""
        )
        runs = f", {format_count(shown.total, 'run')}" if shown.rows != shown.total else ""
        self._range_label.text = counted or (f"{begin:,} to {end:,} of {shown.rows:,}{runs}" if shown.lines else "")
        self._newer.set_visibility(self._offset > 0 and not self._query.group)
        self._older.set_visibility(end < shown.rows and not self._query.group)

    def _columns_shown(self) -> list[str]:
        return [head.column for head in self._shown.heads if head.column not in ("", "run", "state")]

    def _change_columns(self, names: Sequence[str]) -> Awaitable[None] | None:
        shown = not self._query.names and list(names) == self._columns_shown()
        return None if shown else self._change(columns=",".join(names))

    def _direction(self, column: str) -> str:
        return {column: "ascending", f"-{column}": "descending"}.get(self._query.sort, "none")

    async def _change_filter(self, event: Any) -> None:
        words = (event.value or "")[:LONGEST]
        complete = words and not words.endswith(" ")  # else Tab would never leave the field
        found = await history.current().query(lambda store: table.completions(store, words)) if complete else []
        self._filter.set_autocomplete(found)
        await self._change(push=False, filter=words)

    async def _change(self, push: bool = True, offset: int = 0, **changes: str) -> None:
        from nicegui import ui

        query = replace(self._query, **changes)
        if (query, offset) == (self._query, self._offset):
            return
        self._query, self._offset = query, offset
        address = "/?" + "&".join(filter(None, (query.address(), f"offset={offset}" if offset else "")))
        (ui.navigate.history.push if push else ui.navigate.history.replace)(address.rstrip("?"))
        with widgets.loading(self._card):
            await self.refresh()

    async def _change_page(self, by: int) -> None:
        await self._change(offset=max(0, self._offset + by))

    async def _sort(self, column: str) -> None:
        """Sort by a column: upwards, downwards, by age again."""
        order = ["", column, f"-{column}", ""]
        await self._change(sort=order[order.index(self._query.sort) + 1] if self._query.sort in order else column)

    async def _open_view(self, event: Any) -> None:
        from nicegui import ui

        views = await history.current().query(marks.views)
        if event.value in views:
            ui.navigate.to(f"/?{views[event.value]}")

    async def _save_view(self) -> None:
        from nicegui import ui

        with ui.dialog().props('aria-label="Save the view"') as dialog, ui.card():
            name = ui.input(label="Name of the view").props("outlined dense autofocus")
            with ui.element("div").classes("ct-row"):
                widgets.button("Save", lambda: dialog.submit(name.value or ""), "ct-first")
                widgets.button("Close", lambda: dialog.submit(None))
        chosen = await dialog
        dialog.delete()
        if chosen is not None:
            query = self._query.address()
            if await self._try(lambda store: marks.keep_view(store, chosen, query)):
                self._views.set_options(list(await history.current().query(marks.views)))
                ui.notify("saved")

    async def _export(self) -> None:
        from nicegui import ui

        query = self._query if self._query.group else replace(self._query, columns=",".join(self._columns_shown()))
        chosen = list(self._chosen)
        content = await history.current().query(lambda store: runrows.to_csv(store, query, chosen))
        ui.download.content(content, "runs.csv", "text/csv")

    async def _mark(self, changes: Callable[[], dict[str, Any]]) -> None:
        chosen, given = list(self._chosen), changes()
        if await self._try(lambda store: [marks.write(store, run_id, **given) for run_id in chosen]):
            if "archive" in given:  # their rows leave the list
                self._chosen.clear()
                self._sweeps.clear()
                self._show_chosen()
            self._known = None
            await self.refresh()

    async def _cancel(self) -> None:
        """Cancel the chosen runs, when the person is sure."""
        if await sure_to_cancel([*self._chosen]):
            await self._each("cancelled", lambda run: run.cancel())

    async def _each(self, done: str, action: Callable[[Run], object]) -> None:
        """Do something with each chosen run; those that cannot are named with the reason."""
        from nicegui import ui

        def do(run_id: str, store: Store) -> str:
            try:
                action(Run(run_id, store))
            except CloudtrainError as error:
                return f"{run_id}: {shell.format_error(error)}"
            return ""

        chosen = list(self._chosen)
        jobs = [history.current().query(partial(do, run_id)) for run_id in chosen]
        problems = [problem for problem in await asyncio.gather(*jobs) if problem]
        if problems:
            ui.notify("\n".join(problems[:5]), type="negative", multi_line=True, close_button="Close", timeout=0)
        if len(problems) < len(chosen):
            ui.notify(f"{format_count(len(chosen) - len(problems), 'run')} {done}", type="positive")
        self._known = None
        await self.refresh()

    async def _try(self, action: Callable[[Store], Any]) -> bool:
        """Do something with the history; an error is shown. Returns whether it was done."""
        try:
            await history.current().query(action)
        except CloudtrainError as error:
            shell.notify_error(error)
            return False
        return True

    def _choose(self, keys: Sequence[str], chosen: bool) -> None:
        """Choose rows, or no longer; the row of a sweep stands for its runs."""
        sweeps = self._shown.sweeps
        for run_id in (run_ids := [run_id for key in keys for run_id in sweeps.get(key, [key])]):
            self._chosen.pop(run_id, None)
        self._chosen |= dict.fromkeys(run_ids) if chosen else {}
        self._sweeps = self._sweeps | {key for key in keys if key in sweeps} if chosen else self._sweeps - {*keys}
        self._show_chosen()

    async def _choose_all(self) -> None:
        """Choose all runs that the filter selects, those of other pages too."""
        query = self._query
        found = await history.current().query(lambda store: table.run_ids(store, query, limit=runrows.LONGEST_CSV))
        self._chosen = dict.fromkeys(found)
        self._sweeps = {*self._shown.sweeps}
        self._show_chosen()

    def _show_chosen(self) -> None:
        self._table.props["rows"] = runrows.selects(self._shown.lines, self._chosen.keys() | self._sweeps)
        count = len(self._chosen)
        self._count_label.text = f"{format_count(count, 'run')} chosen"
        self._all.text = f"Choose all {self._shown.total:,}"
        self._all.set_visibility(count < self._shown.total)
        self._csv.text = f"CSV of {format_count(count, 'run')}" if count else "CSV"
        self._compare.text = f"Compare {count} runs" if count > 1 else "Compare"
        self._compare.set_enabled(1 < count <= MAX_RUNS)
        self._marking.set_visibility(count > 0)

    def _open_comparison(self) -> None:
        from nicegui import ui

        ui.navigate.to("/compare?runs=" + quote(",".join(self._chosen)))
