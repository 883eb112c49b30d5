"""Law 9: every line once, in order on each node, the last without a newline too; and again from any cursor.

Eight nodes talk at once through the real launcher: progress bars that end lines with \\r, binary junk, characters that are
cut by the reads, empty lines. They are followed while they talk, and the reader leaves and comes back with its cursor.
"""

from __future__ import annotations

import random
import shutil
from itertools import islice
from pathlib import Path

import pytest

from cloudtrain.events import State
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from tests.conftest import WAIT_S
from tests.laws.scripts import talk
from tests.seed import first_seed

NODES = 8


def start(folder: Path, home: Path, each: int) -> Run:
    folder.mkdir()
    shutil.copy(talk.__file__, folder / "talk.py")
    job = {"source": str(folder), "entrypoint": "talk.py", "num_nodes": NODES, "args": [str(each)]}
    return Submitter(home=home, watch=False).submit(job)


def expected(node: int, each: int) -> list[str]:
    return [line for _, lines in talk.said(node, each) for line in lines]


def prove(tmp_path: Path, home: Path, figure, lines: int) -> None:
    choose = random.Random(first_seed())
    each = lines // NODES
    run = start(tmp_path / "source", home, each)
    seen: list[list[str]] = [[] for _ in range(NODES)]
    seqs: list[list[int]] = [[] for _ in range(NODES)]
    cursors: list[tuple[str, list[int]]] = []  # where a reader left, and how many lines of each node it had
    cursor, ended = None, False
    while not ended:
        ended = True
        limit = int(10 ** choose.uniform(0, 4.3))  # from one line to twenty thousand
        for count, line in enumerate(run.logs(follow=True, after=cursor, raw=True), start=1):
            seqs[line.node].append(line.seq)
            if line.rank >= 0:
                seen[line.node].append(line.text)
            cursor = line.cursor
            if count >= limit:
                ended = False
                cursors.append((cursor, [len(found) for found in seqs]))
                break
    assert run.wait(WAIT_S).state is State.SUCCEEDED
    for node in range(NODES):
        wanted = expected(node, each)
        assert len(wanted) == each
        assert seen[node] == wanted, f"node {node}: {len(seen[node])} lines of {each}"
        assert seqs[node] == list(range(len(seqs[node])))
    # From a cursor anywhere, now that all is said: nothing twice, nothing left out.
    for at, had in choose.sample(cursors, min(20, len(cursors))):
        for line in islice(run.logs(after=at, raw=True), 3000):
            assert line.seq == had[line.node], "the next one of its node"
            had[line.node] += 1
    figure(f"lines of {NODES} nodes, each once and in order", NODES * each)
    figure("times the reader left and came back by its cursor", len(cursors))


def test_every_line_once_and_in_order(tmp_path, home, figure):
    prove(tmp_path, home, figure, 200_000)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_million_lines_once_and_in_order(tmp_path, home, figure):
    prove(tmp_path, home, figure, 1_000_000)
