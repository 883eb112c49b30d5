"""docs/cli.md and docs/spec.md are what the code says, and name everything."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends import registry
from cloudtrain.cli import COMMANDS
from cloudtrain.events import CLI_EXIT, EXIT_REFUSED, EXIT_RESUMABLE, KINDS
from cloudtrain.job.job import schema
from tests.conftest import WAIT_S

DOCS = Path(__file__).parents[1] / "docs"


def test_the_reference_is_current():
    done = subprocess.run(
        [sys.executable, DOCS / "generate.py", "--check"], capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module that writes the pages; those beside it have names that other tests import from elsewhere."""
    monkeypatch.syspath_prepend(str(DOCS))
    names = [path.stem for path in DOCS.glob("*.py")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("generate")
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["options", "keys"])
def test_the_pages_say_what_backends_take(generate: Any, name: str):
    made = getattr(generate, f"{name}_page")()
    assert made == (DOCS / "reference" / f"{name}.md").read_text(), "python docs/generate.py"


def test_a_stale_reference_is_noticed(tmp_path):
    (tmp_path / "docs").mkdir()
    scripts = ["generate.py", "trainer.py", "strategies.py", "strategies.json", "resume.py", "resume.json"]
    scripts += ["results.json"]
    scripts += [
        "own_strategies.py",
        "own_strategies.json",
        "contract.py",
        "contract.json",
        "credentials.json",
        "limits.py",
        "job_keys.py",
        "published.py",
        "versions.py",
        "versions.json",
        "published.csv",
        "troubleshooting.py",
        "troubleshooting.md",
    ]
    scripts += [
        "tables.py",
        "cli.md",
        "spec.md",
        "cost.md",
    ]
    for name in scripts:
        (tmp_path / "docs" / name).write_bytes((DOCS / name).read_bytes())
    for name in ("cloudtrain", "entrypoints", "tests"):
        (tmp_path / name).symlink_to(DOCS.parent / name)
    (tmp_path / "docs" / "cli.md").write_text("old")
    done = subprocess.run(
        [sys.executable, tmp_path / "docs" / "generate.py", "--check"], capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 1
    assert "docs/cli.md is not current" in done.stdout and "spec.md" not in done.stdout


def test_every_command_has_its_section():
    text = (DOCS / "cli.md").read_text()
    for name, line in COMMANDS.items():
        assert f"\n### {name}\n" in text
        assert f"\n{line}\n" in text


def test_every_key_of_a_job_has_its_row():
    text = (DOCS / "spec.md").read_text()
    keys = [*schema()["properties"]]
    for part in schema()["$defs"].values():
        keys += [key for form in [part, *part.get("anyOf", ())] for key in form.get("properties", ())]
    assert len(keys) > 40
    assert [key for key in keys if f"| `{key}` |" not in text] == []


def test_the_page_of_events_has_every_kind():
    page = (DOCS / "reference" / "events.md").read_text()
    assert set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE)) == KINDS | {"status"}


def test_the_page_of_exit_codes_has_those_of_the_states():
    page = (DOCS / "reference" / "exit-codes.md").read_text()
    codes = {int(code) for code in re.findall(r"^\| (\d+) ", page, re.MULTILINE)}
    assert {*CLI_EXIT.values(), EXIT_RESUMABLE, EXIT_REFUSED} <= codes
    generated = (DOCS / "cli.md").read_text().partition("An error is")[0]
    assert {
        int(code) for row in re.findall(r"^\| ([\d, ]+) \|", generated, re.MULTILINE) for code in row.split(", ")
    } <= codes


def test_the_page_has_every_option_of_every_backend():
    text = (DOCS / "reference" / "options.md").read_text()
    for name in registry.names():
        section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert [
            key for key in registry.backend_class(name).options().model_fields if f"| `{key}` |" not in section
        ] == []
    page = (DOCS / "sagemaker-options.md").read_text()
    options = registry.backend_class("sagemaker").options().model_fields
    assert [key for key in options if f"`{key}`" not in page and f"`{key}:" not in page] == []
