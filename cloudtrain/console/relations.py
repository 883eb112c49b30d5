"""A scatter of two columns and parallel coordinates of many runs, for any page: a comparison, a sweep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cloudtrain.console import charts, lists, text, widgets
from cloudtrain.errors import BadRequest
from cloudtrain.report import relations

MOST_AXES, MOST_METRICS = 12, 4  # of parallel coordinates
AXIS_PX, LETTER_PX = 85, 5.8  # least width of an axis, and of a letter of its name
_PARALLEL_MARGIN = {"l": 70, "r": 50, "t": 74, "b": 30}  # the buttons are above the names of the axes


class Relations:
    """The two charts of runs.

    Args:
        labels: a name for each run.
        columns: name of a column -> its value for each run, None where a run has none.
        axes: `x` and `y`, the columns of the scatter, and `axes`, those of the parallel coordinates, chosen here where they are
            missing; changes are written to it.
        on_axes: called after each change of the axes.
    """

    def __init__(
        self,
        labels: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        axes: dict[str, str],
        on_axes: Callable[[], None] = lambda: None,
    ) -> None:
        self._labels, self._columns = [text.clean(label, 120) for label in labels], columns
        self._kept, self._on_axes = axes, on_axes
        self._log = {"x": False, "y": False}
        self._choices: list[Any] = []
        self._lines: Any = None  # the parallel coordinates

    def show(self) -> None:
        """Draw both charts, where at least two columns differ."""
        from nicegui import ui

        if len(self._columns) < 2:
            return
        self._axes = self._choose_axes()
        self._scatter()
        if (found := self._parallel()) is None:
            return
        figure, width = found
        with widgets.card("Parallel coordinates"):
            chosen = ui.select(
                [*self._columns], value=self._axes_of_lines(), label="Axes", multiple=True, with_input=True
            )
            chosen.props("outlined dense").on_value_change(lambda event: self._choose_lines(event.value or ()))
            ui.label("Drag an axis by its name to move it, and along it to filter.").classes("ct-dim ct-small")
            # Axes need room: on a narrow screen the chart is scrolled.
            self._lines = _chart("parallel coordinates", figure).style(f"min-width: {width:.0f}px")

    def update(self, labels: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> None:
        """Draw other runs, in the same charts."""
        self._labels, self._columns = [text.clean(label, 120) for label in labels], columns
        self._axes = self._choose_axes() | {axis: name for axis, name in self._axes.items() if name in columns}
        for choice in self._choices:
            choice.set_options([*columns])
        self._drawn.update_figure(self._figure())
        if self._lines is not None and (found := self._parallel()):
            self._lines.update_figure(found[0])

    def _choose_axes(self) -> dict[str, str]:
        given, metrics = self._sorted_columns()
        usual = {"x": [*given, *self._columns][0], "y": [*metrics, *[*self._columns][::-1]][0]}
        return {axis: name if (name := self._kept.get(axis, "")) in self._columns else usual[axis] for axis in usual}

    def _sorted_columns(self) -> tuple[list[str], list[str]]:
        """Return the columns that were given and the metrics, a loss first; what nodes used is an axis of the scatter alone."""
        given = [name for name in self._columns if not name.startswith(("metric.", "system."))]
        metrics = [name for name in self._columns if name.startswith("metric.") and name.count(".") == 1]
        metrics.sort(key=lambda name: "loss" not in name)
        return given, metrics

    def _parallel(self) -> tuple[dict[str, Any], float] | None:
        """Return the parallel coordinates and their least width in pixels; None where no run has all metrics."""
        chosen = self._axes_of_lines()
        try:
            figure = relations.parallel([(name, self._columns[name]) for name in chosen])
        except BadRequest:
            return None
        width = max([AXIS_PX, *(LETTER_PX * len(name) for name in chosen)]) * len(chosen)
        return charts.style_figure(figure, height=380, margin=_PARALLEL_MARGIN), width

    def _axes_of_lines(self) -> list[str]:
        """Return the axes of the parallel coordinates: those that were chosen, or the parameters and a few metrics."""
        kept = [name for name in self._kept.get("axes", "").split(",") if name in self._columns]
        if len(kept) > 1:
            return kept[:MOST_AXES]
        given, metrics = self._sorted_columns()
        # A run has a line where it has all metrics. The last axis gives the colour: a metric, where there is one.
        has = {name: sum(value is not None for value in self._columns[name]) for name in metrics}
        metrics = [name for name in metrics if has[name] == max(has.values())][:MOST_METRICS][::-1]
        return [*given[: MOST_AXES - len(metrics)], *metrics]

    def _choose_lines(self, names: Sequence[str]) -> None:
        """Draw the parallel coordinates with other axes, in the order in which they were chosen."""
        if len(names) < 2:
            return
        self._kept["axes"] = ",".join(names)
        self._on_axes()
        if found := self._parallel():
            self._lines.style(f"min-width: {found[1]:.0f}px").update_figure(found[0])

    def _scatter(self) -> None:
        from nicegui import ui

        with widgets.card("Scatter"):
            with ui.element("div").classes("ct-row"):
                for axis in ("x", "y"):
                    choice = ui.select([*self._columns], value=self._axes[axis], label=f"{axis} axis", with_input=True)
                    choice.props("outlined dense").classes("ct-choice ct-column")
                    self._choices.append(choice)
                    choice.on_value_change(lambda e, axis=axis: self._change(axis, e.value))
                    ui.checkbox(f"log {axis} axis", on_change=lambda e, axis=axis: self._change(axis, log=e.value))
            self._drawn = _chart("scatter", self._figure())

    def _figure(self) -> dict[str, Any]:
        x, y = ((self._axes[axis], self._columns[self._axes[axis]]) for axis in ("x", "y"))
        figure = relations.scatter(self._labels, x, y, log_x=self._log["x"], log_y=self._log["y"])
        return charts.style_figure(figure, height=340, hovermode="closest")

    def _change(self, axis: str, column: str | None = None, log: bool | None = None) -> None:
        if column:
            self._axes[axis] = self._kept[axis] = column
            self._on_axes()
        if log is not None:
            self._log[axis] = log
        self._drawn.update_figure(self._figure())


def _chart(name: str, figure: dict[str, Any]) -> Any:
    from nicegui import ui

    with ui.element("div").classes("ct-plot ct-scroll").props('role="group" tabindex="0"') as around:
        around.props["aria-label"] = name
        return lists.chart(figure)
