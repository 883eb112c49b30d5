"""What runs have spent: their billed seconds, else their measured time, at the price of each attempt; in sums."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cloudtrain.cli import main
from cloudtrain.console.pages.overview import read_details
from cloudtrain.events import ENDED, State, Status
from cloudtrain.job.job import Job
from cloudtrain.job.units import format_time
from cloudtrain.report import page
from cloudtrain.runs.planning import spend
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from cloudtrain.testing.clock import VirtualClock
from cloudtrain.testing.memory import MemoryBackend
from tests.runs.steps import newest, watch

PAGE = (Path(__file__).parents[2] / "docs" / "cost.md").read_text()
CONFIG = """
[targets.prod]
backend = "memory"
usd_per_hour = 1.69
[targets.lab]
backend = "memory"
"""


@pytest.fixture
def submit(memory, job: Job, tmp_path: Path, monkeypatch):
    """Return a function that submits a job to a target, and ends it after so many billed seconds of all nodes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cloudtrain.toml").write_text(CONFIG)

    def run(target: str, billable_s: int | None = None, **changes) -> Run:
        run = Submitter(target, watch=False).submit(job.replace(**changes), new=True)
        run.acknowledge()
        if billable_s is not None:
            MemoryBackend.finish(newest(run), State.SUCCEEDED, 0, billable_s=billable_s)
            watch(run)
        return run

    return run


@pytest.fixture
def three(submit) -> None:
    submit("prod", 14_400, num_nodes=2)
    submit("prod", 36_000, labels={"team": "nlp"})
    submit("lab", 10_800, labels={"team": "nlp"})


def costs(capsys, *words: str) -> list[dict]:
    capsys.readouterr()
    assert main(["costs", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_sums_by_target_user_and_label(three, capsys):
    by_target = {row["key"]: row for row in costs(capsys)}
    assert by_target["prod"] | {"key": ""} == {
        "key": "", "keys": {"target": "prod"}, "runs": 2, "node_s": 50_400, "usd": 23.66, "unpriced_node_s": 0, "estimate": False,
    }  # fmt: skip
    assert by_target["lab"]["usd"] is None, "a price that is not known is not 0"
    assert by_target["lab"]["unpriced_node_s"] == 10_800
    by_team = {row["key"]: row for row in costs(capsys, "--by", "label.team")}
    assert (by_team["nlp"]["usd"], by_team["nlp"]["unpriced_node_s"]) == (16.9, 10_800)
    assert by_team[spend.NONE]["usd"] == 6.76
    (user,) = costs(capsys, "--by", "user")
    assert user["runs"] == 3 and user["usd"] == 23.66


def test_runs_are_listed_by_what_they_cost(three, capsys):
    capsys.readouterr()
    assert main(["ls", "cost>5", "--sort", "-cost", "--columns", "cost", "--json"]) == 0
    assert [round(row["cost"], 2) for row in json.loads(capsys.readouterr().out)] == [16.9, 6.76]


def test_months_and_since(three, home: Path, capsys):
    import sqlite3

    with sqlite3.connect(home / "history.sqlite3") as db:
        first = db.execute("SELECT attempt_id FROM attempts ORDER BY created_at").fetchone()
        db.execute("UPDATE attempts SET created_at = '2026-01-31T23:59:59.000000Z' WHERE attempt_id = ?", first)
    months = costs(capsys, "--by", "month")
    assert [row["key"] for row in months][0] == "2026-01" and [row["usd"] for row in months] == [6.76, 16.9]
    assert len(costs(capsys, "--by", "month", "--since", "2026-02-01")) == 1
    assert len(costs(capsys, "--by", "month", "--since", "2026-01-31")) == 2
    assert [row["runs"] for row in costs(capsys, "--since", "1d")] == [1, 1]


def test_a_live_attempt_counts_until_now_and_an_unknown_end_in_full(submit):
    run = submit("prod", num_nodes=2, limits={"max_runtime": "1h", "grace": "30s"})
    attempt = run.attempts[0]
    clock = VirtualClock()
    running = replace(attempt, status=Status(State.RUNNING, started_at=format_time(clock.now() - 600)))
    live = spend.share_of(running, run.store.home, clock)
    assert live.node_s == 1200 and live.usd == pytest.approx(1200 / 3600 * 1.69, abs=0.01)
    queued = replace(attempt, status=Status(State.QUEUED))
    assert spend.share_of(queued, run.store.home).usd == 0.0, "nothing was started"
    lost = replace(attempt, status=Status(State.LOST, None, "", format_time(clock.now() - 600), None))
    assert spend.share_of(lost, run.store.home).node_s == 2 * 3630, "its whole limit"


def test_costs_say_that_a_lost_attempt_counts_in_full(submit, capsys):
    run = submit("prod", limits={"max_runtime": "1h"})
    assert main(["costs"]) == 0 and "LOST attempts" not in capsys.readouterr().out
    MemoryBackend.finish(newest(run), State.LOST, None)
    watch(run)
    assert main(["costs"]) == 0 and "LOST attempts whose end was not reported count with" in capsys.readouterr().out


def test_a_loss_of_which_the_end_was_reported_counts_as_it_ran(submit, capsys):
    run = submit(
        "prod",
        num_nodes=2,
        limits={"max_runtime": "1h", "grace": "30s", "max_cost": "9 USD"},
        retry={"max_attempts": 2},
    )
    MemoryBackend.finish(newest(run), State.LOST, None, "no output for 5m (limits.max_silence)", event=ENDED)
    watch(run)
    assert len(run.attempts) == 2, "retry.on_events has `lost`"
    MemoryBackend.finish(newest(run), State.LOST, None, "no output for 5m (limits.max_silence)", event=ENDED)
    watch(run)
    assert spend.total(run.attempts, run.store.home).node_s < 2 * 3630
    ended_s = time.time()
    lost = Status(State.LOST, None, "", format_time(ended_s - 600), format_time(ended_s), event=ENDED)
    stored = replace(run.attempts[0], status=lost)
    assert spend.share_of(stored, run.store.home).node_s == 1200
    assert re.match(r"9 USD \(limits.max_cost\), 8.44 USD left", spend.describe_cap([stored], run.store.home))
    assert main(["costs"]) == 0 and "LOST attempts" not in capsys.readouterr().out


def test_attempts_of_a_run_add_up(submit, capsys):
    run = submit("prod", retry={"max_attempts": 2}, labels={"team": "nlp"})
    for state, code, billable_s in ((State.PREEMPTED, 75, 3600), (State.SUCCEEDED, 0, 1800)):
        MemoryBackend.finish(newest(run), state, code, billable_s=billable_s)
        watch(run)
    assert len(run.attempts) == 2
    (row,) = costs(capsys)
    assert (row["runs"], row["usd"]) == (1, round(1.5 * 1.69, 4))
    assert main(["show", run.run_id]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^  spent +2\.5\d USD \(1h 30m of nodes' time\)$", shown, re.MULTILINE)
    first, second = spend.describe_attempts(run.attempts, run.store.home)
    assert (first, second) == ("1.69", "0.84") and re.search(r"^  1 +PREEMPTED .*1\.69 ", shown, re.MULTILINE)
    text = page.render(run.store, run.run_id, None, (), costs=[first, second])
    assert '<th scope="col">USD</th>' in text and "<td>1.69</td>" in text and "<td>0.84</td>" in text
    assert read_details(run).costs == (first, second)


def test_what_is_spent_so_far_and_at_most(submit):
    run = submit("prod", num_nodes=2, limits={"max_runtime": "1h", "grace": "30s"})
    watch(run)
    text = spend.describe_run(run.attempts, run.store.home)
    assert re.fullmatch(r"\d\.\d\d USD so far \(.*s of nodes' time\); at most 3\.41 USD", text), text
    run.store.record(run.attempts[0].attempt_id, status=Status(State.RUNNING, billable_s=2520))
    assert f"`spent  {spend.describe_run(run.attempts, run.store.home)}`" in PAGE


def test_show_has_no_sum_without_a_price(submit, capsys):
    run = submit("lab", 100)
    assert main(["show", run.run_id]) == 0
    assert "  spent" not in capsys.readouterr().out
    assert spend.describe_attempts(run.attempts * 2, run.store.home) == []


def test_without_runs(home: Path, capsys):
    assert main(["costs"]) == 0 and "no runs yet" in capsys.readouterr().out
    assert main(["costs", "--by", "colour"]) == 2 and main(["costs", "--since", "soon"]) == 2


def test_the_table_on_the_page_is_what_is_printed(three, capsys):
    assert main(["costs"]) == 0
    shown = capsys.readouterr().out.rstrip()
    page = PAGE.partition("$ cloudtrain costs\n")[2].partition("```")[0]
    assert [line.rstrip() for line in shown.splitlines()] == [line.rstrip() for line in page.splitlines()]


def test_the_console_says_it_too(submit):
    facts = dict(read_details(submit("prod", 7200)).facts)
    assert facts["spent"] == "3.38 USD (2h of nodes' time)" and facts["billed"] == "2h of nodes' time, 7,200 s"


def test_sums_by_several_columns_and_before_a_day(three, submit, capsys):
    rows = costs(capsys, "--by", "team", "--by", "target")
    assert [row["keys"] for row in rows] == [
        {"label.team": "nlp", "target": "prod"},
        {"label.team": spend.NONE, "target": "prod"},
        {"label.team": "nlp", "target": "lab"},
    ]
    assert [row["usd"] for row in rows] == [16.9, 6.76, None]
    assert main(["costs", "--by", "month", "--by", "label.team"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["month", "label.team"] and len(lines) == 3 and lines[-1].startswith("all")
    assert costs(capsys, "--until", "2026-01-01") == [] and costs(capsys, "--since", "1d", "--until", "1d") == []
    assert main(["costs", "--by", "label.tam"]) == 0
    assert "no run has label.tam: did you mean label.team?" in capsys.readouterr().err
    assert main(["costs", "--by", "tam"]) == 2
    assert "one of the labels" in capsys.readouterr().err


def test_a_label_does_not_change_who_submitted_a_run(submit, monkeypatch, capsys):
    run = submit("prod", 3600, labels={"user": "bob", "submitted_by": "carol"})
    me = spend.shares(run.store)[0].labels["submitted_by"]
    assert me not in ("bob", "carol") and run.record.job["labels"]["user"] == "bob"
    assert any("labels.user is bob" in note for note in run.store.attempts(run.run_id)[-1].plan.notes)
    submit("prod", 3600)
    (row,) = costs(capsys, "--by", "user")
    assert (row["key"], row["runs"]) == (me, 2)
    assert [row["key"] for row in costs(capsys, "--by", "label.user")] == sorted(["bob", me], key=str)
    assert main(["ls", "--json", "--columns", "user", f"user:{me}"]) == 0
    assert [row["user"] for row in json.loads(capsys.readouterr().out)] == [me, me]
    assert main(["ls", "user:bob"]) == 0
    assert "no run has user:bob" in capsys.readouterr().err


def test_the_time_of_a_resumed_run_is_said_without_its_pauses(submit, capsys):
    run = submit("prod", retry={"max_attempts": 2})
    for state in (State.PREEMPTED, State.SUCCEEDED):
        MemoryBackend.finish(newest(run), state, 0)
        watch(run)
    with run.store.database.write() as db:
        for number, begin in ((1, 1e9), (2, 1e9 + 3600)):
            times = (format_time(begin), format_time(begin + 10), f"{run.run_id}-a{number}")
            db.execute("UPDATE attempts SET started_at = ?, ended_at = ? WHERE attempt_id = ?", times)
        whole = (format_time(1e9), format_time(1e9 + 3610), run.run_id)
        db.execute("UPDATE runs SET started_at = ?, ended_at = ? WHERE run_id = ?", whole)
    assert main(["show", run.run_id]) == 0
    assert "SUCCEEDED after 1h (2 attempts ran 20s)" in capsys.readouterr().out
    assert dict(read_details(Run.find(run.run_id)).facts)["took"] == "1h (2 attempts ran 20s)"
    assert main(["ls", "--columns", "took"]) == 0
    heads, row = capsys.readouterr().out.splitlines()[:2]
    assert row[: heads.index("took") + 4].split()[-1] == "20s", row
