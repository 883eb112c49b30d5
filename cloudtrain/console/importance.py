"""The importance of hyperparameters on a page: computed at a click, because the random forest takes seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from cloudtrain.console import text, widgets
from cloudtrain.errors import MissingExtra
from cloudtrain.report.importance import LEAST_RUNS, importance
from cloudtrain.report.relations import value_of

TITLE = "Importance of hyperparameters"


class Importance:
    """A choice of the metric, a button and the table of shares.

    Args:
        columns: name of a column -> its value for each run, None where a run has none.
    """

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self._params = {name: values for name, values in columns.items() if name.startswith("hp.")}
        enough = [
            name
            for name, values in columns.items()
            if name.startswith("metric.") and sum(value is not None for value in values) >= LEAST_RUNS
        ]
        # The last value of a loss comes first.
        self._metrics = sorted(enough, key=lambda name: ("loss" not in name, name.endswith((".min", ".max"))))
        self._values = columns
        self._area: Any = None

    def show(self) -> None:
        """Draw the card, where enough runs have a metric and a hyperparameter differs."""
        from nicegui import ui

        if not self._metrics or not self._params:
            return
        with widgets.card(TITLE):
            with ui.element("div").classes("ct-row"):
                self._metric = ui.select(self._metrics, value=self._metrics[0], label="importance for", with_input=True)
                self._metric.props("outlined dense").classes("ct-choice ct-column")
                self._metric.on_value_change(lambda: self._area.clear())  # shares of another metric are stale
                ui.button("Compute", on_click=self._compute).props("outline no-caps")
            self._area = ui.element("div").props('aria-live="polite"')

    async def _compute(self) -> None:
        from nicegui import ui

        metric = self._metric.value
        with widgets.loading(self._area):
            try:
                shares = await asyncio.to_thread(self._shares, metric)
            except MissingExtra as missing:
                shares, problem = {}, f"{missing}"
            else:
                problem = f"Fewer than {LEAST_RUNS} runs have a finite value."
        if metric != self._metric.value:
            return  # another metric was chosen meanwhile
        self._area.clear()
        with self._area:
            if shares:
                rows = [(text.clean(name, 120), f"{share:.0%}") for name, share in shares.items()]
                widgets.table(("hyperparameter", "share of the variance"), rows, caption="Shares of the variance")
            else:
                ui.label(problem).classes("ct-dim")

    def _shares(self, metric: str) -> dict[str, float]:
        values = self._values[metric]
        params = [
            {name: value_of(name, given, at) for name, given in self._params.items()} for at in range(len(values))
        ]
        return importance(params, [None if value is None else float(value) for value in values])
