"""A script of the Trainer or of TRL as people write them, with one line of ours; it is killed after a step on request.

resumed.py KIND TRAINING_ARGUMENTS...   KIND: classification, lm, sft, dpo, grpo
"""

import copy
import functools
import json
import math
import os
import signal
import sys

import cloudtrain_runtime
import torch
import transformers
from transformers import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments

FIRST = os.environ["CLOUDTRAIN_ATTEMPT"] == "1"
KILL_AFTER, DROPOUT = int(os.environ.get("KILL_AFTER", 0)), float(os.environ.get("DROPOUT", 0))
SAMPLES = int(os.environ.get("SAMPLES", 22))
WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(61))]


class Killer(TrainerCallback):
    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        if FIRST and state.global_step == KILL_AFTER:
            ours(self.trainer).wait()  # for the save before this step
            if "ASK" not in os.environ:
                os.kill(os.getpid(), signal.SIGKILL)
            elif os.environ["ASK"] == os.environ["RANK"]:
                os.kill(os.getpid(), signal.SIGTERM)


def ours(trainer):
    from cloudtrain_trainer import TrainerCheckpoints

    return next(each for each in trainer.callback_handler.callbacks if isinstance(each, TrainerCheckpoints))


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def sentence(seed, length):
    return " ".join(WORDS[3 + (seed * seed + 5 * k + seed * k) % 61] for k in range(length))


def llama():
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, attention_dropout=DROPOUT, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip


def variety(completions, **kwargs):
    """The reward of a completion: how far its words are from one another."""
    return [sum(WORDS.index(word) * place for place, word in enumerate(text.split(), 1)) / 100 for text in completions]


def trainer_of(kind, args):
    arguments = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1, "learning_rate": 1e-2}
    if kind in ("classification", "lm"):
        (given,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(args)
        for name, value in arguments.items():
            setattr(given, name, value)
        rows = [{"input_ids": [3 + (n * n + 7 * k * (n + 1)) % 61 for k in range(6)]} for n in range(SAMPLES)]
        if kind == "lm":
            return Trainer(llama(), given, train_dataset=[{**row, "labels": row["input_ids"]} for row in rows])
        model = transformers.BertForSequenceClassification(
            transformers.BertConfig(
                vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                num_labels=3, hidden_dropout_prob=DROPOUT, attention_probs_dropout_prob=DROPOUT,
            )
        )  # fmt: skip
        return Trainer(model, given, train_dataset=[{**row, "labels": n % 3} for n, row in enumerate(rows)])
    import datasets
    import trl

    if kind == "sft":
        (given,) = HfArgumentParser(trl.SFTConfig).parse_args_into_dataclasses([*args, "--bf16", "false"])
        rows = [{"text": sentence(n, 4 + n % 5)} for n in range(SAMPLES)]
        trainer = trl.SFTTrainer
    elif kind == "grpo":
        more = ["--bf16", "false", "--num_generations", "2", "--max_completion_length", "5"]
        (given,) = HfArgumentParser(trl.GRPOConfig).parse_args_into_dataclasses([*args, *more])
        rows = [{"prompt": sentence(n, 3)} for n in range(12)]  # four a step
        trainer = functools.partial(trl.GRPOTrainer, reward_funcs=variety)
    else:
        (given,) = HfArgumentParser(trl.DPOConfig).parse_args_into_dataclasses([*args, "--bf16", "false"])
        rows = [
            {"prompt": sentence(n, 3), "chosen": " " + sentence(n + 1, 2 + n % 3), "rejected": " " + sentence(n + 9, 3)}
            for n in range(SAMPLES)
        ]
        trainer = trl.DPOTrainer
    for name, value in arguments.items():
        setattr(given, name, value)
    model, data = llama(), datasets.Dataset.from_list(rows)
    more = {"ref_model": copy.deepcopy(model)} if kind == "dpo" else {}  # else it is loaded by the model's name
    return trainer(model, args=given, train_dataset=data, processing_class=tokenizer(), **more)


def main():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    trainer = trainer_of(sys.argv[1], sys.argv[2:])
    if "CLOUDTRAIN_CHECKPOINT_ENGINE" not in os.environ:
        cloudtrain_runtime.TrainerCheckpoints(trainer)
    trainer.add_callback(Killer(trainer))
    trainer.train()
    if trainer.is_world_process_zero():
        losses = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
        weights = [value.double().sum().item() for value in trainer.model.state_dict().values()]
        sampler = ours(trainer).sampler  # GRPO has its own
        epoch = sampler.epoch if sampler else math.ceil(trainer.state.epoch) - 1
        with open(os.path.join(os.environ["CLOUDTRAIN_OUTPUT_DIR"], "result.json"), "w") as file:
            json.dump({"losses": losses, "weights": weights, "epoch": epoch}, file)


if __name__ == "__main__":
    main()
