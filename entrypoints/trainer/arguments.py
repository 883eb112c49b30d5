"""Command line arguments of the shared trainer, named as in transformers' TrainingArguments where one exists.

Parsed without torch or transformers, so that a misspelt flag is reported at once. A flag may be written with - or _, a
boolean alone (`--bf16`) or with a value (`--bf16 false`).
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, NoReturn, TypeVar, get_type_hints

from .argument_rules import TRACKERS, contradictions
from .kinds import BUILT_IN, DEFAULT, Kind, kind_of

TRUE, FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}
SCHEDULES = (
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
)  # fmt: skip
SECTIONS = {  # of the help, by their first argument
    "dataset": "data", "task": "task and model", "optim": "optimisation", "eval_strategy": "evaluation",
    "logging_steps": "logging and checkpoints", "push_to_hub": "the hub", "samples": "data in memory",
}  # fmt: skip
FROM_SCRATCH = (  # arguments that a pretrained model does not read
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "tie_word_embeddings", "dropout",
)  # fmt: skip
DTYPES = ("float32", "bfloat16", "float16")
OPTIMIZERS = ("adamw_torch_fused", "adamw_torch")


class Misuse(Exception):
    """Arguments that cannot be meant; str() names every problem, one a line."""


def _is(default: Any, help: str, choices: Sequence[str] = ()) -> Any:
    described = {"help": help, "choices": tuple(choices)}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=described)
    return field(default=default, metadata=described)


@dataclass
class Arguments:
    """The arguments of one training; -1 means "not limited" wherever a number of steps or samples is asked for."""

    # data
    dataset: list[str] = _is(  # noqa: RUF009
        [], "Files, folders, globs, a hub dataset, input:NAME of the job, or python-stdlib. Default: the input `train`."
    )
    eval_dataset: list[str] = _is(  # noqa: RUF009
        [],
        "Evaluation data, named as in --dataset. Default: the input `validation`, else a part of the documents is held out.",
    )
    dataset_config: str = _is("", "Configuration name of a Hugging Face Hub dataset.")
    dataset_split: str = _is("train", "Split of a Hugging Face Hub dataset.")
    validation_split_percentage: float = _is(
        5.0,
        "Percentage of the documents or rows held out for evaluation without --eval_dataset; none of a stream. "
        "A document is a whole file; of a single text file its end is held out.",
    )
    text_column: str = _is(
        "text", "Column of the text in jsonl, csv, parquet and hub datasets; in causal-lm and sequence-classification."
    )
    messages_column: str = _is(
        "messages",
        "In chat, column of the conversations: lists of role and content. A row without it has prompt and completion.",
    )
    label_column: str = _is("label", "In sequence-classification, column of the label.")
    block_size: int = _is(
        512,
        "Sequence length in tokens: of each block in causal-lm, at most of a row in the other tasks.",
    )
    max_train_bytes: int = _is(-1, "In causal-lm, maximum text read for training, in bytes.")
    max_train_samples: int = _is(
        -1, "Maximum number of training samples: blocks in causal-lm, rows in the other tasks."
    )
    max_eval_samples: int = _is(-1, "Maximum number of samples of an evaluation.")
    token_cache: str = _is(
        "",
        "Folder that caches tokens for later attempts and runs, or none. Default: the user's cache, for large texts.",
    )
    streaming: bool = _is(
        False, "Stream the data instead of loading it all; in causal-lm and in your own task. Needs --max_steps."
    )
    shuffle_buffer_size: int = _is(
        1000, "In a stream of causal-lm, documents to draw the next one from; 0: read them in order."
    )
    dataloader_num_workers: int = _is(0, "Data loader worker processes of each rank.")
    dataloader_drop_last: bool = _is(False, "Leave out the last incomplete batch of an epoch.")

    # model
    task: str = _is(DEFAULT, f"Task: {', '.join(BUILT_IN)}, or a class of the source: mypkg.task:MyTask.")
    task_args: list[str] = _is(  # noqa: RUF009
        [], "Options of your own task: name=value, as JSON or as text."
    )
    dpo_beta: float = _is(0.1, "In dpo, beta: how strongly the model stays near the reference model.")
    chat_template_path: str = _is(
        "",
        "In chat and dpo, file with a chat template (Jinja). Default: the tokenizer's; ChatML for one that is trained here.",
    )
    assistant_only_loss: bool = _is(
        True, "In chat, compute the loss on the assistant's tokens only; off: on every token."
    )
    model: str = _is(
        "", "Hub name, folder or input:NAME of a pretrained model. Default: train from scratch, see --model_type."
    )
    tokenizer: str = _is(
        "", "Hub name, folder, input:NAME, or bpe:4096 to train one. Default: the model's; bpe:4096 from scratch."
    )
    model_type: str = _is("llama", "Architecture from scratch: llama, qwen2, gpt2, bert or any that transformers has.")
    hidden_size: int = _is(256, "Hidden size of a model trained from scratch.")
    intermediate_size: int = _is(-1, "Size of the feed-forward layers, from scratch; -1: the architecture's default.")
    num_hidden_layers: int = _is(4, "Number of layers of a model trained from scratch.")
    num_attention_heads: int = _is(4, "Number of attention heads of a model trained from scratch.")
    num_key_value_heads: int = _is(-1, "Key and value heads, from scratch; -1: as many as attention heads.")
    tie_word_embeddings: bool = _is(True, "Tie input and output embeddings of a model trained from scratch.")
    dropout: float = _is(-1.0, "Dropout of all layers of a model trained from scratch; -1: the architecture's default.")
    dtype: str = _is(
        "float32",
        "Data type of the weights in memory and as saved; a LoRA adapter stays in float32. Weights that are trained have"
        " gradients and optimizer state in it too.",
        DTYPES,
    )
    attn_implementation: str = _is("sdpa", "Attention: sdpa, eager, flash_attention_2.")
    gradient_checkpointing: bool = _is(False, "Gradient checkpointing: recompute activations instead of keeping them.")
    torch_compile: bool = _is(False, "Compile the model with torch.compile.")
    torch_compile_backend: str = _is("inductor", "Backend of torch.compile: inductor, aot_eager, ...")
    torch_compile_mode: str = _is("", "Mode of torch.compile: reduce-overhead, max-autotune, ...")
    use_peft: bool = _is(
        False, "Train a LoRA adapter and freeze the pretrained model, --model or that of your own task."
    )
    lora_r: int = _is(16, "Rank of the LoRA adapter.")
    lora_alpha: int = _is(32, "LoRA alpha: the adapter is scaled by alpha / rank.")
    lora_dropout: float = _is(0.05, "Dropout before the LoRA adapter.")
    lora_target_modules: list[str] = _is(  # noqa: RUF009
        [], "Modules with an adapter: q_proj v_proj, or all-linear. Default: as peft has it for the architecture."
    )
    merge_adapter: bool = _is(False, "Save the model with the adapter merged into it, instead of the adapter alone.")

    # optimisation
    optim: str = _is("adamw_torch_fused", "Fused AdamW kernel, or the standard implementation.", OPTIMIZERS)
    learning_rate: float = _is(5e-5, "Peak learning rate of AdamW.")
    weight_decay: float = _is(0.0, "Weight decay of matrices; biases and norms have none.")
    adam_beta1: float = _is(0.9, "AdamW's beta1.")
    adam_beta2: float = _is(0.999, "AdamW's beta2.")
    adam_epsilon: float = _is(1e-8, "AdamW's epsilon.")
    max_grad_norm: float = _is(1.0, "Maximum gradient norm (clipping); 0: off.")
    num_train_epochs: float = _is(3.0, "Number of epochs.")
    max_steps: int = _is(-1, "Optimizer steps; overrides --num_train_epochs.")
    lr_scheduler_type: str = _is("linear", "Learning rate schedule.", SCHEDULES)
    warmup_steps: float = _is(0.0, "Warm-up steps; below 1: a fraction of all steps.")
    warmup_ratio: float = _is(0.0, "Warm-up as a fraction of all steps, if --warmup_steps is 0.")
    per_device_train_batch_size: int = _is(8, "Batch size of one rank in one forward pass.")
    per_device_eval_batch_size: int = _is(8, "Batch size of one rank in an evaluation.")
    gradient_accumulation_steps: int = _is(1, "Gradient accumulation: forward passes per optimizer step.")
    global_batch_size: int = _is(
        -1, "Samples of all ranks in one optimizer step; --gradient_accumulation_steps follows from it."
    )
    global_batch_tokens: int = _is(-1, "In causal-lm, like --global_batch_size, but in tokens.")
    bf16: bool = _is(False, "Mixed precision with bfloat16.")
    fp16: bool = _is(False, "Mixed precision with float16 (GPU only).")
    gradient_compression: str = _is("no", "Data type in which ddp sends gradients.", ("no", "fp16", "bf16"))
    seed: int = _is(42, "Random seed of initial weights, sample order and dropout.")

    # evaluation, logging, checkpoints
    eval_strategy: str = _is(
        "no",
        "When to evaluate during training. If data is held out, the end is evaluated too.",
        ["no", "steps", "epoch"],
    )
    eval_steps: int = _is(-1, "Steps between evaluations; -1: as --logging_steps.")
    load_best_model_at_end: bool = _is(False, "At the end, load the checkpoint with the best evaluation.")
    metric_for_best_model: str = _is(
        "loss",
        "Metric that selects the best checkpoint: loss, perplexity, accuracy, f1 or another result of an evaluation.",
    )
    greater_is_better: str = _is(
        "auto",
        "Whether the best is the highest --metric_for_best_model; auto: the lowest of names that end with loss or perplexity.",
        ("auto", "true", "false"),
    )
    early_stopping_patience: int = _is(-1, "Stop after this many evaluations in a row without improvement.")
    early_stopping_threshold: float = _is(0.0, "Minimum improvement that counts for early stopping.")
    eval_on_start: bool = _is(True, "Evaluate before the first step too.")
    logging_steps: int = _is(10, "Steps between progress lines.")
    logging_first_step: bool = _is(True, "Print progress of the first step too.")
    save_steps: int = _is(-1, "Steps between checkpoints; -1: as the job's `checkpoint.every` says, else 15 minutes.")
    save_total_limit: int = _is(-1, "Number of checkpoints to keep; -1: as the job's `checkpoint.keep` says, else 3.")
    save_async: bool = _is(
        True, "Continue training while a checkpoint is written from a copy of the state in host memory."
    )
    report_to: list[str] = _is([], f"Trackers: {', '.join(TRACKERS)}. Default: none.")  # noqa: RUF009
    run_name: str = _is("", "Name of the run in trackers; default: the run id.")
    wandb_project: str = _is("", "Project in W&B; default: the environment's WANDB_PROJECT, then cloudtrain.")
    wandb_entity: str = _is("", "Team or user in W&B; default: WANDB_ENTITY, then that of the key.")
    wandb_group: str = _is("", "Run group in W&B.")
    wandb_tags: list[str] = _is([], "Tags of the run in W&B.")  # noqa: RUF009
    sample_prompt: str = _is(
        "",
        "Prompt of the text that a language model generates at the end; in chat, a user's message. Without it "
        "a text is generated too, from no prompt; sample_tokens: 0 generates none.",
    )
    sample_prompts: list[str] = _is(  # noqa: RUF009
        [], "More prompts. All generated texts are in the table `samples`, also in W&B."
    )
    sample_tokens: int = _is(96, "Tokens of each generated text; 0: none.")

    # the hub
    push_to_hub: bool = _is(False, "Upload the model at the end; the token is in HF_TOKEN.")
    hub_model_id: str = _is("", "Repository to upload to: owner/name.")
    hub_private_repo: bool = _is(False, "Make that repository private when it is created.")

    def __post_init__(self) -> None:
        self.kind: type[Kind] = kind_of(self.task)  # of a class of the source, that class, once a node has loaded it

    @property
    def own_loss(self) -> bool:
        """Whether the loss needs the whole model and whole samples."""
        return self.own_task or self.kind.whole_loss

    @property
    def metrics(self) -> tuple[str, ...]:
        """The results of an evaluation, none where only the task knows them."""
        return () if self.own_task else self.kind.metric_names

    @property
    def own_task(self) -> bool:
        """Whether the task is a class of the job's source."""
        return ":" in self.task

    @property
    def writes(self) -> bool:
        """Whether what is learned is to write on."""
        return self.kind.writes

    @property
    def mixed_precision(self) -> str:
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "no"


A = TypeVar("A", bound=Arguments)


def parse(argv: Sequence[str], made: type[A] = Arguments) -> A:  # type: ignore[assignment]
    """Return the arguments of a command line; raises Misuse with every problem at once."""
    hints = get_type_hints(made)
    items = {item.name: item for item in fields(made)}
    parser = _Parser(
        prog="train.py",
        usage="train.py [--NAME VALUE ...]",
        description="Train a model with Hugging Face Accelerate. Names may be written with - too, as --learning-rate.",
        allow_abbrev=False,
    )
    group: Any = parser
    for name, item in items.items():
        group = parser.add_argument_group(SECTIONS[name]) if name in SECTIONS else group
        shape: dict[str, Any] = {bool: {"nargs": "?", "const": "true"}, list[str]: {"nargs": "*"}}.get(hints[name], {})
        group.add_argument(f"--{name}", dest=name, help=_help(item), metavar=_metavar(hints[name], item), **shape)
        if "_" in name:
            hidden = {"dest": name, "help": argparse.SUPPRESS, **shape}
            parser.add_argument(f"--{name.replace('_', '-')}", **hidden)
    known, strange = parser.parse_known_args(list(argv))
    problems = [_unknown(text, items) for text in strange if text.startswith("--")]
    loose = [text for text in strange if not text.startswith("--")]
    if loose and not problems:
        problems.append(f"{loose[0]!r} has no flag before it: write --NAME {loose[0]!r}")
    values: dict[str, Any] = {}
    for name, text in vars(known).items():
        if text is not None:
            try:
                values[name] = _read(hints[name], text)
            except ValueError:
                kind = {int: "a whole number", float: "a number", bool: "true or false"}[hints[name]]
                problems.append(f"--{name} takes {kind}, not {text!r}")
    arguments = made(**values)
    problems += contradictions(arguments, items)
    if problems:
        raise Misuse("\n".join(problems))
    return arguments


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Misuse(
            re.sub(r"^argument |(?<=\w)/--[\w-]+", "", message).replace(": expected one argument", " needs a value")
        )


def _help(item: Field[Any]) -> str:
    default: Any = item.default if item.default is not MISSING else ""
    said = "on" if default is True else default
    shown = f" (default {said})" if default not in ("", -1, -1.0, False) else ""
    choices = f" One of {', '.join(item.metadata['choices'])}." if item.metadata["choices"] else ""
    return f"{item.metadata['help']}{choices}{shown}".replace("%", "%%")


def _metavar(kind: Any, item: Field[Any]) -> str:
    return {bool: "true|false", int: "N", float: "X", list[str]: "TEXT"}.get(
        kind, "NAME" if item.metadata["choices"] else "TEXT"
    )


def _unknown(text: str, items: Sequence[str] | dict[str, Any]) -> str:
    name = text.removeprefix("--").partition("=")[0].replace("-", "_")
    near = difflib.get_close_matches(name, list(items), 1, 0.6)
    return f"--{name} is not a flag of the shared trainer" + (f"; did you mean --{near[0]}?" if near else "")


def _read(kind: Any, text: Any) -> Any:
    if kind is bool:
        if text.lower() not in TRUE | FALSE:
            raise ValueError(text)
        return text.lower() in TRUE
    if kind is int:
        return int(text) if text.lstrip("+-").isdigit() else _whole(text)
    return kind(text) if kind is float else list(text) if isinstance(text, list) else text


def _whole(text: str) -> int:
    """Return 1e6 or 8.0 as a whole number; raises ValueError for 1.5."""
    if not float(text).is_integer():
        raise ValueError(text)
    return int(float(text))


def parse_or_exit(argv: Sequence[str], parse: Callable[[Sequence[str]], A] = parse) -> A:  # type: ignore[assignment]
    """Return the arguments; ends with 2 and a sentence for each problem when they cannot be meant."""
    try:
        return parse(argv)
    except Misuse as error:
        for line in str(error).splitlines():
            print(f"train.py: {line}", file=sys.stderr)
        print("train.py: run `python train.py --help` to list the flags", file=sys.stderr)
        raise SystemExit(2) from None
