"""The page of a sweep: best so far, parallel coordinates, importance, trials; pause, resume, stop it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from cloudtrain.console import charts, history, lists, relations, shell, text, widgets
from cloudtrain.console.pages.sweeps import draw_state
from cloudtrain.console.polling import poll
from cloudtrain.errors import CloudtrainError, MissingExtra, UnknownRun
from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.report import sweep_figures
from cloudtrain.sweeps import standing
from cloudtrain.sweeps.sweep import Sweep, format_value

LEAST_LINES = 2  # trials in parallel coordinates
MOST_TRIALS = 500  # rows of the table, the newest
_ACTIONS = (
    ("Pause", "pause", ("RUNNING",)),
    ("Resume", "resume", ("PAUSED",)),
    ("Stop", "stop", ("RUNNING", "PAUSED")),
)


@dataclass(frozen=True)
class Trial:
    """A trial as the page shows it."""

    number: int
    state: State | None
    values: tuple[float, ...]
    params: tuple[Any, ...]
    run_id: str | None
    note: str


@dataclass(frozen=True)
class Shown:
    """A sweep as the page shows it, read in one query."""

    sweep_id: str
    state: str
    reason: str
    method: str
    metrics: tuple[str, ...]
    minimize: bool
    searched: tuple[str, ...]
    trials: tuple[Trial, ...]
    best: str
    best_run: str | None
    spent: str


def read(store: Store, sweep_id: str) -> Shown:
    """Read a sweep of an exact id; blocking. Raises UnknownRun. Its process is started again where it has died."""
    sweep = Sweep.find(sweep_id, store.home)
    if sweep.sweep_id != sweep_id:
        raise UnknownRun(f"no sweep has the id {text.clean(sweep_id)}", "see the list of sweeps")
    sweep.ensure_driven()
    record, file, best = sweep.record, sweep.file, sweep.best
    searched = tuple(parameter.name for parameter in file.searched)
    trials = tuple(
        Trial(
            trial.number, trial.state, tuple(trial.result or ()), tuple(trial.params.get(name) for name in searched),
            trial.run_id, trial.stopped or (f"repeats trial {trial.retry_of}" if trial.retry_of else ""),
        )
        for trial in sweep.trials
    )  # fmt: skip
    return Shown(
        sweep_id, record.state, record.reason, file.method, tuple(metric.name for metric in file.metrics),
        not file.metrics or file.metrics[0].goal == "minimize", searched, trials, sweep.best_text,
        best.run_id if best and not best.deleted else None, standing.describe_spent(sweep.spent),
    )  # fmt: skip


async def show(sweep_id: str) -> None:
    """Show a sweep."""
    page = SweepPage(sweep_id)
    await page.show()
    poll([page.refresh])


class SweepPage:
    """The page of one sweep; what has changed is drawn again."""

    def __init__(self, sweep_id: str) -> None:
        self._id = sweep_id
        self._shown: Shown | None = None
        self._sorted = ""  # the column of the table of trials, `-` before it for the highest first
        self._results: object = None  # of which the charts are
        self._best_chart: Any = None
        self._shares_chart: Any = None
        self._related: relations.Relations | None = None

    async def show(self) -> None:
        """Draw the page; raises UnknownRun."""
        from nicegui import ui

        first = await history.current().query(lambda store: read(store, self._id))
        shell.heading(text.clean(self._id, 120))
        with ui.element("div").classes("ct-row"):
            self._buttons = [
                (widgets.button(label, lambda name=name: self._change(name)), states)
                for label, name, states in _ACTIONS
            ]
        self._facts = widgets.area("Sweep")
        self._curve = widgets.area("Best so far")
        with self._curve:
            self._no_result = ui.label("no trial has a result yet").classes("ct-dim")
        self._relations = ui.element("div").classes("ct-stack")
        self._importance = widgets.area("Importance")
        with self._importance:
            self._no_shares = ui.label("").classes("ct-dim")
        self._trials = widgets.area("Trials")
        await self._draw(first)

    async def refresh(self) -> None:
        """Read the sweep, and draw what has changed."""
        now = await history.current().query(lambda store: read(store, self._id))
        if now != self._shown:
            await self._draw(now)

    async def _draw(self, now: Shown) -> None:
        from nicegui import ui

        self._shown = now
        for button, states in self._buttons:
            button.set_visibility(now.state in states)
        self._facts.clear()
        with self._facts:
            widgets.pairs(
                (
                    ("state", lambda: draw_state(now.state)), ("reason", now.reason), ("method", now.method),
                    ("metric", ", ".join(now.metrics)), ("trials", str(len(now.trials))), ("best", now.best),
                    ("spent", now.spent),
                )
            )  # fmt: skip
            if now.best_run:
                ui.label(f"cloudtrain fetch {text.clean(now.best_run)} -o best").classes("ct-mono")
        self._trials.clear()
        with self._trials:
            self._table(now)
        results = [(trial.number, trial.values) for trial in now.trials if trial.values]
        if results == self._results:
            return
        self._results = results
        self._charts(now)
        await self._shares()

    def _table(self, now: Shown) -> None:
        from nicegui import ui

        if len(now.trials) > MOST_TRIALS:
            ui.label(f"the newest {MOST_TRIALS} of {len(now.trials)}").classes("ct-dim ct-small")
        with ui.element("div").classes("ct-scroll").props('tabindex="0" role="region" aria-label="All trials"'):
            drawn = lists.runs_table()
        drawn.on("sort", lambda event: self._sort(event.args))
        column, descending = self._sorted.removeprefix("-"), self._sorted.startswith("-")
        heads = ("trial", "state", *now.metrics, *now.searched, "run", "note")
        order = {True: "descending", False: "ascending"}[descending]
        drawn.props["heads"] = tuple(
            (text.clean(head, 80), "", head, order if head == column else "none") for head in heads
        )
        trials = now.trials[-MOST_TRIALS:][::-1]
        if column in heads:
            trials = sort_trials(trials, heads.index(column), len(now.metrics), descending=descending)
        drawn.props["rows"] = tuple((str(trial.number), "", False, _cells(trial, len(now.metrics))) for trial in trials)

    async def _sort(self, column: str) -> None:
        """Sort by a column: upwards, downwards, the newest first again."""
        order = ["", column, f"-{column}", ""]
        self._sorted = order[order.index(self._sorted) + 1] if self._sorted in order else column
        if self._shown:
            self._trials.clear()
            with self._trials:
                self._table(self._shown)

    def _charts(self, now: Shown) -> None:
        whole = [trial for trial in now.trials if trial.values]
        self._no_result.set_visibility(not whole)
        if not whole:
            return
        results = [(trial.number, trial.values[0], trial.note == standing.PRUNED) for trial in whole]
        figure = sweep_figures.best_so_far(now.metrics[0], results, minimize=now.minimize)
        drawn = charts.style_figure(figure, height=320, hovermode="closest")
        self._best_chart = _draw_chart(self._best_chart, drawn, self._curve)
        columns: dict[str, list[Any]] = {
            f"hp.{name}": [trial.params[at] for trial in whole] for at, name in enumerate(now.searched)
        }
        columns |= {f"metric.{name}": [trial.values[at] for trial in whole] for at, name in enumerate(now.metrics)}
        columns = {name: values for name, values in columns.items() if len(set(map(str, values))) > 1}
        labels = [f"trial {trial.number}" for trial in whole]
        if self._related:
            self._related.update(labels, columns)
        elif len(columns) > 1 and len(whole) >= LEAST_LINES:
            self._related = relations.Relations(labels, columns, {})
            with self._relations:
                self._related.show()

    async def _shares(self) -> None:
        problem = "8 trials with a result are needed"
        shares: dict[str, float] = {}
        try:
            shares = await history.current().query(lambda store: Sweep.find(self._id, store.home).importance)
        except MissingExtra as error:
            problem = shell.format_error(error)
        self._no_shares.text = "" if shares else problem
        if shares:
            figure = sweep_figures.importance_bars(shares)
            drawn = charts.style_figure(figure, height=90 + 34 * len(shares), hovermode="closest")
            self._shares_chart = _draw_chart(self._shares_chart, drawn, self._importance)

    async def _change(self, name: str) -> None:
        try:
            await history.current().query(lambda store: getattr(Sweep.find(self._id, store.home), name)())
        except CloudtrainError as error:
            shell.notify_error(error)
        await self.refresh()


def sort_trials(trials: Sequence[Trial], at: int, metrics: int, *, descending: bool) -> tuple[Trial, ...]:
    """Return trials in the order of a column of the table: numbers before texts, those without a value last."""

    def value(trial: Trial) -> Any:
        state = trial.state.value if trial.state else None
        values = [*trial.values, *(None for _ in range(metrics - len(trial.values)))]
        return [trial.number, state, *values, *trial.params, trial.run_id, trial.note][at]

    known = [trial for trial in trials if value(trial) is not None and value(trial) == value(trial)]
    numbers = [trial for trial in known if isinstance(value(trial), int | float)]
    texts = [trial for trial in known if trial not in numbers]
    numbers.sort(key=value, reverse=descending)
    texts.sort(key=lambda trial: str(value(trial)), reverse=descending)
    return (*numbers, *texts, *(trial for trial in trials if trial not in known))


def _cells(trial: Trial, metrics: int) -> tuple[tuple[str, str, str, str, tuple[str, ...]], ...]:
    """Return the cells of a trial as runs.js draws them."""
    word = trial.state.value if trial.state else "deleted" if trial.run_id else "not sent"
    look = (widgets.state_class(trial.state) or "ct-other") if trial.state else ""
    values = [*(f"{value:.6g}" for value in trial.values), *("" for _ in range(metrics - len(trial.values)))]
    words = [*values, *(text.clean(format_value(value)) for value in trial.params)]
    run = (
        "ct-whole",
        text.clean(trial.run_id or ""),
        f"/runs/{quote(trial.run_id or '')}" if trial.state else "",
        "",
        (),
    )
    return (
        ("", str(trial.number), "", "", ()),
        ("", word, "", look, ()),
        *(("ct-whole", each, "", "", ()) for each in words),
        run,
        ("", text.clean(trial.note), "", "", ()),
    )


def _draw_chart(chart: Any, figure: dict[str, Any], area: Any) -> Any:
    """Return the chart with another figure; without one it is made in an area."""

    if chart is not None:
        chart.update_figure(figure)
        return chart
    with area:
        return lists.chart(figure).classes("ct-plot")
