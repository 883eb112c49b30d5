"""docs/how/team.md: its files are planned, and the refusals are those that it shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cloudtrain.backends import registry
from cloudtrain.cli import main
from cloudtrain.policy import enforce, files

PAGE = (Path(__file__).parents[2] / "docs" / "how" / "team.md").read_text()
FILES = dict(re.findall(r'^```\w+ title="(.+?)"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL))


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project of the page."""
    folder = tmp_path / "acme"
    for name, text in {**FILES, "train.py": "print(1)\n"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    return folder


def test_the_refusal_is_the_one_of_the_page(acme: Path, capsys):
    assert main(["plan", "wrong.yaml"]) == 2
    printed = capsys.readouterr().err.replace(f"{acme}/", "")
    shown = PAGE[PAGE.index("$ cloudtrain plan wrong.yaml") :].partition("```")[0].splitlines()[1:]
    assert [line for line in shown if line != "..." and line not in printed.splitlines()] == [], printed


def test_the_table_has_every_key_of_a_rule():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "policy.md").read_text()
    table = page[page.index("| key | requires |") :].partition("\n\n")[0]
    assert {
        key for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for key in re.findall(r"`(\w+)`", row)
    } == {*files.REQUIREMENTS, "set"}


def test_the_function_of_the_page_refuses_and_changes():
    from cloudtrain.job.job import Job
    from cloudtrain.policy.changes import Context

    code: dict = {}
    exec(PAGE.partition("```python\n")[2].partition("```")[0], code)
    context = Context("prod", "sagemaker", "ann")
    assert code["apply"](Job(entrypoint="train.py"), context).labels == {"org": "acme"}
    with pytest.raises(ValueError, match="several nodes"):
        code["apply"](Job(entrypoint="train.py", num_nodes=2), context)


def test_the_denial_of_the_page_is_one_of_those_that_are_written(acme: Path, capsys):
    assert main(["permissions", "-t", "prod", "--policy", "--json"]) == 0
    documents = json.loads(capsys.readouterr().out)["documents"]
    shown = json.loads(PAGE.partition("```json\n")[2].partition("```")[0])
    assert shown in documents["rules.json"]["Statement"]


def test_the_table_says_what_each_platform_holds():
    """Rows of the page and what is generated for each requirement alone."""
    table = PAGE[PAGE.index("| rule | AWS |") :].partition("\n\n")[0].splitlines()[2:]
    rows = {cells[1]: [bool(cell.strip()) for cell in cells[2:5]] for cells in (row.split("|") for row in table)}
    shown = {key: held for names, held in rows.items() for key in re.findall(r"`(\w+)`", names)}
    samples = {"labels": {"a": ["b"]}, "max_runtime": "1h", "max_cost": "1 USD", "max_usd_per_hour": 1, "max_gpus": 1}
    for key in files.REQUIREMENTS:
        wanted = samples.get(key, True if key in files.FLAGS else ["x"])
        rule = files.Rule("r", "", (), {key: wanted}, {}, "policy.toml", {})
        policy = files.Policy("policy.toml", "", (rule,))
        options = {"sagemaker": {}, "kubernetes": {"spot_selector": {"a": "b"}}, "vertex": {"project": "p"}}
        held = [
            bool(enforce.build([policy], name, registry.create(name, options[name], Path()))[0]) for name in options
        ]
        assert held == (shown.get(key, [False] * 3) if key != "accounts" else [True, False, False]), key


def test_the_budgets_of_the_page_are_read(tmp_path: Path):
    from cloudtrain.job import configfile

    (tmp_path / "cloudtrain.toml").write_text(PAGE[PAGE.index("[budgets]\n") :].partition("```")[0])
    assert configfile.read(tmp_path / "cloudtrain.toml").value["budgets"]["label.team=nlp"] == "2000 USD/month"
