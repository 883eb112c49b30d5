"""docs/metrics.md shows what the parser finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain.metrics.parser import MetricParser

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
ROWS = [
    [
        cell.strip().replace("\\|", "|")
        for cell in line.strip("|").replace("\\|", "\0").replace("|", "\n").replace("\0", "\\|").split("\n")
    ]
    for line in PAGE.split("| --- |", 1)[1].split("\n\n")[0].split("\n")[1:]
]


@pytest.mark.parametrize(("lines", "points"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_a_shape_of_the_page_gives_the_points_that_it_shows(lines, points):
    parser = MetricParser({})
    texts = [text.strip()[1:-1] for text in lines.split("<br>")]
    found = [point for text in texts for point in parser.metrics(text)]
    found += [point for _, rest in parser.flush() for point in rest]
    assert ", ".join(f"{point.step} {point.name} {point.value:g}" for point in found) == points
