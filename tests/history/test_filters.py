"""The filter language, the table of runs and what people write to runs, over one small history."""

from __future__ import annotations

import json
import math
import sqlite3

import pytest

from cloudtrain.backends.api import Plan
from cloudtrain.errors import BadRequest
from cloudtrain.events import Event, Row, State, Status
from cloudtrain.history import filters, marks, migrations, repair, table
from cloudtrain.history.store import Store
from cloudtrain.history.table import Query
from cloudtrain.history.usage import FILL_USAGE
from cloudtrain.nodes.process import Process
from cloudtrain.runs.listing import Runs
from cloudtrain.runs.run import Run

RUNS = {  # id: hyperparameters, labels, args, state, losses by step
    "a-1": ({"lr": "1e-3", "opt": "adam"}, {"team": "vision"}, [], State.SUCCEEDED, [0.9, 0.4]),
    "a-2": ({"lr": "1e-2", "opt": "sgd"}, {"team": "two words"}, [], State.FAILED, [0.7, math.nan]),
    "b-1": ({}, {}, ["--lr", "5e-4", "--bs=32", "--fast"], State.RUNNING, []),
    "b-2": ({"lr": 0.001, "opt": "adamw"}, {}, [], State.TIMED_OUT, [2.0]),
}


@pytest.fixture
def store(tmp_path) -> Store:
    found = Store(tmp_path / "home")
    for number, (run_id, (given, labels, args, state, losses)) in enumerate(RUNS.items()):
        job = {"name": run_id[0], "source": ".", "hyperparameters": given, "labels": labels, "args": args}
        plan = Plan("local", run_id, 1, {}, {"sha256": "0"}, {"secrets": {}, "nodes": 1}, job, "here")
        assert found.intend(plan, identity="i", owner=Process.here())
        found.accept(f"{run_id}-a1", "h")
        add(found, run_id, losses)
        ended = "2026-11-01T11:00:00Z" if state.final else None
        found.set_status(run_id, Status(state, None, "", f"2026-11-01T{9 - number:02d}:00:00Z", ended))
    with found.database.write() as db:
        db.execute("UPDATE runs SET created_at = '2026-11-0' || rowid || 'T00:00:00.000000Z'")
    return found


def add(store: Store, run_id: str, losses: list[float], *, rank: int = 0, attempt: int = 1, begin: int = 0) -> None:
    points = []
    for step, loss in enumerate(losses, begin):
        event = Event(f"{run_id}-a{attempt}", 0, step, "2026-11-01T10:00:00Z", "metric", {})
        points.append(Row(event.node, event.seq, event.at, step, "loss", loss, rank, None))
    store.record(f"{run_id}-a{attempt}", metrics=points)


def ids(store: Store, text: str, sort: str = "run") -> list[str]:
    rows, count = table.page(store, Query(text, sort))
    assert count == len(rows)
    return [row.record.run_id for row in rows]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "a-1 a-2 b-1 b-2"),
        ("state:failed", "a-2"),
        ("state:failed,timed_out", "a-2 b-2"),
        ("state:live", "b-1"),
        ("-state:live a-", "a-1 a-2"),
        ("state!=live,failed", "a-1 b-2"),
        ("label.team=vision", "a-1"),
        ('label.team:"two words"', "a-2"),
        ("label.team!=vision", "a-2 b-1 b-2"),
        ("hp.lr>=1e-3", "a-1 a-2 b-2"),
        ("hp.lr=0.001", "a-1 b-2"),  # 1e-3 and a number
        ("hp.lr<1e-3 hp.bs:32", "b-1"),  # of a script's arguments
        ("hp.opt:adam*", "a-1 b-2"),
        ("hp.opt~dam", "a-1 b-2"),
        ("hp.opt~/^ada.*w$/,/^x/", "b-2"),
        (r"hp.opt~/^(?:ada|x\+)[*+?]*.*w$/", "b-2"),
        ("metric.loss<0.5", "a-1"),
        ("metric.loss.max>=0.9", "a-1 b-2"),
        ("metric.loss.min<0.8", "a-1 a-2"),  # its last value is not a number
        ("step>=1", "a-1 a-2"),
        ("name:b", "b-1 b-2"),
        ("took>2h", "a-2 b-1 b-2"),
        ("created>=2026-11-03T00:00:00Z", "b-1 b-2"),
        ("before:2026-11-02T00:00:00+00:00", "a-1"),
        ("since:1h", ""),
        ("target:here backend:local 1", "a-1 b-1"),
        ("a_1", ""),  # no pattern
        ("hp.opt~adam metric.loss<3 step>=0 -label.team:vision", "b-2"),
        ("hp.opt~adam metric.loss<3 hp.lr:1e-3,1e-2", "a-1 b-2"),
        ("hp.opt~adam metric.loss>9", ""),
    ],
)
def test_a_filter_selects(store, text, found):
    assert ids(store, text) == found.split()


@pytest.mark.parametrize(
    ("text", "at", "message"),
    [
        ("state:faled", 6, "'faled' is not a state"),
        ("words stat:failed", 6, "unknown field 'stat'"),
        ("metric.loss<low", 12, "'low' is not a number"),
        ("took>soon", 5, "'soon' is not a duration"),
        ("since:yesterday", 6, "'yesterday' is not a time"),
        ('label.team="two', 0, "a quote is not closed"),
        ("state:", 6, "state has no value"),
        ("state>failed", 5, "the field state cannot be compared with '>'"),
        ("eta:1h", 0, "unknown field 'eta'"),
        ("name~/a(/", 5, "/a(/ is not a regular expression: missing ), unterminated subpattern at position 1"),
        (
            "name~/(a+)+$/",
            5,
            "/(a+)+$/ could take long: it has over 200 characters, over 3 of * + ? {, or a group that is repeated",
        ),
        (
            "name~/[)]*a*.*.*$/",
            5,
            "/[)]*a*.*.*$/ could take long: it has over 200 characters, over 3 of * + ? {, or a group that is repeated",
        ),
    ],
)
def test_a_mistake_says_what_and_where(store, text, at, message):
    with pytest.raises(filters.FilterError) as caught:
        table.page(store, Query(text))
    assert caught.value.at == at and caught.value.message == f"filter, character {at + 1}: {message}"
    assert caught.value.hint


def test_columns_sort_and_groups(store):
    columns = "hp.lr,metric.loss,metric.loss.min,step,label.team,took,eta"
    rows, _ = table.page(store, Query("", "-hp.lr", columns))
    assert [row.record.run_id for row in rows] == ["a-2", "b-2", "a-1", "b-1"]
    assert rows[0].values == ("1e-2", None, 0.7, 1, "two words", pytest.approx(3 * 3600), None)
    assert ids(store, "", "metric.loss") == ["a-1", "b-2", "b-1", "a-2"]  # then those without, the newest first
    by_name = table.groups(store, Query("", columns="hp.lr,metric.loss.max", group="name"))
    assert [(group.key, group.count) for group in by_name] == [("a", 2), ("b", 2)]
    assert by_name[0].values == (pytest.approx((0.0055, 0.001, 0.01)), pytest.approx((0.8, 0.7, 0.9)))
    for query in (Query(sort="eta"), Query(columns="lr"), Query(group="nothing")):
        with pytest.raises(BadRequest):
            table.groups(store, query) if query.group else table.page(store, query)
    assert Query.of_address(Query("hp.lr>1 a&b", "-step", "a,b").address()) == Query("hp.lr>1 a&b", "-step", "a,b")


def test_the_metrics_of_a_run_are_those_of_its_curves(store):
    """Whatever order batches come in, and when they come twice; a migration finds the same of a history without them."""
    add(store, "a-1", [5.0], rank=3, begin=7)  # another rank has no say
    add(store, "b-1", [3.0], rank=2)
    add(store, "b-1", [4.0, 1.0], rank=1, begin=5)  # a lower one
    add(store, "b-2", [2.0, -1.0, math.inf])
    add(store, "b-2", [2.0])
    expected = {
        ("a-1", 0.4, 0.4, 0.9, 1), ("a-2", None, 0.7, 0.7, 1), ("b-1", 1.0, 1.0, 4.0, 6), ("b-2", math.inf, -1.0, 2.0, 2),
    }  # fmt: skip
    select = "SELECT run_id, last, lowest, highest, step FROM run_metrics"
    assert {tuple(row) for row in store.select(select)} == expected
    with store.database.write() as db:
        db.execute("DELETE FROM run_metrics")
        db.execute(migrations.FILL_METRICS)
    assert {tuple(row) for row in store.select(select)} == expected


def test_what_nodes_used_is_a_column(store):
    """Of reports that come twice, in any order and with values of other kinds; a history of an older version has the same."""
    reports = [
        (
            0,
            1,
            {
                "cpu_percent": 100,
                "rss_bytes": 2e9,
                "gpus": [{"index": 0, "percent": 50.0}, {"index": 1, "percent": 100}],
            },
        ),
        (1, 1, {"cpu_percent": 300.0, "gpus": [{"percent": 90, "memory_bytes": 4e9}, 7, {"percent": "x"}]}),
        (0, 2, {"cpu_percent": "abc", "rss_bytes": -1, "gpus": 5}),
        (0, 3, {"cpu_percent": True, "gpus": {"0": {"percent": 1}}}),
        (0, 4, {"gpus": [{"index": n, "percent": 0} for n in range(70)][:0]}),
    ]
    events = [Event("a-1-a1", node, 900 + seq, "t", "usage", data) for node, seq, data in reports]
    store.record("a-1-a1", events=events[:3])
    store.record("a-1-a1", events=events[::-1])
    store.record("b-1-a1", events=[Event("b-1-a1", 0, 900, "t", "usage", {"gpus": [{"percent": 10}]})])
    query = Query(
        "", "-system.gpu", "system.cpu,system.cpu.max,system.gpu,system.gpu.max,system.memory,system.gpu_memory"
    )
    rows = table.page(store, query)[0]
    assert [row.record.run_id for row in rows[:2]] == ["a-1", "b-1"]
    assert rows[0].values == (200.0, 300.0, 80.0, 100.0, 2.0, 4.0)
    assert rows[1].values[2:] == (10.0, 10.0, None, None)
    assert ids(store, "system.gpu<50") == ["b-1"] and ids(store, "system.cpu.max>=300") == ["a-1"]
    assert table.groups(store, Query("", group="backend", columns="system.gpu"))[0].values == ((45.0, 10.0, 80.0),)
    assert "system.gpu_memory.max" in table.names(store, "system.gpu")
    for wrong in ("system.disk", "system.gpu.min", "system.", "system.gpu."):
        with pytest.raises(BadRequest, match="no column"):
            table.page(store, Query(columns=wrong))
    select = "SELECT name, run_id, points, round(total, 6), round(highest, 6) FROM run_usage"
    expected = {tuple(row) for row in store.select(select)}
    with store.database.write() as db:
        db.execute("DELETE FROM run_usage")
        db.execute(FILL_USAGE)
    assert {tuple(row) for row in store.select(select)} == expected


def test_marks_are_kept_searched_and_survive_a_repair(store):
    marks.write(store, "a-1", title="warmup 500", note="diverged", tag=["baseline", "x"], star=True)
    marks.write(store, "a-1", untag=["x"], tag=["best"])
    marks.write(store, "b-2", archive=True)
    assert marks.read(store, "a-1") == marks.Marks("warmup 500", "diverged", ("baseline", "best"), True, False)
    for text in ("tag:baseline", "is:starred", "diverged", "title:warmup*", "tag~bas", "note~verge star:1"):
        assert ids(store, text) == ["a-1"], text
    assert ids(store, "") == ["a-1", "a-2", "b-1"] and ids(store, "is:archived") == ["b-2"]
    for wrong in ({"tag": ["a,b"]}, {"tag": [""]}, {"title": "x" * 500}):
        with pytest.raises(BadRequest):
            marks.write(store, "a-1", **wrong)
    marks.keep_view(store, "mine", "filter=a")
    store.database.close()
    repair.rebuild(store.database.path)
    again = Store(store.home)
    assert marks.read(again, "a-1").tags == ("baseline", "best") and marks.views(again) == {"mine": "filter=a"}
    assert ids(again, "metric.loss<0.5") == ids(again, "hp.opt:adam") == ["a-1"]
    assert again.delete("a-1")
    assert [again.select(f"SELECT 1 FROM {name} WHERE run_id = 'a-1'") for name in ("marks", "run_values")] == [[], []]


def test_a_history_without_values_gets_them(tmp_path, monkeypatch):
    home = tmp_path / "old"
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "MIGRATIONS", migrations.MIGRATIONS[:10])
        assert Store(home).select("SELECT 1 FROM runs") == []
    with sqlite3.connect(home / "history.sqlite3") as db:
        for run_id, job in (("r", json.dumps({"hyperparameters": {"lr": "3"}, "args": ["--bs", "8"]})), ("s", "{")):
            db.execute(
                "INSERT INTO runs (run_id, name, backend, target, identity, job, created_at, state)"
                " VALUES (?, 'n', 'local', '', 'i', ?, 't', 'LOST')", (run_id, job),
            )  # fmt: skip
    values = Store(home).select("SELECT name, run_id, text, number FROM run_values ORDER BY name")
    assert [tuple(row) for row in values] == [("hp.bs", "r", "8", 8.0), ("hp.lr", "r", "3", 3.0)]


def test_terms_are_completed(store):
    marks.write(store, "a-1", tag=["baseline"])
    assert table.completions(store, "sta") == ["started:", "state:"]
    assert table.completions(store, "words -state:fa") == ["words -state:failed "]
    assert table.completions(store, "hp.o") == ["hp.opt:"]
    assert table.completions(store, "hp.opt:") == ["hp.opt:adam ", "hp.opt:adamw ", "hp.opt:sgd "]
    assert table.completions(store, "label.team:t") == ['label.team:"two words" ']
    assert table.completions(store, "metric.l")[0] == "metric.loss<"
    assert table.completions(store, "tag:") == ["tag:baseline "] and table.completions(store, "nothing") == []


def test_several_runs_are_marked_at_once(store):
    chosen = Runs([Run(run_id, store, watch=False) for run_id in ("a-1", "a-2", "b-1")])
    chosen[:2].mark(title="baseline", note="first sweep", tag=["paper"], star=True)
    assert ids(store, "tag:paper title:baseline note~sweep is:starred") == ["a-1", "a-2"]
    chosen.mark(untag=["paper"], star=False, archive=True)
    assert ids(store, "is:archived") == ["a-1", "a-2", "b-1"] and ids(store, "-is:starred") == ["b-2"]
    assert ids(store, "is:archived tag:paper") == []
    with pytest.raises(BadRequest, match="commas or quotes"):
        chosen.mark(title="other", tag=["a,b"])
    assert ids(store, "is:archived title:other") == []
