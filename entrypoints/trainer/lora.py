"""LoRA adapters through peft: the pretrained weights are frozen, the adapter is trained."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from .errors import Unsupported

if TYPE_CHECKING:
    from .arguments import Arguments


def adapted(model: Any, arguments: Arguments) -> Any:
    """Return the model with an adapter in it, the only part that is trained; raises Unsupported when it finds no place."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise Unsupported("--use_peft needs the package peft (pip install peft)") from None
    # peft asks transformers for something by its old name, which would print a warning on every rank.
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
    targets: Any = arguments.lora_target_modules or None
    config = LoraConfig(
        r=arguments.lora_r,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM" if arguments.writes else "SEQ_CLS",
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise Unsupported(f"--use_peft: {str(error).strip().splitlines()[0]}") from None


def merged(model: Any) -> Any:
    """Return the plain model that a model with an adapter stands for."""
    return model.merge_and_unload()
