"""The documentation is built strictly: every link leads somewhere, and whoever reads it fetches nothing from elsewhere."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudtrain
from cloudtrain.cli import COMMANDS
from tests.conftest import WAIT_S
from tests.test_words import MOST_WORDS, OURS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
EXPORTED = set(cloudtrain.__all__) - {"__version__", "Job", "runs"} | {
    "runs.listing.runs"
}  # docs/spec.md has the keys of a job
GENERATED = {
    "cli.md",
    "keys.md",
    "options.md",
    "promises.md",
    "spec.md",
    "tables-evidence.md",
    "trainer.md",
    "troubleshooting.md",
}


def test_the_site_is_built_strictly_and_fetches_nothing(tmp_path: Path):
    # without -q: with it mkdocs 1.6.1 exits with 0 in spite of a broken link
    words = ["build", "--strict", "-f", str(ROOT / "mkdocs.yml"), "-d", str(tmp_path / "site")]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", *words],
        env=env,
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = [path.read_text() for path in (tmp_path / "site").rglob("*.html")]
    assert len(pages) > len(list(DOCS.rglob("*.md")))  # and one that says 404
    fetched = [
        url
        for text in pages
        for url in re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="?(http[^" >]+)', text)
    ]
    assert not fetched
    assert not list((tmp_path / "site").rglob("*.py"))
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())
    found = words_of(index)
    assert [word for word in ASKED if not words_of({**index, "docs": [{"title": word, "text": ""}]}) <= found] == []
    python = (tmp_path / "site" / "python" / "index.html").read_text()
    assert [name for name in EXPORTED if f'id="cloudtrain.{name}"' not in python] == []


# What readers typed into the search.
ASKED = [
    "kill -9",
    "SIGKILL",
    "OOM",
    "stuck",
    "deadlock",
    "max_cost",
    "out of memory",
    "137",
    "preempted",
    "interrupted",
    "bastion",
    "failover",
    "fallback",
    "guardrails",
    "organization",
    "least privilege",
    "by hand",
]


def words_of(index: dict[str, Any]) -> set[str]:
    """Return the words of a search index of user pages, cut as its own configuration says."""
    user_pages = [each for each in index["docs"] if "evidence" not in each.get("location", "")]
    text = " ".join(f"{each['title']} {re.sub('<[^>]+>', ' ', each['text'])}" for each in user_pages)
    return {word.lower() for word in re.split(index["config"]["separator"], html.unescape(text)) if word}


def test_the_readme_is_short_and_its_links_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    links = re.findall(r"\]\(([^)#]+)", text)
    assert len(links) > 10 and [link for link in links if not (ROOT / link).exists()] == []


def test_no_page_has_more_than_250_lines():
    pages = [path for path in DOCS.rglob("*.md") if path.name not in GENERATED]
    assert [path.name for path in pages if len(path.read_text().splitlines()) > 250] == []


def test_the_pages_are_short():
    """Words of each page that is not generated: at most 1,200, and 50,000 of all together."""
    words = {
        str(path.relative_to(DOCS)): len(path.read_text().split())
        for path in DOCS.rglob("*.md")
        if path.name not in GENERATED
    }
    assert {page: count for page, count in words.items() if count > 1200} == {} and sum(words.values()) <= 50_000


def sentences(page: Path) -> list[str]:
    """Return a page's sentences: of paragraphs, items of lists and cells of tables, without code blocks and links' addresses."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.) ?)", text):
        cells = block.split("|") if block.strip().startswith("|") else [block]
        for cell in cells:
            words = " ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell).split())
            found += re.split(r"(?<=[.!?:;]) ", words)
    return found


def test_user_pages_have_short_sentences_in_the_fields_words():
    pages = [path for path in DOCS.rglob("*.md") if path.name not in GENERATED and "evidence" not in path.name]
    assert len(pages) > 50
    every = [(path.name, sentence) for path in pages for sentence in sentences(path)]
    assert len(every) > 2000
    assert [(page, text) for page, text in every if len(text.split()) > MOST_WORDS] == []
    assert [(page, text) for page, text in every if re.search("|".join(OURS), text)] == []


def test_pages_name_commands_that_exist():
    named = [
        (path.name, word)
        for path in [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"]
        for word in re.findall(r"`(?:\$ )?cloudtrain ([a-z]+)(?![\w.-])[^`\n]*`", path.read_text())
    ]
    assert len(named) > 100
    assert [(page, word) for page, word in named if word not in COMMANDS] == []
