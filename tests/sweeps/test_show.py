"""What `sweep show` and the notebook card have of a sweep: its best trial, and which parameters matter."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from cloudtrain.cli.sweep import command
from cloudtrain.history.trials import SweepHistory
from cloudtrain.job.document import Document
from cloudtrain.sweeps.file import read
from cloudtrain.sweeps.send import specification
from cloudtrain.sweeps.sweep import Sweep
from tests.sweeps.conftest import SCRIPT


@pytest.fixture
def ended(home: Path, tmp_path: Path) -> Sweep:
    """A sweep of 12 trials that has ended: the rate decides."""
    (tmp_path / "train.py").write_text(SCRIPT)
    keys = {
        "program": "train.py", "method": "grid", "metric": "loss",
        "parameters": {"lr": {"values": [0.1, 0.2, 0.3, 0.4]}, "act": {"values": ["a", "<b>", "c"]}},
    }  # fmt: skip
    document = Document.of(keys, "sweep").value
    history = SweepHistory(home)
    history.add("s", "s", specification(home, document, read(document, tmp_path)))
    history.set_state("s", "SUCCEEDED", "all 12 trials of <s> have run")
    found = Sweep.find("s", home)
    for number in range(1, 13):
        lr = round(0.1 * (number % 4 + 1), 1)
        history.add_trial("s", number, {"lr": lr, "act": ["a", "<b>", "c"][number % 3], "steps": 3}, {}, "local")
        history.end_trial("s", number, [lr])
    return found


def test_show_has_the_importance(ended: Sweep):
    assert ended.importance["lr"] > 0.9 and ended.importance.keys() == {"lr", "act"}
    shown = CliRunner().invoke(command, ["show", "s"], standalone_mode=False)
    share = f"{ended.importance['lr']:.0%}"
    assert f"importance: lr {share}, act" in shown.output, shown
    as_json = json.loads(CliRunner().invoke(command, ["show", "s", "--json"], standalone_mode=False).stdout)
    assert as_json["importance"] == ended.importance


def test_the_notebook_card_has_its_state_and_the_importance(ended: Sweep):
    card = ended._repr_html_()
    assert "SUCCEEDED" in card and "all 12 trials of &lt;s&gt; have run" in card
    assert f"lr {ended.importance['lr']:.0%}, act" in card and "<th>best</th>" not in card


def test_without_the_extra_show_says_what_to_install(ended: Sweep, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    shown = CliRunner().invoke(command, ["show", "s"], standalone_mode=False)
    assert "SUCCEEDED" in shown.output and "the importance of hyperparameters needs the extra sweep" in shown.output
