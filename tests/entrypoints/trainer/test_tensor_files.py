"""Safetensors files that are written one tensor after the other, read by safetensors and transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.entrypoints.training import ENTRYPOINTS

from trainer import publish, tensor_files  # isort: skip
from trainer.arguments import Arguments  # isort: skip
from trainer.tensor_files import TensorFormat  # isort: skip

assert ENTRYPOINTS

TENSORS = {
    "first": torch.arange(6, dtype=torch.float32).view(2, 3),
    "half": torch.ones(5, dtype=torch.bfloat16) / 3,
    "count": torch.tensor(7),
    "turned": torch.arange(12.0).view(3, 4).T,
    "mask": torch.tensor([True, False, True]),
    "nothing": torch.zeros(0, 4),
    "last": torch.randn(9, 9, dtype=torch.float64),
}
FORMATS = {name: TensorFormat(tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()}


def test_safetensors_reads_what_was_written(tmp_path: Path):
    tensor_files.write(tmp_path, FORMATS, TENSORS.items())
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_several_files_have_an_index(tmp_path: Path):
    tensor_files.write(tmp_path, FORMATS, TENSORS.items(), file_bytes=60)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    assert len(files) == 3 and sorted(path.name for path in tmp_path.glob("*.safetensors")) == files
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], TENSORS[name])


def test_another_tensor_than_announced_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"half is torch.float32 \(5,\), the header has half"):
        tensor_files.write(tmp_path, FORMATS, [("first", TENSORS["first"]), ("half", TENSORS["half"].float())])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_in_parts_is_written_as_transformers_writes_it(tmp_path: Path, family: str):
    """The same tensors under the same names, and a configuration that it loads with; older files are gone."""
    from trainer import model as models
    from trainer.weights import skeleton
    from transformers import AutoModelForCausalLM

    from tests.entrypoints.trainer.test_weights import SIZES, Words

    model = models.build(Arguments(**SIZES, model_type=family), Words(), [])
    model.save_pretrained(tmp_path / "theirs")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "model-00001-of-00002.safetensors").touch()
    state = model.state_dict()
    publish.save_in_parts(
        skeleton(model), lambda names: ((name, state[name]) for name in names), None, mine, 1, lambda: None
    )
    assert sorted(path.name for path in mine.iterdir()) == sorted(path.name for path in (tmp_path / "theirs").iterdir())
    first, second = (load_file(folder / "model.safetensors") for folder in (mine, tmp_path / "theirs"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (mine, tmp_path / "theirs")]
    assert configs[0] == configs[1]
    loaded = AutoModelForCausalLM.from_pretrained(mine).eval()
    ids = torch.arange(16)[None]
    assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_an_adapter_is_merged_layer_by_layer_as_peft_merges_it(tmp_path: Path, family: str):
    """The adapter alone, and the merged model, are what peft writes of the whole; the trained model stays as it was."""
    from trainer import lora
    from trainer import model as models
    from trainer.weights import skeleton

    from tests.entrypoints.trainer.test_weights import SIZES, Words

    wanted = Arguments(**SIZES, model_type=family, use_peft=True, lora_target_modules=["all-linear"])
    model = models.build(wanted, Words(), [])
    for name, parameter in model.named_parameters():
        parameter.data += torch.randn_like(parameter) * ("lora_B" in name or "bias" in name)
    bare, state = skeleton(model), model.state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    model.save_pretrained(tmp_path / "theirs")
    asked = []

    def tensors(names: list[str]):
        for name in names:
            asked.append(name)
            yield name, state[name]

    rest = tensors, None
    publish.save_in_parts(bare, *rest, tmp_path / "mine", 1, lambda: None)
    assert asked and all("lora" in name for name in asked), "the model below was gathered"
    first, second = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("mine", "theirs"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)

    publish.save_in_parts(bare, *rest, tmp_path / "merged", 1, lambda: None, merge=True)
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
    lora.merged(model).save_pretrained(tmp_path / "whole")
    first, second = (load_file(tmp_path / folder / "model.safetensors") for folder in ("merged", "whole"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "family, targets",
    [
        ("llama", ["q_proj", "embed_tokens"]),
        ("qwen2", ["embed_tokens", "lm_head", "v_proj"]),
        ("gemma", ["lm_head"]),
        ("gpt2", ["wte", "c_attn"]),
    ],
)
def test_adapters_of_a_tied_matrix_are_merged_as_peft_merges_them(tmp_path: Path, family: str, targets: list[str]):
    from trainer import lora
    from trainer import model as models

    from tests.entrypoints.trainer.test_weights import SIZES, Words

    wanted = Arguments(**SIZES, model_type=family, use_peft=True, lora_target_modules=targets)
    model = models.build(wanted, Words(), [])
    for name, parameter in model.named_parameters():
        parameter.data += torch.randn_like(parameter) * ("lora_" in name or "bias" in name)
    state = model.state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    assert publish.saves_in_parts(model, merge=True) and not publish.saves_in_parts(None)
    # The model itself, as replicas have it, in place of one without values.
    publish.save_in_parts(
        model,
        lambda names: ((name, state[name]) for name in names),
        None,
        tmp_path / "mine",
        1,
        lambda: None,
        merge=True,
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    lora.merged(model).save_pretrained(tmp_path / "theirs")
    first, second = (load_file(tmp_path / folder / "model.safetensors") for folder in ("mine", "theirs"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("mine", "theirs")]
    assert configs[0] == configs[1] and configs[0]["tie_word_embeddings"]


def test_packed_experts_are_written_by_transformers():
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    more = {"num_local_experts": 2, "num_key_value_heads": 2, "intermediate_size": 32}
    with torch.device("meta"):
        made = [
            AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **(more if kind == "mixtral" else {})))
            for kind in ("llama", "mixtral")
        ]
    assert [publish.saves_in_parts(model) for model in made] == [True, False]
    assert publish.saves_in_parts(torch.nn.Linear(2, 2))
