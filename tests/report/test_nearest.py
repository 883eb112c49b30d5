"""The lines that come nearest to a metric, and the expressions that are offered for them."""

from __future__ import annotations

import pytest
import yaml

from cloudtrain.events import LogLine
from cloudtrain.metrics.parser import MetricParser
from cloudtrain.report.nearest import describe, nearest_lines


def lines(*texts: str, rank: int = 0) -> list[LogLine]:
    return [LogLine("t", 0, rank, seq, text, str(seq)) for seq, text in enumerate(texts)]


LOG = (
    "Python 3.11.2",
    "MASTER_PORT=29500",
    "loading 120 files from /data/v1.2/train",
    "goodness is 0.25",
    "Epoch 1/3 | Fit's Loss 0.532 | 12 s",
    "Epoch 2/3 | Fit's Loss 0.432 | 12 s",
    "Step 3 of 9: accuracy | 91.5",
    "seed 42",
)


def test_the_three_nearest_lines_best_first_each_of_another_form():
    found = nearest_lines(lines(*LOG))
    assert [(near.seq, near.name) for near in found] == [(4, "s_loss"), (6, "accuracy"), (3, "goodness")]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("validation accuracy | 0.88", 0.88),
        ("val loss=3e-4, it's 'quoted'", 3e-4),
        ("[12:00] mean (std) f1: -0.5", -0.5),
        ("\x1b[32mppl: 12\x1b[0m", 12.0),
    ],
)
def test_the_entry_of_a_job_file_reads_the_number(text, value):
    (near,) = nearest_lines(lines(text))
    ((name, pattern),) = yaml.safe_load(f"metrics: {{{near.entry}}}")["metrics"].items()
    assert [point.value for point in MetricParser({name: pattern}).metrics(text)] == [value]


def test_of_lines_without_a_number_beside_a_name_nothing_is_offered():
    assert nearest_lines(lines("hello", "42", "1.2.3", "a/b/0.5.tar", "x" * 3000 + " loss 1")) == []
    assert nearest_lines(lines("loss 0.5", rank=-1)) == [], "the launcher's own"
    assert describe(lines("hello"))[0].startswith("no metrics were found: no line")
