"""The loss in chunks, against that of whole logits: losses, gradients, and what it takes of memory."""

from __future__ import annotations

import pytest
import torch

from tests.entrypoints.training import ENTRYPOINTS

from trainer import chunked_loss  # isort: skip
from trainer import model as models  # isort: skip
from trainer.labels import IGNORED  # isort: skip

assert ENTRYPOINTS
SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "pad_token_id": 0}
INNER = {"intermediate_size": 48, "num_key_value_heads": 4}
DROPOUTS = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop", "attention_dropout", "hidden_dropout"), 0.0)


def made(family: str):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    more = {} if family == "gpt2" else INNER
    config = AutoConfig.for_model(family, **SIZES, **more, **DROPOUTS, max_position_embeddings=32, use_cache=False)
    return AutoModelForCausalLM.from_config(config).train()


def batch() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(1, 61, (3, 20), generator=draw)
    return {"input_ids": ids, "labels": torch.where(torch.rand(3, 20, generator=draw) < 0.7, ids, IGNORED)}


def gradients(model) -> torch.Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


@pytest.mark.parametrize("family", sorted(chunked_loss.FAMILIES))
def test_losses_and_gradients_are_those_of_whole_logits(monkeypatch: pytest.MonkeyPatch, family: str):
    monkeypatch.setattr(chunked_loss, "LOGITS", 61 * 7)  # seven tokens at a time
    rows = batch()
    model = made(family)
    whole = models.losses(model(rows["input_ids"]).logits, rows["labels"])
    (whole.sum() / 42).backward()
    expected = gradients(model)
    model.zero_grad()
    head = chunked_loss.of(model)
    assert head is not None
    loss = head.losses(model, rows, summed=True)
    (loss.sum() / 42).backward()
    assert torch.allclose(loss.sum(), whole.sum(), rtol=1e-6)
    assert loss._base is None, "FSDP warns of a view: its hook may be lost"
    assert torch.allclose(gradients(model), expected, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(head.losses(model, rows, summed=False), whole, rtol=1e-6)
    assert model(rows["input_ids"]).logits.shape == (3, 20, 61), "without a loss to be made it is what it was"


@pytest.mark.parametrize("learned", [True, False])
def test_in_bfloat16_the_loss_has_all_its_digits(learned: bool):
    """Under autocast; a frozen head, as below an adapter, gets no gradient."""
    rows, model = batch(), made("llama")
    model.lm_head.weight.requires_grad_(learned)
    losses = []
    for chunked in (False, True):
        head = chunked_loss.of(model) if chunked else None
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            if head is None:
                loss = models.losses(model(rows["input_ids"]).logits, rows["labels"]).sum()
            else:
                loss = head.losses(model, rows, summed=True).sum()
        loss.backward()
        losses.append((loss.detach(), gradients(model)))
    (whole, expected), (loss, found) = losses
    assert loss.dtype == torch.float32 and torch.allclose(loss, whole, rtol=1e-4)
    assert (found - expected).norm() < 0.02 * expected.norm()
    assert (model.lm_head.weight.grad is not None) == learned or model.config.tie_word_embeddings


def test_the_logits_are_never_whole():
    from torch.distributed._tools.mem_tracker import MemTracker
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1
    )
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, 8192, (4, 2048))
    head = chunked_loss.of(model)
    with (tracker := MemTracker()):
        head.losses(model, {"input_ids": ids, "labels": ids}, summed=True).sum().backward()
    peak = max(each["Total"] for each in tracker.get_tracker_snapshot("peak").values())
    assert peak < 4 * 8192 * ids.numel() * 2, "whole logits took 12 bytes for each, at the start of the backward pass"


@pytest.mark.parametrize("why", ["tensor parallel", "compiled", "another family"])
def test_where_logits_have_to_be_whole_they_are(why: str):
    model = made("llama")
    if why == "compiled":
        model.compile(backend="eager")
    if why == "another family":
        model.config.model_type = "gemma2"
    assert chunked_loss.of(model, 2 if why == "tensor parallel" else 1) is None
