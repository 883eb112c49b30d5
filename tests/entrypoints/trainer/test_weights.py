"""Models that are built without values: drawn tensor by tensor, read by slices, cut to a rank's part."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.entrypoints.training import ENTRYPOINTS

from trainer import model as models  # isort: skip
from trainer import publish, weights  # isort: skip
from trainer.arguments import Arguments  # isort: skip

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "block_size": 16}
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gpt2", "gemma", "phi3", "bert", "opt"]


class Words:
    bos_token_id = eos_token_id = pad_token_id = 1

    def __len__(self) -> int:
        return 50


def arguments(**more) -> Arguments:
    return Arguments(**(SIZES | more))


def outlined(**more):
    task = arguments(**more)
    return models.outline(task, Words(), [] if task.writes else ["a", "b", "c"])


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_are_drawn_as_transformers_draws_them(family: str):
    """Means and deviations of each tensor are those of a model that transformers makes whole; ties are the same."""
    more = {"model_type": family, "task": "sequence-classification" if family == "bert" else "causal-lm"}
    model = outlined(**more)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    weights.fill(model, torch.device("cpu"))
    torch.manual_seed(4)
    whole = type(model)(model.config).requires_grad_(False)
    model.requires_grad_(False)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in whole.named_parameters()]
    for (name, mine), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        if other.std() == 0 or other.numel() < 2:
            assert torch.equal(mine, other), name
        else:
            assert mine.std() == pytest.approx(other.std().item(), rel=12 / mine.numel() ** 0.5), name
            assert abs(mine.mean()) < 6 * other.std() / mine.numel() ** 0.5, name
    for (name, mine), other in zip(model.named_buffers(), whole.buffers(), strict=True):
        assert torch.equal(mine, other), name
    padding = whole.get_input_embeddings().padding_idx
    if padding is not None:
        assert torch.equal(model.get_input_embeddings().weight[padding], whole.get_input_embeddings().weight[padding])
    if whole.get_output_embeddings() is not None:
        tied = [each.get_output_embeddings().weight is each.get_input_embeddings().weight for each in (model, whole)]
        assert tied[0] == tied[1]


def test_a_tensor_depends_on_its_name_and_the_seed_alone():
    """Other layers, other random numbers before it: the same values. Another name or seed: others."""
    torch.manual_seed(1)
    first = models.build(arguments(), Words(), [])
    torch.manual_seed(2)
    deeper = models.build(arguments(num_hidden_layers=4), Words(), [])
    state = deeper.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in first.state_dict().items())
    assert not torch.equal(state["model.layers.0.mlp.up_proj.weight"], state["model.layers.1.mlp.up_proj.weight"])
    other = models.build(arguments(seed=7), Words(), [])
    assert not torch.equal(other.lm_head.weight, first.lm_head.weight)


def test_drawing_leaves_the_random_numbers_alone():
    before = torch.get_rng_state()
    models.build(arguments(), Words(), [])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("on_meta", [False, True])
def test_recording_uses_torchs_hooks_and_removes_them(on_meta: bool):
    """A library that replaced a method of nn.Module would change modules that other threads build."""
    from torch.nn.modules import module

    names = ("_global_parameter_registration_hooks", "_global_buffer_registration_hooks")
    before, hooks = dict(vars(torch.nn.Module)), [dict(getattr(module, name)) for name in names]
    with pytest.raises(ZeroDivisionError), weights.Recorder().recording(on_meta):
        assert dict(vars(torch.nn.Module)) == before
        1 / 0  # noqa: B018
    assert [dict(getattr(module, name)) for name in names] == hooks


def saved(folder: Path, **more):
    """Return a model with values of its own, and its folder in bfloat16 and in several files."""
    model = models.build(arguments(seed=99, **more), Words(), [])
    with torch.no_grad():
        for parameter in model.parameters():  # as training would leave them
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return model.float()


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_a_pretrained_model_is_read_as_transformers_reads_it(tmp_path: Path, family: str):
    model = saved(tmp_path, model_type=family)
    mine = models.outline(arguments(model=str(tmp_path)), Words(), [])
    assert all(parameter.is_meta for parameter in mine.parameters()), "each rank reads its part"
    weights.fill(mine, torch.device("cpu"))
    theirs = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    assert mine.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(mine.state_dict()[name], tensor), name
    assert mine.get_output_embeddings().weight is mine.get_input_embeddings().weight
    ids = torch.arange(16)[None]
    assert torch.equal(mine.eval()(ids).logits, theirs.eval()(ids).logits)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_frozen_weights_have_the_data_type_that_is_asked_for(tmp_path: Path, dtype: str):
    """As from_pretrained has it; the adapter is that of float32."""
    model = saved(tmp_path / "base")
    adapter: dict = {"model": str(tmp_path / "base"), "use_peft": True}
    mine = models.build(arguments(**adapter, dtype=dtype), Words(), [])
    plain = models.build(arguments(**adapter), Words(), [])
    theirs = type(model).from_pretrained(tmp_path / "base", dtype=getattr(torch, dtype)).state_dict()
    assert {tensor.dtype for tensor in theirs.values()} == {getattr(torch, dtype)}
    state, drawn = mine.state_dict(), {}
    for name, tensor in state.items():
        if "lora_" in name:
            drawn[name] = tensor
            assert tensor.dtype == torch.float32 and torch.equal(tensor, plain.state_dict()[name]), name
        else:
            other = theirs[name.removeprefix("base_model.model.").replace(".base_layer.", ".")]
            assert tensor.dtype == other.dtype and torch.equal(tensor, other), name
    assert len(drawn) == 2 * 2 * 2
    bare = weights.skeleton(mine)
    publish.save_in_parts(
        bare, lambda names: ((name, state[name]) for name in names), None, tmp_path / "a", 1, lambda: None
    )
    kept = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert len(kept) == len(drawn) and {tensor.dtype for tensor in kept.values()} == {torch.float32}


def test_trained_weights_have_the_data_type_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    model = saved(tmp_path)
    made = models.build(arguments(model=str(tmp_path), dtype="bfloat16"), Words(), [])
    assert all(torch.equal(each, model.state_dict()[name].bfloat16()) for name, each in made.state_dict().items())
    assert made.config.dtype == torch.bfloat16 and not capsys.readouterr().out
    drawn = models.build(arguments(dtype="bfloat16"), Words(), [])
    assert {parameter.dtype for parameter in drawn.parameters()} == {torch.bfloat16}
    # What transformers keeps in float32 stays so.
    monkeypatch.setattr(type(model), "_keep_in_fp32_modules_strict", {"norm"})
    mixed = models.build(arguments(model=str(tmp_path), dtype="bfloat16"), Words(), [])
    assert mixed.model.norm.weight.dtype == torch.float32 and mixed.lm_head.weight.dtype == torch.bfloat16
    assert "transformers keeps some of its layers in float32 with dtype bfloat16" in capsys.readouterr().out


def test_the_base_of_a_language_model_becomes_a_classifier(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Names without the prefix, a head that the files lack, and one that they have in vain; all of it is said."""
    model = saved(tmp_path, tie_word_embeddings=False)
    task = arguments(model=str(tmp_path), task="sequence-classification")
    made = models.build(task, Words(), ["a", "b", "c"])
    assert torch.equal(made.model.layers[1].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight)
    assert made.score.weight.shape == (3, 32) and made.score.weight.std() > 0
    said = capsys.readouterr().out
    assert f"1 tensors of {tmp_path} are drawn, as the files have none: score.weight" in said
    assert f"1 tensors of {tmp_path} are in the files and not used: lm_head.weight" in said
    model.model.save_pretrained(tmp_path / "base")
    again = models.build(arguments(model=str(tmp_path / "base")), Words(), [])
    assert torch.equal(again.model.layers[1].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight)


def test_what_cannot_be_read_in_parts_is_read_whole(tmp_path: Path, capsys: pytest.CaptureFixture):
    model = saved(tmp_path / "model")
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    (tmp_path / "old").mkdir()
    torch.save(state, tmp_path / "old" / "pytorch_model.bin")
    model.config.save_pretrained(tmp_path / "old")
    made = models.outline(arguments(model=str(tmp_path / "old")), Words(), [])
    assert not any(parameter.is_meta for parameter in made.parameters())
    assert torch.equal(made.lm_head.weight, model.lm_head.weight)
    said = capsys.readouterr().out
    assert f"each rank builds the whole model before it is sharded: {tmp_path / 'old'} has no model.safetensors" in said


def test_experts_that_transformers_packs_are_read_whole(tmp_path: Path, capsys: pytest.CaptureFixture):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "mixtral", vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    made = models.outline(arguments(model=str(tmp_path)), Words(), [])
    assert "transformers converts its tensor" in capsys.readouterr().out
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in made.state_dict().items())


@pytest.mark.long
def test_ranks_hold_their_parts_and_nothing_else(tmp_path: Path):
    """Four processes: the memory that each start adds is its own part and one tensor, drawn and read from files."""
    script = Path(__file__).with_name("starting.py")
    env = {**os.environ, "PYTHONPATH": str(ENTRYPOINTS), "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run(
        [*command, str(script), str(tmp_path)], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(text) for text in re.findall(r"^FOUND (.*)$", done.stdout, re.MULTILINE)]
    assert {each["case"] for each in found} == {"drawn", "read", "whole", "frozen in bfloat16"}
    parts = {each["case"]: max(rank["part"] for rank in each["ranks"]) for each in found}
    assert parts["frozen in bfloat16"] < 0.52 * parts["read"]
    for each in found:
        for rank in each["ranks"]:
            limit = 1.3 * rank["part"] + rank["tensor"]
            assert rank["part"] <= rank["whole"] / 4 * 1.05, rank
            assert (rank["peak"] <= limit) == (each["case"] != "whole"), (each["case"], rank)
        assert each["equal"], each["case"]
