"""The documentation is built strictly: every link leads somewhere, and whoever reads it fetches nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import cloudtrain
from tests.conftest import WAIT_S

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
EXPORTED = set(cloudtrain.__all__) - {"__version__", "Job", "runs"} | {
    "runs.listing.runs"
}  # docs/spec.md has the keys of a job
LONG = {"cli.md", "troubleshooting.md"}  # generated reference


def test_the_site_is_built_strictly_and_fetches_nothing(tmp_path: Path):
    # without -q: with it mkdocs 1.6.1 exits with 0 in spite of a broken link
    words = ["build", "--strict", "-f", str(ROOT / "mkdocs.yml"), "-d", str(tmp_path / "site")]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", *words], env=env, capture_output=True, text=True, timeout=WAIT_S, check=False
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
    python = (tmp_path / "site" / "python" / "index.html").read_text()
    assert [name for name in EXPORTED if f'id="cloudtrain.{name}"' not in python] == []


def test_the_readme_is_short_and_its_links_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    links = re.findall(r"\]\(([^)#]+)", text)
    assert len(links) > 10 and [link for link in links if not (ROOT / link).exists()] == []


def test_no_page_has_more_than_250_lines():
    pages = [path for path in DOCS.rglob("*.md") if path.name not in LONG]
    assert [path.name for path in pages if len(path.read_text().splitlines()) > 250] == []
