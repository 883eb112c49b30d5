"""List runs of the history: `cloudtrain.runs()`, a sequence that a notebook shows as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from cloudtrain.history import table
from cloudtrain.history.store import Store
from cloudtrain.job import targets
from cloudtrain.runs.planning import spend
from cloudtrain.runs.progress import of_run
from cloudtrain.runs.run import Run


class Runs(Sequence[Run]):
    """Runs, the newest first: a sequence that a notebook shows as a table."""

    def __init__(self, runs: Sequence[Run], columns: Sequence[str] = ()) -> None:
        self._runs, self._columns = list(runs), list(columns)

    @overload
    def __getitem__(self, at: int) -> Run: ...
    @overload
    def __getitem__(self, at: slice) -> Runs: ...
    def __getitem__(self, at: int | slice) -> Run | Runs:
        return Runs(self._runs[at], self._columns) if isinstance(at, slice) else self._runs[at]

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs)

    def __repr__(self) -> str:
        return f"<Runs {', '.join(run.run_id for run in self._runs[:5])}{', ...' if len(self._runs) > 5 else ''}>"

    def to_pandas(self) -> Any:
        """Return a data frame with a row for each run: what it is, its hyperparameters (`hp.NAME`), and the last value of
        every metric (`metrics.NAME` where a column of the run has that name); then the columns that `runs` was given.
        Raises BadRequest without pandas."""
        from cloudtrain.report import notebook

        return notebook.data_frame(*self._stored(), self._columns, self._rows())

    def mark(
        self,
        *,
        title: str | None = None,
        note: str | None = None,
        tag: Sequence[str] = (),
        untag: Sequence[str] = (),
        star: bool | None = None,
        archive: bool | None = None,
    ) -> None:
        """Change the title, the note, the tags or the star of all these runs, or archive them, as `Run.mark` does for one.

        Args:
            title: Name of the runs in lists.
            note: Text that replaces the notes.
            tag: Tags to add.
            untag: Tags to remove.
            star: Whether the runs have a star.
            archive: Whether lists hide the runs.

        Raises:
            BadRequest: A title or tag is too long, or has characters that are not allowed. No run is changed.
        """
        for run in self._runs:
            run.mark(title=title, note=note, tag=tag, untag=untag, star=star, archive=archive)

    def report(self, path: str | Path, *, rank: int | None = 0) -> Path:
        """Write a comparison of these runs as one HTML file that works offline; blocking.

        Args:
            path: The file.
            rank: Whose curves; None for all ranks.

        Returns:
            The path of the file.

        Raises:
            BadRequest: There are not 2 to 200 runs, or plotly is not installed.
            OSError: The file cannot be written.
        """
        from cloudtrain.report import comparison

        store, run_ids = self._stored()
        return comparison.write(store or Store(targets.home()), run_ids, Path(path), rank=rank)

    def _repr_html_(self) -> str:
        from cloudtrain.report import notebook

        store, run_ids = self._stored()
        if self._columns:
            return notebook.table_of(self._columns, self._rows())
        return notebook.table(store or Store(targets.home()), run_ids)

    def _rows(self) -> list[table.Row]:
        """Return the rows of the chosen columns."""
        store, run_ids = self._stored()
        if store is None or not self._columns:
            return []
        return with_live(store, table.rows_of(store, run_ids, self._columns), self._columns)

    def _stored(self) -> tuple[Store | None, list[str]]:
        return (self._runs[0].store if self._runs else None), [run.run_id for run in self._runs]


def runs(
    filter: str = "",
    *,
    sort: str = "",
    columns: str | Sequence[str] = (),
    limit: int = 50,
    state: str | None = None,
    name: str | None = None,
) -> Runs:
    """Return the runs of the history that a filter selects, the newest first.

    Args:
        filter: such as `state:failed label.team=vision hp.lr>=1e-3 metric.loss<0.5 since:7d words` (page "runs").
        sort: a column, such as `metric.loss` or `-hp.lr` (the highest first).
        columns: shown by the table of a notebook, such as `hp.lr,metric.loss.min,system.gpu`, and part of `to_pandas()`.
        limit: how many at most.
        state: only runs in this state.
        name: only runs of jobs of this name.

    Returns:
        A sequence of Run; a notebook shows it as a table, and `to_pandas()` returns a data frame.

    Raises:
        BadRequest: the filter or the column cannot be read.
    """
    store = Store(targets.home())
    given = [("state", state), ("name", name)]
    terms = [filter, *(f'{field}:"{value}"' for field, value in given if value)]
    shown = columns if isinstance(columns, str) else ",".join(columns)
    query = table.Query(" ".join(terms), sort, shown)
    rows = table.first_rows(store, query, limit=limit)
    return Runs([Run(row.record.run_id, store) for row in rows], query.names)


def read(store: Store, query: table.Query, *, limit: int, offset: int = 0) -> tuple[list[table.Row], int]:
    """Return one page of the table (history/table.py), with what is known of live runs alone: cost so far and ETA."""
    rows, count = table.page(store, query, limit=limit, offset=offset)
    return with_live(store, rows, query.names), count


def with_live(store: Store, rows: list[table.Row], names: Sequence[str]) -> list[table.Row]:
    """Return rows with what is known of live runs alone: cost so far and ETA."""
    wanted = [at for at, name in enumerate(names) if name in ("cost", "eta")]
    return [_with_live(store, row, names, wanted) for row in rows] if wanted else rows


def _with_live(store: Store, row: table.Row, names: Sequence[str], wanted: Sequence[int]) -> table.Row:
    ended, values = row.record.status.state.final, list(row.values)
    if not ended or any(names[at] == "cost" and values[at] is None for at in wanted):
        attempts = store.attempts(row.record.run_id)
        live = None if ended else of_run(store, attempts)
        used = spend.total(attempts, store.home)
        found = {
            "cost": used.usd if attempts[-1].plan.price and not used.unpriced_s else None,
            "eta": sum(live.left_s) / 2 if live and live.left_s else None,
        }
        for at in wanted:
            values[at] = found[names[at]]
    return table.Row(row.record, tuple(values))
