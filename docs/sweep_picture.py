"""Draw docs/pictures/sweep.png: the console's page of a sweep in a home, in a headless Chromium.

cloudtrain sweep examples/quickstart/sweep.yaml --wait
.venv/bin/python docs/sweep_picture.py
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from cloudtrain.sweeps.sweep import Sweep

PICTURE = Path(__file__).parent / "pictures" / "sweep.png"
WIDTH, COLOURS = 900, 256


def main() -> int:
    """Draw the newest sweep."""
    sweep = Sweep.find()
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
    picture.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE).save(
        PICTURE, optimize=True
    )
    sys.stdout.write(f"{PICTURE} shows {sweep.sweep_id}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
