"""The trainer's arguments: TrainingArguments' names, booleans in both forms, every problem at once."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from tests.entrypoints.training import ENTRYPOINTS

from trainer.arguments import Arguments, Misuse, parse  # isort: skip


@pytest.mark.parametrize(
    "argv, value",
    [
        (["--bf16"], True),
        (["--bf16", "true"], True),
        (["--bf16=false"], False),
        (["--bf16", "False"], False),
        ([], False),
    ],
)
def test_booleans_stand_alone_or_with_a_value(argv: list[str], value: bool):
    assert parse(argv).bf16 is value
    assert parse([*argv, "--max_steps", "3"]).max_steps == 3


def test_a_boolean_before_another_flag_takes_nothing_of_it():
    found = parse(["--bf16", "--dataset", "a", "b c", "--sample_prompt=-x", "--learning-rate", "3e-4"])
    assert (found.bf16, found.dataset, found.sample_prompt, found.learning_rate) == (True, ["a", "b c"], "-x", 3e-4)


@pytest.mark.parametrize("text, value", [("7", 7), ("1e6", 1_000_000), ("8.0", 8), ("-1", -1)])
def test_whole_numbers(text: str, value: int):
    assert parse(["--max_train_bytes", text]).max_train_bytes == value


def test_all_problems_are_told_at_once():
    with pytest.raises(Misuse) as caught:
        parse(shlex.split("--learnin_rate 1 --bf16 maybe --max_steps 1.5 --lr_scheduler_type cosin --logging_steps 0"))
    told = str(caught.value).splitlines()
    assert told[0] == "--learnin_rate is not a flag of the shared trainer; did you mean --learning_rate?"
    assert "--bf16 takes true or false, not 'maybe'" in told
    assert "--max_steps takes a whole number, not '1.5'" in told
    assert any(line.startswith("--lr_scheduler_type is one of linear, cosine") for line in told)
    assert "--logging_steps must be at least 1" in told
    assert len(told) == 5


@pytest.mark.parametrize(
    "argv, sentence",
    [
        ("word", "'word' has no flag before it: write --NAME 'word'"),
        ("--learning_rate", "--learning_rate needs a value"),
        ("--bf16 --fp16", "cannot be combined"),
        ("--global_batch_size 8 --global_batch_tokens 8", "cannot be combined"),
        ("--global_batch_size 8 --gradient_accumulation_steps 2", "is computed from the global batch"),
        ("--global_batch_tokens 8 --task chat", "needs samples of equal length, but samples of chat differ in length"),
        ("--streaming", "--streaming needs --max_steps"),
        (
            "--streaming --max_steps 3 --task chat",
            "--streaming works with the task causal-lm, and with classes that stream, not with chat",
        ),
        ("--streaming --max_steps 3 --dataloader_num_workers 1", "combined with --dataloader_num_workers"),
        ("--streaming --max_steps 3 --max_train_bytes 9", "ends at --max_steps only"),
        ("--streaming --max_steps 3 --eval_strategy epoch", "has no epochs"),
        ("--use_peft", "--use_peft adapts a pretrained model"),
        ("--use_peft --model gpt2 --lora_r 0", "--lora_r must be at least 1"),
        ("--merge_adapter", "--merge_adapter needs --use_peft"),
        ("--attn_implementation flash_attention_2", "flash_attention_2 needs --bf16 or --fp16"),
        ("--dtype bf16", "--dtype is one of float32, bfloat16, float16, not 'bf16'"),
        ("--dtype float16", "--dtype float16 needs --use_peft"),
        ("--dtype float16 --use_peft --model gpt2 --bf16", "--bf16 and --dtype float16 cannot be combined"),
        ("--dtype bfloat16 --fp16", "--fp16 and --dtype bfloat16 cannot be combined"),
        ("--dtype bfloat16 --task a.b:C", "--dtype works with the built-in tasks only"),
        ("--load_best_model_at_end", "needs --eval_strategy"),
        ("--early_stopping_patience 2", "needs --eval_strategy"),
        ("--early_stopping_patience 0 --eval_strategy steps", "--early_stopping_patience must be at least 1"),
        ("--metric_for_best_model accuracy", "one of loss, perplexity for causal-lm, not 'accuracy'"),
        ("--wandb_project p", "--wandb_project needs --report_to wandb"),
        ("--wandb_tags a b --report_to tensorboard", "--wandb_tags needs --report_to wandb"),
        ("--task classify", "--task is one of causal-lm, chat, sequence-classification, dpo, or module:Class"),
        ("--task_args a=1", "--task_args works with your own task only, not with causal-lm"),
        ("--task a.b:C --task_args a", "--task_args takes name=value, not 'a'"),
        ("--task dpo --dpo_beta 0", "--dpo_beta must be above 0"),
        ("--optim sgd", "--optim is one of adamw_torch_fused, adamw_torch"),
        ("--report_to wandbb", "--report_to takes"),
        ("--push_to_hub", "needs --hub_model_id"),
        ("--num_train_epochs 0", "--num_train_epochs must be above 0"),
        ("--validation_split_percentage 100", "between 0 and 100"),
        ("--max_steps 0", "--max_steps must be at least 1, or -1"),
        ("--lr 3", "--lr is not a flag"),
        ("--learning_rate nan_", "takes a number"),
    ],
)
def test_what_cannot_be_meant(argv: str, sentence: str):
    with pytest.raises(Misuse, match=sentence):
        parse(argv.split())


@pytest.mark.parametrize(
    "argv",
    ["--dtype bfloat16 --bf16", "--dtype float16 --use_peft --model gpt2 --fp16",
     "--dtype bfloat16 --attn_implementation flash_attention_2"],
)  # fmt: skip
def test_data_types_that_go_together(argv: str):
    assert parse(argv.split()).dtype in ("bfloat16", "float16")


def test_names_and_meanings_are_those_of_training_arguments():
    """Every name that transformers' class has too is read as the same type; a few that are ours are known here."""
    from dataclasses import fields

    from transformers import TrainingArguments

    theirs = {item.name for item in fields(TrainingArguments)}
    ours = {item.name for item in fields(Arguments)}
    shared = ours & theirs
    assert shared >= set(
        shlex.split(
            "learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm num_train_epochs max_steps "
            "lr_scheduler_type warmup_steps per_device_train_batch_size per_device_eval_batch_size bf16 fp16 seed "
            "gradient_accumulation_steps logging_steps logging_first_step eval_strategy eval_steps eval_on_start "
            "save_steps save_total_limit report_to run_name push_to_hub hub_model_id hub_private_repo "
            "gradient_checkpointing dataloader_num_workers dataloader_drop_last"
        )
    )
    defaults = {item.name: item.default for item in fields(TrainingArguments)}
    for name in shlex.split(
        "learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm num_train_epochs max_steps seed "
        "per_device_train_batch_size gradient_accumulation_steps"
    ):
        assert getattr(Arguments(), name) == defaults[name], name


def test_help_names_every_flag():
    done = subprocess.run(
        [sys.executable, str(ENTRYPOINTS / "train.py"), "--help"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0
    assert "--per_device_train_batch_size" in done.stdout and "(default 5e-05)" in done.stdout
