"""Curves in few points say the same as all of their points: after any order of writing, and after the migration."""

from __future__ import annotations

import math
import sqlite3

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloudtrain.backends.api import Plan
from cloudtrain.events import Event, State, Status
from cloudtrain.history import database
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import Process

VALUES = st.one_of(st.floats(allow_nan=False, width=32), st.sampled_from([math.nan, math.inf, -math.inf, 0.0]))


def plan(run_id="r", attempt=1):
    return Plan("local", run_id, attempt, {}, {"sha256": "0"}, {"secrets": {}}, {"name": "n"}, "local")


@pytest.fixture
def store(home) -> Store:
    store = Store(home)
    assert store.intend(plan(), identity="i", owner=Process.here())
    return store


def write(store: Store, points, attempt="r-a1", name="loss", node=0):
    """Write (seq, step, value)."""
    rows = [(Event(attempt, node, seq, f"t{seq:08d}", "metric"), step, name, value) for seq, step, value in points]
    store.record(attempt, metrics=rows)


def facts(store: Store, run_id="r"):
    """Return the summaries from the blocks, and the points themselves."""
    summaries = {row.name: row for row in store.curves.summary(run_id)}
    points = {}
    for row in store.metrics(run_id):
        points.setdefault(row.name, []).append(row)
    return summaries, points


def same(first, second):
    return first == second or (math.isnan(first) and math.isnan(second))


def check(store: Store):
    summaries, points = facts(store)
    assert summaries.keys() == points.keys()
    for name, rows in points.items():
        finite = [row.value for row in rows if math.isfinite(row.value)] or [math.nan]
        row = summaries[name]
        assert row.points == len(rows)
        assert same(row.first, rows[0].value) and same(row.last, rows[-1].value)
        assert same(row.lowest, min(finite)) and same(row.highest, max(finite))
        assert (row.step, row.at) == (rows[-1].step, rows[-1].at)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seqs=st.lists(st.integers(0, 5000), unique=True, min_size=1, max_size=40).map(sorted),
    values=st.lists(VALUES, min_size=40, max_size=40),
    again=st.integers(0, 40),
)
def test_blocks_are_what_their_points_are(tmp_path_factory, seqs, values, again):
    store = Store(tmp_path_factory.mktemp("home"))
    assert store.intend(plan(), identity="i", owner=Process.here())
    points = [(seq, seq * 3, value) for seq, value in zip(seqs, values, strict=False)]
    write(store, points)
    write(store, points[:again])  # a watcher that took over sees lines again
    write(store, [(7, 1, 0.5)], name="other", node=1)
    check(store)


def test_a_history_of_an_older_schema_gets_its_blocks(tmp_path, monkeypatch):
    points = [(seq, seq * 2, math.nan if seq % 700 == 0 else math.cos(seq)) for seq in range(0, 5000, 3)]
    points[5] = (15, 30, math.inf)
    with monkeypatch.context() as patch:
        patch.setattr(database, "MIGRATIONS", database.MIGRATIONS[:3])
        old = Store(tmp_path / "old")
        assert old.intend(plan(), identity="i", owner=Process.here())
        write(old, points)
        write(old, points[:100], name="b", node=2)
    new = Store(tmp_path / "new")
    assert new.intend(plan(), identity="i", owner=Process.here())
    write(new, points)
    write(new, points[:100], name="b", node=2)
    old = Store(tmp_path / "old")
    check(old)
    for name in ("loss", "b"):
        assert repr(old.curves.points("r", name, 50)) == repr(new.curves.points("r", name, 50))
    write(old, [(6000, 6000, 1.0)])  # and they go on
    check(old)


def test_a_long_curve_keeps_its_spike_and_its_ends(store):
    values = [math.sin(n / 1000) for n in range(60_000)]
    values[31_234], values[45_678] = 99.0, math.nan
    for begin in range(0, 60_000, 20_000):
        write(store, [(n, n, values[n]) for n in range(begin, begin + 20_000)])
    points = store.curves.points("r", "loss", 50)
    assert 10 <= len(points) <= 51 and sum(point.points for point in points) == 60_000
    assert points[-1].step == 59_999 and [point.step for point in points] == sorted(point.step for point in points)
    assert max(point.highest for point in points) == 99.0
    (spiked,) = [point for point in points if point.highest == 99.0]
    assert spiked.step >= 31_234 > spiked.step - spiked.points
    exact = sum(value for value in values if not math.isnan(value)) / 59_999
    mean = sum(point.value * point.points for point in points) / 60_000
    assert mean == pytest.approx(exact, abs=1e-4)  # the missing one is weighed with its neighbours
    assert points[0].step == 0 and points[0].points > 1, "the axis begins where the curve does"
    short = store.curves.points("r", "loss", 40_000)
    assert len(short) == 60_000 // 2 and [point.step for point in short[:2]] == [0, 3]
    tail = store.curves.tail("r", "loss", 20)
    assert len(tail) == 20 and tail[-1] == pytest.approx(sum(values[59_392:]) / (60_000 - 59_392))


def test_a_short_curve_is_itself_and_attempts_stay_apart(store):
    write(store, [(n, n, float(n)) for n in range(10)])
    store.record("r-a1", status=Status(State.PREEMPTED, 75))
    assert store.next_attempt(plan(attempt=2), owner=Process.here())
    write(store, [(n, n + 5, float(-n)) for n in range(5)], attempt="r-a2")
    points = store.curves.points("r", "loss")
    assert [(p.attempt, p.step, p.value) for p in points][8:12] == [(1, 8, 8.0), (1, 9, 9.0), (2, 5, 0.0), (2, 6, -1.0)]
    assert store.curves.tail("r", "loss", 15) == [float(n) for n in range(10)] + [0.0, -1.0, -2.0, -3.0, -4.0]
    assert store.curves.tail("r", "loss", 8)[:5] == [0.5, 2.5, 4.5, 6.5, 8.5]  # means of two; attempts stay apart
    for most in (1, 2, 3):
        assert all(p.attempt == 1 or p.step in (5, 6, 7, 8, 9) for p in store.curves.points("r", "loss", most))
    assert [row.last for row in store.curves.of_attempt("r-a1")] == [9.0]


def test_the_last_loss_of_many_runs(store):
    assert store.intend(plan("s"), identity="i", owner=Process.here())
    write(store, [(1, 10, 2.0)], name="train/loss")
    write(store, [(2, 20, math.nan)], attempt="s-a1")
    last = store.curves.last(["r", "s", "none"])
    assert (last["r"].name, last["r"].last, last["r"].step) == ("train/loss", 2.0, 10)
    assert math.isnan(last["s"].last) and "none" not in last


def test_drawing_a_curve_reads_its_blocks_and_not_the_metrics(store):
    """How long it takes is measured by benchmarks/curves.py; here the way to it."""
    for begin in range(0, 300_000, 100_000):
        with store.database.write() as db:
            db.executemany(
                "INSERT INTO metrics VALUES ('r-a1', 0, ?, 't', ?, 'loss', ?)",
                [(n, n, float(n % 7)) for n in range(begin, begin + 100_000)],
            )
    with store.database.read() as db:
        asked: list[str] = []
        db.set_trace_callback(asked.append)
        assert len(store.curves.points("r", "loss", 100)) <= 101
        assert len(store.curves.tail("r", "loss", 40)) == 40
        assert store.curves.last(["r"])["r"].step == 299_999
        db.set_trace_callback(None)
        assert asked and not [query for query in asked if "FROM metrics" in query]
        for query in asked:
            steps = [row["detail"] for row in db.execute(f"EXPLAIN QUERY PLAN {query}")]
            assert not [step for step in steps if step.startswith("SCAN") and "wanted" not in step], (query, steps)


def test_a_trigger_of_ours_is_all_that_writes_blocks(store):
    write(store, [(1, 1, 1.0)])
    with sqlite3.connect(store.database.path) as db:
        assert [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")] == [
            "metrics_into_curves"
        ]
