"""Draw the pictures of README and the documentation: real commands on a terminal of 100 columns, what its screen showed as SVG.

python docs/pictures.py             runs two small scripts for it (half a minute); writes docs/pictures/*.svg

Nothing is drawn by hand: a terminal emulator (pyte) is fed what the commands wrote to a pseudo-terminal.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.sax.saxutils import escape

import pyte

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).parent / "pictures"
COLUMNS, LINES = 100, 30
BLANK = "\xa0"  # others are run together
CELL_W, CELL_H, MARGIN = 8.4, 18.0, 14.0
PAPER, INK = "#16181d", "#d8dade"
COLOURS = {
    "default": INK,
    "red": "#ff6b68",
    "green": "#7bc275",
    "brown": "#e3b341",
    "cyan": "#56b6c2",
    "blue": "#6cb6ff",
}
PLACE = Path("/tmp/demo")  # noqa: S108 - what the pictures show of paths; it must not exist
JOB = """\
name: my-model
source: .
entrypoint: train.py
hyperparameters: {learning_rate: 0.1}
limits: {max_runtime: 1h}
"""
TRAINING = """\
import argparse, random, time

parser = argparse.ArgumentParser()
parser.add_argument("--learning_rate", type=float)
rate, weights = parser.parse_args().learning_rate, [0.0] * 8
draw = random.Random(0)
truth = [draw.gauss(0, 1) for _ in weights]
print("training 8 weights on 3,200 drawn points", flush=True)
for step in range(1, 101):
    loss = 0.0
    for _ in range(32):
        point = [draw.gauss(0, 1) for _ in weights]
        error = sum(x * (w - t) for x, w, t in zip(point, weights, truth)) + draw.gauss(0, 0.1)
        weights = [w - rate / 32 * error * x for w, x in zip(weights, point)]
        loss += error * error / 32
    time.sleep(0.2)
    if step % 5 == 0:
        print(f"step {step}/100  loss {loss:.3f}", flush=True)
"""
FAILING = """\
import os, time

rank = int(os.environ["RANK"])
print(f"rank {rank} of {os.environ['WORLD_SIZE']} is ready", flush=True)
time.sleep(1)
with open(f"data/shard-{rank}.txt") as shard:
    print(sum(1 for line in shard), "lines", flush=True)
time.sleep(600)
"""


class Screen:
    """A terminal that commands are typed into, one after the other."""

    def __init__(self) -> None:
        self._screen = pyte.HistoryScreen(COLUMNS, LINES, history=2000)
        self._stream = pyte.ByteStream(self._screen)

    def type(self, *words: str, cwd: Path, look: Callable[[Screen], None] | None = None) -> int:
        """Run `cloudtrain WORDS` and return its exit code; `look` is called whenever something was written."""
        self._stream.feed(b"\x1b[1m$ cloudtrain " + " ".join(words).encode() + b"\x1b[0m\r\n")
        main, worker = pty.openpty()
        fcntl.ioctl(worker, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        told = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        command = [str(Path(sys.executable).with_name("cloudtrain")), *words]
        process = subprocess.Popen(
            command, cwd=cwd, stdout=worker, stderr=worker, env={**told, "TERM": "xterm-256color"}
        )
        os.close(worker)
        for piece in _pieces(main):
            self._stream.feed(piece)
            if look:
                look(self)
        os.close(main)
        return process.wait()

    @property
    def text(self) -> str:
        return "\n".join(self._screen.display)

    def svg(self) -> str:
        """Return the screen as a picture, without the empty lines at its end."""
        rows = [[row[at] for at in range(COLUMNS)] for row in (self._screen.buffer[y] for y in range(LINES))]
        while rows and not "".join(cell.data for cell in rows[-1]).strip():
            rows.pop()
        texts = [f for y, row in enumerate(rows) for f in _texts(row, MARGIN + CELL_H * (y + 0.75))]
        width, height = COLUMNS * CELL_W + 2 * MARGIN, len(rows) * CELL_H + 2 * MARGIN
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}">\n'
            f'<rect width="100%" height="100%" rx="8" fill="{PAPER}"/>\n'
            f'<g font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="14" xml:space="preserve">\n'
            + "\n".join(texts)
            + "\n</g>\n</svg>\n"
        )


def _pieces(main: int) -> Iterator[bytes]:
    while True:
        try:
            piece = os.read(main, 65536)
        except OSError:  # the other end is closed
            return
        if not piece:
            return
        yield piece


def _texts(row: list[pyte.screens.Char], y: float) -> Iterator[str]:
    """Yield the text elements of a row: neighbours of one style together, each held to its cells."""
    at = 0
    while at < len(row):
        end = at + 1
        while end < len(row) and (row[end].fg, row[end].bold) == (row[at].fg, row[at].bold):
            end += 1
        text = "".join(cell.data for cell in row[at:end])
        if text.strip():
            start = at + len(text) - len(text.lstrip())
            text = text.strip()
            style = f' fill="{COLOURS.get(row[at].fg, INK)}"' + (' font-weight="bold"' if row[at].bold else "")
            place = f'x="{MARGIN + start * CELL_W:.1f}" y="{y:.1f}" textLength="{len(text) * CELL_W:.1f}"'
            yield f"<text {place}{style}>{escape(text).replace(' ', BLANK)}</text>"
        at = end


@contextmanager
def place() -> Iterator[Path]:
    """Give the new folder that all of it happens in; raises FileExistsError."""
    PLACE.mkdir()
    try:
        yield PLACE
    finally:
        shutil.rmtree(PLACE)


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    with place() as folder:
        os.environ["CLOUDTRAIN_HOME"] = f"{folder}/home"
        project = folder / "project"
        (project / "data").mkdir(parents=True)
        (project / "train.py").write_text(FAILING)
        (project / "data" / "shard-0.txt").write_text("one\ntwo\n")
        own = folder / "my-project"
        own.mkdir()
        (own / "train.py").write_text(TRAINING)
        (own / "job.yaml").write_text(JOB)
        pictures: dict[str, str] = {}

        def half(screen: Screen) -> None:
            steps = re.findall(r"RUNNING .* step (\d+)/(\d+)", screen.text)  # of the panel below the log
            if steps and "following" not in pictures and 2 * int(steps[-1][0]) >= int(steps[-1][1]):
                pictures["following"] = screen.svg()

        screen = Screen()
        if screen.type("submit", "--follow", cwd=own, look=half):
            sys.stderr.write(screen.text)
            return 1
        screen = Screen()
        if not screen.type("submit", "train.py", "--processes", "2", "--wait", cwd=project):
            return 1
        pictures["failure"] = screen.svg()
    for name, svg in pictures.items():
        (FOLDER / f"{name}.svg").write_text(svg)
    sys.stdout.write(f"{', '.join(sorted(pictures))}: written to {FOLDER}\n")
    return 0 if len(pictures) == 2 else 1


if __name__ == "__main__":
    sys.exit(main())
