"""The rows of `ls`: short names, GPUs, and a sweep as one row."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain.backends.api import Plan
from cloudtrain.cli.view import terminal
from cloudtrain.events import State, Status
from cloudtrain.history import overview, table
from cloudtrain.history.store import Store
from cloudtrain.history.table import Query
from cloudtrain.history.trials import SweepHistory
from cloudtrain.nodes.process import Process
from tests.cli.conftest import cli  # noqa: F401

SWEEP = "tune-sweep-261129-171646-2xke"
OK, FAILED, CANCELLED, RUNNING = State.SUCCEEDED, State.FAILED, State.CANCELLED, State.RUNNING
BASE = {"secrets": {}, "nodes": 2, "processes_per_node": 1, "gpus_per_node": 8}


@pytest.fixture
def store(home: Path) -> Store:
    return Store(home)


def add(
    store: Store,
    run_id: str,
    state: State = OK,
    manifest: dict | None = None,
    gpus: str | None = "H100:8",
    **job: object,
) -> Plan:
    job = {"name": run_id[:-2], "source": ".", "resources": {"accelerators": gpus}, **job}
    plan = Plan("local", run_id, 1, {}, {"sha256": "0"}, BASE | (manifest or {}), job, "here")
    assert store.intend(plan, identity=run_id, owner=Process.here())
    store.accept(plan.attempt_id, "h")
    if state.final:
        store.set_status(run_id, Status(state, 0, "", "2026-11-01T10:00:00Z", "2026-11-01T11:00:00Z"))
    return plan


def add_sweep(
    store: Store, states: list[State], results: list[float | None], metric: object, sweep: str = SWEEP
) -> None:
    sweeps = SweepHistory(store.home)
    sweeps.add(sweep, "tune", {"document": {"metrics": metric} if isinstance(metric, list) else {"metric": metric}})
    for number, (state, result) in enumerate(zip(states, results, strict=True)):
        run_id = f"{sweep}-{number}"
        sweeps.add_trial(sweep, number, {}, {}, "here")
        add(store, run_id, state, name="tune", labels={"sweep": sweep})
        if state.final:
            store.set_cost(run_id, 1.25)
        sweeps.submitted(sweep, number, run_id)
        sweeps.end_trial(sweep, number, None if result is None else [result])


@pytest.mark.parametrize(
    ("gpus", "manifest"),
    [
        ("H100:8", {}),
        (None, {}),
        (None, {"gpus_per_node": 0}),
        ("H100:8", {"roles": [{"name": "main", "nodes": 2}, {"name": "data", "nodes": 3, "gpus_per_node": 1}]}),
        (None, {"roles": [{"name": "main", "nodes": 2}, {"name": "data", "nodes": 3, "gpus_per_node": 1}]}),
        (None, {"roles": [{"name": "main", "nodes": 2, "gpus_per_node": 8}, {"name": "data", "nodes": 3}]}),
        ("H100:8", {"roles": [{"name": "main", "nodes": 2}, {"name": "data", "nodes": 3, "gpus_per_node": 0}]}),
        ("H100:8", {"roles": []}),
    ],
)
def test_the_column_of_gpus_is_what_the_plan_requests(store, gpus, manifest):
    plan = add(store, "lm-a", gpus=gpus, manifest=manifest)
    [row] = table.first_rows(store, Query(columns="gpus,short"))
    assert row.values == (plan.requested_gpus, "lm-1")


def test_a_damaged_plan_hides_no_run(store):
    add(store, "lm-a")
    with store.database.write() as db:
        db.execute("UPDATE attempts SET plan = '{'")
    assert [row.values for row in overview.newest(store, ["gpus"], limit=5)] == [(None,)]


@pytest.mark.parametrize(
    ("metric", "best"),
    [
        ("loss", 0.5),
        ({"name": "acc", "goal": "maximize"}, 0.9),
        ([{"name": "acc", "goal": "maximize"}, "loss"], 0.9),
        (None, 0.5),
    ],
)
def test_a_sweep_is_one_row_at_its_newest_run(store, metric, best):
    add(store, "old-a")
    add_sweep(store, [OK, OK, FAILED, CANCELLED], [0.9, 0.5, None, 0.1], metric)
    add(store, "new-a")
    rows = overview.newest(store, ["short"], limit=5)
    assert [getattr(row, "sweep_id", None) or row.values[0] for row in rows] == ["new-6", SWEEP, "old-1"]
    assert rows[1].states == {OK: 2, FAILED: 1, CANCELLED: 1} and (rows[1].usd, rows[1].best) == (5.0, best)
    assert [each.created_at for each in rows[1:2]] == [store.get(f"{SWEEP}-3").created_at]
    assert len(overview.newest(store, [], limit=2)) == 2


def test_runs_behind_a_long_sweep_are_found(store, monkeypatch):
    monkeypatch.setattr(overview, "AT_ONCE", 2)
    add(store, "old-a")
    add_sweep(store, [OK] * 5, [None] * 5, None)
    assert [type(row) for row in overview.newest(store, [], limit=2)] == [overview.Fold, table.Row]


def test_rows_are_paged_and_counted_and_a_sweep_stands_for_its_runs(store):
    add(store, "old-a")
    add_sweep(store, [OK, FAILED, RUNNING], [0.9, None, None], "loss")
    add(store, "new-a")
    pages = [overview.newest(store, [], limit=1, offset=at) for at in range(4)]
    assert [len(page) for page in pages] == [1, 1, 1, 0] and overview.count(store) == 3
    fold = pages[1][0]
    assert isinstance(fold, overview.Fold) and fold.counts == "1/3 ok, 1 failed, 1 live"
    assert overview.runs_of_sweeps(store, ["new-a", SWEEP]) == {SWEEP: [f"{SWEEP}-{number}" for number in range(3)]}


def test_archived_trials_and_those_of_deleted_runs_are_not_counted(store):
    add_sweep(store, [OK, FAILED], [0.3, None], "loss")
    with store.database.write() as db:
        db.execute("INSERT INTO marks (run_id, archived) VALUES (?, 1)", (f"{SWEEP}-1",))
        db.execute("UPDATE trials SET run_id = 'gone', result = '[0.2]' WHERE number = 0")
        db.execute("UPDATE trials SET run_id = ? WHERE number = 0", (f"{SWEEP}-0",))
    [row] = overview.newest(store, [], limit=5)
    assert row.states == {OK: 1} and row.best == 0.2 and overview.count(store) == 1
    with store.database.write() as db:
        db.execute("INSERT INTO marks (run_id, archived) VALUES (?, 1)", (f"{SWEEP}-0",))
    assert overview.newest(store, [], limit=5) == [] and overview.count(store) == 0
    assert overview.runs_of_sweeps(store, [SWEEP]) == {}


def test_ls_fits_80_columns_and_a_filter_opens_a_sweep(store, cli, monkeypatch):  # noqa: F811
    add(store, "tiny-lm-a", OK, {"nodes": 4})
    store.set_cost("tiny-lm-a", 1234.5)
    add_sweep(store, [OK] * 8 + [FAILED] * 3 + [CANCELLED] * 10, [0.25] * 8 + [None] * 13, "loss")
    shown = cli("ls")
    head, sweep, run = shown.out.splitlines()
    assert head.split() == ["run", "state", "gpus", "USD", "loss/best", "age", "target"]
    assert sweep.split()[:-1] == [SWEEP, "8/21", "ok,", "3", "failed", "26.25", "0.25"]
    assert run.split()[:4] == ["tiny-lm-1", "SUCCEEDED", "32", "1234.50"] and run.split()[-1] == "here"
    assert "\x1b" not in shown.out
    assert shown.err == f"the runs of a sweep: cloudtrain ls label.sweep={SWEEP}\n"
    opened = cli("ls", f"label.sweep={SWEEP}", "-n", "2")
    assert [line.split()[0] for line in opened.out.splitlines()[1:]] == ["tune-22", "tune-21"]
    assert opened.err == "there are more: -n 4\n"
    assert cli("show", "tune-22", "--json").json["run_id"] == f"{SWEEP}-20"
    monkeypatch.setattr(terminal, "is_terminal", lambda stream=None: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    shown = cli("ls")
    assert len(shown.out.splitlines()) == 3 and max(map(len, shown.out.splitlines())) <= 80
    assert shown.out.split()[:6] == ["run", "state", "gpus", "USD", "loss/best", "age"]
    assert shown.err.splitlines()[0] == "left out of a narrow terminal: target"


def test_a_reader_of_json_gets_every_run_as_before(store, cli):  # noqa: F811
    add(store, "lm-a")
    add_sweep(store, [OK, FAILED], [0.3, None], "loss")
    rows = cli("ls", "--json").json
    assert [row["run_id"] for row in rows] == [f"{SWEEP}-1", f"{SWEEP}-0", "lm-a"]
    assert list(rows[0]) == [
        "run_id", "name", "backend", "target", "attached", "state", "exit_code", "reason", "created_at", "started_at",
        "ended_at", "loss", "step",
    ]  # fmt: skip
    assert cli("ls", "-q").out.split() == [row["run_id"] for row in rows]
