"""The log of a run on its page: a window of lines that moves, follows the end, and is chosen by node, rank and words."""

from __future__ import annotations

import asyncio
from typing import Any

from cloudtrain.console import history, lists, logbook, text, widgets
from cloudtrain.console.logbook import Line, LineFilter

WINDOW = 200  # lines on the page
SHOWN = 2000  # characters of a line
EVERYTHING = "all nodes"


class RunLog:
    """The log panel of one page."""

    def __init__(self, run_id: str) -> None:
        self._book = logbook.open_logbook(run_id)
        self._run_id = run_id
        self._wanted = LineFilter()
        self._first = 0  # of those that are wanted
        self._follows = True
        self._marked = -1  # the line that was gone to
        self._stand = "end"  # what of the window is looked at: its start, its end, the line that was gone to
        self._turn = 0  # how often somebody went elsewhere
        self._drawn: object = None
        self._reading: asyncio.Task[None] | None = None

    def show(self) -> None:
        """Draw it."""
        from nicegui import ui

        with widgets.card("Log"):
            with ui.element("div").classes("ct-row ct-tools"):
                search = ui.input(label="Search", on_change=self._searched).props(
                    "outlined dense clearable debounce=300"
                )
                search.classes("ct-grow").props("data-search")
                self._people = ui.select([EVERYTHING], value=EVERYTHING, label="From", on_change=self._chosen)
                self._people.props("outlined dense").classes("ct-choice")
                self._goto = ui.number(label="Line", min=1, format="%d").props("outlined dense").classes("ct-short")
                self._goto.on("keydown.enter", lambda: self.go(int(self._goto.value or 1) - 1))
            with ui.element("div").classes("ct-row ct-tools"):
                widgets.button("First", lambda: self._move(0))
                widgets.button("Earlier", self._earlier)
                widgets.button("Later", lambda: self._move(self._first + WINDOW))
                self._end = widgets.button("Newest", self._follow)
                self._told = ui.label("").classes("ct-dim ct-small").props('role="status"')
            self._lines = lists.log_window().props('tabindex="0" role="region" aria-label="Lines of the log"')
            self._lines.on("go", lambda event: self.go(int(event.args)))

    async def refresh(self) -> None:
        """Read on, and draw the window again where it has changed."""
        if self._reading is None or self._reading.done():
            book = self._book
            self._reading = asyncio.create_task(history.current().query(book.read_on))
            await asyncio.wait([self._reading], timeout=0.5)  # a long log is drawn while it is being read
            if self._reading.done():
                self._reading.result()
        await self._draw()

    async def _draw(self) -> None:
        book, wanted, first = self._book, self._wanted, -WINDOW if self._follows else self._first
        lines, total = await history.current().query(lambda _: book.window(wanted, first, WINDOW))
        state = (wanted, total, book.complete, self._marked, lines[:1], len(lines))
        if state == self._drawn:
            return
        self._drawn = state
        self._first = max(0, total - WINDOW) if self._follows else min(self._first, max(0, total - 1))
        self._offer()
        of = f"{total:,} of {book.count:,} lines" if not wanted.everything else f"{total:,} lines"
        reading = "" if book.complete else ", following" if self._follows else ", more may come"
        begin = self._first + 1 if total else 0
        self._told.text = f"{begin:,} to {self._first + len(lines):,} of {of}{reading}"
        self._fill(lines)

    def _fill(self, lines: list[Line]) -> None:
        """Draw lines."""
        who = [f"{line.node}:{line.rank}" if line.rank >= 0 else f"{line.node}:–" for line in lines]
        widths = len(str(lines[-1].number + 1)) if lines else 0, max(map(len, who), default=0)
        self._lines.props.update(
            lines=tuple(
                (line.number, f"{line.number + 1:>{widths[0]}}  {line.at}  {said:<{widths[1]}}", shown(line.text))
                for line, said in zip(lines, who, strict=True)
            ),
            marked=self._marked,
            jumps=not self._wanted.everything,
            stand=self._stand,
            turn=self._turn,
        )

    def _offer(self) -> None:
        """Offer the nodes and ranks that have spoken."""
        known = sorted(self._book.ranks)
        nodes = sorted({node for node, _ in known})
        names = [EVERYTHING] + [f"node {node}" for node in nodes]
        names += [f"node {node}, {_who(rank)}" for node, rank in known]
        if names != self._people.options:
            self._people.set_options(names)

    async def _searched(self, event: Any) -> None:
        await self._want(LineFilter(self._wanted.node, self._wanted.rank, (event.value or "")[:200]))

    async def _chosen(self, event: Any) -> None:
        node, _, rank = str(event.value).removeprefix("node ").partition(", ")
        chosen = (int(node) if node.isdigit() else None, {"": None, "launcher": -1}.get(rank, -2))
        number = int(rank.removeprefix("rank ")) if chosen[1] == -2 else chosen[1]
        await self._want(LineFilter(chosen[0], number, self._wanted.text))

    async def _want(self, wanted: LineFilter) -> None:
        self._wanted, self._marked = wanted, -1
        await self._draw()

    async def _move(self, first: int, stand: str = "start") -> None:
        self._follows, self._first = False, max(0, first)
        await self._go(stand)

    async def _earlier(self) -> None:
        """Show the window before; reading goes on where it was."""
        await self._move(self._first - WINDOW, "end" if self._first >= WINDOW else "start")

    async def _follow(self) -> None:
        self._follows = True
        await self._go("end")

    async def go(self, number: int) -> None:
        """Show the line of a number among its neighbours, whoever wrote them."""
        self._wanted, self._marked, self._follows = LineFilter(), number, False
        self._first = max(0, number - WINDOW // 4)
        await self._go("marked")

    async def _go(self, stand: str) -> None:
        self._stand, self._turn, self._drawn = stand, self._turn + 1, None
        await self._draw()


def shown(line: str) -> str:
    """Return a line as a terminal would leave it: of what was written over with \\r the last."""
    if "\r" in line:
        line = next((piece for piece in reversed(line.split("\r")) if piece.strip()), "")
    return text.clean(line, SHOWN)


def _who(rank: int) -> str:
    return f"rank {rank}" if rank >= 0 else "launcher"
