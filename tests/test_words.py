"""What a user reads is in the field's words: no phrases of our own, no sentence over 30 words.

Read are the texts in the code (messages, hints, notes, help of commands, descriptions of keys) and the verdicts' table.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = (  # a phrase of our own, and what it means is said plainly instead
    r"\bnobody\b", r"\bsomebody\b", r"\bheard\b", r"\bhears\b", r"\btold\b", r"\bgo(es)? on\b", r"\bwent on\b", r"\bwish(es)?\b",
    r"\bspoils?\b", r"\bto blame\b", r"\bis ill\b", r"\bill GPU", r"\banew\b", r"\bmade again\b", r"\banother start\b",
    r"\bcannot be had\b", r"\bwant of\b", r"\bmended\b", r"\bgangs?\b", r"\bheadway\b", r"\btellers?\b", r"platform's word\b",
    r"\bof no account\b", r"\b(stands?|stood) (there|here|in)\b", r"\bspeaks?\b", r"\bspoke\b", r"\bpassed over\b",
    r"\bbrought home\b", r"\bcomes? home\b", r"\ba word\b", r"\blast words?\b", r"\blaid over\b", r"\blies? in parts\b",
    r"\bknown are\b", r"\bpossible are\b", r"\bpackaged is\b", r"\band their kin\b", r"\bdealt (out|over)\b",
    r"\bexclude each other\b", r"\btaken up\b", r"\bleave (it|them) out\b", r"\bgoes? without\b",
    r"\basked to end\b", r"\bcannot be held\b", r"\b(is|are) meant\b",
    r"(?<!there )\bis no (number|duration|size|name|mapping|pattern|address|setting|cursor|file|folder|program|key)\b",
)  # fmt: skip
MOST_WORDS = 30
CODE = re.compile(r"\n.*\n|^\s*(SELECT|INSERT|UPDATE|DELETE|CREATE|WITH)\b|\(SELECT|\\[bwsd(]|\|.*\|", re.DOTALL)


def texts() -> Iterator[tuple[str, str]]:
    """Yield place and text of everything that is shown; programs, queries and regular expressions are not."""
    for folder in ("cloudtrain", "entrypoints"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith("cloudtrain/testing/"):
                yield from ((f"{name}:{line}", text) for line, text in _strings(path, "/cli/" in name))
    classes = tomllib.loads((ROOT / "cloudtrain/diagnosis/classes.toml").read_text())
    for name, row in classes.items():
        sentences = [row["cause"], row.get("fix", ""), *row.get("fixes", {}).values()]
        yield from ((f"classes.toml: {name}", text) for text in sentences)


def _strings(path: Path, of_commands: bool) -> Iterator[tuple[int, str]]:
    tree = ast.parse(path.read_text())
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                skipped.add(id(first.value))
                if of_commands and getattr(node, "name", "") == "command":  # its docstring is its help
                    yield from (
                        (first.lineno, part) for part in str(first.value.value).split("\n\n") if "\b" not in part
                    )
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped.update(id(part) for part in node.values)
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            text = node.value
        else:
            continue
        if len(text.split()) >= 3 and not CODE.search(text):
            yield node.lineno, text


@pytest.fixture(scope="module")
def shown() -> list[tuple[str, str]]:
    return list(texts())


def test_no_phrase_of_our_own(shown):
    assert len(shown) > 2000, "the texts are found"
    ours = re.compile("|".join(OURS), re.IGNORECASE)
    assert [f"{place}: {text}" for place, text in shown if ours.search(text)] == []


def test_no_sentence_over_30_words(shown):
    sentences = ((place, part) for place, text in shown for part in re.split(r"(?<=[.!?:;])\s+|\n\s*\n", text))
    assert [f"{place}: {part}" for place, part in sentences if len(part.split()) > MOST_WORDS] == []


def test_a_message_names_pages_by_their_name(shown):
    """An installed cloudtrain has no docs folder."""
    assert [f"{place}: {text}" for place, text in shown if re.search(r"\bdocs/[\w/-]+\.md", text)] == []
    files = [path for folder in ("cloudtrain", "entrypoints") for path in (ROOT / folder).rglob("*.py")]
    named = {name for path in files for name in re.findall(r"\bpage\(['\"]([\w/-]+)['\"]\)", path.read_text())}
    assert len(named) > 4 and [name for name in named if not (ROOT / "docs" / f"{name}.md").exists()] == []


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("the wish is stored", True),
        ("connection refused", False),
        ("nobody knows it", True),
        ("a data frame", False),
        ('"x" is no number', True),
        ("there is no number", False),
        ("is no longer there", False),
        ("known areas", False),
    ],
)
def test_ordinary_words_pass(text, counts):
    assert bool(re.search("|".join(OURS), text)) is counts
