"""The part of the review that starts a sweep of the job: trials with other hyperparameters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import quote

from cloudtrain.console import shell, text, widgets
from cloudtrain.console.draft import Draft
from cloudtrain.errors import CloudtrainError, page

TEMPLATE = """\
method: random
metric: {{name: loss, goal: minimize}}
run_cap: 20
max_parallel: 4
parameters:
  {name}: {{distribution: log_uniform_values, min: 1.0e-5, max: 1.0e-2}}
"""


class NewSweep:
    """The sweep of one draft. `started` is called when there is a sweep."""

    def __init__(self, draft: Draft, started: Callable[[], None]) -> None:
        self._draft, self._started = draft, started

    def draw(self) -> None:
        """Draw the text field with a sweep's keys, and the button."""
        from nicegui import ui

        with widgets.card(name="Sweep"), widgets.collapsible("Run a sweep of this job instead"):
            ui.label(f"Keys of a sweep file, see {page('how/sweep')}. Each trial is a run of this job.").classes(
                "ct-dim"
            )
            self._text = ui.textarea("Sweep").props("outlined autogrow spellcheck=false stack-label data-field=sweep")
            self._text.classes("ct-mono").style("width: 100%")
            with ui.element("div").classes("ct-row"):
                self._button = widgets.button("Start the sweep", self._start, icon="tune")
                self._status = ui.label("").classes("ct-wrong").props('role="status"')

    def fill(self) -> None:
        """Write the template for the job's first hyperparameter, where nothing was written yet."""
        if not self._text.value:
            names = self._draft.hyperparameters()
            self._text.value = TEMPLATE.format(name=next((name for name in names if "lr" in name or "rate" in name),
                                                         next(iter(names), "learning_rate")))  # fmt: skip

    async def _start(self) -> None:
        from nicegui import ui

        draft, written = self._draft.snapshot(), str(self._text.value or "")
        self._button.props("loading").set_enabled(False)
        self._status.text = ""
        try:
            sweep_id = await asyncio.to_thread(lambda: draft.start_sweep(written))
        except CloudtrainError as error:
            self._status.text = text.clean(shell.format_error(error), 2000)
            self._button.props(remove="loading").set_enabled(True)
            return
        self._started()
        ui.navigate.to(f"/sweeps/{quote(sweep_id)}")
