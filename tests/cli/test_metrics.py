"""cloudtrain metrics over a run of two attempts and two ranks, and over one without metrics."""

from __future__ import annotations

import csv
import io

import pytest

from cloudtrain.backends.api import Plan
from cloudtrain.cli.view import summary
from cloudtrain.events import Row, State, Status
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import Process
from cloudtrain.runs.run import Run

FINAL = Status(State.SUCCEEDED, 0, started_at="2026-11-21T10:00:00Z", ended_at="2026-11-21T11:00:00Z")


def plan(run_id: str, attempt: int) -> Plan:
    manifest = {"secrets": {}, "nodes": 1, "processes_per_node": 2, "argv": ["train.py"]}
    return Plan("local", run_id, attempt, {}, {"sha256": "0", "files": 1}, manifest, {"name": "n"}, "local")


@pytest.fixture
def resumed(home) -> str:
    """A run whose second attempt resumed at step 6 of 10; both ranks log, rank 1 values above 10."""
    store = Store(home)
    assert store.intend(plan("r-1", 1), identity="i", owner=Process.here())
    for attempt, first in ((1, 0), (2, 6)):
        for rank in (0, 1):
            rows = [
                Row(
                    0,
                    100 * rank + n,
                    "t",
                    n,
                    "loss",
                    9.0 - n + 10 * rank,
                    rank,
                    n / 4,
                )
                for n in range(first, 10)
            ]
            store.record(f"r-1-a{attempt}", metrics=rows)
        if attempt == 1:
            store.record("r-1-a1", status=Status(State.PREEMPTED, 75))
            assert store.next_attempt(plan("r-1", 2), owner=Process.here())
    store.record("r-1-a2", status=FINAL)
    store.set_status("r-1", FINAL)
    return "r-1"


def test_a_metrics_name_in_place_of_a_run_is_explained(cli, resumed):
    for words, right in ((["loss"], "cloudtrain metrics --name loss"), (["r-1", "loss"], "metrics r-1 --name loss")):
        done = cli("metrics", *words)
        assert done.code == 2 and "no run has the id or prefix 'loss'" in done.err and right in done.err
    assert "cloudtrain ls" in cli("metrics", "lost").err


def test_rank_0_is_the_default_everywhere_and_all_are_apart(cli, resumed):
    for words in ([], ["--rank", "0"]):
        rows = cli("metrics", resumed, "--json", *words).rows
        assert {row["rank"] for row in rows} == {0} and len(rows) == 14
    assert list(rows[-1]) == ["step", "name", "value", "at", "attempt", "rank", "epoch"], "new ones come last"
    assert (rows[-1]["attempt"], rows[-1]["epoch"]) == (2, 2.25)
    assert {row["value"] > 9 for row in cli("metrics", resumed, "--json", "--rank", "1").rows} == {True}
    table = list(csv.DictReader(io.StringIO(cli("metrics", resumed, "--csv", "--rank", "all").out)))
    assert sorted({(row["attempt"], row["rank"]) for row in table}) == [("1", "0"), ("1", "1"), ("2", "0"), ("2", "1")]
    heads, *lines = [line.split() for line in cli("metrics", resumed, "--rank", "all").out.splitlines()]
    assert heads[:3] == ["rank", "metric", "points"] and [line[:3] for line in lines] == [
        ["0", "loss", "14"],
        ["1", "loss", "14"],
    ]
    heads, first, *_ = cli("metrics", resumed, "--name", "loss", "--rank", "1").out.splitlines()
    assert heads.split() == ["attempt", "rank", "step", "epoch", "loss", "at"]
    assert first.split() == ["1", "1", "0", "0", "19", "t"]


def test_a_rank_without_metrics_and_what_is_no_rank(cli, resumed):
    shown = cli("metrics", resumed, "--rank", "7")
    assert shown.code == 1 and "no metrics of rank 7; ranks with metrics: 0, 1" in shown.err
    assert "is not a rank number or all" in cli("metrics", resumed, "--rank", "x").err


def test_a_plot_has_a_line_for_each_rank_and_lost_points_are_faint(cli, resumed):
    lines = cli("metrics", resumed, "--plot").out.splitlines()
    assert lines[-1].strip() == "· lost: the next attempt resumed before it"
    drawn = "".join(lines[1:15])
    assert "·" not in drawn, "the newer attempt went the same way, and covers it"
    every = cli("metrics", resumed, "--plot", "--rank", "all").out
    assert [line.split() for line in every.splitlines()[-3:-1]] == [
        ["*", "r-1", "rank", "0"],
        ["o", "r-1", "rank", "1"],
    ]
    assert cli("metrics", resumed, "--plot", "--over", "epoch").out.splitlines()[15].split()[-1] == "2.25"


def test_a_name_that_is_not_there_is_an_error_that_suggests(cli, resumed):
    for words in ([], ["--json"], ["--csv"], ["--plot"]):
        shown = cli("metrics", resumed, "--name", "lsos", *words)
        assert (shown.code, shown.err) == (1, "r-1 has no metric 'lsos'\n  did you mean loss?\n"), words
    shown = cli("metrics", resumed, "--name", "nope")
    assert shown.code == 1 and "it has loss" in shown.err


def test_epochs_that_are_not_known_are_said(cli, home, resumed):
    Store(home).record("r-1-a2", metrics=[Row(0, 900, "t", 1, "lr", 0.1)])
    shown = cli("metrics", resumed, "--plot", "--name", "lr", "--over", "epoch")
    assert (shown.code, shown.out) == (0, "") and "its points have no epochs" in shown.err


def test_a_finished_run_without_metrics_shows_what_to_write(shell, project, census):
    (project / "quiet.py").write_text(
        "print('loading 12 files')\nfor n in range(3):\n    print(f'[{n}] Goodness of fit -> chi2 = {n}.5, ndf 3')\n"
    )
    assert shell("submit", "quiet.py", "--wait").code == 0
    shown = shell("metrics")
    assert (shown.code, shown.out) == (0, "")
    assert "no metrics were found in the log. The log lines most like metrics" in shown.err
    entry = next(line.strip() for line in shown.err.splitlines() if "metrics: {chi2" in line)
    (project / "job.yaml").write_text(f"name: again\nentrypoint: quiet.py\n{entry}\n")
    assert shell("submit", "job.yaml", "--wait").code == 0
    assert [row["value"] for row in shell("metrics", "again", "--json").rows] == [0.5, 1.5, 2.5], "what it says works"
    assert shell("metrics", "--name", "nope").code == 1
    first = shell("ls", "--json").json[-1]["run_id"]
    assert shell("report", first, "-o", "r.html").code == 0
    assert entry.split(":")[1].strip(" {") in (project / "r.html").read_text()


def test_where_a_loss_became_nan_is_said(cli, home):
    store = Store(home)
    assert store.intend(plan("r-1", 1), identity="i", owner=Process.here())
    values = [7.5, 9.0, float("inf"), float("nan")]
    store.record("r-1-a1", metrics=[Row(0, 20 + n, "t", 18 + n, "loss", v, 0)
                                    for n, v in enumerate(values)], status=FINAL)  # fmt: skip
    store.set_status("r-1", FINAL)
    since = "loss is not finite since step 20, log line 22"
    table = cli("metrics", "r-1").out
    head, row, note = table.splitlines()
    assert head.endswith("last step") and row.split()[-3:] == ["7.5", "9", "21"]
    assert note == f"{since}; min and max are of its finite values"
    assert summary.describe_not_finite(Run("r-1", store)) == since
    assert since in cli("metrics", "r-1", "--plot").out
    assert cli("metrics", "r-1", "--json").out.count("not finite") == 0


def test_an_option_of_one_value_that_is_given_twice_is_said(cli, resumed):
    shown = cli("metrics", resumed, "--name", "other", "--name", "loss", "--json", "--rank", "0")
    assert shown.code == 0 and {row["name"] for row in shown.rows} == {"loss"}
    assert shown.err.splitlines() == ["note: --name is given more than once; the last one counts"]
    assert "more than once" not in cli("submit", "nothing.yaml", "--set", "name=a", "--set", "name=b").err
