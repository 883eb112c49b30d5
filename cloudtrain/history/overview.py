"""The newest runs as `ls` and the console show them: a sweep, or a function's `map`, is one row for all of its runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cloudtrain.events import State
from cloudtrain.history import filters
from cloudtrain.history.table import Row, rows_of

if TYPE_CHECKING:
    from cloudtrain.history.store import Store

_GOALS = "CASE WHEN json_valid(spec) THEN json_extract(spec, '$.document.metric', '$.document.metrics') ELSE '[null, null]' END"
AT_ONCE = 100  # runs that are read first, to find so many rows; then as many again as before


@dataclass(frozen=True)
class Fold:
    """A sweep and its runs that are not archived, as one row; a function's `map` is one too.

    Attributes:
        sweep_id: its id, the label `sweep` of its runs.
        created_at: when the newest run was submitted.
        states: how many runs are in each state.
        usd: what ended runs have cost, None where no price is known.
        best: the best value so far of the metric that it optimizes first, None without any.
        live: the runs that have not ended.
    """

    sweep_id: str
    created_at: str
    states: Counter[State]
    usd: float | None
    best: float | None
    live: tuple[Row, ...]

    @property
    def counts(self) -> str:
        """How many of its runs have succeeded, failed, and are live: `5/9 ok, 1 failed, 3 live`."""
        failed = sum(count for state, count in self.states.items() if state.final) - self.states[State.CANCELLED]
        failed -= self.states[State.SUCCEEDED]
        found = f"{self.states[State.SUCCEEDED]}/{self.states.total()} ok" + (f", {failed} failed" if failed else "")
        return found + (f", {len(self.live)} live" if self.live else "")


def newest(store: Store, names: Sequence[str], *, limit: int, offset: int = 0) -> list[Row | Fold]:
    """Return the newest runs with their values of some columns; the runs of a sweep are one row, at its newest run."""
    where, values = filters.where("")
    sweep = "(SELECT sweep_id FROM trials t WHERE t.run_id = runs.run_id)"
    query = f"SELECT run_id, {sweep}, created_at FROM runs WHERE {where} ORDER BY created_at DESC, run_id DESC LIMIT ? OFFSET ?"
    found: dict[tuple[bool, str], str] = {}  # (is a sweep, id) -> time of its newest run
    at = 0
    while len(found) < offset + limit:
        rows = store.select(query, [*values, max(AT_ONCE, offset + limit, at), at])
        for run_id, sweep_id, created_at in rows:
            found.setdefault((sweep_id is not None, sweep_id or run_id), created_at)
        at += len(rows)
        if not rows:
            break
    chosen = dict(list(found.items())[offset : offset + limit])
    runs = {row.record.run_id: row for row in rows_of(store, [key for is_sweep, key in chosen if not is_sweep], names)}
    folds = _folds(store, {key: when for (is_sweep, key), when in chosen.items() if is_sweep}, names)
    entries = [folds.get(key) if is_sweep else runs.get(key) for is_sweep, key in chosen]
    return [each for each in entries if each]


def runs_of(entry: Row | Fold) -> Sequence[Row]:
    """Return the runs whose state may still change of what `newest` returns: of a sweep the live ones."""
    return entry.live if isinstance(entry, Fold) else (entry,)


def runs_of_sweeps(store: Store, sweep_ids: Sequence[str]) -> dict[str, list[str]]:
    """Return sweep -> ids of its runs that are not archived, for those ids that are sweeps."""
    where, values = filters.where("")
    query = (
        f"SELECT sweep_id, run_id FROM trials WHERE run_id IN (SELECT run_id FROM runs WHERE {where})"
        " AND sweep_id IN (SELECT value FROM json_each(?)) ORDER BY number"
    )
    found: dict[str, list[str]] = {}
    for sweep_id, run_id in store.select(query, [*values, json.dumps(list(sweep_ids))]):
        found.setdefault(sweep_id, []).append(run_id)
    return found


def count(store: Store) -> int:
    """Return how many rows `newest` has altogether."""
    where, values = filters.where("")
    folded = "run_id IN (SELECT run_id FROM trials WHERE run_id IS NOT NULL)"
    single = store.select(f"SELECT count(*) FROM runs WHERE {where} AND NOT {folded}", values)[0][0]
    trials = f"SELECT count(DISTINCT sweep_id) FROM trials WHERE run_id IN (SELECT run_id FROM runs WHERE {where} AND {folded})"
    return int(single + store.select(trials, values)[0][0])


def _folds(store: Store, times: dict[str, str], names: Sequence[str]) -> dict[str, Fold]:
    """Return the rows of sweeps, of which the time of the newest run is given."""
    if not times:
        return {}
    chosen = json.dumps(list(times))
    specs = f"SELECT sweep_id, {_GOALS} FROM sweeps"
    wanted = "sweep_id IN (SELECT value FROM json_each(?))"
    goals = {row[0]: _goal(*json.loads(row[1])) for row in store.select(f"{specs} WHERE {wanted}", (chosen,))}
    where, values = filters.where("")
    trials = (
        "SELECT sweep_id, run_id, state, usd, CASE WHEN json_valid(result) THEN json_extract(result, '$[0]') END, stopped"
        f" FROM trials LEFT JOIN (SELECT run_id, state, usd FROM runs WHERE {where}) USING (run_id) WHERE {wanted}"
    )
    states: dict[str, Counter[State]] = {sweep_id: Counter() for sweep_id in times}
    usd, best, live = dict[str, float](), dict[str, float](), dict[str, list[str]]()
    for sweep_id, run_id, state, cost, result, stopped in store.select(trials, [*values, chosen]):
        if state is not None:
            states[sweep_id][State(state)] += 1
            if not State(state).final:
                live.setdefault(sweep_id, []).append(run_id)
        if cost is not None:
            usd[sweep_id] = usd.get(sweep_id, 0.0) + cost
        # Of a deleted run the result is kept, which a failed one never has.
        counts = not stopped if state is None else state == State.SUCCEEDED.value
        if counts and isinstance(result, float | int):
            choose = max if goals.get(sweep_id) == "maximize" else min
            best[sweep_id] = choose(best.get(sweep_id, result), result)
    rows = {row.record.run_id: row for row in rows_of(store, [each for of in live.values() for each in of], names)}
    return {
        sweep_id: Fold(
            sweep_id, when, states[sweep_id], usd.get(sweep_id), best.get(sweep_id),
            tuple(rows[run_id] for run_id in live.get(sweep_id, ()) if run_id in rows),
        )
        for sweep_id, when in times.items()
    }  # fmt: skip


def _goal(one: Any, several: Any) -> str:
    """Return the goal of a sweep's first metric; `metric` and `metrics` are as its file has them."""
    first = (several or [one])[0]
    return str(first.get("goal", "minimize")) if isinstance(first, dict) else "minimize"
