"""List runs of the history: `cloudtrain.runs()`, a sequence that a notebook shows as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.job import targets
from cloudtrain.runs.run import Run


class Runs(Sequence[Run]):
    """Runs, the newest first: a sequence that a notebook shows as a table."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = list(runs)

    @overload
    def __getitem__(self, at: int) -> Run: ...
    @overload
    def __getitem__(self, at: slice) -> Runs: ...
    def __getitem__(self, at: int | slice) -> Run | Runs:
        return Runs(self._runs[at]) if isinstance(at, slice) else self._runs[at]

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs)

    def __repr__(self) -> str:
        return f"<Runs {', '.join(run.run_id for run in self._runs[:5])}{', ...' if len(self._runs) > 5 else ''}>"

    def to_pandas(self) -> Any:
        """Return a data frame with a row for each run: what it is, its hyperparameters (`hp.NAME`), and the last value of
        every metric (`metrics.NAME` where a column of the run has that name). Raises BadRequest without pandas."""
        from cloudtrain.report import notebook

        return notebook.data_frame(*self._stored())

    def _repr_html_(self) -> str:
        from cloudtrain.report import notebook

        store, run_ids = self._stored()
        return notebook.table(store, run_ids) if store else notebook.table(Store(targets.home()), [])

    def _stored(self) -> tuple[Store | None, list[str]]:
        return (self._runs[0].store if self._runs else None), [run.run_id for run in self._runs]


def runs(*, limit: int = 50, state: str | None = None, name: str | None = None) -> Runs:
    """Return the newest runs of the history, those in a state or of a job's name where these are given."""
    store = Store(targets.home())
    states = [State(state.upper())] if state else []
    return Runs([Run(record.run_id, store) for record in store.runs(limit=limit, states=states, name=name)])
