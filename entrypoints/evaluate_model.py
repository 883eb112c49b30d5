"""Evaluate a model that a run has trained: its loss on a file, tasks of lm-evaluation-harness, samples.

`cloudtrain eval RUN` submits it. By hand, on a folder that `save_pretrained` has written:

    python evaluate_model.py --model out/model --data test.jsonl --prompt "Once upon a time"
    python evaluate_model.py --model out/model --tasks arc_easy hellaswag

Ends with 0, with 78 and one sentence when it cannot evaluate, 2 for flags that cannot be meant.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent / "path"))  # where it is started by hand

import cloudtrain_runtime as runtime
from trainer.errors import Unsupported, exit_when_unsupported

MOST = 50  # results of one event
DTYPES = ("float32", "bfloat16", "float16")


def main() -> int:
    arguments = parser().parse_args()
    runtime.install()
    with exit_when_unsupported("evaluate_model.py"):
        return evaluate(arguments)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="evaluate_model.py", description="Evaluate a trained model.", allow_abbrev=False
    )
    made.add_argument("--model", default="input:model", help="folder of the model, or input:NAME of the job")
    made.add_argument(
        "--base", default="", help="base model of an adapter; default: the one that the adapter's config names"
    )
    made.add_argument("--checkpoints", default="", help="folder of the run's checkpoints, each of which is evaluated")
    made.add_argument("--step", type=int, default=-1, help="training step at which the model was saved")
    made.add_argument("--data", default="", help="file of texts, conversations or labelled texts")
    made.add_argument("--name", default="", help="name of the data in the results; default: the file's name")
    made.add_argument("--tasks", nargs="*", default=[], help="tasks of lm-evaluation-harness")
    made.add_argument("--include_path", default="", help="folder with YAML files of tasks")
    made.add_argument("--prompt", nargs="*", default=[], help="prompts that the model continues")
    made.add_argument("--task", default="", help="task of the training; chat: the prompts are users' messages")
    made.add_argument("--sample_tokens", type=int, default=64, help="number of tokens to generate for each prompt")
    made.add_argument("--limit", type=int, default=-1, help="use only the first N samples of the data and of each task")
    made.add_argument("--batch_size", type=int, default=8, help="batch size of a forward pass")
    made.add_argument("--block_size", type=int, default=512, help="maximum length of a sample, in tokens")
    made.add_argument("--text_column", default="text", help="column of the text")
    made.add_argument("--messages_column", default="messages", help="column of conversations")
    made.add_argument("--label_column", default="label", help="column of the label")
    made.add_argument("--dtype", default="float32", choices=DTYPES, help="type of the weights")
    return made


def evaluate(arguments: argparse.Namespace) -> int:
    """Evaluate the model, and the checkpoints where they are given; return the exit code."""
    import torch
    from trainer import saved
    from trainer.data.documents import located
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    context = runtime.context()
    folder = Path(located(arguments.model, context.inputs))
    base = located(arguments.base, context.inputs)
    dtype = getattr(torch, arguments.dtype)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = []
    if arguments.checkpoints:
        found = saved.find_checkpoints(Path(located(arguments.checkpoints, context.inputs)))
    model = saved.load(folder, base, dtype, device)
    size = sum(parameter.numel() for parameter in model.model.parameters())
    print(f"model: {type(model.model).__name__}, {size:,} parameters, {dtype} on {device.type}", flush=True)
    run = _Run(arguments, model)
    others = [checkpoint for checkpoint in found if checkpoint.step != arguments.step]  # it has the run's model
    for checkpoint, each in saved.checkpoints_with_models(others, model, base, dtype, device):
        run.report(checkpoint.step, checkpoint.path.name, each, False)
    if others:
        model = saved.load(folder, base, dtype, device)  # its weights were replaced
    step = f", step {arguments.step}" if arguments.step >= 0 else ""
    run.report(max(arguments.step, 0), f"the run's model{step}", model, True)
    return 0


class _Run:
    """Evaluates one model after the other in the same way."""

    def __init__(self, arguments: argparse.Namespace, saved: Any) -> None:
        from trainer import scoring

        self.arguments, self.task, self.data = arguments, None, ""
        self.reading = scoring.Reading(
            arguments.text_column,
            arguments.messages_column,
            arguments.label_column,
            arguments.block_size,
            arguments.batch_size,
            arguments.limit,
        )
        if arguments.data:
            path = Path(located_data(arguments.data))
            self.task = scoring.prepare(path, saved, self.reading)
            self.data = arguments.name or path.stem
            print(f"data: {self.data}, {len(self.task.train):,} samples", flush=True)

    def report(self, step: int, what: str, saved: Any, final: bool) -> None:
        """Evaluate one model, print its results and emit them for a step of the evaluated run."""
        from trainer import generate, harness, scoring
        from trainer.kinds import kind_of

        given, results = self.arguments, {}
        if self.task is not None:
            scores = scoring.score(self.task, saved, given.batch_size)
            results |= {f"{self.data}/{name}": value for name, value in scores.items()}
        if given.tasks:
            results |= harness.run_tasks(saved, given.tasks, given.include_path, given.limit, given.batch_size)
        if given.prompt and saved.classifies:
            raise Unsupported("--prompt needs a language model, this one is a classifier of texts")
        print(f"{what}:" + "".join(f"  {name} {value:.6g}" for name, value in results.items()), flush=True)
        named = {f"eval/{name}": value for name, value in results.items()}
        for at in range(0, len(named), MOST):
            values = dict(list(named.items())[at : at + MOST])
            runtime.emit("evaluation", step=step, final=final, values=values)
        chat = kind_of(given.task).chats and saved.tokenizer.chat_template is not None
        rows = [
            {"prompt": text, "text": generate.sample(saved.model, saved.tokenizer, text, given.sample_tokens, 42, chat)}
            for text in given.prompt
        ]
        for row in rows:
            print("sample:\n" + "\n".join(f"    {line}" for line in row["text"].splitlines()), flush=True)
        if rows:
            runtime.log_table("samples", rows, step=step)


def located_data(name: str) -> str:
    """Return the path of the data; of an input that is a folder with one file in it, that file."""
    from trainer.data.documents import located

    path = located(name, runtime.context().inputs)
    inside = os.listdir(path) if os.path.isdir(path) else []
    return os.path.join(path, inside[0]) if len(inside) == 1 else path


if __name__ == "__main__":
    sys.exit(main())
