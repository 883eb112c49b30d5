"""Budgets and confirm_above: a warning at 80 %, a refusal at 100 %, a question on a terminal and a refusal on a pipe."""

from __future__ import annotations

import json
import os
import pty
import re
import sys
from pathlib import Path

import pytest

from cloudtrain.cli import main
from cloudtrain.cli.view import terminal
from cloudtrain.errors import BadJob, BadRequest, OverBudget
from cloudtrain.events import State
from cloudtrain.job import configfile
from cloudtrain.job.job import Job
from cloudtrain.runs import remove
from cloudtrain.runs.planning import spend
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from cloudtrain.testing.memory import MemoryBackend
from tests.runs.steps import newest, watch

PAGE = (Path(__file__).parents[2] / "docs" / "cost.md").read_text()
TARGET = '[targets.prod]\nbackend = "memory"\nusd_per_hour = 100\n'


@pytest.fixture
def submit(memory, job: Job, tmp_path: Path, monkeypatch):
    """Return a function that submits a job under some budgets, after a run of the team nlp that has spent an amount."""
    monkeypatch.chdir(tmp_path)

    def run(budgets: str, spent_usd: float = 0.0, confirm=None, **changes) -> tuple[Run, list[str]]:
        if spent_usd:
            (tmp_path / "cloudtrain.toml").write_text(TARGET)
            earlier = Submitter("prod", watch=False).submit(job.replace(labels={"team": "nlp"}), new=True)
            earlier.acknowledge()
            MemoryBackend.finish(newest(earlier), State.FAILED, 1, billable_s=round(spent_usd * 36))
            watch(earlier)
        (tmp_path / "cloudtrain.toml").write_text(f"{TARGET}[budgets]\n{budgets}\n")
        submitter = Submitter("prod", watch=False, confirm=confirm)
        return submitter.submit(job.replace(**changes), new=True), submitter.notes

    return run


NLP = {"labels": {"team": "nlp"}, "limits": {"max_runtime": "1h", "grace": "36s"}}
BUDGET = '"label.team=nlp" = "500 USD/month"'


def test_below_80_percent_nothing_is_said(submit):
    assert submit(BUDGET, 399.0, **NLP)[1] == []


def test_from_80_percent_it_warns(submit):
    _, (note,) = submit(BUDGET, 400.0, **NLP)
    assert "the budget label.team=nlp is 500 USD/month, of which 400.00 USD are spent in 20" in note
    assert "this run may cost 101.00 USD more" in note and "never stops a run" in note and "this machine" in note


def test_at_100_percent_nothing_is_sent(submit):
    with pytest.raises(OverBudget, match=r"500\.00 USD are spent.*nothing was submitted") as error:
        submit(BUDGET, 500.0, **NLP)
    assert "this machine only" in error.value.hint and "max_cost" in error.value.hint and error.value.exit_code == 2
    assert len(MemoryBackend.attempts) == 1, "only the run that had spent it"


def test_a_deleted_run_still_counts_for_a_budget_and_for_costs(submit, capsys):
    with pytest.raises(OverBudget):
        submit(BUDGET, 500.0, **NLP)
    (attempt,) = MemoryBackend.attempts
    run = Run.find(attempt.removesuffix("-a1"))
    remove.remove(run, here=True)
    assert run.store.runs() == []
    with pytest.raises(OverBudget, match=r"500\.00 USD are spent"):
        submit(BUDGET, **NLP)
    assert main(["costs", "--by", "label.team", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["key"], row["runs"], row["usd"]) == ("nlp", 1, 500.0)
    spend.append_deleted(run.store.home, list(spend.read_deleted(run.store.home)))  # as an interrupted removal repeats
    assert main(["costs", "--since", "2020-01-01", "--until", "2021-01-01"]) == 0
    assert "no costs" in capsys.readouterr().out
    assert main(["costs"]) == 0 and "500.00" in capsys.readouterr().out


def test_live_runs_count_with_what_they_may_cost(submit):
    _, notes = submit(BUDGET, 200.0, **NLP)
    assert notes == []
    for _ in range(2):  # of at most 101 USD each, which are not over
        _, notes = submit(BUDGET, **NLP)
    (note,) = notes
    assert "200.00 USD are spent" in note and "and live runs may cost 202.00 USD more" in note
    with pytest.raises(OverBudget, match=r"live runs may cost 303\.00 USD more"):
        submit(BUDGET, **NLP)


def test_a_live_run_of_last_month_counts_with_what_it_may_cost(submit, home: Path):
    run, _ = submit(BUDGET, **NLP)
    with run.store.database.write() as db:
        for table in ("runs", "attempts"):
            db.execute(f"UPDATE {table} SET created_at = '2026-01-31T23:59:59.000000Z'")
    with pytest.raises(OverBudget, match=r"0\.00 USD are spent .* and live runs may cost 101\.00 USD more"):
        submit(BUDGET.replace("500", "100"), **NLP)


@pytest.mark.parametrize(
    ("selector", "counts"),
    [
        ("all", True),
        ('"target=prod"', True),
        ('"target=ssh"', False),
        ('"label.team=vision"', False),
        ('"user=nobody"', False),
    ],
)
def test_a_budget_counts_what_its_selector_names(selector: str, counts: bool, submit):
    if counts:
        with pytest.raises(OverBudget):
            submit(f'{selector} = "500 USD/month"', 500.0, **NLP)
    else:
        assert submit(f'{selector} = "500 USD/month"', 500.0, **NLP)[1] == []


def test_a_resume_is_refused_too_and_a_rerun(submit, tmp_path: Path):
    run, _ = submit(BUDGET, **NLP)
    MemoryBackend.finish(newest(run), State.PREEMPTED, 75, billable_s=500 * 36)
    watch(run)
    assert run.record.status.state is State.PREEMPTED
    with pytest.raises(OverBudget):
        run.resume()
    with pytest.raises(OverBudget):
        run.rerun()
    assert len(run.attempts) == 1


def test_what_has_no_price_is_said_beside_the_sum(submit, tmp_path: Path, job: Job):
    (tmp_path / "cloudtrain.toml").write_text('[targets.prod]\nbackend = "memory"\n')
    other = Submitter("prod", watch=False).submit(job.replace(labels={"team": "nlp"}), new=True)
    MemoryBackend.finish(newest(other), State.SUCCEEDED, 0, billable_s=7200)
    watch(other)
    _, (note,) = submit(BUDGET, 400.0, **NLP)
    assert "(and 2h of nodes without a price)" in note


ABOVE = 'confirm_above = "50 USD"'


def test_a_run_above_the_amount_is_confirmed(submit):
    asked: list[str] = []
    submit(ABOVE, confirm=asked.append, **NLP)
    assert len(asked) == 1 and asked[0].endswith("may cost 101.00 USD (confirm_above is 50 USD)")
    submit('confirm_above = "101 USD"', confirm=asked.append, **NLP)
    submit("", confirm=asked.append, **NLP)
    assert len(asked) == 1, "not above it, and unset"


def test_a_cost_that_is_not_known_is_confirmed_where_machines_are_rented(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "none")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "none")
    (tmp_path / "train.py").write_text("print(1)\n")
    options = (
        'backend = "sagemaker"\nregion = "us-east-1"\nbucket = "my-bucket"\nrole = "arn:aws:iam::123456789012:role/r"\n'
    )
    (tmp_path / "cloudtrain.toml").write_text(f"[targets.prod]\n{options}[budgets]\n{ABOVE}\n")
    words = ["submit", "train.py", "-t", "prod", "--set", "resources.instance_type=ml.p9.48xlarge", "--gpus", "H100:8"]
    assert main([*words, "--set", "image=img:1"]) == 2
    assert "may cost is unknown" in capsys.readouterr().err


def test_on_a_pipe_it_is_refused_with_the_flag(memory, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "cloudtrain.toml").write_text(f"{TARGET}[budgets]\n{ABOVE}\n")
    words = ["submit", "train.py", "-t", "prod"]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert "may cost 2400.83 USD (confirm_above is 50 USD): nothing was submitted" in err and "--yes" in err
    assert not MemoryBackend.attempts and main(["ls"]) == 0 and "no runs yet" in capsys.readouterr().out


@pytest.mark.parametrize(("typed", "sent"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_a_terminal_is_asked(typed: str, sent: bool, monkeypatch):
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "r") as stdin:
        os.write(ours, typed.encode())
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        confirm = terminal.confirmer(yes=False, as_json=False)
        if sent:
            confirm("it may cost 60 USD")
        else:
            with pytest.raises(BadRequest, match="nothing was submitted"):
                confirm("it may cost 60 USD")
        with pytest.raises(BadRequest, match="nothing was submitted"):
            terminal.confirmer(yes=False, as_json=True)("it may cost 60 USD")
        terminal.confirmer(yes=True, as_json=False)("it may cost 60 USD")
    os.close(ours)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ('"team=nlp" = "5 USD/month"', "is not a valid budget"),
        ('"label.team" = "5 USD/month"', "is not a valid budget"),
        ('"label.team=nlp" = "5 USD"', "500 USD/month"),
        ('"label.team=nlp" = 5', "500 USD/month"),
        ('all = "5 EUR/month"', "40 USD"),
        ('confirm_above = "5 USD/month"', "40 USD"),
    ],
)
def test_a_wrong_budget_is_reported_with_its_line(line: str, wrong: str, tmp_path: Path):
    (tmp_path / "cloudtrain.toml").write_text(f"[budgets]\n{line}\n")
    with pytest.raises(BadJob, match=rf"cloudtrain\.toml:2: .*{re.escape(wrong)}"):
        configfile.read(tmp_path / "cloudtrain.toml")


def test_the_budgets_on_the_page_can_be_read(tmp_path: Path):
    text = next(block for block in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL) if "[budgets]" in block)
    (tmp_path / "cloudtrain.toml").write_text(text)
    assert configfile.read(tmp_path / "cloudtrain.toml").value["budgets"]["confirm_above"] == "50 USD"


def test_plan_says_what_a_submit_would_say_of_budgets(submit, job: Job, tmp_path: Path, cli):
    submit('confirm_above = "1 USD"', 300.0, **NLP)  # and this one is live: 101 USD at most
    (tmp_path / "job.yaml").write_text(
        f"entrypoint: {job.entrypoint}\nsource: {job.source}\nlabels: {{team: nlp}}\nlimits: {{max_runtime: 1h, grace: 36s}}\n"
    )
    before = len(MemoryBackend.attempts)

    def said(budgets: str) -> list[str]:
        (tmp_path / "cloudtrain.toml").write_text(f"{TARGET}[budgets]\n{budgets}\n")
        code, shown, _ = cli("plan", "-t", "prod")
        assert code == 0
        return re.findall(r"^  submit  (.+)$", shown, re.MULTILINE)

    assert said('"label.team=nlp" = "5000 USD/month"') == []
    (warning,) = said(BUDGET)
    assert warning.startswith(
        "would warn: the budget label.team=nlp is 500 USD/month, of which 300.00 USD are spent in 20"
    )
    (refusal,) = said('"label.team=nlp" = "300 USD/month"')
    assert refusal.startswith(
        "would refuse this here: the budget label.team=nlp is 300 USD/month, of which 300.00 USD are"
    )
    assert "nothing was submitted" not in refusal and "raise it in [budgets] of cloudtrain.toml" in refusal
    (question,) = said('confirm_above = "50 USD"')
    assert re.fullmatch(r"would ask first: \S+ may cost 101.00 USD \(confirm_above is 50 USD\)", question)
    assert len(MemoryBackend.attempts) == before


def test_a_budget_of_a_target_that_does_not_exist_is_refused(submit, job, tmp_path, cli):
    with pytest.raises(
        BadRequest, match='"target=prdo" in .budgets. of cloudtrain.toml is for no known target'
    ) as caught:
        submit('"target=prdo" = "5 USD/month"')
    assert caught.value.hint == "did you mean target=prod?"
    submit('"target=sagemaker" = "5 USD/month"')
