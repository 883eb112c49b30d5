"""What a task of the user's own returns: nothing to count, one number, every parameter, rows of one shape."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.entrypoints.training import ENTRYPOINTS

from trainer.arguments import Arguments  # isort: skip
from trainer.data import tasks  # isort: skip
from trainer.data.custom import CustomTask  # isort: skip
from trainer.data.in_memory import InMemoryTask  # isort: skip
from trainer.errors import Unsupported  # isort: skip
from trainer.evaluation import joined  # isort: skip

assert ENTRYPOINTS
pytestmark = pytest.mark.train


def own_task(**methods) -> CustomTask:
    return CustomTask(None, [], None, None, own=SimpleNamespace(**methods))


def test_a_batch_of_which_nothing_counts_adds_nothing_and_is_no_nan():
    """Tokens without labels: the mean of none is not a number."""
    model, batch = torch.nn.Linear(2, 3), (torch.tensor(2), (torch.ones(4, 2), torch.full((4,), -100)))
    task = own_task(
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        count=lambda batch: (batch[1] != -100).sum(),
    )
    in_memory = InMemoryTask(None, [], None, None, parts={})
    in_memory.count = lambda model, batch: torch.tensor(0)
    for each in (task, in_memory):
        losses = each.losses(model, batch)
        losses.sum().backward()
        assert losses.sum() == 0 and model.weight.grad.abs().sum() == 0
        assert each.scores(model, batch)[0, :2].tolist() == [0, 0]


def test_a_loss_of_each_sample_is_refused():
    task = own_task(loss=lambda model, batch: torch.ones(4))
    with pytest.raises(Unsupported, match=r"must return the mean loss, one number, not a tensor of shape \(4,\)"):
        task.losses(None, (torch.tensor(4), None))


def test_a_parameter_that_is_in_no_group_is_refused_by_its_name():
    model = torch.nn.Linear(2, 2)
    arguments = Arguments(task="mypkg.task:Mine", weight_decay=0.3)
    task = own_task(parameter_groups=lambda model: [{"params": (each for each in [model.weight]), "lr": 0.5}])
    with pytest.raises(Unsupported, match=r"parameter_groups\(\) of mypkg.task:Mine leaves out bias"):
        task.optimizer(model, arguments)
    model.bias.requires_grad = False
    (group,) = task.optimizer(model, arguments).param_groups
    assert (group["params"], group["lr"], group["weight_decay"]) == ([model.weight], 0.5, 0.3)


def test_predictions_are_rows_of_one_shape_or_lists():
    rows = [{"a": torch.ones(2, 3), "b": [torch.ones(1)]}, {"a": torch.ones(1, 3), "b": [torch.ones(2)]}]
    whole = joined(rows)
    assert whole["a"].shape == (3, 3) and [len(row) for row in whole["b"]] == [1, 2]
    for odd in (torch.ones(1, 4), torch.tensor(1.0)):
        with pytest.raises(Unsupported, match=r"predictions\(\) gives 'a' rows of the shapes .*a list of them"):
            joined([*rows, {"a": odd, "b": []}])


def test_the_class_of_the_page_that_derives_from_a_built_in_one():
    from transformers import LlamaConfig, LlamaForCausalLM

    page = (Path(__file__).parents[4] / "docs" / "how" / "own-task.md").read_text()
    named: dict[str, Any] = {}
    exec(page.partition('```python title="smooth.py"')[2].partition("```")[0], named)
    task = named["Smooth"](None, [], None, None)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    torch.manual_seed(
        0
    )  # an unlucky draw gives logits so near zero that smoothing changes the loss by less than isclose sees
    model = LlamaForCausalLM(LlamaConfig(vocab_size=11, initializer_range=1.0, **sizes))
    ids = torch.arange(20).view(2, 10) % 11
    batch = {"input_ids": ids, "labels": torch.where(ids == 3, -100, ids)}
    loss = task.losses(model, batch)
    assert not task.of_labels, "its loss needs whole logits"
    task.smoothing = 0.0
    plain = tasks.Task.losses(task, model, batch).sum()
    assert torch.isclose(task.losses(model, batch), plain) and not torch.isclose(loss, plain)


def test_metrics_without_predictions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    methods = "".join(
        f"    def {name}(self, *_):\n        pass\n" for name in ("model", "train_data", "loss", "metrics")
    )
    (tmp_path / "half.py").write_text(f"class Mine:\n    def __init__(self, *_): pass\n{methods}")
    with pytest.raises(Unsupported, match=r"the task half:Mine has metrics\(\), but no predictions\(\)"):
        tasks.prepare(Arguments(task="half:Mine"), {})
