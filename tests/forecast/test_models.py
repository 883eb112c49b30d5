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
    # keras-team/keras-hub bloom_presets.py at 1f5bf552; 7b1: https://openllmlist.com/bloom-7b1-by-bigscience
    "bigscience/bloom-560m": 559_214_592,
    "bigscience/bloomz-1b1": 1_065_314_304,
    "bigscience/bloom-1b7": 1_722_408_960,
    "bigscience/bloom-3b": 3_002_557_440,
    "bigscience/bloomz-7b1": 7_069_016_064,
    # the same, vit_presets.py at 1ec4b723, without classes: 1000 of them have 1000 vectors and numbers
    "google/vit-base-patch16-224": 85_798_656 + 1000 * 769,
    "google/vit-base-patch32-384": 87_528_192 + 1000 * 769,
    "google/vit-large-patch16-384": 303_690_752 + 1000 * 1025,
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


MORE = {"vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
T5 = {"d_model": 64, "d_ff": 96, "d_kv": 24, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2}
WHOLE = {"t5": "T5ForConditionalGeneration", "mt5": "MT5ForConditionalGeneration", "vit": "ViTForImageClassification"}
CONFIGS = [
    {"model_type": "gemma2", "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 32},
    {"model_type": "gemma3_text", "intermediate_size": 96, "num_key_value_heads": 1, "head_dim": 32},
    {"model_type": "mixtral", "intermediate_size": 96, "num_key_value_heads": 2, "num_local_experts": 4,
     "num_experts_per_tok": 2},
    {"model_type": "qwen3_moe", "moe_intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 4,
     "num_experts_per_tok": 2},
    {"model_type": "qwen2_moe", "moe_intermediate_size": 32, "num_key_value_heads": 2, "num_experts": 4,
     "num_experts_per_tok": 2, "shared_expert_intermediate_size": 48},
    {"model_type": "phi", "intermediate_size": 96, "num_key_value_heads": 4},
    {"model_type": "gpt_neox", "intermediate_size": 96},
    {"model_type": "stablelm", "intermediate_size": 96, "num_key_value_heads": 4},
    {"model_type": "falcon"},
    {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2},
    *({"model_type": name, "intermediate_size": 96, "num_key_value_heads": 2}
      for name in ("llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "olmo", "olmo2")),
    {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4},
    {"model_type": "bloom", "n_layer": 2, "n_head": 4},
    {"model_type": "t5", **T5},
    {"model_type": "t5", **T5, "feed_forward_proj": "gated-gelu"},
    {"model_type": "mt5", **T5},
    {"model_type": "vit", "intermediate_size": 96, "image_size": 64, "patch_size": 8, "num_labels": 11},
]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config['model_type']}{len(config)}")
def test_a_family_has_the_parameters_that_transformers_builds(config: dict):
    torch = pytest.importorskip("torch")
    import transformers

    family = config["model_type"]
    given = {"vocab_size": 1000, **({} if family in ("gpt2", "t5", "mt5") else MORE), **config}
    words = {name: value for name, value in given.items() if name != "model_type"}
    made = transformers.AutoConfig.for_model(family, pad_token_id=0, **words)
    with torch.device("meta"):
        if family in WHOLE:
            model = getattr(transformers, WHOLE[family])(made)
        else:
            model = transformers.AutoModelForCausalLM.from_config(made)
    shape = models.from_config(
        given | {"tie_word_embeddings": getattr(made, "tie_word_embeddings", True)} | made.to_dict() | given
    )
    assert isinstance(shape, models.Shape), shape
    assert shape.parameters == sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize("name, config", [
    ("num_decoder_layers", {"model_type": "t5", **T5, "vocab_size": 50}),
    ("decoder_sparse_step", next(each for each in CONFIGS if each["model_type"] == "qwen2_moe") | MORE),
])  # fmt: skip
def test_layers_that_differ_are_not_counted(name: str, config: dict):
    plain, shape = models.from_config(config), models.from_config({**config, name: 3})
    assert isinstance(plain, models.Shape) and isinstance(shape, models.Shape)
    assert (plain.special, shape.special) == ("", name)


def test_the_table_names_200_models_and_the_source_of_each():
    text = Path(models.__file__).with_suffix(".csv").read_text()
    rows = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(models.named()) == len(rows) - 1 >= 200
    assert all(f"# {line.rpartition(',')[2]}: " in text for line in rows[1:]), "the header names address and date"


@pytest.mark.parametrize(
    "name, billions, active",
    [  # totals that the publishers' pages have in the models' names
        ("Qwen/Qwen3-30B-A3B", 30.5, 3.3),
        ("Qwen/Qwen3-235B-A22B", 235, 22),
        ("mistralai/Mixtral-8x7B-v0.1", 46.7, 12.9),
        ("EleutherAI/pythia-6.9b", 6.9, 6.9),
        (
            "Qwen/Qwen1.5-MoE-A2.7B",
            14.3,
            2.7,
        ),  # docs.nvidia.com/nemo/automodel/latest/model-coverage/llm/qwen/qwen2-moe.html
        ("google/gemma-2-9b-it", 9.24, 9.24),
        ("microsoft/phi-2", 2.78, 2.78),
        ("tiiuae/falcon-40b", 41.3, 41.3),
        # README.md and released_checkpoints.md of google-research/text-to-text-transfer-transformer at 03c94165, and
        # https://github.com/KwangryeolPark/Model.Summary legacy/docs/image_model_info/t5-large.md
        ("google-t5/t5-small", 0.060, 0.060),
        ("google-t5/t5-base", 0.22, 0.22),
        ("google-t5/t5-large", 0.73767, 0.73767),
        ("google/t5-v1_1-small", 0.077, 0.077),
    ],
)
def test_all_and_active_parameters(tmp_path: Path, name: str, billions: float, active: float):
    shape = models.find(name, tmp_path)
    assert isinstance(shape, models.Shape)
    left_out = shape.layers * (shape.layer_matrices - shape.active_matrices)
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.02)
    assert (shape.parameters - left_out) / 1e9 == pytest.approx(active, rel=0.02)
