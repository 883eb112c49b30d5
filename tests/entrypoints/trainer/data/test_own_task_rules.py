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
from trainer.data.custom import CustomLanguageTask, CustomTask  # isort: skip
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


WITHOUT = {
    "train_data": (["model"], {}, r"the task own:\w+ has no method train_data\(\)"),
    "predictions": (["model", "train_data", "loss", "metrics"], {}, r"has metrics\(\), but no predictions\(\)"),
    "predictions of samples": (["model", "train_data", "samples"], {}, r"has samples\(\), but no predictions\(\)"),
    "loss": (["model", "train_data", "count"], {}, r"has count\(\), but no loss\(\): without it the labels are counted"),
    "eval_data": (["model", "train_data"], {"eval_strategy": "steps"}, r"--eval_strategy steps needs an eval_data\(\) of own:"),
    "an iterable": (["model", "train_data"], {"streaming": True}, r"--streaming: .*IterableDataset, not a list"),
    "a length": (["model", "stream"], {}, r"train_data\(\) of .* must return a dataset with __len__ .*: set streaming: true"),
}  # fmt: skip
BODIES = {"train_data": "[1]", "stream": "iter([1])"}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", WITHOUT)
def test_a_class_without_what_it_needs_is_refused(source: Path, case: str):
    methods, more, said = WITHOUT[case]
    name = f"Mine{sorted(WITHOUT).index(case)}"
    lines = [f"class {name}:", "    def __init__(self, *_): pass"]
    lines += [
        f"    def {each.replace('stream', 'train_data')}(self, *_): return {BODIES.get(each)}" for each in methods
    ]
    (source / f"own{name}.py").write_text("\n".join(lines))
    with pytest.raises(Unsupported, match=said.replace("own:", f"own{name}:")):
        tasks.prepare(Arguments(task=f"own{name}:{name}", **more), {})


ARGUMENTS = """
from dataclasses import replace
from trainer.data.language import CausalLM


class Plain:
    own_arguments = ("label_column",)

    def __init__(self, arguments, inputs):
        pass


class Titles(CausalLM):
    @classmethod
    def columns(cls, arguments):
        return replace(super().columns(arguments), text="title")
"""


def test_the_node_refuses_arguments_that_the_class_does_not_take(source: Path):
    (source / "taking.py").write_text(ARGUMENTS)
    for task, name, value in (("Plain", "dpo_beta", 0.5), ("Titles", "label_column", "x")):
        with pytest.raises(Unsupported, match=f"^--{name} has no effect with the task taking:{task}, only with "):
            tasks.prepare(Arguments(task=f"taking:{task}", **{name: value}), {})
    with pytest.raises(Unsupported, match="has no method model"):
        tasks.prepare(Arguments(task="taking:Plain", label_column="x"), {})


def test_a_derived_class_says_which_columns_it_reads(source: Path, capsys: pytest.CaptureFixture[str]):
    (source / "reading.py").write_text(ARGUMENTS)
    (source / "rows.jsonl").write_text('{"title": "abcd efgh"}\n' * 30)
    given = {"dataset": ["rows.jsonl"], "tokenizer": "bpe:260", "block_size": 4, "token_cache": "none"}
    assert len(tasks.prepare(Arguments(task="reading:Titles", **given), {}).train) > 10
    with pytest.raises(Unsupported, match="rows.jsonl:1: the row has no 'text'"):
        tasks.prepare(Arguments(**given), {})


def test_labels_of_a_sample_that_does_not_count_are_ignored():
    task = CustomLanguageTask(None, [], None, torch.utils.data.default_collate, own=SimpleNamespace())
    rows = [{"input_ids": torch.tensor([number, 8]), "labels": torch.tensor([number, 8])} for number in (1, 2)]
    batch = task.collate([(True, rows[0]), (False, rows[1])])
    assert batch["labels"].tolist() == [[1, 8], [-100, -100]] and batch["input_ids"].tolist() == [[1, 8], [2, 8]]
    assert int(task.count(None, batch)) == 1 and task.of_labels
    with pytest.raises(Unsupported, match=r"has no loss\(\): its batches must have input_ids and labels"):
        task.collate([(True, torch.ones(2))])


def test_an_adapter_on_the_meta_device_needs_the_values_of_the_model():
    from trainer import meta_device

    def build() -> torch.nn.Module:
        with torch.device("meta"):
            return torch.nn.Sequential(torch.nn.Linear(2, 2))

    arguments = Arguments(task="a:B", use_peft=True, lora_target_modules=["0"])
    task = own_task(model=build, train_data=list)
    with pytest.raises(Unsupported, match=r"weights\(\) of a:B does not name the values of 0.weight"):
        tasks.build_model(task, arguments)
    model = meta_device.outlined(build(), build, 1)
    model.initial_weights.stored = {"0.weight": lambda: torch.ones(2, 2), "0.bias": lambda: torch.ones(2)}
    model.initial_weights.draws = {}
    adapted = tasks.lora.put_on(model, arguments)
    adapted.initial_weights.fill(adapted, torch.device("cpu"))
    layer = adapted.get_submodule("base_model.model.0")
    assert (layer.base_layer.weight == 1).all() and (layer.lora_B["default"].weight == 0).all()
    assert layer.lora_A["default"].weight.abs().sum() > 0
    assert [name for name, each in adapted.named_parameters() if each.requires_grad] == [
        f"base_model.model.0.lora_{which}.default.weight" for which in "AB"
    ]
    own = own_task(model=lambda: adapted, train_data=list)
    assert tasks.build_model(own, arguments) is adapted, "an adapter of the user's own stays"
