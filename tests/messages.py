"""Every sentence that cloudtrain and the launcher can show: errors, hints, notes, problems, verdicts, and the help of commands.

    python -m tests.messages    writes tests/golden/messages.txt, whose diff is reviewed

A sentence is a literal of three words or more that is no docstring. `{}` stands for what differs, and each sentence is there
once, in the order of the alphabet: code that moves changes no line, a reworded sentence changes one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click

from cloudtrain.cli import program
from tests.imports import files

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "messages.txt"
WORDS = re.compile(r"(?:[A-Za-z,;:'(){}]{2,} ){2}[A-Za-z{(]")
SCRIPTS = re.compile(r"[\n\\$=<>|]|\b(?:SELECT|FROM|WHERE|PRAGMA|OR|SET|AND) |^(?:import|from) ")  # SQL, shell, code


def written() -> str:
    """Return the golden file's text."""
    said = {" ".join(text.split()) for text in (*literals(), *helps())}
    return "".join(f"{text}\n" for text in sorted(said, key=lambda text: (text.lower(), text)))


def literals() -> Iterator[str]:
    for folder in ("cloudtrain", "entrypoints"):
        for path in files(ROOT / folder):
            yield from sentences(path.read_text())


def sentences(source: str) -> Iterator[str]:
    """Yield the sentences among the literals of a Python text."""
    tree = ast.parse(source)
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    alone |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if id(node) not in alone and (text := text_of(node)) and WORDS.search(text) and not SCRIPTS.search(text):
            yield text


def text_of(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def helps() -> Iterator[str]:
    """Yield the paragraphs of each command's help; those of its options are literals."""
    with click.Context(program) as context:
        commands = [program, *(program.get_command(context, name) for name in program.list_commands(context))]
    for command in commands:
        assert command is not None
        for paragraph in (command.help or "").split("\n\n"):
            yield from paragraph.removeprefix("\b\n").splitlines() if paragraph.startswith("\b") else [paragraph]


if __name__ == "__main__":
    GOLDEN.write_text(written())
