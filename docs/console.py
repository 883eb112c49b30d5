"""Copy docs/console.md's pictures from the screenshots that the tests have kept, made small.

CLOUDTRAIN_SCREENSHOTS=/tmp/shots .venv/bin/python -m pytest tests/console
.venv/bin/python docs/console.py /tmp/shots
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image

PICTURES = Path(__file__).parent / "pictures"
WIDTH, COLOURS = 900, 256


def main(folder: Path) -> int:
    """Copy every picture of a name that the page shows; 1 where one is missing."""
    page = (Path(__file__).parent / "console.md").read_text("utf-8")
    names = sorted({part.partition(")")[0] for part in page.split("(pictures/")[1:]})
    missing = [name for name in names if not (folder / name).is_file()]
    for name in set(names) - set(missing):
        picture = Image.open(folder / name).convert("RGB")
        if picture.width > WIDTH:
            picture = picture.resize((WIDTH, round(picture.height * WIDTH / picture.width)), Image.Resampling.LANCZOS)
        # By coverage a small badge keeps a colour of its own; the means then make the large areas exact again.
        few = picture.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
        few.save(PICTURES / name, optimize=True)
    sys.stdout.write(
        f"{len(names) - len(missing)} pictures copied{'; missing: ' if missing else ''}{', '.join(missing)}\n"
    )
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
