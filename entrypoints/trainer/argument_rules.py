"""Rules between the shared trainer's arguments: ranges of values, and what does not go together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any

from .kinds import BUILT_IN, TASK_ARGUMENTS

TRACKERS = ("none", "all", "tensorboard", "wandb", "mlflow", "comet_ml", "trackio")


def contradictions(arguments: Any, items: Mapping[str, Field[Any]]) -> list[str]:
    """Return a sentence for each value, or pair of values, that the trainer does not take."""
    problems = []
    for name, item in items.items():
        value, choices = getattr(arguments, name), item.metadata["choices"]
        if choices and value not in choices:
            problems.append(f"--{name} is one of {', '.join(choices)}, not {value!r}")
    problems += _task(arguments)
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
                 "logging_steps", "block_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):  # fmt: skip
        if getattr(arguments, name) < 1:
            problems.append(f"--{name} must be at least 1")
    for name in ("save_steps", "save_total_limit", "eval_steps", "max_steps", "global_batch_size",
                 "global_batch_tokens", "early_stopping_patience"):  # fmt: skip
        if getattr(arguments, name) == 0 or getattr(arguments, name) < -1:
            problems.append(f"--{name} must be at least 1, or -1")
    if arguments.max_steps < 0 and arguments.num_train_epochs <= 0:
        problems.append("--num_train_epochs must be above 0")
    if not 0 <= arguments.validation_split_percentage < 100:
        problems.append("--validation_split_percentage must be between 0 and 100")
    if arguments.bf16 and arguments.fp16:
        problems.append("--bf16 and --fp16 cannot be combined")
    problems += [sentence for wrong, sentence in _pairs(arguments) if wrong]
    problems += _trackers(arguments)
    if arguments.push_to_hub and not arguments.hub_model_id:
        problems.append("--push_to_hub needs --hub_model_id owner/name")
    return problems


def _trackers(arguments: Any) -> list[str]:
    given = [name for name in ("project", "entity", "group", "tags") if getattr(arguments, f"wandb_{name}")]
    problems = [
        f"--report_to takes {', '.join(TRACKERS)}, not {name!r}" for name in arguments.report_to if name not in TRACKERS
    ]
    if given and not {"wandb", "all"} & set(arguments.report_to):
        problems.append(f"--wandb_{given[0]} needs --report_to wandb")
    return problems


def _task(arguments: Any) -> list[str]:
    named = re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", arguments.task)
    problems = []
    if arguments.task not in BUILT_IN and not named:
        problems.append(
            f"--task is one of {', '.join(BUILT_IN)}, or module:Class of the source, not {arguments.task!r}"
        )
    problems += [
        f"--task_args takes name=value, not {pair!r}"
        for pair in arguments.task_args
        if not re.match(r"[^\W\d]\w*=", pair)
    ]
    if arguments.task_args and not arguments.own_task:
        problems.append(f"--task_args works with your own task only, not with {arguments.task}")
    if not arguments.own_task:  # of a class of the source the node says it
        problems += task_problems(arguments)
    if arguments.dpo_beta <= 0:
        problems.append("--dpo_beta must be above 0")
    return problems


def task_problems(arguments: Any) -> list[str]:
    """Return a sentence for each argument that the task does not take; `arguments.kind` is that of the task."""
    task, kind = arguments.task, arguments.kind
    problems = []
    if arguments.global_batch_tokens > 0 and not kind.equal_lengths:
        problems.append(f"--global_batch_tokens needs samples of equal length, but samples of {task} differ in length")
    if arguments.streaming and not kind.streams:
        names = ", ".join(name for name, each in BUILT_IN.items() if each.kind.streams)
        problems.append(f"--streaming works with the task {names}, and with classes that stream, not with {task}")
    if arguments.metrics and arguments.metric_for_best_model not in arguments.metrics:
        problems.append(
            f"--metric_for_best_model is one of {', '.join(arguments.metrics)} for {task}, "
            f"not {arguments.metric_for_best_model!r}"
        )
    defaults = {item.name: item.default for item in fields(arguments) if item.name in TASK_ARGUMENTS}
    for name in TASK_ARGUMENTS:
        given = getattr(arguments, name) not in (defaults[name], [])
        if given and kind.own_arguments is not None and name not in kind.own_arguments:
            readers = ", ".join(task for task, each in BUILT_IN.items() if name in (each.kind.own_arguments or ()))
            problems.append(f"--{name} has no effect with the task {task}, only with {readers}: remove --{name}")
    return problems


def _pairs(arguments: Any) -> list[tuple[bool, str]]:
    """Return what does not go together, and whether it is asked for."""
    sizes = (arguments.global_batch_size, arguments.global_batch_tokens)
    stream, silent = arguments.streaming, arguments.eval_strategy == "no"
    return [
        (min(sizes) > 0, "--global_batch_size and --global_batch_tokens cannot be combined"),
        (
            max(sizes) > 0 and arguments.gradient_accumulation_steps > 1,
            "--gradient_accumulation_steps is computed from the global batch: remove one of the two",
        ),
        (stream and arguments.max_steps < 0, "--streaming needs --max_steps: the length of a stream is unknown"),
        (
            stream and arguments.dataloader_num_workers > 0,
            "--streaming cannot be combined with --dataloader_num_workers",
        ),
        (
            stream and max(arguments.max_train_samples, arguments.max_train_bytes) >= 0,
            "--streaming ends at --max_steps only: remove --max_train_samples and --max_train_bytes",
        ),
        (arguments.shuffle_buffer_size < 0, "--shuffle_buffer_size must be at least 0"),
        (stream and arguments.eval_strategy == "epoch", "--streaming has no epochs: use --eval_strategy steps"),
        (
            arguments.use_peft and not (arguments.model or arguments.own_task),
            "--use_peft adapts a pretrained model: set --model",
        ),
        (arguments.use_peft and arguments.lora_r < 1, "--lora_r must be at least 1"),
        (arguments.merge_adapter and not arguments.use_peft, "--merge_adapter needs --use_peft"),
        (
            arguments.attn_implementation.startswith("flash")
            and arguments.mixed_precision == "no"
            and arguments.dtype == "float32",
            f"--attn_implementation {arguments.attn_implementation} needs --bf16 or --fp16",
        ),
        (
            {arguments.mixed_precision, arguments.dtype} in ({"bf16", "float16"}, {"fp16", "bfloat16"}),
            f"--{arguments.mixed_precision} and --dtype {arguments.dtype} cannot be combined",
        ),
        (
            arguments.dtype == "float16" and not arguments.use_peft,
            "--dtype float16 needs --use_peft: weights are trained in float32 or bfloat16",
        ),
        (
            arguments.own_task and arguments.dtype != "float32",
            f"--dtype works with the built-in tasks only: return a model in {arguments.dtype} from the model() of your task",
        ),
        (arguments.load_best_model_at_end and silent, "--load_best_model_at_end needs --eval_strategy steps or epoch"),
        (
            arguments.early_stopping_patience > 0 and silent,
            "--early_stopping_patience needs --eval_strategy steps or epoch",
        ),
    ]
