"""Lines after those of public projects: each gives its metrics at its steps; other lines give nothing."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from cloudtrain.events import Point
from cloudtrain.metrics.parser import MetricParser

CORPUS = Path(__file__).parent / "corpus"
KNOWN = tomllib.loads((CORPUS / "known.toml").read_text())
MISSED = {"darknet", "tacotron2"}  # values that stand before their names, or behind a bare step


def found(entry) -> list[Point]:
    """Return the points of an entry's lines, in the order in which they are found."""
    parser = MetricParser({})
    lines = entry["text"].strip("\n").split("\n")
    points = [point for line in lines for point in parser.metrics(line)]
    return points + [point for _, rest in parser.flush() for point in rest]


def judged(entry) -> tuple[list[str], list[Point]]:
    """Return the points that are missing, and those that should not be there."""
    missing, left = [], found(entry)
    for row in entry["points"]:
        step, *fields = row.split()
        for field in fields:
            name, value = field.rsplit("=", 1)
            hits = [
                point
                for point in left
                if (point.name, point.value) == (name, pytest.approx(float(value))) and step in ("*", str(point.step))
            ]
            if hits:
                left.remove(hits[0])
            else:
                missing.append(f"{step} {field}")
    return missing, [point for point in left if point.name not in entry.get("also", "").split()]


@pytest.mark.parametrize("entry", KNOWN["form"], ids=lambda entry: entry["project"])
def test_a_projects_lines_give_their_metrics_at_their_steps(entry):
    missing, wrong = judged(entry)
    assert not wrong
    assert bool(missing) == (entry["project"] in MISSED), missing


@pytest.mark.parametrize("entry", KNOWN["nothing"], ids=lambda entry: entry["kind"])
def test_a_line_without_a_metric_gives_none(entry):
    assert found(entry) == []


def test_the_corpus_is_as_large_as_the_page_says():
    assert len(KNOWN["form"]) >= 60 and len({entry["project"] for entry in KNOWN["form"]}) >= 20
    assert len(KNOWN["nothing"]) >= 60
    assert len(KNOWN["form"]) - len(MISSED) >= 54
