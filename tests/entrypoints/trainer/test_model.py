"""Models from a few sizes, their losses, their optimiser and schedule."""

from __future__ import annotations

import pytest
import torch

from tests.entrypoints.training import ENTRYPOINTS

from trainer import model as models  # isort: skip
from trainer.arguments import Arguments  # isort: skip
from trainer.errors import Unsupported  # isort: skip
from trainer.labels import IGNORED  # isort: skip

assert ENTRYPOINTS


class Words:
    bos_token_id = eos_token_id = pad_token_id = 1

    def __len__(self) -> int:
        return 50


def small(**more) -> Arguments:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "block_size": 16}
    return Arguments(**(sizes | more))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "mistral"])
def test_from_scratch_by_a_few_sizes(kind: str):
    model = models.build(small(model_type=kind, dropout=0.25), Words(), [])
    assert model.config.model_type == kind
    assert model.get_input_embeddings().weight.shape == (50, 32)
    assert model.config.num_hidden_layers == 2 and model.config.num_attention_heads == 4
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    told = model.config.to_dict()
    dropouts = [told[name] for name in told if name.endswith("pdrop") or name == "attention_dropout"]
    assert dropouts and set(dropouts) == {0.25}
    ids = torch.arange(16)[None]
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits), "dropout is on"
    model.eval()
    assert model(ids).logits.shape == (1, 16, 50)


def test_sizes_are_heard():
    model = models.build(small(num_key_value_heads=2, intermediate_size=80, tie_word_embeddings=False), Words(), [])
    assert (model.config.num_key_value_heads, model.config.intermediate_size) == (2, 80)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert models.build(small(gradient_checkpointing=True), Words(), []).is_activation_checkpointing


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_classifiers(kind: str):
    args = small(model_type=kind, task="sequence-classification")
    model = models.build(args, Words(), ["a", "b", "c"])
    batch = {"input_ids": torch.ones(2, 5, dtype=torch.int64), "attention_mask": torch.ones(2, 5, dtype=torch.int64)}
    assert model(**batch).logits.shape == (2, 3)
    assert model.config.label2id == {"a": 0, "b": 1, "c": 2}


@pytest.mark.parametrize(
    "more, sentence",
    [
        ({"model_type": "lama"}, "of type lama cannot be created"),
        ({"model": "/nowhere/at/all"}, "the model /nowhere/at/all cannot be created"),
        ({"hidden_size": 30}, "--hidden_size 30 is not a multiple of --num_attention_heads 4"),
    ],
)
def test_what_cannot_be_made_is_refused(more: dict, sentence: str, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(Unsupported, match=sentence) as caught:
        models.build(small(**more), Words(), [])
    assert "\n" not in str(caught.value)


def test_losses_are_those_of_transformers():
    model = models.build(small(dropout=0.0), Words(), [])
    ids = torch.randint(0, 50, (3, 16), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[1, 5:] = IGNORED
    logits = model(ids).logits
    each, count = models.losses(logits, labels), models.counted(labels)
    assert count.tolist() == [15, 4, 15]
    assert torch.allclose(each.sum() / count.sum(), model(ids, labels=labels).loss)
    assert models.losses(logits, torch.full_like(ids, IGNORED)).tolist() == [0.0, 0.0, 0.0]
    sure = torch.nn.functional.one_hot(ids.roll(-1, 1), 50).float()
    assert models.hits(sure, labels).tolist() == [15, 4, 15]
    assert models.length({"input_ids": ids}) == 48
    assert int(models.length({"input_ids": ids, "attention_mask": labels != IGNORED})) == 37


def test_classes_have_losses_too():
    logits, labels = torch.tensor([[2.0, 0.0], [0.0, 1.0], [5.0, 0.0]]), torch.tensor([0, 0, IGNORED])
    expected = torch.nn.functional.cross_entropy(logits[:2], labels[:2], reduction="none").tolist()
    assert models.losses(logits, labels).tolist() == pytest.approx([*expected, 0.0])
    assert models.counted(labels).tolist() == [1, 1, 0]
    assert models.hits(logits, labels).tolist() == [1, 0, 0]


def test_biases_and_norms_are_not_decayed():
    model = models.build(small(model_type="qwen2"), Words(), [])
    optimizer = models.optimizer(model, small(weight_decay=0.1, adam_beta2=0.95))
    decayed, others = optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {one.dim() for one in decayed["params"]} == {2} and {one.dim() for one in others["params"]} == {1}
    assert decayed["betas"] == (0.9, 0.95)
    assert sum(one.numel() for group in optimizer.param_groups for one in group["params"]) == sum(
        one.numel() for one in model.parameters()
    )


@pytest.mark.parametrize("warmup", [{"warmup_steps": 0.2}, {"warmup_ratio": 0.2}, {"warmup_steps": 4}])
def test_schedules(warmup: dict):
    model = torch.nn.Linear(2, 2)
    args = small(lr_scheduler_type="cosine", learning_rate=1.0, **warmup)
    schedule = models.schedule(models.optimizer(model, args), args, 20)
    rates = []
    for _ in range(21):
        rates.append(schedule.get_last_lr()[0])
        schedule.optimizer.step()
        schedule.step()
    assert rates[:5] == [0.0, 0.25, 0.5, 0.75, 1.0] and rates[20] == pytest.approx(0.0)
    assert rates[12] == pytest.approx(0.5)


def test_one_kernel_or_step_by_step():
    model = torch.nn.Linear(2, 2)
    assert models.optimizer(model, small()).defaults["fused"] is True
    assert models.optimizer(model, small(optim="adamw_torch")).defaults["fused"] is False


def test_activations_are_computed_again():
    """Fewer tensors are kept from the forward to the backward pass, and the gradients are the same."""
    ids = torch.arange(16)[None]
    kept, gradients = [], []
    for again in (False, True):
        torch.manual_seed(0)
        model = models.build(small(gradient_checkpointing=again, dropout=0.0), Words(), []).train()
        found = []
        with torch.autograd.graph.saved_tensors_hooks(lambda one: found.append(one.numel()) or one, lambda one: one):
            loss = models.losses(model(ids).logits, ids).sum()
        loss.backward()
        kept.append(sum(found))
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert kept[1] < kept[0] / 2
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*gradients, strict=True))
