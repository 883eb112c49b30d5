"""What the nodes of one run or of several used, as charts (plotly), updated while runs are active; stacks of a live one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cloudtrain.console import history, lists, shell, text, widgets
from cloudtrain.console.charts import MANY_RUNS, style_figure
from cloudtrain.errors import CloudtrainError
from cloudtrain.events import State
from cloudtrain.report import use
from cloudtrain.report.nodecheck import NodeCheck, node_check
from cloudtrain.runs.run import Run


class Use:
    """The charts of node usage on a run's page."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._known = -1
        self._drawn: dict[str, Any] = {}  # title -> its plotly element

    async def show(self) -> None:
        """Draw the charts."""
        from nicegui import ui

        self._empty_label = ui.label("The nodes have reported no usage.").classes("ct-dim")
        self._area = ui.element("div").classes("ct-use").props('role="group" aria-label="use of each node over time"')
        await self.refresh()

    async def refresh(self) -> None:
        """Redraw the charts when there are new usage events."""
        from nicegui import ui

        self._known, figures = await history.current().query_run(self._run_id, lambda run: _use(run, self._known))
        for title, figure in figures.items():
            self._empty_label.visible = False
            if title in self._drawn:
                self._drawn[title].update_figure(figure)
                continue
            with self._area, ui.element("div").classes("ct-plot"):
                self._drawn[title] = lists.chart(figure)


def _use(run: Run, previous_count: int) -> tuple[int, dict[str, dict[str, Any]]]:
    count = run.store.count_events(run.run_id, "usage")
    if count in (0, previous_count):
        return count, {}
    figures = {}
    for title, figure in use.use_panels(run.store, run.run_id).items():
        several, many = len(figure.data) > 1, len(figure.data) > MANY_RUNS
        below = {"orientation": "h", "y": -0.3, "yanchor": "top"}  # beside the curves it takes half of a narrow screen
        figures[title] = style_figure(
            figure, showlegend=several and not many, legend=below, height=290 if several and not many else 250,
            hovermode="closest" if many else "x unified",
        )  # fmt: skip
    return count, figures


class Now:
    """What a live run does: the table of `cloudtrain top`, and at a click the stacks of `cloudtrain stack`."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    async def show(self) -> None:
        """Draw the table and the button, while the run runs."""
        from nicegui import ui

        from cloudtrain.cli import top

        with widgets.card("Now") as self._card:
            with ui.element("div").classes("ct-scroll").props('tabindex="0" role="region" aria-label="Nodes now"'):
                self._table = lists.runs_table()
            self._table.props["heads"] = tuple(
                (head, "ct-number" * (at > 1), "", "none") for at, head in enumerate(top.HEADS)
            )
            with ui.element("div").classes("ct-row ct-foot"):
                self._button = widgets.button("Show stacks", self._show_stacks)
                ui.label("Where each rank is in its Python code; the run continues.").classes("ct-dim ct-small")
            self._stacks = ui.element("div").classes("ct-foot")
        await self.refresh()

    async def refresh(self) -> None:
        """Show what the nodes have reported last."""
        rows = await history.current().query_run(self._run_id, _now)
        self._card.set_visibility(rows is not None)
        looks = ["ct-number" * (at > 1) for at in range(len(rows[0]))] if rows else []
        self._table.props["rows"] = tuple(
            (
                row[0],
                "",
                False,
                tuple((look, text.clean(cell), "", "", ()) for look, cell in zip(looks, row, strict=True)),
            )
            for row in rows or ()
        )

    async def _show_stacks(self) -> None:
        self._button.props("loading")
        try:
            found = await history.current().query_run(self._run_id, _stacks)
        except CloudtrainError as error:
            shell.notify_error(error)
        else:
            self._stacks.clear()
            with self._stacks:
                widgets.preformatted(found, name="Stacks")
        finally:
            self._button.props(remove="loading")


def _now(run: Run) -> list[list[str]] | None:
    """Return the table of `cloudtrain top` for a run that runs here, else None."""
    from cloudtrain.cli import top

    record = run.record
    runs = not record.status.state.final and record.status.state is not State.QUEUED and not record.attached
    return top.cells(run) if runs else None


def _stacks(run: Run) -> str:
    from cloudtrain.cli import stack
    from cloudtrain.runs.inside import Inside

    inside = Inside.of(run)
    inside.record("stack")
    roles, found = inside.attempt.plan.node_roles, list[str]()
    for node, rows, why in inside.stacks():
        found += [line for row in rows for line in stack.lines(node, roles[node] if roles else "", row)]
        found += [f"node {node}: {why}"] if why else []
    return "\n".join(found) or "no rank runs"


class Check:
    """What was measured on the nodes of a run before its ranks started, and what was found."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._drawn: NodeCheck | None = None

    async def show(self) -> None:
        """Draw the table, where the nodes were checked."""
        from nicegui import ui

        with widgets.card("Check of the nodes") as self._card:
            self._area = ui.element("div")
        await self.refresh()

    async def refresh(self) -> None:
        """Draw the table again when something new was reported."""
        found = await history.current().query(lambda store: node_check(store, self._run_id))
        self._card.set_visibility(found is not None)
        if found is None or found == self._drawn:
            return
        self._drawn = found
        self._area.clear()
        with self._area:
            for line in found.verdict or ["No fault was found."]:
                widgets.element("p", text.clean(line, 500))
            looks = dict.fromkeys(found.head[3:], "ct-number")
            widgets.table(found.head, found.rows, caption="Figures of each node", looks=looks)
            with widgets.collapsible("What else each node reported"):
                widgets.preformatted("\n".join(found.facts), name="reports of each node")


class UseOfRuns:
    """The charts of what the nodes of several runs used; of many runs after a click, because their events are many."""

    def __init__(self, run_ids: Sequence[str], labels: Mapping[str, str]) -> None:
        self._ids, self._labels = list(run_ids), {run_id: text.clean(label, 120) for run_id, label in labels.items()}
        self._wanted = len(self._ids) <= MANY_RUNS
        self._known = 0
        self._drawn: dict[str, Any] = {}

    async def show(self) -> None:
        """Draw the charts, where the nodes have reported something."""
        from nicegui import ui

        with widgets.card("Use of nodes") as self._card:
            self._button = widgets.button("Draw", self._draw)
            self._area = (
                ui.element("div").classes("ct-use").props('role="group" aria-label="use of the nodes of each run"')
            )
        self._button.set_visibility(not self._wanted)
        await self.refresh()

    async def refresh(self) -> None:
        """Redraw the charts when there are new usage events."""
        count = await history.current().query(
            lambda store: sum(store.count_events(run_id, "usage") for run_id in self._ids)
        )
        self._card.set_visibility(count > 0)
        if count == self._known or not self._wanted:
            return
        self._known = count
        await self._draw_figures()

    async def _draw(self) -> None:
        self._wanted = True
        self._button.set_visibility(False)
        with widgets.loading(self._card):
            await self.refresh()

    async def _draw_figures(self) -> None:
        from nicegui import ui

        figures = await history.current().query(lambda store: use.use_of_runs(store, self._ids, self._labels))
        for title, figure in figures.items():
            styled = style_figure(figure, hovermode="closest" if len(self._ids) > MANY_RUNS else "x unified")
            if title in self._drawn:
                self._drawn[title].update_figure(styled)
                continue
            with self._area, ui.element("div").classes("ct-plot").props('role="group"') as around:
                around.props["aria-label"] = title
                self._drawn[title] = lists.chart(styled)
