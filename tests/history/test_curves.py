"""Curves in few points say the same as all of their points: after any order of writing, and after the migration."""

from __future__ import annotations

import math
import sqlite3

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloudtrain.backends.api import Plan
from cloudtrain.events import Row, State, Status
from cloudtrain.history import migrations, not_finite, sampling
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


def write(store: Store, points, attempt="r-a1", name="loss", node=0, rank=0):
    """Write (seq, step, value)."""
    rows = [Row(node, seq, f"t{seq:08d}", step, name, value, rank) for seq, step, value in points]
    store.record(attempt, metrics=rows)


def write_as_before_ranks(store: Store, points, name="loss", node=0):
    """Write (seq, step, value) as a cloudtrain before ranks did."""
    rows = [(node, seq, f"t{seq:08d}", step, name, value) for seq, step, value in points]
    with store.database.write() as db:
        db.executemany(
            "INSERT INTO metrics (attempt_id, node, seq, at, step, name, value) VALUES ('r-a1', ?, ?, ?, ?, ?, ?)", rows
        )


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
    write(store, points[:again])
    write(store, points[again // 2 :])  # a watcher that took over sees lines again, and new ones
    write(store, [(7, 1, 0.5)], name="other", node=1)
    check(store)


def test_a_batch_of_old_and_new_points_counts_each_once(store):
    write(store, [(seq, seq, 1 / seq) for seq in range(1, 1500)])
    write(store, [(seq, seq, 1 / seq) for seq in range(1400, 1600)])
    assert store.curves.summary("r")[0].points == 1599
    check(store)


def test_sums_of_huge_values_of_both_signs_stop_no_watcher(store):
    for first, value in ((0, 1.7e308), (50, -1.7e308)):
        write(store, [(seq, seq, value) for seq in range(first, first + 50)])
    check(store)


def test_points_that_an_older_cloudtrain_stored_alone_come_into_their_blocks(store):
    """It still ran when the schema was changed, and left the blocks to a trigger that was gone."""
    write(store, [(seq, seq, 1 / seq) for seq in range(1, 1500)])
    write_as_before_ranks(store, [(seq, seq, 1 / seq) for seq in range(1500, 3000)])
    assert store.curves.summary("r")[0].points == 1499
    store.complete_curves("r-a1")
    check(store)


def test_a_history_of_an_older_schema_gets_its_blocks(tmp_path, monkeypatch):
    points = [(seq, seq * 2, math.nan if seq % 700 == 0 else math.cos(seq)) for seq in range(0, 5000, 3)]
    points[5] = (15, 30, math.inf)
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "MIGRATIONS", migrations.MIGRATIONS[:3])
        old = Store(tmp_path / "old")
        assert old.intend(plan(), identity="i", owner=Process.here())
        write_as_before_ranks(old, points)
        write_as_before_ranks(old, points[:100], name="b", node=2)
    new = Store(tmp_path / "new")
    assert new.intend(plan(), identity="i", owner=Process.here())
    write(new, points)
    write(new, points[:100], name="b", node=2)
    old = Store(tmp_path / "old")
    check(old)
    assert {row.rank for row in old.metrics("r", rank=None)} == {0}, "whose they were is not known"
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
    assert store.curves.last_steps("r") == {1: {(0, "loss"): 9}, 2: {(0, "loss"): 9}}


def test_no_curve_mixes_ranks(store):
    for rank in (0, 1):
        write(store, [(2 * n + rank, n, n + rank / 2) for n in range(20)], rank=rank)
    write(store, [(100, 3, 7.0), (101, 4, 8.0)], name="of the last stage", rank=5)
    check(store)
    assert [(row.name, row.points, row.last, row.rank) for row in store.curves.summary("r")] == [
        ("loss", 20, 19.0, 0),
        ("of the last stage", 2, 8.0, 5),
    ], "what rank 0 has not logged is that of the lowest rank that has"
    assert [(row.name, row.last) for row in store.curves.summary("r", 1)] == [("loss", 19.5)]
    everything = [(row.name, row.rank, row.points) for row in store.curves.summary("r", None)]
    assert everything == [("loss", 0, 20), ("loss", 1, 20), ("of the last stage", 5, 2)]
    assert (store.curves.ranks("r"), store.curves.ranks("r", "loss")) == ([0, 1, 5], [0, 1])
    assert [(row.rank, row.value) for row in store.metrics("r", "loss")] == [(0, float(n)) for n in range(20)]
    assert {row.rank for row in store.metrics("r", rank=1)} == {1} and len(store.metrics("r", rank=None)) == 42
    for most in (4, 100):
        assert max(point.highest for point in store.curves.points("r", "loss", most)) == 19.0
        assert max(point.highest for point in store.curves.points("r", "loss", most, 1)) == 19.5
    assert store.curves.points("r", "of the last stage")[-1].value == 8.0
    assert not store.curves.points("r", "of the last stage", rank=1)
    assert store.curves.tail("r", "loss", 30) == [float(n) for n in range(20)]
    assert store.curves.last(["r"])["r"].last == 19.0
    assert {row.name: row.last for row in store.curves.newest("r")} == {"loss": 19.0, "of the last stage": 8.0}


def resumed(store: Store, attempt: int) -> None:
    store.record(f"r-a{attempt - 1}", status=Status(State.PREEMPTED, 75))
    assert store.next_attempt(plan(attempt=attempt), owner=Process.here())


def test_a_rank_that_is_ahead_in_a_newer_attempt_does_not_continue_another_ones_curve(store):
    write(store, [(n, n, 0.5) for n in range(5)])
    resumed(store, 2)
    write(store, [(n, n + 5, 9.0) for n in range(5)], attempt="r-a2", rank=1)
    assert (
        {point.value for point in store.curves.points("r", "loss")} == {0.5} == set(store.curves.tail("r", "loss", 9))
    )
    assert {row.value for row in store.metrics("r")} == {0.5} and store.curves.newest("r") == []
    assert [(row.points, row.highest) for row in store.curves.summary("r")] == [(5, 0.5)]
    assert store.curves.last(["r"])["r"].last == 0.5


def test_what_a_newer_attempt_did_again_is_lost(store):
    write(store, [(n, n, 1.0) for n in range(10)])
    write(store, [(100, 4, 0.4), (101, 8, 0.8)], name="eval_loss")
    assert not any(point.lost for point in store.curves.points("r", "loss"))
    resumed(store, 2)
    write(store, [(n, n + 6, 2.0) for n in range(6)], attempt="r-a2")
    resumed(store, 3)
    write(store, [(n, n + 9, 3.0) for n in range(3)], attempt="r-a3")
    points = store.curves.points("r", "loss")
    assert [(p.attempt, p.step) for p in points if p.lost] == [(1, 6), (1, 7), (1, 8), (1, 9), (2, 9), (2, 10), (2, 11)]
    kept, lost = sampling.split_lost(points)
    assert [p.step for p in kept] == list(range(12)) and {p.attempt for p in kept} == {1, 2, 3}
    assert [[p.step for p in part] for part in lost] == [[5, 6, 7, 8, 9], [8, 9, 10, 11]], "each with where it branches"
    evaluations = [(p.step, p.lost) for p in store.curves.points("r", "eval_loss")]
    assert evaluations == [(4, False), (8, True)], "its training was done again, though no evaluation was yet"
    few = store.curves.points("r", "loss", 3)
    assert sum(p.points for p in few if p.lost) == 7 and sum(p.points for p in few) == 19


def test_a_lost_part_begins_inside_a_block(store):
    write(store, [(n, n, 1.0) for n in range(5000)])
    resumed(store, 2)
    write(store, [(n, n + 3000, 2.0) for n in range(5000)], attempt="r-a2")
    points = store.curves.points("r", "loss", 8)
    assert sum(point.points for point in points) == 10_000
    assert sum(point.points for point in points if point.lost) == 2000
    assert not [p for p in points if p.attempt == 1 and p.lost != (p.step >= 3000)]


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
        write(store, [(n, n, float(n % 7)) for n in range(begin, begin + 100_000)])
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


def test_triggers_of_ours_are_all_that_there_are(store):
    write(store, [(1, 1, 1.0)])
    with sqlite3.connect(store.database.path) as db:
        assert [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")] == [
            "runs_into_values",
            "number_of_run",
        ]


def test_names_are_in_the_order_that_people_count_and_groups_come_last(store: Store):
    for seq, name in enumerate(("train/loss", "norm.10", "norm.2", "loss", "eval/loss.10", "eval/loss.9")):
        write(store, [(seq, 1, 0.5)], name=name)
    names = [row.name for row in store.curves.summary("r")]
    assert names == ["loss", "norm.2", "norm.10", "eval/loss.9", "eval/loss.10", "train/loss"]


def test_where_a_curve_became_nan_or_infinite_is_found(store):
    write(store, [(seq, seq, 1.0 / seq) for seq in range(1, 2000)], name="accuracy")
    write(store, [(seq, seq - 6, [1.0, math.inf, math.nan][min(2, max(0, seq - 1499))]) for seq in range(1, 2000)])
    write(store, [(5, 1, math.nan), (6, 2, 1.0)], name="eval_loss")
    write(store, [(1 << 62, 3, math.nan)], name="norm")  # of a tracker's file
    assert [each.sentence for each in not_finite.find(store, "r")] == [
        "eval_loss was not finite at step 1, log line 5",
        "norm is not finite since step 3",
        "loss is not finite since step 1494, log line 1500",
    ]
