"""Amounts in a currency that the user gave a rate for."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain.cli.view import planned
from cloudtrain.errors import BadJob
from cloudtrain.job.configfile import in_currency, read


def written(folder: Path, text: str, name: str = "cloudtrain.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "text, shown",
    [
        ("at most 40.00 USD (2 attempts of 4h)", "at most 40.00 USD (36.80 EUR) (2 attempts of 4h)"),
        ("expected 10.00 to 20.50 USD", "expected 10.00 to 20.50 USD (9.20 to 18.86 EUR)"),
        (
            "32 USD an hour, on spot 12 to 14 USD",
            "32 USD (29.44 EUR) an hour, on spot 12 to 14 USD (11.04 to 12.88 EUR)",
        ),
        ("no price for A100", "no price for A100"),
    ],
)
def test_amounts_are_shown_in_the_currency_too(tmp_path: Path, text: str, shown: str):
    assert in_currency(text, [written(tmp_path, "[currency]\nEUR = 0.92\n")]) == shown


def test_the_later_file_wins_and_without_a_rate_nothing_changes(tmp_path: Path):
    user, project = written(tmp_path, "[currency]\nEUR = 0.9\n"), written(tmp_path, "[currency]\nJPY = 150\n", "b.toml")
    assert in_currency("2.00 USD", [user, project]) == "2.00 USD (300.00 JPY)"
    assert in_currency("2.00 USD", []) == "2.00 USD"


@pytest.mark.parametrize(
    "line", ["EUR = 0", "EUR = -1.5", 'EUR = "0.92"', "euro = 0.92", "EUR = inf", "EUR = true", "EUR = 1\nCHF = 1"]
)
def test_what_is_no_rate_is_refused_with_its_line(tmp_path: Path, line: str):
    with pytest.raises(BadJob) as caught:
        read(written(tmp_path, f"[currency]\n{line}\n"))
    problem = caught.value.problems[0]
    assert problem.line == 2 and problem.path.startswith("currency."), problem


def test_a_file_that_cannot_be_read_keeps_no_run_from_being_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    written(tmp_path, "[currency]\nEUR = 0.5\n")
    monkeypatch.chdir(tmp_path)
    assert planned.in_currency("2.00 USD") == "2.00 USD (1.00 EUR)"
    for broken in ("[currency]\nEUR = 0\n", "[currency\n"):
        written(tmp_path, broken)
        assert planned.in_currency("2.00 USD") == "2.00 USD"
