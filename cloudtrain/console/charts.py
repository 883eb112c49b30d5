"""Interactive charts of metrics (plotly), updated while a run is active."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

from cloudtrain.console import curvestyle, gestures, history, layout, lists, text, widgets
from cloudtrain.errors import CloudtrainError
from cloudtrain.history.store import Store
from cloudtrain.report import nearest, plots
from cloudtrain.report.sections import Chart, Section
from cloudtrain.runs.run import Run

HEIGHT_PX = 250
MAX_POINTS = 600  # of a curve: about the width of a chart in pixels
MAX_CHARTS = 24  # on a page, before a click shows all
MANY_RUNS = 12  # more have fewer charts and points, no bands, and a tooltip for the nearest run alone
# No nested lists: plotly.js (as of NiceGUI 3.18) takes them for a change at every update and redraws in a loop.
# Its buttons that upload a figure are off by default.
_CONFIG = {"displaylogo": False, "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"]}
_LAYOUT = {
    "template": None,
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "height": HEIGHT_PX,
    "margin": {"l": 48, "r": 12, "t": 34, "b": 44},
    "uirevision": "kept",  # keeps the zoom when points are added
    "font": {"size": 12, "family": "system-ui, sans-serif"},
    "showlegend": False,  # the page has its own legend
    "hovermode": "x unified",
    "modebar": {"bgcolor": "rgba(0,0,0,0)"},
}
_AXIS = {
    "gridcolor": "rgba(128,140,152,.22)",
    "zeroline": False,
    "linecolor": "rgba(128,140,152,.4)",
    "automargin": True,
}


class Curves:
    """The charts of one or several runs on a page, in a collapsible section for each prefix (`train/`)."""

    def __init__(
        self,
        run_ids: Sequence[str],
        *,
        project: str = "",
        labels: Mapping[str, str] | None = None,
        style: curvestyle.CurveStyle | None = None,
        on_style: Callable[[], None] = lambda: None,
    ) -> None:
        self._ids, self._labels, self._project = list(run_ids), dict(labels or {}), project
        self._style, self._on_style = style or curvestyle.CurveStyle(), on_style
        self._sections: dict[str, _Section] = {}
        self._most = MAX_CHARTS if len(self._ids) <= MANY_RUNS else MAX_CHARTS // 4
        self._known: object = None
        self._ranks: list[int] = []
        self._explained = False
        self._layout = layout.Layout()
        self._wanted: set[str] = set()
        self._shown: list[str] = []  # metrics

    async def show(self) -> None:
        """Draw the charts."""
        from nicegui import ui

        ids, project = self._ids, self._project
        read = lambda store: (layout.read(store, project), layout.wanted(store, ids))  # noqa: E731
        self._layout, self._wanted = await history.current().query(read)
        with ui.element("div").classes("ct-row"):
            self._choices()
        self._empty_label = ui.label("no metrics yet").classes("ct-dim")
        self._nearest = ui.element("div")
        self._area = ui.element("div").classes("ct-plots ct-sections")
        with ui.element("div").classes("ct-row ct-foot"):
            self._more = widgets.button("Show all", self._show_all)
            widgets.button("Save layout", self._save_layout)
            widgets.button("Load layout", None).on("click", self._load_layout, js_handler=gestures.PICK)
            self._hidden = ui.element("div").classes("ct-row")
            self._count_label = ui.label("").classes("ct-dim ct-small").props('role="status"')
        self._draw_hidden()
        await self.refresh()

    def _choices(self) -> None:
        from nicegui import ui

        def changes(name: str, value_of: Callable[[Any], Any] = lambda value: value) -> Callable[[Any], Any]:
            return lambda event: self.change(**{name: value_of(event.value)})

        style = self._style
        over = {"step": "over steps", "epoch": "over epochs", "time": "over time", "tokens": "over tokens"}
        ui.select(over, value=style.over, label="axis", on_change=changes("over")).props("outlined dense").classes(
            "ct-choice"
        )
        search = ui.input(label="Metrics", value=style.search, on_change=changes("search", lambda value: value or ""))
        search.props("outlined dense clearable debounce=250").classes("ct-choice")
        to_rank = changes("rank", lambda text: None if text == "all" else int(text))
        self._rank_choice = ui.select(["0"], value="0", label="rank", on_change=to_rank)
        self._rank_choice.props("outlined dense").classes("ct-choice")
        self._rank_choice.visible = False
        widgets.slider("smoothing", style.smoothing, 0.99, lambda value: self.change(smoothing=value))
        with ui.element("div").classes("ct-row"):
            ui.checkbox("log x", value=style.log_x, on_change=changes("log_x"))
            ui.checkbox("log y", value=style.log, on_change=changes("log"))
        widgets.button("CSV", self._export)

    async def change(self, **changes: Any) -> None:
        """Draw the charts in another style."""
        for name, value in changes.items():
            setattr(self._style, name, value)
        self._on_style()
        with widgets.loading(self._area):
            await self.refresh(at_once=True)

    async def _arrange(self, change: Callable[[layout.Layout], None]) -> None:
        """Change the layout, keep it in the home, and draw it."""
        change(self._layout)
        self._draw_hidden()
        await history.current().query(lambda store: layout.write(store, self._project, self._layout))
        await self.refresh(at_once=True)

    def _save_layout(self) -> None:
        from nicegui import ui

        ui.download.content(layout.to_json(self._layout), "layout.json", "application/json")

    async def _load_layout(self, event: Any) -> None:
        from nicegui import ui

        if (given := layout.of_json(str(event.args))) == layout.Layout():
            ui.notify("this file has no layout of charts", type="negative")
            return
        self._layout = given
        self._area.clear()
        self._sections.clear()
        await self._arrange(lambda _: None)

    async def _show_all(self) -> None:
        self._most = 10_000
        self._layout.closed.clear()
        await self.change()

    async def _export(self) -> None:
        from nicegui import ui

        ids, names, rank = self._ids, self._shown, self._style.rank
        content = await history.current().query(lambda store: curvestyle.to_csv(store, ids, names, self._labels, rank))
        ui.download.content(content, "metrics.csv", "text/csv")

    async def refresh(self, *, at_once: bool = False) -> None:
        """Redraw the charts when there are new points, or at once."""
        ids, look, labels = self._ids, replace(self._style), self._labels
        sizes, ranks = await history.current().query(lambda store: _curve_sizes(store, ids, look.rank))
        if not ranks:
            await self._explain()
        if sizes == self._known and not at_once:
            return
        self._known = sizes
        if ranks != self._ranks:
            self._ranks = ranks
            self._rank_choice.set_options([*(str(rank) for rank in sorted({0, *ranks})), "all"])
            self._rank_choice.visible = ranks != [0]
        every = list(dict.fromkeys(name for _, name, *_ in sizes))
        sections = self._layout.arrange([name for name in every if look.search.lower() in name.lower()], self._wanted)
        drawn = self._layout.drawn(sections, 10_000 if look.search else self._most)
        charts = [chart for of in drawn.values() for chart in of]
        figures = await history.current().query(lambda store: _figures(store, ids, charts, look, labels))
        if look != self._style:
            return  # another refresh draws what was chosen meanwhile
        self._shown = [name for chart in charts for name in chart.names]
        self._empty_label.visible = not every
        is_part = len(charts) < sum(len(section.charts) for section in sections)
        self._count_label.text = f"{len(self._shown)} of {len(every)} metrics are shown" if is_part else ""
        self._more.set_visibility(is_part)
        if [*self._sections] != [section.prefix for section in sections]:
            self._area.clear()
            self._sections.clear()
        for section in sections:
            self._draw_section(section, drawn[section.prefix], figures, alone=len(sections) == 1)

    async def _explain(self) -> None:
        """Say of an ended run that it has no metrics, and show the nearest lines of its log."""
        if self._explained or len(self._ids) > 1:
            return
        told = await history.current().query_run(self._ids[0], _no_metrics)
        if told:
            self._explained = True
            self._empty_label.text = told[0]
            with self._nearest:
                widgets.preformatted("\n".join(told[1:]), name="The nearest lines") if told[1:] else None

    def _draw_section(
        self, section: Section, charts: Sequence[Chart], figures: Mapping[str, dict[str, Any]], *, alone: bool
    ) -> None:
        from nicegui import ui

        async def toggle(is_open: bool) -> None:
            if is_open != self._sections[section.prefix].is_open:
                self._sections[section.prefix].is_open = is_open
                await self._arrange(lambda layout: layout.set_open(section.prefix, is_open))

        if section.prefix not in self._sections:
            with self._area:
                if alone and not section.prefix:
                    grid, title = ui.element("section").classes("ct-plots"), None
                else:
                    with widgets.collapsible("", opened=bool(charts), on_toggle=toggle) as title:
                        grid = ui.element("div").classes("ct-plots")
            self._sections[section.prefix] = _Section(title, grid, bool(charts))
        drawn = self._sections[section.prefix]
        if drawn.title is not None:
            drawn.title.text = f"{text.clean(section.prefix or 'other', 80)} ({len(section.charts)})"
        titles = [chart.title for chart in charts]
        if [*drawn.charts] != titles[: len(drawn.charts)]:
            drawn.grid.clear()
            drawn.charts.clear()
        for title in titles:
            figures[title]["layout"]["height"] = self._layout.heights.get(title, HEIGHT_PX)
            if title in drawn.charts:
                drawn.charts[title].update_figure(figures[title])
            else:
                with drawn.grid:
                    drawn.charts[title] = self._draw_chart(title, figures[title], titles)
            wide = title in self._layout.wide
            drawn.charts[title].parent_slot.parent.classes(add="ct-spread" * wide, remove="ct-spread" * (not wide))

    def _draw_chart(self, title: str, figure: dict[str, Any], titles: Sequence[str]) -> Any:
        """Draw a chart that is dragged to the place of another one, with its buttons."""
        from nicegui import ui

        name, at = text.clean(title, 80), titles.index(title)

        def button(label: str, change: Callable[[layout.Layout], None]) -> None:
            own = widgets.element("button", label).classes("ct-sort").props("type=button")
            own.props["aria-label"] = f"{label} {name}"
            own.on("click", lambda: self._arrange(change))

        async def drop(event: Any) -> None:
            await self._arrange(lambda layout: layout.move(str(event.args), title, titles))

        async def resize(event: Any) -> None:
            height, wide = event.args
            await self._arrange(
                lambda layout: layout.resize(title, height, title in layout.wide if wide is None else wide)
            )

        with ui.element("div").classes("ct-plot ct-chart").props('role="group"') as around:
            around.props["aria-label"] = f"curve of {name}"
            around.on("dragover", js_handler="(event) => event.preventDefault()")
            around.on("drop", drop, js_handler=gestures.DROP)
            chart = lists.chart(figure)
            if len(self._ids) > 1:
                chart.on("plotly_click", self._open_run, js_handler=gestures.NEAREST)
            with ui.element("div").classes("ct-chart-tools ct-small ct-dim"):
                handle = widgets.element("span", "⠿").props('draggable=true aria-hidden=true title="Drag to move"')
                handle.props["data-chart"] = title
                handle.on("dragstart", js_handler=gestures.DRAG)
                button(
                    "Unpin" if title in self._layout.pinned else "Pin", lambda layout: layout.toggle("pinned", title)
                )
                if at:
                    button("Move up", lambda layout: layout.move(title, titles[at - 1], titles))
                button("Hide", lambda layout: layout.toggle("hidden", title))
                if len(self._ids) > 1:
                    runs = widgets.element("button", "Runs").classes("ct-sort").props("type=button")
                    runs.props["aria-label"] = f"Runs of {name}"
                    runs.on("click", lambda: self._choose_runs(title))
                size = widgets.element("button", "Resize").classes("ct-sort ct-resize")
                size.props('type=button title="Drag, or press the arrow keys"').props["aria-label"] = f"Resize {name}"
                for kind in ("pointerdown", "keydown"):
                    size.on(kind, resize, js_handler=gestures.RESIZE)
        return chart

    async def _choose_runs(self, title: str) -> None:
        """Ask which runs one chart shows."""
        from nicegui import ui

        names = {run_id: text.clean(self._labels.get(run_id, run_id), 120) for run_id in self._ids}
        with self._nearest, ui.dialog() as dialog, ui.card():
            dialog.props["aria-label"] = f"Runs of {text.clean(title, 80)}"
            given = [run_id for run_id in self._ids if run_id in self._style.some.get(title, ())]
            choice = ui.select(names, value=given, multiple=True, with_input=True, label="Runs in this chart")
            choice.props("outlined dense clearable").classes("ct-column")
            with ui.element("div").classes("ct-row"):
                widgets.button("Show these", lambda: dialog.submit(choice.value or ()), "ct-first")
                widgets.button("Show all", lambda: dialog.submit(()))
        chosen = await dialog
        dialog.delete()
        if chosen is not None:
            await self.change(some={**self._style.some, title: frozenset(chosen)})

    def _draw_hidden(self) -> None:
        """Draw a button for each hidden chart, that shows it again."""
        self._hidden.clear()
        with self._hidden:
            for title in self._layout.hidden:
                show = lambda title=title: self._arrange(lambda layout: layout.toggle("hidden", title))  # noqa: E731
                widgets.button(f"Show {text.clean(title, 60)}", show)

    def _open_run(self, event: Any) -> None:
        from nicegui import ui

        if event.args in self._ids:
            ui.navigate.to(f"/runs/{quote(event.args, safe='')}")


@dataclass
class _Section:
    """What is drawn of a section."""

    title: Any
    grid: Any
    is_open: bool
    charts: dict[str, Any] = field(default_factory=dict)  # title -> its plotly element


def _curve_sizes(
    store: Store, ids: Sequence[str], rank: int | None
) -> tuple[list[tuple[str, str, int, int, int]], list[int]]:
    """Return run, name, rank, number of points and last step of each curve; and the ranks that have any."""
    rows = [(run_id, row) for run_id in ids for row in store.curves.summary(run_id, rank)]
    ranks = sorted({rank for run_id in ids for rank in store.curves.ranks(run_id)})
    return [(run_id, row.name, row.rank, row.points, row.step) for run_id, row in rows], ranks


def _no_metrics(run: Run) -> list[str]:
    """Return what to say of an ended run without metrics; nothing while it may still log some."""
    if not run.record.status.state.final:
        return []
    try:
        return nearest.describe(run.logs(raw=True))
    except CloudtrainError:  # its log cannot be read
        return ["no metrics were found"]


def _figures(
    store: Store, ids: Sequence[str], charts: Sequence[Chart], look: curvestyle.CurveStyle, labels: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    shown, many = [run_id for run_id in ids if run_id not in look.hidden], len(ids) > MANY_RUNS
    colours = {run_id: look.colours.get(run_id, plots.colour_of(at)) for at, run_id in enumerate(ids)}
    figures = {}
    for chart in charts:
        some = look.some.get(chart.title)
        of_chart = [run_id for run_id in shown if not some or run_id in some]
        figure = style_figure(
            plots.curves(
                store,
                of_chart,
                chart.names,
                over=look.over,
                rank=look.rank,
                smoothing=look.smoothing,
                log=look.log,
                log_x=look.log_x,
                most=MAX_POINTS // 6 if many else MAX_POINTS,
                bands=not many and len(chart.names) == 1,
                labels={run_id: text.clean(label, 120) for run_id, label in labels.items()},
                stored=chart.names,
                together=chart.title if len(chart.names) > 1 else "",
                colours=colours if len(ids) > 1 else None,
            )
        )
        figure["layout"]["showlegend"] = look.rank is None
        if many or len(chart.names) > 1:
            figure["layout"]["hovermode"] = "closest"  # else the tooltip is longer than the screen
        if some and (titles := figure["layout"].get("annotations")):
            titles[0]["text"] += f" (curves of {len(of_chart)} of the {len(ids)} runs)"
        if look.baseline in of_chart:
            curvestyle.subtract(figure["data"], look.baseline)
        figures[chart.title] = figure
    return figures


def style_figure(figure: Any, **layout_changes: Any) -> dict[str, Any]:
    """Return a figure of report/plots.py as JSON for the page, with the console's layout and buttons."""
    data = figure.to_plotly_json()
    layout = data["layout"] | _LAYOUT | layout_changes
    for name in [key for key in layout if key.startswith(("xaxis", "yaxis"))]:
        layout[name] = layout[name] | _AXIS
    return {"data": data["data"], "layout": layout, "config": _CONFIG}
