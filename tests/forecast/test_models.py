"""Sizes of models, against what their publishers and transformers say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloudtrain.forecast import models

PUBLISHED = {  # the parameters that each model's page on huggingface.co names (safetensors' count)
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Meta-Llama-3-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "google/gemma-2b": 2_506_172_416,
    "google/gemma-7b-it": 8_537_680_896,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "gpt2": 124_439_808,
    "openai-community/gpt2-xl": 1_557_611_200,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_named_model_has_the_published_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    shape = models.find(name, tmp_path)
    assert isinstance(shape, models.Shape) and shape.parameters == PUBLISHED[name]


def test_an_unknown_name_gets_the_names_that_are_like_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert "known by name: llama-3.1-8b" in str(models.find("meta-llama/Llama-3.1-8", tmp_path))
    assert str(models.find("me/tiny", tmp_path)).endswith("nothing has checked that name")


@pytest.mark.parametrize("place", ["folder", "cache"])
def test_a_config_file_says_the_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    folder = tmp_path / ("model" if place == "folder" else "hf/hub/models--me--model/snapshots/abc")
    folder.mkdir(parents=True)
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 50,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    found = models.find("model" if place == "folder" else "me/model", tmp_path)
    assert found == models.Shape("llama", 64, 96, 2, 4, 64, 32, 50, False)


def test_what_is_not_known_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert "are unknown: there is no config.json" in str(models.find("me/secret", tmp_path))
    assert models.from_config({"model_type": "mamba"}) == "models of type mamba are not supported"
