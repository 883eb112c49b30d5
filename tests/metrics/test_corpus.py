"""Lines after those of public projects: each gives its metrics at its steps; other lines give nothing."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from cloudtrain.events import Point
from cloudtrain.metrics import lines
from cloudtrain.metrics.parser import MetricParser

CORPUS = Path(__file__).parent / "corpus"
KNOWN = tomllib.loads((CORPUS / "known.toml").read_text())
SECOND = tomllib.loads((CORPUS / "second.toml").read_text())  # its other half, second_set_aside.toml, is only measured
# Values that stand before their names, or behind a bare step; a step with a name of its own (Total T).
MISSED = {"darknet", "tacotron2"}
WRONG_STEP = {"TD3"}


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


@pytest.mark.parametrize("entry", SECOND["form"], ids=lambda entry: entry["project"])
def test_lines_of_other_projects_too(entry):
    missing, wrong = judged(entry)
    assert (bool(missing), bool(wrong)) == (entry["project"] in WRONG_STEP,) * 2, (missing, wrong)


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("Mean value_function loss: 0.3, Surrogate loss: 0.2", ["1 mean_value_function_loss", "1 surrogate_loss"]),
        ("Epoch 4\nloss: 0.31\nEpoch 5\nloss: 0.29", ["4 loss", "5 loss"]),
        ("[epoch=1][batch=20/150]:\n  loss: 0.8\n  acc: 0.6", ["20 loss", "20 acc"]),
        ("Step... (500 | Loss: 2.3)", ["500 loss"]),
        ("[0/25][50/782] Loss_D: 0.3\n[1/25][0/782] Loss_D: 0.2", ["50 loss_d", "782 loss_d"]),
        ("Episode 10\tLast reward: 21.00", ["10 last_reward"]),
        ("fit:  10%|#  | 100/1000 [00:10<01:30, 10.00it/s, loss=0.5, step=100, epoch=1]", ["100 loss"]),
        ("model saved with best val loss: 0.31", ["1 best_val_loss"]),  # of a sentence only what belongs to the name
        ("hyperparameters: lr0=0.01, box=0.05, loss_gain=0.5, iou_t=0.2, val_loss=1.0", []),
        ("batch_size=8, momentum=0.9, dropout=0.1, eps=1e-8, val_loss=0.3", []),
        ("elapse: 1.312 min, loss: 0.3", ["1 loss"]),
    ],
)
def test_kinds_of_names_steps_and_settings(text, points):
    assert [f"{point.step} {point.name}" for point in found({"text": text})] == points


@pytest.mark.parametrize("entry", KNOWN["form"], ids=lambda entry: entry["project"])
def test_a_line_is_read_alike_after_one_that_differs_in_its_digits(entry):
    for text in entry["text"].splitlines():
        other = re.sub(r"\d", lambda digit: str((int(digit[0]) + 3) % 10), text)
        lines._forms.clear()
        alone = lines.parse_line(text)
        lines._forms.clear()
        lines.parse_line(other)
        assert lines.parse_line(text) == alone


def test_lines_of_endless_forms_are_not_remembered():
    for number in range(3 * lines.MOST_FORMS):
        lines.parse_line(f"loss {'x' * number}: 0.5")
    assert len(lines._forms) <= lines.MOST_FORMS


@pytest.mark.parametrize("entry", KNOWN["nothing"], ids=lambda entry: entry["kind"])
def test_a_line_without_a_metric_gives_none(entry):
    assert found(entry) == []


def test_the_corpus_is_as_large_as_the_page_says():
    assert len(KNOWN["form"]) >= 60 and len({entry["project"] for entry in KNOWN["form"]}) >= 20
    assert len(KNOWN["nothing"]) >= 60
    assert len(KNOWN["form"]) - len(MISSED) >= 54


def test_the_summary_of_a_tracker_holds_no_points():
    lines = (
        "wandb: Run summary:",
        "wandb: loss 0.2",
        "\x1b[34m\x1b[1mwandb\x1b[0m: step 3 loss 0.5",
        "wandb: {'loss': 1}",
    )
    parser = MetricParser({"lr": "lr ([0-9.]+)"})
    assert not [point for line in lines for point in parser.metrics(line)]
    assert [point.name for point in parser.metrics("wandb: lr 0.1")] == ["lr"], "a user's expression reads every line"
    assert [point.value for point in parser.metrics("loss 0.2")] == [0.2]
