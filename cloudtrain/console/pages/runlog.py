"""The log on the page of a run: a window of lines that follows the end, with filters by node, rank and text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from cloudtrain.console import history, lists, logbook, text, widgets
from cloudtrain.console.logbook import Line, LineFilter
from cloudtrain.job.units import format_count

WINDOW = 200  # lines on the page
MAX_CHARACTERS = 2000  # characters of a line
ALL_NODES = "all nodes"


def name_origins(ranks: Sequence[tuple[int, int]], roles: Sequence[str]) -> list[str]:
    """Return what to choose lines by: each node with its role, and each of its ranks."""
    names = {node: f"node {node} {roles[node] if node < len(roles) else ''}".rstrip() for node, _ in ranks}
    return [ALL_NODES, *names.values(), *(f"{names[node]}, {_rank_name(rank)}" for node, rank in ranks)]


class RunLog:
    """A log panel of one page; `number` counts those beside each other."""

    def __init__(self, run_id: str, roles: Sequence[str], number: int = 1) -> None:
        self._name = f"Log {number}" if number > 1 else "Log"
        self._roles = roles  # by node; none in a job without
        self._logbook = logbook.open_logbook(run_id)
        self._run_id = run_id
        self._filter = LineFilter()
        self._first = 0  # number among the matching lines
        self._follows = True
        self._marked = -1  # number of the line that the user opened
        self._anchor = "end"  # part of the window to scroll to: start, end or marked line
        self._jumps = 0  # how often the window was moved; makes lines.js scroll
        self._drawn: object = None
        self._reading: asyncio.Task[None] | None = None

    def show(self) -> None:
        """Draw the log."""
        from nicegui import ui

        with widgets.card(self._name):
            with ui.element("div").classes("ct-row ct-tools"):
                search = ui.input(label="Search", on_change=self._on_search).props(
                    "outlined dense clearable debounce=300"
                )
                search.classes("ct-grow").props("data-search")
                self._origin_select = ui.select([ALL_NODES], value=ALL_NODES, label="From", on_change=self._on_origin)
                self._origin_select.props("outlined dense").classes("ct-choice")
                self._goto = ui.number(label="Line", min=1, format="%d").props("outlined dense").classes("ct-short")
                self._goto.on("keydown.enter", lambda: self._go_to(int(self._goto.value or 1)))
            with ui.element("div").classes("ct-row ct-tools"):
                widgets.button("First", lambda: self._move(0))
                widgets.button("Earlier", self._earlier)
                widgets.button("Later", lambda: self._move(self._first + WINDOW))
                self._end = widgets.button("Newest", self._follow)
                self._status_label = ui.label("").classes("ct-dim ct-small").props('role="status"')
            name = self._name.lower() if self._name != "Log" else "the log"
            self._lines = lists.log_window().props(f'tabindex="0" role="region" aria-label="Lines of {name}"')
            self._lines.on("go", lambda event: self.go(int(event.args)))

    async def refresh(self) -> None:
        """Read new lines, and redraw the window when it has changed."""
        if self._reading is None or self._reading.done():
            book = self._logbook
            self._reading = asyncio.create_task(history.current().query(book.read_on))
            await asyncio.wait([self._reading], timeout=0.5)  # a long log is drawn while it is read
            if self._reading.done():
                self._reading.result()
        await self._draw()

    async def _draw(self) -> None:
        book, line_filter, first = self._logbook, self._filter, -WINDOW if self._follows else self._first
        lines, total = await history.current().query(lambda _: book.window(line_filter, first, WINDOW))
        state = (line_filter, total, book.complete, self._marked, lines[:1], len(lines))
        if state == self._drawn:
            return
        self._drawn = state
        self._first = max(0, total - WINDOW) if self._follows else min(self._first, max(0, total - 1))
        self._update_origins()
        count_text = (
            f"{total:,} of {format_count(book.count, 'line')}"
            if not line_filter.everything
            else format_count(total, "line")
        )
        reading = "" if book.complete else ", following" if self._follows else ", more may come"
        begin = self._first + 1 if total else 0
        counted = f"{begin:,} to {self._first + len(lines):,} of {count_text}"
        self._status_label.text = (counted if book.count else "nothing was printed") + reading
        self._draw_lines(lines)

    def _draw_lines(self, lines: list[Line]) -> None:
        """Draw lines."""
        origins = [f"{line.node}:{line.rank}" if line.rank >= 0 else f"{line.node}:–" for line in lines]
        widths = len(str(max((line.seq for line in lines), default=0))), max(map(len, origins), default=0)
        self._lines.props.update(
            lines=tuple(
                (
                    line.number,
                    f"{line.seq:>{widths[0]}}  {line.at}  {origin:<{widths[1]}}",
                    visible_text(line.text),
                )
                for line, origin in zip(lines, origins, strict=True)
            ),
            marked=self._marked,
            jumps=not self._filter.everything,
            stand=self._anchor,
            turn=self._jumps,
        )

    def _update_origins(self) -> None:
        """Update the list of nodes and ranks."""
        names = name_origins(sorted(self._logbook.ranks), self._roles)
        if names != self._origin_select.options:
            self._origin_select.set_options(names)

    async def _on_search(self, event: Any) -> None:
        await self._set_filter(LineFilter(self._filter.node, self._filter.rank, (event.value or "")[:200]))

    async def _on_origin(self, event: Any) -> None:
        name, _, rank = str(event.value).removeprefix("node ").partition(", ")
        node = name.partition(" ")[0]
        chosen = (int(node) if node.isdigit() else None, {"": None, "launcher": -1}.get(rank, -2))
        number = int(rank.removeprefix("rank ")) if chosen[1] == -2 else chosen[1]
        await self._set_filter(LineFilter(chosen[0], number, self._filter.text))

    async def _set_filter(self, line_filter: LineFilter) -> None:
        self._filter, self._marked = line_filter, -1
        await self._draw()

    async def _move(self, first: int, stand: str = "start") -> None:
        self._follows, self._first = False, max(0, first)
        await self._show_window(stand)

    async def _earlier(self) -> None:
        """Show the previous window."""
        await self._move(self._first - WINDOW, "end" if self._first >= WINDOW else "start")

    async def _follow(self) -> None:
        self._follows = True
        await self._show_window("end")

    async def _go_to(self, seq: int) -> None:
        """Show the line with a number on its node: as `cloudtrain logs --number` prints it, of the node that is selected."""
        book, node = self._logbook, self._filter.node
        await self.go(await history.current().query(lambda _: book.find(seq, node)))

    async def go(self, number: int) -> None:
        """Show a line by its number, without a filter."""
        self._filter, self._marked, self._follows = LineFilter(), number, False
        self._first = max(0, number - WINDOW // 4)
        await self._show_window("marked")

    async def open_line(self, node: int, words: str) -> None:
        """Show the last line of a node with a text, and move the keyboard focus to the log."""
        from nicegui import ui

        book, wanted = self._logbook, LineFilter(node, None, words)
        lines, _ = await history.current().query(lambda _: book.window(wanted, -1, 1))
        if lines:
            await self.go(lines[0].number)
        box = f"getHtmlElement({self._lines.id})"
        ui.run_javascript(f"{box}.scrollIntoView({{block: 'center'}}); {box}.focus()")

    async def _show_window(self, stand: str) -> None:
        self._anchor, self._jumps, self._drawn = stand, self._jumps + 1, None
        await self._draw()


def visible_text(line: str) -> str:
    """Return a line as a terminal would show it: after \\r the last part."""
    if "\r" in line:
        line = next((piece for piece in reversed(line.split("\r")) if piece.strip()), "")
    return text.clean(line, MAX_CHARACTERS)


def _rank_name(rank: int) -> str:
    return f"rank {rank}" if rank >= 0 else "launcher"
