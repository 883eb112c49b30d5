"""Interactive charts of metrics (plotly), updated while a run is active."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cloudtrain.console import curvestyle, history, shell, text, widgets
from cloudtrain.errors import CloudtrainError
from cloudtrain.history.curves import metric_order
from cloudtrain.history.store import Store
from cloudtrain.report import nearest, plots
from cloudtrain.runs.run import Run

MAX_POINTS = 600  # of a curve: about the width of a chart in pixels
MAX_CHARTS = 24  # on a page, before a click shows all
MANY_RUNS = 12  # more have fewer charts and points, no bands, and a tooltip for the nearest run alone
# No nested lists: plotly.js (as of NiceGUI 3.18) takes them for a change at every update and redraws in a loop.
# Its buttons that upload a figure are off by default.
_CONFIG = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"]}
_LAYOUT = {
    "template": None,
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "height": 250,
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
    """The charts of one or several runs on a page, one for each metric, below a heading for each group (`train/`)."""

    def __init__(
        self,
        run_ids: Sequence[str],
        *,
        labels: Mapping[str, str] | None = None,
        style: curvestyle.CurveStyle | None = None,
        on_style: Callable[[], None] = lambda: None,
    ) -> None:
        self._ids, self._labels = list(run_ids), dict(labels or {})
        self._style, self._on_style = style or curvestyle.CurveStyle(), on_style
        self._drawn: dict[str, Any] = {}  # metric -> its plotly element
        self._grids: dict[str, Any] = {}  # group of metrics -> where their charts are
        self._most = MAX_CHARTS if len(self._ids) <= MANY_RUNS else MAX_CHARTS // 4
        self._known: object = None
        self._ranks: list[int] = []
        self._explained = False

    async def show(self) -> None:
        """Draw the charts."""
        from nicegui import ui

        with ui.element("div").classes("ct-row"):
            self._choices()
        self._empty_label = ui.label("no metrics yet").classes("ct-dim")
        self._nearest = ui.element("div")
        self._area = ui.element("div").classes("ct-stack")
        with ui.element("div").classes("ct-row ct-foot"):
            self._count_label = ui.label("").classes("ct-dim ct-small").props('role="status"')
            self._more = widgets.button("Show all", self._show_all)
        await self.refresh()

    def _choices(self) -> None:
        from nicegui import ui

        def changes(name: str, value_of: Callable[[Any], Any] = lambda value: value) -> Callable[[Any], Any]:
            return lambda event: self._change(**{name: value_of(event.value)})

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
        widgets.slider("smoothing", style.smoothing, 0.99, lambda value: self._change(smoothing=value))
        with ui.element("div").classes("ct-row"):
            ui.checkbox("log x", value=style.log_x, on_change=changes("log_x"))
            ui.checkbox("log y", value=style.log, on_change=changes("log"))
        widgets.button("CSV", self._export)

    async def _change(self, **changes: Any) -> None:
        for name, value in changes.items():
            setattr(self._style, name, value)
        self._on_style()
        with widgets.loading(self._area):
            await self.refresh(at_once=True)

    async def _show_all(self) -> None:
        self._most = 10_000
        await self._change()

    async def _export(self) -> None:
        from nicegui import ui

        ids, names, rank = self._ids, list(self._drawn), self._style.rank
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
        every = sorted(dict.fromkeys(name for _, name, *_ in sizes), key=metric_order)
        found = [name for name in every if look.search.lower() in name.lower()]
        names = found[: self._most]
        figures = await history.current().query(lambda store: _figures(store, ids, names, look, labels))
        if look != self._style:
            return  # another refresh draws what was chosen meanwhile
        self._empty_label.visible = not every
        self._count_label.text = f"{len(names)} of {len(every)} metrics are shown" if len(names) < len(every) else ""
        self._more.set_visibility(len(names) < len(found))
        if [*self._drawn] != names[: len(self._drawn)]:
            self._area.clear()
            self._drawn.clear()
            self._grids.clear()
        for name, figure in figures.items():
            self._draw_figure(name, figure)

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

    def _draw_figure(self, name: str, figure: dict[str, Any]) -> None:
        from nicegui import ui

        if name in self._drawn:
            self._drawn[name].update_figure(figure)
            return
        group = name.rpartition("/")[0]
        if group not in self._grids:
            with self._area, ui.element("section"):
                if group:
                    shell.heading(text.clean(group, 80), 3)
                self._grids[group] = ui.element("div").classes("ct-plots")
        with self._grids[group], ui.element("div").classes("ct-plot").props('role="group"') as around:
            around.props["aria-label"] = f"curve of {text.clean(name, 80)}"
            self._drawn[name] = ui.plotly(figure)


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
    store: Store, ids: Sequence[str], names: Sequence[str], look: curvestyle.CurveStyle, labels: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    figures = {
        name: style_figure(
            plots.curves(
                store,
                ids,
                [name],
                over=look.over,
                rank=look.rank,
                smoothing=look.smoothing,
                log=look.log,
                log_x=look.log_x,
                most=MAX_POINTS if len(ids) <= MANY_RUNS else MAX_POINTS // 6,
                bands=len(ids) <= MANY_RUNS,
                labels={run_id: text.clean(label, 120) for run_id, label in labels.items()},
                stored=[name],
            )
        )
        for name in names
    }
    for figure in figures.values():
        figure["layout"]["showlegend"] = look.rank is None
        if len(ids) > MANY_RUNS:
            figure["layout"]["hovermode"] = "closest"  # else the tooltip is longer than the screen
    return figures


def style_figure(figure: Any, **layout_changes: Any) -> dict[str, Any]:
    """Return a figure of report/plots.py as JSON for the page, with the console's layout and buttons."""
    data = figure.to_plotly_json()
    layout = data["layout"] | _LAYOUT | layout_changes
    for name in [key for key in layout if key.startswith(("xaxis", "yaxis"))]:
        layout[name] = layout[name] | _AXIS
    return {"data": data["data"], "layout": layout, "config": _CONFIG}
