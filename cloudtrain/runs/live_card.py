"""The card of a run in a notebook, drawn again until the run has ended. IPython is used where a kernel has it."""

from __future__ import annotations

import sys
import threading
from typing import Any

from cloudtrain.events import without_event
from cloudtrain.history.store import Store
from cloudtrain.report import notebook
from cloudtrain.runs.progress import of_run

EVERY_S = 1.0  # between two drawings at least
LONGEST_S = 10.0  # how long `wait` waits for the last drawing


class LiveCard:
    """A card below the cell that runs now, drawn again by a thread whenever the run logs something, and at its end."""

    def __init__(self, run: Any) -> None:
        from IPython.display import display  # type: ignore[import-not-found]

        self._run_id, self._store = run.run_id, run.store
        self._kind = type(run)
        self._line = ""
        self._handle = display(self._draw(run), display_id=True)
        self._thread = threading.Thread(target=self._follow, name="cloudtrain-card", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Block until the run's end is drawn."""
        self._thread.join(LONGEST_S)

    def _follow(self) -> None:
        run = self._kind(self._run_id, Store(self._store.home, self._store.clock))  # a store is of one thread
        drawn_at = 0.0
        for line in run.logs(follow=True, raw=True):
            if line.rank >= 0 and (shown := without_event(line.text)) is not None:
                self._line = shown
            if (moment := run.store.clock.monotonic()) >= drawn_at + EVERY_S:
                drawn_at = moment
                self._handle.update(self._draw(run))
        self._handle.update(self._draw(run))

    def _draw(self, run: Any) -> Any:
        from IPython.display import HTML

        record = run.record
        done = of_run(run.store, run.attempts)
        rows = [("progress", done.line if done else ""), ("last line", self._line[:200])]
        if not record.status.state.final:
            rows.append(("to cancel", f'cloudtrain.Run.find("{run.run_id}").cancel()'))
        return HTML(notebook.card(run.store, run.run_id, rows))


def live_card(run: Any) -> LiveCard | None:
    """Show the card of a run below the cell that runs now; None where this is no notebook, or one of its threads."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    is_cell = hasattr(shell, "kernel") and threading.current_thread() is threading.main_thread()
    return LiveCard(run) if is_cell else None
