"""The page of all sweeps: state, trials, best result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote

from cloudtrain.console import history, shell, text, widgets
from cloudtrain.console.polling import poll
from cloudtrain.history.store import Store
from cloudtrain.history.trials import SweepHistory
from cloudtrain.sweeps.sweep import Sweep

MOST = 200  # sweeps on the page
STATES = {"SUCCEEDED": "ct-good", "RUNNING": "ct-live", "FAILED": "ct-bad"}  # others: ct-warn


@dataclass(frozen=True)
class Line:
    """A row of the table."""

    sweep_id: str
    state: str
    trials: int
    live: int
    best: str
    created: str


def read(store: Store) -> list[Line]:
    """Read the newest sweeps; blocking."""
    lines = []
    for record in SweepHistory(store.home).sweeps(MOST):
        sweep = Sweep.find(record.sweep_id, store.home)
        trials = sweep.trials
        live = sum(not trial.ended for trial in trials) if record.live else 0
        created = text.format_time(record.created_at)
        lines.append(Line(record.sweep_id, record.state, len(trials), live, sweep.best_text, created))
    return lines


def draw_state(state: str) -> None:
    """Draw the state of a sweep."""
    widgets.element("span", state).classes(f"ct-state {STATES.get(state, 'ct-warn')}")


async def show() -> None:
    """Show the sweeps."""
    from nicegui import ui

    shell.heading("Sweeps")
    shown: list[list[Line]] = []
    with widgets.card(name="List of sweeps"):
        area = ui.element("div")

    async def refresh() -> None:
        lines = await history.current().query(read)
        if shown == [lines]:
            return
        shown[:] = [lines]
        area.clear()
        with area:
            _draw(lines)

    await refresh()
    poll([refresh])


def _draw(lines: list[Line]) -> None:
    from nicegui import ui

    if not lines:
        ui.label("There are no sweeps yet.")
        ui.label("cloudtrain sweep sweep.yaml").classes("ct-mono")
        return

    def link(line: Line) -> Callable[[], None]:
        return lambda: widgets.link(line.sweep_id, f"/sweeps/{quote(line.sweep_id)}")

    rows = [
        (link(line), lambda line=line: draw_state(line.state), line.trials, line.live, line.best, line.created)
        for line in lines
    ]
    widgets.table(("sweep", "state", "trials", "live", "best", "created"), rows, caption="Sweeps")
