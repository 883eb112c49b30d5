"""Why a run failed, as the command line says it: of a real run, word for word."""

from __future__ import annotations

import pytest

from cloudtrain.cli.view.summary import LONGEST, verdict_rows
from cloudtrain.diagnosis.verdict import Verdict

pytestmark = pytest.mark.usefixtures("census")


def test_a_failed_run_says_why_wherever_it_is_shown(project, shell):
    (project / "train.py").write_text('print("loading", flush=True)\nopen("data/train.jsonl")\n')
    waited = shell("submit", "train.py", "--wait")
    assert waited.code == 1
    run_id = waited.out.split()[0]
    told = """\
  why  file not found (rank 0) (missing-file)
  log  line {} of node 0: FileNotFoundError: [Errno 2] No such file or directory: 'data/train.jsonl'
  at   train.py, line 2
  try  correct the path, or declare the file under inputs
"""
    verdict = shell("show", run_id, "--json").json["verdict"]
    assert told.format(verdict["seq"]) in waited.out
    assert (verdict["label"], verdict["rank"], verdict["changes_results"]) == ("missing-file", 0, False)
    assert shell("logs", run_id, "--json").rows[-1]["seq"] > verdict["seq"]
    numbered = [line.split(maxsplit=1) for line in shell("logs", run_id, "--number").out.splitlines()]
    assert [text for number, text in numbered if number == str(verdict["seq"])] == [verdict["deciding"]]
    assert shell("logs", run_id, "--number", "--json").code == 2
    assert shell("wait", run_id, "--json").json["verdict"] == verdict
    shown = [line.split(maxsplit=1) for line in shell("show", run_id).out.splitlines()]
    assert ["why", "file not found (rank 0) (missing-file)"] in shown


def test_a_run_that_ended_well_has_no_verdict(project, shell):
    done = shell("submit", "train.py", "--wait")
    assert done.code == 0 and "  why " not in done.out
    assert shell("show", "--json").json["verdict"] is None


def test_a_long_line_is_cut_and_a_reason_is_not_said_twice():
    assert verdict_rows(None) == []
    long = Verdict("nan-loss", "it became NaN", "x" * 1000, "log", 2, 7, 5, "a lower learning rate", True)
    assert verdict_rows(long) == [
        ("why", "it became NaN (rank 5) (nan-loss)"),
        ("log", "line 7 of node 2: " + "x" * (LONGEST - 3) + "..."),
        ("try", "a lower learning rate (this changes the results)"),
    ]
    placed = Verdict("script-error", "its own", "KeyError: 'x'", "log", 0, 3, 0, raised="rows.py, line 12")
    assert verdict_rows(placed)[2] == ("at", "rows.py, line 12")
    assert verdict_rows(Verdict("quota", "too much", "the platform's words", "reason"))[1] == ("log", "")
