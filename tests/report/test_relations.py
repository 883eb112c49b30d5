"""Figures of many runs: which runs and values they have."""

from __future__ import annotations

import pytest

from cloudtrain.errors import BadRequest
from cloudtrain.report import relations


def test_parallel_coordinates_have_an_axis_for_each_column():
    figure = relations.parallel(
        [
            ("hp.lr", ["0.001", "0.1", None, "0.00052"]),
            ("label.team", ["nlp", "vision", "nlp", "nlp"]),
            ("metric.loss", [0.3, 0.2, 0.1, None]),  # the last run has no line
        ]
    )
    lr, team, loss = figure.data[0].dimensions
    assert (lr.ticktext, lr["values"]) == (("0.001", "0.1", "–"), (0, 1, 2))
    assert (team.ticktext, team["values"]) == (("nlp", "vision"), (0, 1, 0))
    assert loss["values"] == figure.data[0].line.color == (0.3, 0.2, 0.1)


def test_many_numbers_are_an_axis_of_numbers_and_many_texts_share_the_last_place():
    many = [str(number) for number in range(40)]
    numbers, texts = (
        relations.parallel([("hp.seed", many), ("hp.name", [f"n{each}" for each in many])]).data[0].dimensions
    )
    assert numbers["values"] == tuple(range(40)) and numbers.ticktext is None
    assert len(texts.ticktext) == relations.MOST_CHOICES == max(texts["values"])


def test_runs_without_a_common_metric_have_no_parallel_coordinates():
    with pytest.raises(BadRequest, match="no run has values of all these metrics"):
        relations.parallel([("metric.a", [1.0, None]), ("metric.b", [None, 1.0])])


def test_a_scatter_has_the_runs_with_both_values_in_the_colours_of_their_curves():
    values = ("hp.lr", ["0.1", "0.01", None]), ("metric.loss", [0.3, 0.2, 0.1])
    figure = relations.scatter(["a", "<b>", "c"], *values, log_x=True, log_y=False)
    assert [(dot.name, dot.x, dot.y) for dot in figure.data] == [("a", (0.1,), (0.3,)), ("&lt;b&gt;", (0.01,), (0.2,))]
    assert figure.layout.xaxis.type == "log" and figure.layout.yaxis.type is None
    assert figure.data[0].marker.color != figure.data[1].marker.color
