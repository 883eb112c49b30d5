"""A real console process over a home of its own, and a real Chromium that looks at it.

Screenshots are kept in the folder that CLOUDTRAIN_SCREENSHOTS names (docs/console.md's pictures are some of them), else
with pytest's temporary files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from tests.conftest import WAIT_S, require

CHROMIUM = "chromium"
WIDTH, HEIGHT = 1180, 800
NARROW, WIDEST = 400, 1440
expect.set_options(timeout=120_000)  # ms: machines are slow and busy


@dataclass
class Console:
    """A console process: its home and the address that it printed."""

    home: Path
    url: str  # with the token
    process: subprocess.Popen[str]

    @property
    def root(self) -> str:
        return self.url.partition("/open")[0]

    @property
    def token(self) -> str:
        return self.url.partition("token=")[2]

    @property
    def cookie(self) -> str:
        return f"cloudtrain-{self.root.rpartition(':')[2]}={self.token}"


def submit(console, folder: Path, script: str, *args: str, **job) -> Run:
    """Submit a script of this name to this machine, into the console's home."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(script)
    data = {"name": "tiny", "source": str(folder), "entrypoint": "train.py", "args": list(args), **job}
    run = Submitter("local", home=console.home).submit(data)
    run.acknowledge()
    return run


@contextmanager
def console_of(home: Path) -> Iterator[Console]:
    """Start `cloudtrain console` over a home; it has ended when the block ends."""
    folder = home.parent
    environment = {
        **os.environ,
        "CLOUDTRAIN_HOME": str(home),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "CLOUDTRAIN_CACHE": str(folder / "cache"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "console.err").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "cloudtrain", "console", "--no-open", "--json"],
            cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
        try:
            line = process.stdout.readline()
            assert line, (folder / "console.err").read_text()
            yield Console(home, json.loads(line)["url"], process)
        finally:
            process.terminate()
            try:
                process.wait(WAIT_S)
            finally:
                process.kill()
                process.stdout.close()


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """One console for the tests of a module; its runs are what they put into its home."""
    with console_of(tmp_path_factory.mktemp("console") / "home") as found:
        yield found


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    require(CHROMIUM)
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        arguments += ["--disable-gpu", "--disable-software-rasterizer"]  # it would emulate one
        arguments += ["--process-per-site", "--renderer-process-limit=1"]  # see `visitor`
        found = playwright.chromium.launch(executable_path=shutil.which(CHROMIUM), args=arguments)
        yield found
        found.close()


@pytest.fixture(scope="module")
def visitor(browser: Browser, console: Console) -> Iterator[BrowserContext]:
    """A person's browser that has opened the printed address; it may ask nobody but the console.

    A page stays open: its process serves the others too and has compiled their scripts, which is two thirds of a page's time.
    """
    context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}, reduced_motion="reduce")
    context.set_default_timeout(120_000)
    page = context.new_page()
    page.goto(console.url)
    page.wait_for_url(console.root + "/")
    page.goto(console.root + "/favicon.ico")  # which asks for nothing more
    yield context
    context.close()


@pytest.fixture
def page(visitor: BrowserContext, console: Console) -> Iterator[Page]:
    """A page of that browser; afterwards nothing was asked of others, and no script has failed."""
    found = visitor.new_page()
    asked, failed = [], []
    found.on("request", lambda request: asked.append(request.url))
    found.on("pageerror", lambda error: failed.append(str(error)))
    yield found
    found.close()
    assert [url for url in asked if not url.startswith((console.root, "data:", "blob:"))] == []
    assert failed == []


ROOT = Path(__file__).parents[2]
FOLDER = r"/[^\s'\"]*/pytest-of-\w+/pytest-\d+/(popen-gw\d+/)?[^\s/'\";,:.]+"
ELSEWHERE = """pairs => {
  const nodes = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = nodes.nextNode(); node; node = nodes.nextNode())
    for (const [from, to] of pairs)
      if (new RegExp(from).test(node.data)) node.data = node.data.replace(new RegExp(from, 'g'), to);
}"""

# Colours fade from one theme to the other; half-way they are neither. Two frames first: Vue follows the body a tick later.
SETTLED = """async () => {
  const frame = () => new Promise(requestAnimationFrame);
  const fading = () => document.getAnimations().filter(a => a instanceof CSSTransition && a.playState !== 'finished');
  for (await frame(), await frame(); fading().length; await frame())
    await Promise.allSettled(fading().map(a => a.finished));
}"""


# The dark theme changes colours alone.
OF_COLOURS = {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}
RULES = {"light": {"resultTypes": ["violations"]}, "dark": {"resultTypes": ["violations"], "runOnly": OF_COLOURS}}


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get("CLOUDTRAIN_SCREENSHOTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def picture(pictures: Path) -> Callable[..., None]:
    """Return a function that keeps a screenshot of a page, or of its whole length with `whole`, under a name.

    Folders of the machine that ran the test are no part of the picture: they are shown as somebody's.
    """

    def take(page: Page, name: str, *, whole: bool = False) -> None:
        page.evaluate(ELSEWHERE, [[re.escape(str(ROOT)), "/home/me/cloudtrain"], [FOLDER, "/home/me/project"]])
        page.screenshot(path=pictures / f"{name}.png", full_page=whole, animations="disabled")

    return take


@pytest.fixture
def seemly() -> Callable[[Page], None]:
    """Return a function that holds a page, as it stands, to what every page must be: accessible in both themes (axe: no
    finding), and no wider than a screen of 400 or of 1,440 pixels."""
    from axe_playwright_python.sync_playwright import Axe

    axe = Axe()

    def look(page: Page) -> None:
        brief = page.locator(".q-notification:not(:has(button))")  # they fade at any moment; an error stays
        expect(brief).to_have_count(0, timeout=60_000)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            expect(page.locator(f"body.body--{scheme}")).to_have_count(1)
            page.evaluate(SETTLED)
            found = axe.run(page, options=RULES[scheme]).response["violations"]
            told = [(f["id"], f["impact"], f["help"], [node["html"][:200] for node in f["nodes"][:3]]) for f in found]
            assert told == [], scheme
        page.emulate_media(color_scheme="light")
        for width in (WIDEST, NARROW):
            page.set_viewport_size({"width": width, "height": HEIGHT})
            page.wait_for_function(f"document.documentElement.scrollWidth <= {width}")  # pictures follow a moment later
        page.set_viewport_size({"width": WIDTH, "height": HEIGHT})

    return look
