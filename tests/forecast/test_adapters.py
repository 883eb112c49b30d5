"""LoRA, quantised weights and optimizers: counts against peft and torch, memory against published figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain.errors import BadJob
from cloudtrain.forecast import adapters, fit, memory, models, training
from cloudtrain.job.job import Job

# GB on the GPU, by who measured them (read 2026-11-29):
# unsloth: unslothai/unsloth README.md at e3162dc5 (2025-01-14), column "Hugging Face + FA2": the longest sequence for a size;
# litgpt: Lightning-AI/litgpt tutorials/resource-tables.md at 26857050 (2026-06-29), Alpaca of up to 1304 tokens.
PUBLISHED = [
    *((f"unsloth {gb}", gb, "llama-3.1-8b", {"sequence": sequence, "quantized": "4bit", "lora": 32, "checkpointing": True,
       "lora_targets": ["all-linear"]})
      for gb, sequence in ((12, 932), (16, 2551), (24, 5789), (40, 12264), (48, 15502), (80, 28454))),
    ("unsloth 70b", 80, "llama-3.3-70b", {"sequence": 6916, "quantized": "4bit", "lora": 32, "checkpointing": True,
                                          "lora_targets": ["all-linear"]}),
    *((f"litgpt {model} {quantized} {batch}", gb, model, {"batch": batch, "sequence": 1304, "precision": "bf16-pure",
       "lora": 8, "quantized": quantized})
      for gb, model, quantized, batch in (
          (21.30, "llama-2-7b", None, 1), (29.07, "llama-2-7b", None, 2), (38.12, "llama-2-13b", None, 1),
          (13.84, "llama-2-7b", "4bit", 1), (22.55, "llama-2-13b", "4bit", 1))),
]  # fmt: skip


def of_script(**said: object) -> training.Training:
    job = Job(name="s", source="/", entrypoint="t.py", resources={"accelerators": "A10G:1"}, fit={"batch": 1, **said})
    found = training.of_job(job, job.parallelism.model_dump(mode="json"), 1, 1)
    assert isinstance(found, training.Training), found
    return found


@pytest.mark.parametrize("gb, model, said", [row[1:] for row in PUBLISHED], ids=[row[0] for row in PUBLISHED])
def test_published_trainings_with_an_adapter_lie_in_the_band(gb: float, model: str, said: dict):
    found = of_script(model=model, **said)
    low, high = fit.needed(found)
    assert not found.open and low <= gb * 1e9 <= high
    if not said["quantized"]:
        assert memory.estimate(found.shape, found.step).total == pytest.approx(gb * 1e9, rel=0.02)


@pytest.mark.parametrize("name", ["full", "lora", "qlora"])
def test_a_script_has_an_answer_for_each_way(name: str):
    said = {"full": {}, "lora": {"lora": 16}, "qlora": {"lora": 16, "quantized": "4bit"}}[name]
    found = of_script(model="llama-3.1-8b", sequence=1024, checkpointing=True, **said)
    assert fit.answer(found, "A10G").answer == {"full": fit.NOT, "lora": fit.NOT, "qlora": fit.FITS}[name]


def test_qlora_is_named_where_it_fits():
    found = fit.answer(of_script(model="llama-3.1-8b", sequence=1024), "L4")
    assert found.answer == fit.NOT and any("fit.quantized: 4bit" in text for text, _, _ in found.changes)


def test_weights_that_are_quantized_are_not_trained():
    with pytest.raises(BadJob, match="quantized"):
        of_script(model="gpt2", sequence=8, quantized="4bit")


SHAPE = models.Shape("llama", 64, 96, 2, 4, 64, 32, 50, False)


@pytest.mark.parametrize(
    "optimizer, each",
    [("adamw", 8), ("adamw-8bit", 2 * (1 + 4 / 256)), ("sgd", 0)],
)
def test_bytes_of_a_trained_parameter(optimizer: str, each: float):
    count = SHAPE.parameters
    assert adapters.moments(SHAPE, count, 4 * count, optimizer, 0) == each * count


@pytest.mark.train
@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_states_of_other_optimizers_are_torchs(optimizer: str):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=50))
    matrices = [each for name, each in model.named_parameters() if each.ndim == 2 and "layers" in name]
    rest = [each for each in model.parameters() if all(each is not one for one in matrices)]
    made = (
        [torch.optim.Adafactor(model.parameters())]
        if optimizer == "adafactor"
        else [torch.optim.Muon(matrices), torch.optim.AdamW(rest)]
    )
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    for one in made:
        one.step()
    tensors = [value for one in made for state in one.state.values() for value in state.values()]
    kept = sum(value.nbytes for value in tensors if torch.is_tensor(value) and value.ndim)
    assert adapters.moments(SHAPE, SHAPE.parameters, 4 * SHAPE.parameters, optimizer, 0) == pytest.approx(
        kept, rel=0.06
    )


FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "phi3", "phi", "gpt2", "gpt_neox", "falcon", "bloom", "t5")


@pytest.mark.train
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("named", [(), (adapters.ALL,)])
def test_adapters_have_pefts_parameters(family: str, named: tuple[str, ...], tmp_path: Path):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    if not named and family not in adapters._DEFAULT:
        pytest.skip("peft has no default for it")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "vocab_size": 1000, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if family == "gpt2":
        sizes = {"n_embd": 64, "n_inner": 96, "n_layer": 2, "n_head": 4}
    if family == "bloom":
        sizes = {"hidden_size": 64, "n_layer": 2, "n_head": 4}
    if family == "t5":
        sizes = {"d_model": 64, "d_ff": 96, "d_kv": 24, "num_layers": 2, "num_heads": 4}
    pair = family == "t5"
    config = AutoConfig.for_model(
        family, **sizes, **(more if family not in ("gpt2", "gpt_neox", "bloom", "t5") else {"vocab_size": 1000})
    )
    shape = models.from_config(config.to_dict())
    assert isinstance(shape, models.Shape), shape
    with torch.device("meta"):
        lora = LoraConfig(
            r=4, target_modules=named[0] if named else None, task_type="SEQ_2_SEQ_LM" if pair else "CAUSAL_LM"
        )
        auto = AutoModelForSeq2SeqLM if pair else AutoModelForCausalLM
        model = get_peft_model(auto.from_config(config), lora)
    counted = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert adapters.parameters(shape, 4, named) == counted
