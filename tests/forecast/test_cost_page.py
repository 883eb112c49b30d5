"""The prices on docs/cost.md are what the commands print."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from cloudtrain.backends.vertex import prices
from cloudtrain.cli import main
from cloudtrain.cli import prices as command
from tests.backends.test_http import send
from tests.forecast.test_refresh import GOOD, provider

__all__ = ["provider"]
PAGE = (Path(__file__).parents[2] / "docs" / "cost.md").read_text()


def test_the_price_line_is_what_plan_prints_after_a_refresh(provider, home: Path, tmp_path: Path, monkeypatch, capsys):
    shown = next(line for line in PAGE.splitlines() if "ml.g5.2xlarge" in line)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "job.yaml").write_text(
        "entrypoint: train.py\nnum_nodes: 2\nresources: {instance_type: ml.g5.2xlarge}\n"
    )
    (tmp_path / "cloudtrain.toml").write_text(
        '[targets.prod]\nbackend = "sagemaker"\nregion = "eu-west-1"\nbucket = "my-bucket"\n'
        'role = "arn:aws:iam::123456789012:role/r"\n'
    )
    provider(lambda handler: send(handler, 200, GOOD))
    assert main(["prices", "refresh"]) == 0, "the target's list"
    capsys.readouterr()
    assert main(["plan", "-t", "prod"]) == 0
    said = re.sub(r"\d{4}-\d\d-\d\d(?=, of )", "DATE", capsys.readouterr().out.replace("1 day old", "of today"))
    assert re.sub(r"\d{4}-\d\d-\d\d(?=, of )", "DATE", shown) in said.splitlines()


def test_the_machines_of_the_page_are_listed(home: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words, _, shown = PAGE.partition("$ cloudtrain prices list ")[2].partition("\n")
    assert main(["prices", "list", *words.split()]) == 0
    assert capsys.readouterr().out.splitlines() == shown.partition("\n```")[0].splitlines()


def test_the_lists_that_the_page_names_can_be_asked_for(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = re.findall(r"^cloudtrain prices refresh ([a-z]\S+)", PAGE, re.MULTILINE)
    assert len(lines) == 2 and command._wanted(tmp_path, tuple(lines)) == sorted(lines)
    table = {row.split("/")[0] for row in re.findall(r"`([a-z]+/)REGION`", PAGE)}
    assert table == {"sagemaker", "vertex", "azureml", "aws", "gcp", "runpod"}
    assert f"{prices.FACTOR} times Compute Engine's price" in PAGE


def test_the_target_on_the_page_has_its_price(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    text = next(block for block in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL) if "priced_as" in block)
    (tmp_path / "cloudtrain.toml").write_text(text)
    assert main(["plan", "train.py", "-t", "lab"]) == 0 and "2.5 USD an hour" in capsys.readouterr().out
    other = text.replace("usd_per_hour = 2.50", "").replace("# priced_as", "priced_as")
    assert tomllib.loads(other)["targets"]["lab"]["priced_as"] == "aws/us-east-1/g5.12xlarge"
    (tmp_path / "cloudtrain.toml").write_text(other)
    assert main(["plan", "train.py", "-t", "lab"]) == 0


def test_a_job_file_leads_to_a_capped_run(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    job, cap = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[:2]
    for text, count in ((job, 2), (re.sub("limits: .*\n", cap, job), 2)):
        (tmp_path / "job.yaml").write_text(text)
        assert main(["plan"]) == 0
        printed = capsys.readouterr().out.splitlines()
        shown = PAGE.partition(text.splitlines()[3])[2].partition("```\n  ")[2].partition("```")[0].splitlines()
        assert len(shown) == count
        assert [line.strip() for line in shown if line.strip() not in [each.strip() for each in printed]] == []
