"""Command line arguments of the shared trainer, named as in transformers' TrainingArguments where one exists.

Parsed without torch or transformers, so that a misspelt flag is reported at once. A flag may be written with - or _, a
boolean alone (`--bf16`) or with a value (`--bf16 false`).
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, NoReturn, get_type_hints

TRUE, FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}
SCHEDULES = (
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
)  # fmt: skip
TASKS = ("causal-lm", "chat", "sequence-classification")
OPTIMIZERS = ("adamw_torch_fused", "adamw_torch")
METRICS = ("loss", "accuracy")
TRACKERS = ("none", "all", "tensorboard", "wandb", "mlflow", "comet_ml", "trackio")


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
        [], "As --dataset, for evaluation. Default: the input `validation`, else a part of the documents is held out."
    )
    dataset_config: str = _is("", "Configuration of a hub dataset.")
    dataset_split: str = _is("train", "Split of a hub dataset.")
    validation_split_percentage: float = _is(5.0, "Documents (or rows) held out where there is no --eval_dataset.")
    text_column: str = _is("text", "Column of the text in jsonl, csv, parquet and hub datasets.")
    messages_column: str = _is(
        "messages", "Column of the conversations for chat: lists of role and content; else prompt and completion are."
    )
    label_column: str = _is("label", "Column of the label for sequence classification.")
    block_size: int = _is(512, "Tokens of a training sample, or the most of them in classification.")
    max_train_bytes: int = _is(-1, "Text read for training, in bytes.")
    max_train_samples: int = _is(-1, "Training samples: blocks of a language model, rows in classification.")
    max_eval_samples: int = _is(-1, "Samples of an evaluation.")
    streaming: bool = _is(False, "Read the texts as they come and keep none; needs --max_steps.")
    dataloader_num_workers: int = _is(0, "Processes that prepare batches, beside each rank.")
    dataloader_drop_last: bool = _is(False, "Leave out the last incomplete batch of an epoch.")

    # model
    task: str = _is("causal-lm", "What is learned.", TASKS)
    chat_template_path: str = _is("", "File with a chat template (Jinja). Default: the tokenizer's.")
    assistant_only_loss: bool = _is(
        True, "In chat, compute the loss on the assistant's tokens only; off: on every token."
    )
    model: str = _is(
        "", "Hub name, folder or input:NAME of a pretrained model. Left out: from scratch, as --model_type says."
    )
    tokenizer: str = _is("", "Hub name, folder, input:NAME, or bpe:4096 to train one. Default: the model's, bpe:4096.")
    model_type: str = _is("llama", "Architecture from scratch: llama, qwen2, gpt2, bert or any that transformers has.")
    hidden_size: int = _is(256, "Width, from scratch.")
    intermediate_size: int = _is(-1, "Size of the feed-forward layers, from scratch; -1: the architecture's default.")
    num_hidden_layers: int = _is(4, "Layers, from scratch.")
    num_attention_heads: int = _is(4, "Attention heads, from scratch.")
    num_key_value_heads: int = _is(-1, "Key and value heads, from scratch; -1: as many as attention heads.")
    tie_word_embeddings: bool = _is(True, "One matrix for input and output embeddings, from scratch.")
    dropout: float = _is(-1.0, "Every dropout that the architecture has; -1: as its configuration says.")
    attn_implementation: str = _is("sdpa", "Attention: sdpa, eager, flash_attention_2.")
    gradient_checkpointing: bool = _is(False, "Compute activations again instead of keeping them.")
    torch_compile: bool = _is(False, "Compile the model.")
    torch_compile_backend: str = _is("inductor", "Compiler: inductor, aot_eager, ...")
    torch_compile_mode: str = _is("", "Its mode: reduce-overhead, max-autotune, ...")
    use_peft: bool = _is(False, "Train a LoRA adapter, the pretrained model stays as it is.")
    lora_r: int = _is(16, "Rank of the adapter.")
    lora_alpha: int = _is(32, "What the adapter is scaled by, over its rank.")
    lora_dropout: float = _is(0.05, "Dropout before the adapter.")
    lora_target_modules: list[str] = _is(  # noqa: RUF009
        [], "Modules that get one: q_proj v_proj, or all-linear. Default: as peft has it for the architecture."
    )
    merge_adapter: bool = _is(False, "Save the whole model with the adapter merged into it, not the adapter.")

    # optimisation
    optim: str = _is("adamw_torch_fused", "AdamW in one kernel, or step by step.", OPTIMIZERS)
    learning_rate: float = _is(5e-5, "Peak learning rate of AdamW.")
    weight_decay: float = _is(0.0, "Of matrices; biases and norms have none.")
    adam_beta1: float = _is(0.9, "AdamW's beta1.")
    adam_beta2: float = _is(0.999, "AdamW's beta2.")
    adam_epsilon: float = _is(1e-8, "AdamW's epsilon.")
    max_grad_norm: float = _is(1.0, "Norm to which gradients are clipped; 0: not at all.")
    num_train_epochs: float = _is(3.0, "Passes over the data.")
    max_steps: int = _is(-1, "Optimiser steps; overrides --num_train_epochs.")
    lr_scheduler_type: str = _is("linear", "Shape of the learning rate.", SCHEDULES)
    warmup_steps: float = _is(0.0, "Steps of warm-up; below 1 a share of all steps.")
    warmup_ratio: float = _is(0.0, "Share of all steps that are warm-up, where --warmup_steps is 0.")
    per_device_train_batch_size: int = _is(8, "Samples of one rank in one forward pass.")
    per_device_eval_batch_size: int = _is(8, "Samples of one rank in one forward pass of an evaluation.")
    gradient_accumulation_steps: int = _is(1, "Forward passes for one optimiser step.")
    global_batch_size: int = _is(
        -1, "Samples of all ranks in one optimiser step; --gradient_accumulation_steps follows from it."
    )
    global_batch_tokens: int = _is(-1, "The same in tokens, for blocks of --block_size.")
    bf16: bool = _is(False, "Mixed precision with bfloat16.")
    fp16: bool = _is(False, "Mixed precision with float16 (GPU only).")
    seed: int = _is(42, "Of the model's first weights, the order of samples, dropout.")

    # evaluation, logging, checkpoints
    eval_strategy: str = _is(
        "no", "Evaluations during training; one at the end there is anyhow.", ["no", "steps", "epoch"]
    )
    eval_steps: int = _is(-1, "Steps between evaluations; -1: as --logging_steps.")
    load_best_model_at_end: bool = _is(False, "Go back to the best evaluation's checkpoint, which is kept.")
    metric_for_best_model: str = _is("loss", "What is best: loss, or accuracy in classification.", METRICS)
    early_stopping_patience: int = _is(-1, "End after so many evaluations in a row that were no better.")
    early_stopping_threshold: float = _is(0.0, "How much better counts as better for that.")
    eval_on_start: bool = _is(True, "Evaluate before the first step.")
    logging_steps: int = _is(10, "Steps between lines of progress.")
    logging_first_step: bool = _is(True, "A line for the first step too.")
    save_steps: int = _is(-1, "Steps between checkpoints; -1: as the job's `checkpoint.every` says.")
    save_total_limit: int = _is(-1, "Checkpoints that are kept; -1: as the job's `checkpoint.keep` says.")
    save_async: bool = _is(
        True, "Train on while a checkpoint is written, from a copy of the state in the host's memory."
    )
    report_to: list[str] = _is([], f"Trackers: {', '.join(TRACKERS)}.")  # noqa: RUF009
    run_name: str = _is("", "Name of the run in trackers; default: the run id.")
    sample_prompt: str = _is("", "Beginning of the sample that a language model writes at the end.")
    sample_tokens: int = _is(96, "Length of that sample; 0: none.")

    # the hub
    push_to_hub: bool = _is(False, "Upload the model at the end; the token is in HF_TOKEN.")
    hub_model_id: str = _is("", "Repository to upload to: owner/name.")
    hub_private_repo: bool = _is(False, "Make that repository private when it is created.")

    @property
    def writes(self) -> bool:
        """Whether what is learned is to write on."""
        return self.task != "sequence-classification"

    @property
    def mixed_precision(self) -> str:
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "no"


def parse(argv: Sequence[str]) -> Arguments:
    """Return the arguments of a command line; raises Misuse with every problem at once."""
    hints = get_type_hints(Arguments)
    items = {item.name: item for item in fields(Arguments)}
    parser = _Parser(prog="train.py", description="Train a model with Hugging Face Accelerate.", allow_abbrev=False)
    for name, item in items.items():
        shape: dict[str, Any] = {bool: {"nargs": "?", "const": "true"}, list[str]: {"nargs": "*"}}.get(hints[name], {})
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*spellings, dest=name, help=_help(item), **shape)
    known, strange = parser.parse_known_args(list(argv))
    problems = [_unknown(text, items) for text in strange if text.startswith("--")]
    loose = [text for text in strange if not text.startswith("--")]
    if loose and not problems:
        problems.append(f"{loose[0]!r} belongs to no flag")
    values: dict[str, Any] = {}
    for name, text in vars(known).items():
        if text is not None:
            try:
                values[name] = _read(hints[name], text)
            except ValueError:
                kind = {int: "a whole number", float: "a number", bool: "true or false"}[hints[name]]
                problems.append(f"--{name} takes {kind}, not {text!r}")
    arguments = Arguments(**values)
    problems += _contradictions(arguments, items)
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
    shown = f" (default {default})" if default not in ("", -1, -1.0, False) else ""
    return f"{item.metadata['help']}{shown}".replace("%", "%%")


def _unknown(text: str, items: Sequence[str] | dict[str, Any]) -> str:
    name = text.removeprefix("--").partition("=")[0].replace("-", "_")
    near = difflib.get_close_matches(name, list(items), 1, 0.6)
    return f"--{name} is no flag of the shared trainer" + (f"; did you mean --{near[0]}?" if near else "")


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


def _contradictions(arguments: Arguments, items: dict[str, Field[Any]]) -> list[str]:
    problems = []
    for name, item in items.items():
        value, choices = getattr(arguments, name), item.metadata["choices"]
        if choices and value not in choices:
            problems.append(f"--{name} is one of {', '.join(choices)}, not {value!r}")
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
                 "logging_steps", "block_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):  # fmt: skip
        if getattr(arguments, name) < 1:
            problems.append(f"--{name} is at least 1")
    for name in ("save_steps", "save_total_limit", "eval_steps", "max_steps", "global_batch_size",
                 "global_batch_tokens", "early_stopping_patience"):  # fmt: skip
        if getattr(arguments, name) == 0 or getattr(arguments, name) < -1:
            problems.append(f"--{name} is at least 1, or -1")
    if arguments.max_steps < 0 and arguments.num_train_epochs <= 0:
        problems.append("--num_train_epochs is above 0")
    if not 0 <= arguments.validation_split_percentage < 100:
        problems.append("--validation_split_percentage lies between 0 and 100")
    if arguments.bf16 and arguments.fp16:
        problems.append("--bf16 and --fp16 exclude each other")
    problems += [sentence for wrong, sentence in _pairs(arguments) if wrong]
    problems += [
        f"--report_to knows {', '.join(TRACKERS)}, not {name!r}" for name in arguments.report_to if name not in TRACKERS
    ]
    if arguments.push_to_hub and not arguments.hub_model_id:
        problems.append("--push_to_hub needs --hub_model_id owner/name")
    return problems


def _pairs(arguments: Arguments) -> list[tuple[bool, str]]:
    """Return what does not go together, and whether it is asked for."""
    sizes = (arguments.global_batch_size, arguments.global_batch_tokens)
    blocks, silent = arguments.task == "causal-lm", arguments.eval_strategy == "no"
    stream = arguments.streaming
    return [
        (min(sizes) > 0, "--global_batch_size and --global_batch_tokens exclude each other"),
        (
            max(sizes) > 0 and arguments.gradient_accumulation_steps > 1,
            "--gradient_accumulation_steps follows from the global batch: leave one of them out",
        ),
        (
            sizes[1] > 0 and not blocks,
            f"--global_batch_tokens is for blocks, samples of {arguments.task} differ in length",
        ),
        (stream and not blocks, f"--streaming is for causal-lm, not for {arguments.task}"),
        (stream and arguments.max_steps < 0, "--streaming needs --max_steps: the length of a stream is not known"),
        (stream and arguments.dataloader_num_workers > 0, "--streaming reads in the rank: no --dataloader_num_workers"),
        (
            stream and max(arguments.max_train_samples, arguments.max_train_bytes) >= 0,
            "--streaming is bounded by --max_steps alone: no --max_train_samples, no --max_train_bytes",
        ),
        (stream and arguments.eval_strategy == "epoch", "--streaming knows no epochs: write --eval_strategy steps"),
        (arguments.use_peft and not arguments.model, "--use_peft adapts a pretrained model: name it with --model"),
        (arguments.use_peft and arguments.lora_r < 1, "--lora_r is at least 1"),
        (arguments.merge_adapter and not arguments.use_peft, "--merge_adapter needs --use_peft"),
        (
            arguments.attn_implementation.startswith("flash") and arguments.mixed_precision == "no",
            f"--attn_implementation {arguments.attn_implementation} needs --bf16 or --fp16",
        ),
        (arguments.load_best_model_at_end and silent, "--load_best_model_at_end needs --eval_strategy steps or epoch"),
        (
            arguments.early_stopping_patience > 0 and silent,
            "--early_stopping_patience needs --eval_strategy steps or epoch",
        ),
        (
            arguments.metric_for_best_model == "accuracy" and arguments.writes,
            f"--metric_for_best_model accuracy is for classification, not for {arguments.task}",
        ),
    ]


def parse_or_exit(argv: Sequence[str]) -> Arguments:
    """Return the arguments; ends with 2 and a sentence for each problem when they cannot be meant."""
    try:
        return parse(argv)
    except Misuse as error:
        for line in str(error).splitlines():
            print(f"train.py: {line}", file=sys.stderr)
        print("train.py: the flags are listed by `python train.py --help`", file=sys.stderr)
        raise SystemExit(2) from None
