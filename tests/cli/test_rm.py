"""`rm`: what they print, refuse and delete; a deleted run stays deleted after a repair."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cloudtrain.cli.view import terminal
from cloudtrain.errors import Unreachable
from cloudtrain.events import State, Status
from cloudtrain.history import marks
from cloudtrain.history.store import Store
from cloudtrain.runs import remove
from tests.history.test_repair import add_run

OLD, NEW, LIVE = (f"tiny-lm-261120-10150{number}-ab3d" for number in range(3))


@pytest.fixture
def store(home: Path) -> Store:
    store = Store(home)
    for run_id in (OLD, NEW, LIVE):
        add_run(store, run_id)
        (home / "runs" / run_id / "model").mkdir()
        (home / "runs" / run_id / "model" / "weights").write_bytes(bytes(5_000_000))
    with store.database.write() as db:
        db.execute("UPDATE runs SET ended_at = '2020-01-01T00:00:00Z' WHERE run_id = ?", (OLD,))
        db.execute("UPDATE runs SET ended_at = '2099-01-01T00:00:00Z' WHERE run_id = ?", (NEW,))
        live = (
            "UPDATE runs SET state = 'RUNNING', ended_at = NULL, created_at = '2020-01-01T00:00:00Z' WHERE run_id = ?"
        )
        db.execute(live, (LIVE,))
        db.execute("UPDATE attempts SET state = 'RUNNING', ended_at = NULL WHERE run_id = ?", (LIVE,))
    return store


def rows(store: Store, run_id: str) -> int:
    with store.database.read() as db:
        count = "SELECT count(*) FROM {} WHERE attempt_id LIKE ?"
        tables = ("attempts", "events", "metrics", "curves")
        return sum(db.execute(count.format(table), (f"{run_id}%",)).fetchone()[0] for table in tables)


def test_sizes_are_shown_and_nothing_is_deleted_without_a_yes(store: Store, cli):
    shown = cli("rm", OLD, "--dry-run")
    assert (shown.code, rows(store, OLD) > 0) == (0, True)
    assert re.match(rf"{OLD}  SUCCEEDED, ended \d.* ago, 5 MB\n", shown.out)
    assert f"5 MB  {store.home / 'runs' / OLD}" in shown.out and shown.out.endswith("\n1 run, 5 MB\n")
    assert cli("rm", OLD, NEW, "--dry-run").out.endswith("\n2 runs, 10 MB\n")
    assert cli("rm", "--older", "30d", "--dry-run").out.endswith("\n1 run, 5 MB\n")
    refused = cli("rm", OLD)
    assert refused.code == 2 and "1 run, 5 MB: nothing was deleted" in refused.err and "--yes" in refused.err
    assert (store.home / "runs" / OLD / "model" / "weights").exists()


def test_a_host_that_cannot_be_reached_has_the_advice_to_delete_here(store: Store, cli, monkeypatch):
    def unreachable(run, **given):
        raise Unreachable("root@10.0.0.5 cannot be reached: Connection refused")

    monkeypatch.setattr(remove, "find_remains", unreachable)
    shown = cli("rm", "--older", "30d", "--dry-run")
    assert shown.code == 5 and "cannot be reached" in shown.err and "--here deletes only what is on this" in shown.err


def test_minutes_are_named_because_m_could_be_months(store: Store, cli):
    shown = cli("rm", "--older", "1m", "--dry-run")
    assert shown.code == 0 and "--older 1m is 1 minute; a month is no unit: write 30d" in shown.err
    assert "minute" not in cli("rm", "--older", "30d", "--dry-run").err
    refused = cli("rm", "--older", "1mo", "--dry-run")
    assert refused.code == 2 and "a month is no unit: write 30d" in refused.err


def test_a_deleted_run_is_gone_here_and_is_not_restored(store: Store, cli):
    with store.database.write() as db:
        db.execute("INSERT INTO provenance VALUES (?, '{}')", (OLD,))
    assert cli("rm", OLD, "--yes").code == 0
    assert not (store.home / "runs" / OLD).exists() and rows(store, OLD) == 0 and rows(store, NEW) > 0
    assert cli("show", OLD).code == 2
    store.database.close()
    for part in store.home.glob("history.sqlite3*"):
        part.unlink()
    (store.home / "history.sqlite3").write_bytes(b"damaged" * 1000)
    assert {record.run_id for record in Store(store.home).runs()} == {NEW, LIVE}


def test_the_last_run_of_a_history_can_be_deleted(store: Store, cli):
    for run_id in (NEW, OLD):  # the newest attempt that the journal names is another one then
        assert cli("rm", run_id, "--yes").code == 0
    assert {record.run_id for record in Store(store.home).runs()} == {LIVE}
    store.set_status(LIVE, Status(State.LOST))
    assert cli("rm", LIVE, "--yes", "--here").code == 0
    fresh = Store(store.home)
    assert fresh.runs() == [] and fresh.warnings == []


def test_a_live_run_is_refused_and_the_others_go(store: Store, cli, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cloudtrain.runs.run.Run.refresh", lambda self, *_, **__: self.record.status)
    refused = cli("rm", LIVE, "--yes")
    assert refused.code == 2 and "RUNNING" in refused.err and "cancel" in refused.err
    both = cli("rm", LIVE, OLD, "--yes")
    assert both.code == 2 and rows(store, LIVE) > 0 and rows(store, OLD) == 0


def test_prune_takes_what_ended_longer_ago_and_no_live_run(store: Store, cli):
    shown = cli("rm", "--older", "30d", "--dry-run", "--json")
    assert [(row["run_id"], row["deleted"]) for row in shown.rows] == [(OLD, False)] and rows(store, OLD) > 0
    pruned = cli("rm", "--older", "30d", "--yes", "--json")
    assert ([row["run_id"] for row in pruned.rows], pruned.code, pruned.err) == ([OLD], 0, "")
    assert (rows(store, OLD), rows(store, NEW) > 0, rows(store, LIVE) > 0) == (0, True, True)
    assert "no run ended" in cli("rm", "--older", "30d", "--yes").out
    assert cli("rm", "--older", "soon").code == 2


def test_a_person_is_asked(monkeypatch: pytest.MonkeyPatch, store: Store, cli):
    asked = []

    def confirmer(**settings):
        assert (settings["verb"], settings["yes"]) == ("delete", False)
        return asked.append

    monkeypatch.setattr(terminal, "confirmer", confirmer)
    assert cli("rm", OLD).code == 0 and rows(store, OLD) == 0
    assert asked == ["1 run, 5 MB"]


def test_prune_keeps_a_star_what_is_excepted_and_takes_a_filter(store: Store, cli):
    marks.write(store, OLD, star=True)
    kept = cli("rm", "--older", "30d", "--yes", "--json")
    assert (kept.code, kept.rows, rows(store, OLD) > 0) == (0, [], True)
    assert f"1 run with a star ({OLD})" in kept.err and "--include-starred" in kept.err
    assert cli("rm", "--older", "30d", "--include-starred", "--dry-run", "--json").rows[0]["run_id"] == OLD
    marks.write(store, OLD, star=False, tag=["x"])
    assert cli("rm", "--older", "30d", "--except", OLD, "--dry-run", "--json").rows == []
    marks.write(store, LIVE, tag=["x"])
    assert [row["run_id"] for row in cli("rm", "--ended", "tag:x", "--dry-run", "--json").rows] == [OLD], (
        "live runs stay"
    )
    assert cli("rm", "--ended", "tagg:x", "--yes").code == 2 and cli("rm", "--older", "1s", "--force").code == 2
    assert "no ended run matches" in cli("rm", "--ended", "tag:y", "--yes").out
    assert cli("rm", "--ended", "", "--yes").code == 2, "a variable of a shell that is not set"


def test_prune_by_age_takes_archived_runs_and_a_filter_leaves_them(store: Store, cli):
    assert cli("mark", OLD, "--archive").code == 0
    assert [row["run_id"] for row in cli("rm", "--older", "30d", "--dry-run", "--json").rows] == [OLD]
    assert OLD not in cli("rm", "--ended", "state:ended", "--older", "30d", "--dry-run", "--json").out
    archived = cli("rm", "--ended", "state:ended", "is:archived", "--dry-run", "--json")
    assert [row["run_id"] for row in archived.rows] == [OLD]


def test_ls_prints_ids_alone(store: Store, cli):
    assert set(cli("ls", "--ids").out.split()) == {OLD, NEW, LIVE} and cli("ls", "-q", "state:live").out == f"{LIVE}\n"
