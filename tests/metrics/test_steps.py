"""The steps of metrics are those of the script, before and after a resume."""

from __future__ import annotations

import io

import pytest

from cloudtrain.metrics.parser import MetricParser


def steps(*lines: str, name: str = "loss", earlier: int = 0, first_epoch: float | None = None) -> list[float]:
    """Return the steps of one metric in the lines of one rank; `earlier`: the last one of the attempt before."""
    parser = MetricParser({}, {}, {(0, name): earlier} if earlier else {}, first_epoch)
    points = [point for line in lines for point in parser.metrics(line)]
    points += [point for _, rest in parser.flush() for point in rest]
    return [point.step for point in points if point.name == name]


def bar(done: int, size: int, rate: str = "9.90it/s", title: str = "") -> str:
    return f"{title} {100 * done // size}%|##   | {done}/{size} [00:01<00:01, {rate}]"


@pytest.mark.parametrize("key", ["step", "global_step", "iteration", "iter"])
def test_a_field_with_the_step_is_the_step(key):
    assert steps(str({"loss": 1.5, key: 40}), f"{key} 60: loss 1.25", f"{key}=80, loss=1.0") == [40, 60, 80]


def test_of_local_and_global_steps_the_global_one_counts():
    assert steps("epoch 2 | batch 3/9 | global_step 21 | loss 0.5") == [21]


@pytest.mark.parametrize("first", [0, 1])
def test_steps_that_begin_again_with_every_epoch_are_counted_on(first):
    lines = [f"Epoch [{first + epoch}/3], Step [{step}/600], Loss: 0.5" for epoch in range(3) for step in (300, 600)]
    assert steps(*lines) == [300, 600, 900, 1200, 1500, 1800]
    lines = [f"epoch {first + epoch}, batch {step}, loss 0.5" for epoch in range(2) for step in range(3)]
    assert steps(*lines) == [0, 1, 2, 3, 4, 5]


def test_steps_that_go_on_over_epochs_are_taken_as_they_are():
    assert steps("epoch 0 step 300/900 loss 0.5", "epoch 1 step 600/900 loss 0.4", "epoch 2 step 900/900 loss 0.3") == [
        300, 600, 900
    ]  # fmt: skip


def test_a_resumed_epoch_stands_behind_the_epochs_before_it():
    earlier = 1500
    assert steps("Epoch [2], Step [300/600], Loss: 0.5", earlier=earlier, first_epoch=0.0) == [1500]
    assert steps("epoch 2 step 1501/9000 loss 0.5", earlier=earlier, first_epoch=0.0) == [1501]


def test_the_trainers_rows_have_the_step_of_the_bar_that_is_drawn_behind_them():
    """tqdm draws ten times a second: the bar before a row may be steps behind, the one behind it is not."""
    rows = ["{'loss': '0.5', 'epoch': '0.5'}", "{'eval_loss': '0.6', 'epoch': '0.5'}"]
    lines = [bar(0, 20), bar(3, 20), rows[0], "", bar(5, 20), bar(4, 8), "\x1b[A", rows[1], "", bar(5, 20), bar(8, 8)]
    assert steps(*lines) == [5] and steps(*lines, name="eval_loss") == [5]
    assert steps(bar(7, 20, "2.10s/it"), rows[0]) == [7]


def test_a_bar_that_is_drawn_slowly_is_waited_for_by_no_row():
    parser = MetricParser({})
    assert not list(parser.metrics(bar(7, 20, "1.10s/it")))
    assert [point.step for point in parser.metrics("{'loss': 0.5}")] == [7]


def test_a_row_that_waits_comes_with_the_end_of_the_log():
    parser = MetricParser({})
    assert not [*parser.metrics(bar(3, 20)), *parser.metrics("{'loss': 0.5}")]
    assert parser.flush() == [(0, [(3, "loss", 0.5, None)])] and parser.flush() == []


def test_a_resumed_trainer_continues_at_its_checkpoint():
    """Its bar begins at 0 and jumps behind the checkpoint's step; the attempt before had come further."""
    row = "{'loss': '0.5', 'epoch': '0.5'}"
    assert steps(bar(0, 20), bar(9, 20), row, bar(10, 20), earlier=15) == [10]


def test_a_count_continues_after_a_resume():
    assert steps("loss: 0.5", "loss: 0.4") == [1, 2]
    assert steps("loss: 0.5", "loss: 0.4", earlier=7) == [8, 9]


def test_a_count_continues_at_its_epoch_after_a_resume():
    """Trainer without a bar prints epochs: 15 rows were 0.75 epochs, and a checkpoint of row 10 is resumed."""
    parser = MetricParser({}, {}, {(0, "loss"): 15}, 0.05, {(0, "loss"): 15 / 0.75})
    rows = ["{'loss': 0.5, 'epoch': 0.55}", "{'loss': 0.4, 'epoch': 0.6}"]
    assert [point.step for row in rows for point in parser.metrics(row)] == [11, 12]


def test_the_number_of_steps_in_an_epoch_is_no_step():
    assert steps("[GPU0] Epoch 3 | Steps: 24 | Loss: 0.5", "[GPU0] Epoch 4 | Steps: 24 | Loss: 0.4") == [3, 4]


def test_a_bar_of_an_epoch_that_was_interrupted_begins_that_epoch_again():
    lines = [f" 50%|## | {done}/20 [00:01<00:01, 9.90it/s, loss=1.5]" for done in (1, 2)]
    assert steps(*lines, earlier=15) == [1, 2], "the same bar, resumed or begun again"
    assert steps(*lines, earlier=47) == [41, 42], "two epochs were whole"
    assert steps("Epoch 2: " + lines[0], earlier=47, first_epoch=0.0) == [41]


def test_an_evaluation_without_a_step_stands_at_the_training_step_of_its_time():
    lines = ["step 10 loss 0.5", "val loss: 0.7", "step 20 loss 0.4", "val loss: 0.6"]
    assert steps(*lines, name="val_loss") == [10, 20]
    lines = [
        "Epoch: [0][10/50]\tLoss 0.5",
        "Test: [ 0/2] Loss 0.7",
        "Test: [ 1/2] Loss 0.6",
        "epoch 0: {'accuracy': 0.5}",
    ]
    assert steps(*lines, name="test_loss") == [10, 10] and steps(*lines, name="accuracy") == [10]


def test_an_epoch_is_a_second_axis_and_the_step_of_lines_that_have_no_other():
    parser = MetricParser({})
    lines = ["epoch 1: {'accuracy': 0.5}", "epoch 2: {'accuracy': 0.6}", "Epoch 3 | step 90 | loss 0.5"]
    points = [point for line in lines for point in parser.metrics(line)]
    assert [(point.step, point.name, point.epoch) for point in points] == [
        (1, "accuracy", 1), (2, "accuracy", 2), (90, "loss", 3)
    ]  # fmt: skip


def test_keras_counts_on_over_its_headings():
    lines = []
    for epoch in (1, 2):
        lines += [
            f"Epoch {epoch}/3",
            " 5/10 [===>.....] - ETA: 1s - loss: 0.5",
            "10/10 [====] - 1s 8ms/step - loss: 0.4",
        ]
    assert steps(*lines) == [5, 10, 15, 20]


def test_every_line_that_tqdm_draws_has_its_step():
    tqdm = pytest.importorskip("tqdm").tqdm
    out = io.StringIO()
    with tqdm(total=6, file=out, mininterval=0, miniters=0) as progress:
        for step in range(6):
            progress.update()
            if step % 2:
                progress.write(f"{{'loss': {step}.5}}", file=out)
    assert steps(*out.getvalue().replace("\r", "\n").split("\n")) == [2, 4, 6]


def test_a_bar_that_prepared_something_is_not_the_trainings():
    rows = ["{'loss': 0.5, 'epoch': 0.1}", "{'loss': 0.4, 'epoch': 0.2}"]
    maps = [bar(20, 60, title="Running tokenizer on dataset:"), bar(60, 60, title="Running tokenizer on dataset:")]
    assert steps(*maps, *rows) == [1, 2]
    assert steps(*maps, bar(0, 20), bar(5, 20), rows[0], bar(5, 20)) == [5]
