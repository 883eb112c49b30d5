"""Arguments that do not go with the device or with the parallelism are refused."""

from __future__ import annotations

import pytest
import torch

from tests.entrypoints.training import ENTRYPOINTS

from trainer.arguments import Arguments  # isort: skip
from trainer.errors import Unsupported  # isort: skip
from trainer.strategies.compatibility import check_arguments  # isort: skip
from trainer.strategies.mesh import ParallelismPlan  # isort: skip

assert ENTRYPOINTS


CANNOT = {
    "no gpu": (
        {"attn_implementation": "flash_attention_2"},
        ParallelismPlan(),
        "cpu",
        "needs a GPU; on cpu use sdpa",
    ),
    "no package": (
        {"attn_implementation": "flash_attention_2"},
        ParallelismPlan(),
        "cuda",
        "needs the package flash_attn",
    ),
    "lora, tp": (
        {"use_peft": True},
        ParallelismPlan("fsdp", shard=2, tensor=2),
        "cpu",
        "--use_peft cannot be combined with fsdp .*tensor",
    ),
    "lora, pp": ({"use_peft": True}, ParallelismPlan(pipeline=2), "cpu", "--use_peft cannot be combined with"),
    "chat, pp": ({"task": "chat"}, ParallelismPlan(pipeline=2), "cpu", "pp_size 2 is for causal language models"),
    "classes, cp": (
        {"task": "sequence-classification"},
        ParallelismPlan(context=2),
        "cpu",
        "cp_size 2 is for language models",
    ),
    "dpo, tp": ({"task": "dpo"}, ParallelismPlan(tensor=2), "cpu", "^dpo works with strategies none, ddp"),
    "a class, tp": ({"task": "a:B"}, ParallelismPlan(tensor=2), "cpu", "^a model or a loss of your own works with"),
    "dtype, zero": (
        {"dtype": "bfloat16"},
        ParallelismPlan("zero3", shard=2),
        "cpu",
        "--dtype bfloat16 with zero3.* needs --bf16",
    ),
    "compile": (
        {"torch_compile": True},
        ParallelismPlan(tensor=2),
        "cpu",
        "--torch_compile works with strategies none and ddp",
    ),
    "compiler": (
        {"torch_compile": True, "torch_compile_backend": "gcc"},
        ParallelismPlan(),
        "cpu",
        "is one of .*not gcc",
    ),
}


@pytest.mark.parametrize("case", CANNOT)
def test_what_this_machine_or_layout_does_not_do_is_refused(case: str):
    more, layout, device, sentence = CANNOT[case]
    with pytest.raises(Unsupported, match=sentence) as caught:
        check_arguments(Arguments(**more), layout, torch.device(device))
    assert "\n" not in str(caught.value)
    check_arguments(
        Arguments(use_peft=True, torch_compile=True), ParallelismPlan("ddp", replicate=2), torch.device("cpu")
    )
    for sharded in (
        ParallelismPlan("fsdp", shard=2),
        ParallelismPlan("hsdp", replicate=2, shard=2),
        ParallelismPlan("fsdp", shard=2, context=2),
    ):
        check_arguments(Arguments(use_peft=True), sharded, torch.device("cpu"))
