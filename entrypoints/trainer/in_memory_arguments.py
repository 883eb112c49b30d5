"""Command line arguments of `cloudtrain.DistributedTraining`: those of the shared trainer that suit any model and data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .arguments import Arguments, parse

# The others are about texts, their tokens and models that the trainer builds.
TAKEN = frozenset({
    "adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "dataloader_drop_last", "dataloader_num_workers",
    "early_stopping_patience", "early_stopping_threshold", "eval_on_start", "eval_steps", "eval_strategy", "fp16",
    "global_batch_size", "greater_is_better", "gradient_accumulation_steps", "gradient_compression", "load_best_model_at_end",
    "logging_first_step", "lr_scheduler_type", "max_grad_norm", "max_steps", "metric_for_best_model", "optim",
    "per_device_eval_batch_size", "report_to", "run_name", "save_async", "save_steps", "save_total_limit",
    "torch_compile", "torch_compile_backend", "torch_compile_mode", "warmup_ratio", "warmup_steps", "wandb_entity", "wandb_group",
    "wandb_project", "wandb_tags", "weight_decay",
})  # fmt: skip
DEFAULTS = [  # plain AdamW, as torch has it
    "--optim=adamw_torch", "--weight_decay=0.01", "--max_grad_norm=0", "--lr_scheduler_type=constant",
    "--learning_rate=1e-3", "--num_train_epochs=1", "--per_device_train_batch_size=32",
    "--per_device_eval_batch_size=32",
]  # fmt: skip


def _is(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help, "choices": ()})


@dataclass
class InMemoryArguments(Arguments):
    """The arguments of the training of one model in memory."""

    samples: int = _is(0, "Of runs of older versions, whose own code makes up the data.")
    features: int = _is(0, "As samples.")
    python: str = _is("", "Python version that pickled, such as 3.12.")
    language_model: bool = _is(False, "A language model of transformers is trained on its labels.")
    hook: bool = _is(False, "A communication hook came with the job.")

    @property
    def own_loss(self) -> bool:
        """Whether the loss needs the whole model and whole samples."""
        return not self.language_model

    @property
    def metrics(self) -> tuple[str, ...]:
        """The results of an evaluation."""
        return ("loss", "accuracy") if self.own_loss else ("loss",)

    @property
    def writes(self) -> bool:
        """Whether what is learned is to write on."""
        return self.language_model


def parse_in_memory(argv: Sequence[str]) -> InMemoryArguments:
    """Return the arguments of a command line; raises Misuse with every problem at once."""
    return parse([*DEFAULTS, *argv], InMemoryArguments)
