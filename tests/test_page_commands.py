"""Every command that a page shows is one that the parser takes: its options, their values, its arguments.

A command in backticks or in a block of a shell is whole where it begins with `cloudtrain` and has more words than its name.
Without `cloudtrain`, and with an option last that needs a value (`cloudtrain rerun --set`), it names a part of one.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from cloudtrain.cli import COMMANDS
from tests.test_task_pages import parse

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """Return the commands of a page: in backticks, and lines of its blocks."""
    lines = [line.strip().removeprefix("$ ") for block in BLOCK.findall(text) for line in block.splitlines()]
    quoted = [" ".join(each.split()) for each in re.findall(r"`([^`]+)`", BLOCK.sub("", text))]
    return [line for line in lines if line.startswith("cloudtrain ")] + [each.removeprefix("$ ") for each in quoted]


def refused(command: str) -> str | None:
    """Return what the parser has against a command; None where it takes it, and where the text is no command."""
    try:
        words = shlex.split(command, comments=True)
    except ValueError:
        return None
    whole = words[:1] == ["cloudtrain"]
    words = words[whole:]
    if len(words) < 2 or words[0] not in COMMANDS or "[OPTIONS]" in words:
        return None
    words = words[: next((at for at, word in enumerate(words) if re.fullmatch(r"[0-9]?[|>&;]+", word)), None)]
    by = [words[at + 1] for at, word in enumerate(words[:-1]) if word == "--by"]
    if any(not re.fullmatch(r"target|user|month|label\.\S+", each) for each in by if words[0] == "costs"):
        return f"--by {by}"  # click knows no choices there: labels are those of the history
    try:
        parse(words)
    except click.exceptions.Exit:  # --help
        return None
    except click.MissingParameter as error:
        return error.format_message() if whole else None
    except click.BadOptionUsage as error:
        return None if words[-1] == error.option_name else error.format_message()
    except click.ClickException as error:
        return None if "does not exist" in error.format_message() else error.format_message()
    return None


def test_the_commands_of_every_page_are_parsed():
    shown = [(str(page.relative_to(ROOT)), command) for page in PAGES for command in commands(page.read_text())]
    assert [(page, command, why) for page, command in shown if (why := refused(command))] == []


def test_most_commands_are_seen():
    every = [command for page in PAGES for command in commands(page.read_text())]
    assert len([command for command in every if command.startswith("cloudtrain ")]) > 400


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("cloudtrain costs --by team", "--by"),
        ("cloudtrain logs --taill 3", "No such option"),
        ("cloudtrain metrics --plot --over day", "Invalid value"),
        ("cloudtrain stack RUN > stacks.txt", None),
        ("cloudtrain rerun --set", None),
        ("cloudtrain fetch", None),
        ("resume --set limits.max_cost=80USD", None),
    ],
)
def test_what_is_refused(command: str, why: str | None):
    assert why in refused(command) if why else refused(command) is None
