"""Draw docs/pictures/sweep.png, the console's page of a sweep in a home, and write what `show` prints of it into the page.

cloudtrain sweep examples/quickstart/sweep.yaml --wait
.venv/bin/python docs/sweep_picture.py

A test compares the sweep that the picture names (in its PNG text `sweep`) with that of docs/how/sweep.md.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image, PngImagePlugin
from playwright.sync_api import sync_playwright

from cloudtrain.sweeps.sweep import Sweep

PICTURE = Path(__file__).parent / "pictures" / "sweep.png"
PAGE = Path(__file__).parent / "how" / "sweep.md"
SHOWN = re.compile(r"(?<=`show` printed:\n\n```text\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)
WIDTH, COLOURS = 900, 256


def main() -> int:
    """Draw the newest sweep, and write it into the page."""
    sweep = Sweep.find()
    show = [sys.executable, "-m", "cloudtrain", "sweep", "show", sweep.sweep_id]
    printed = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    PAGE.write_text(SHOWN.sub(lambda _: printed, PAGE.read_text(), count=1))
    command = [sys.executable, "-m", "cloudtrain", "console", "--no-open", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as console, sync_playwright() as playwright:
        assert console.stdout
        url = json.loads(console.stdout.readline())["url"]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 800}, reduced_motion="reduce")
        page.goto(url)
        page.goto(f"{url.partition('/open')[0]}/sweeps/{sweep.sweep_id}")
        page.wait_for_selector('section[aria-label="Importance"] .main-svg')
        page.wait_for_timeout(1000)  # until the charts have their size
        picture = Image.open(io.BytesIO(page.screenshot(full_page=True, animations="disabled"))).convert("RGB")
        browser.close()
        console.terminate()
    text = PngImagePlugin.PngInfo()
    text.add_text("sweep", sweep.sweep_id)
    picture.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE).save(
        PICTURE, optimize=True, pnginfo=text
    )
    sys.stdout.write(f"{PICTURE} shows {sweep.sweep_id}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
