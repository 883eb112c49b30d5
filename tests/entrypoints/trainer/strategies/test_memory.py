"""No rank holds the whole model while checkpoints are written and read and the trained model is written."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from tests.entrypoints.training import Trainer, texts

from trainer import model as models  # isort: skip
from trainer.arguments import Arguments  # isort: skip

from tests.entrypoints.trainer.starting import Words, write_model  # isort: skip

pytestmark = [pytest.mark.train, pytest.mark.timeout(600)]

SIZES = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 1024}
WHOLE = 8 * (4 * 512**2 + 3 * 512 * 1024) * 4  # bytes of the layers, without embeddings and norms


class FewWords(Words):
    def __len__(self) -> int:
        return 300


LITTLE = 20_000_000  # several tensors, and what Python takes; the other ranks' part of the layers is twice as much
LORA = "--use_peft --lora_r 2 --lora_target_modules all-linear"
LORA_OF_TIED = LORA.replace("all-linear", "q_proj v_proj down_proj embed_tokens")
CASES = {
    "fsdp": (2, {"strategy": "fsdp"}, ""),
    "tp": (2, {"tp_size": 2}, ""),
    "fsdp, adapter of tied matrices merged": (2, {"strategy": "fsdp"}, f"{LORA_OF_TIED} --merge_adapter"),
}
LONG = {
    "zero3": (2, {"strategy": "zero3"}, ""),
    "zero1": (2, {"strategy": "zero1"}, ""),
    "pp": (2, {"pp_size": 2}, ""),
    "fsdp, adapter": (2, {"strategy": "fsdp"}, LORA),
    "zero2": (2, {"strategy": "zero2"}, ""),
    "zero3, adapter": (2, {"strategy": "zero3"}, LORA),
    "hsdp": (4, {"strategy": "hsdp", "dp_replicate_size": 2}, ""),
    "zero3, adapter merged": (2, {"strategy": "zero3"}, f"{LORA} --merge_adapter"),
}


REPLICAS = {"zero1", "zero2"}  # each rank holds the model; what is asserted is that none takes a second one


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_no_rank_holds_the_whole_model(tmp_path: Path, name: str):
    world, parallelism, more = (CASES | LONG)[name]
    args = shlex.split(f"--tokenizer bpe:300 --block_size 16 --max_steps 1 --sample_tokens 0 {more}")
    args += shlex.split("--save_async false --validation_split_percentage 0")
    args += ["--dataset", str(texts(tmp_path / "texts")), "--per_device_train_batch_size", "2"]
    if more:
        (tmp_path / "base").mkdir()
        write_model(tmp_path / "base", models.outline(Arguments(**SIZES), FewWords(), []), torch.bfloat16)
        args += ["--model", str(tmp_path / "base")]
    else:
        args += [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    env = {"CLOUDTRAIN_PARALLELISM": json.dumps(parallelism)}
    with Trainer(tmp_path / "run", args, world, env, script=Path(__file__).with_name("measuring.py")) as run:
        assert run.codes() == [0] * world, run.everything()
    ranks = [json.loads(text) for text in re.findall(r"^FOUND (.*)$", run.everything(), re.MULTILINE)]
    assert len(ranks) == world
    for rank in ranks:
        if replicas := name in REPLICAS:
            assert rank["held"] > WHOLE, rank
        else:
            assert rank["held"] < 0.52 * WHOLE, rank
        # DeepSpeed reads its file of optimizer state at once: values and two moments of what the rank optimizes.
        own = 3.2 * rank["held"] / (world if replicas else 1) if name.startswith("zero") else 0
        assert max(rank["checkpoint"], rank["model"], rank["load"] - own) < LITTLE, rank
