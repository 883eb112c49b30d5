"""Which metrics come first on a page, and which share a section or a chart."""

from cloudtrain.report.comparison import MOST_POINTS, share_of_many
from cloudtrain.report.sections import Chart, arrange, worth

LAYERS = [f"layers/{number}/grad_norm" for number in range(14)]


def test_the_loss_is_first_and_numbered_metrics_share_a_chart():
    names = ["throughput/tokens_per_s", *LAYERS[::-1], "eval/acc", "train/acc", "train/lr", "eval/loss", "train/loss"]
    sections = arrange(names)
    assert [section.prefix for section in sections] == ["train", "eval", "layers", "throughput"]
    assert [chart.title for chart in sections[0].charts] == ["train/loss", "train/acc", "train/lr"]
    assert [chart.title for chart in sections[1].charts] == ["eval/loss", "eval/acc"]
    assert sections[2].charts == (Chart("layers/0..13/grad_norm", tuple(LAYERS)),)


def test_what_the_job_names_or_a_sweep_optimizes_comes_before_the_loss():
    sections = arrange(["loss", "b/dice", "distance"], wanted={"b/dice"})
    assert [section.prefix for section in sections] == ["b", ""]
    assert [chart.title for chart in sections[1].charts] == ["loss", "distance"]


def test_classes_are_told_by_whole_words():
    assert [worth(name) for name in ("nll", "val/f1", "top1_acc", "grad_norm", "lossless", "accelerator", "glr")] == [
        1, 2, 3, 4, 5, 5, 5,
    ]  # fmt: skip


def test_one_numbered_metric_is_no_family():
    assert arrange(["layers/3/norm", "eval/acc_1", "eval/acc_2"])[1].charts == (
        Chart("layers/3/norm", ("layers/3/norm",)),
    )


def test_a_file_of_many_runs_has_few_points_of_the_first_metrics():
    assert share_of_many(200, 1) == (1, 100)
    count, points = share_of_many(200, 400)
    assert count == 20 and count * points * 200 <= MOST_POINTS
