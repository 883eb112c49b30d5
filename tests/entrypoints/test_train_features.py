"""What people expect of a trainer, run as a whole: each test fails where its feature does nothing."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path

import pytest

from tests.entrypoints.training import TINY, Trainer, texts, train

pytestmark = pytest.mark.train

BASE = ["--logging_steps", "1", "--sample_tokens", "0", "--learning_rate", "5e-3", "--block_size", "16"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that was trained before, with its tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    train(folder / "run", [*TINY, "--dataset", str(texts(folder / "texts")), "--max_steps", "20"])
    return folder


def test_chat_learns_answers_not_questions(tmp_path: Path):
    """Answers are always the same, questions are noise: a loss near nothing says that answers alone are learned."""
    draw = random.Random(5)
    rows = []
    for _ in range(60):
        question = "".join(draw.choices("abcdefgh ", k=20))
        rows.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "yes sir"}]})
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    args = [*TINY, "--task", "chat", "--dataset", str(tmp_path / "chats.jsonl"), "--block_size", "64"]
    args += shlex.split("--max_steps 40 --learning_rate 1e-2 --lr_scheduler_type constant --logging_steps 40")
    args += ["--sample_prompt", "ab c"]
    done = train(tmp_path / "run", [*args, "--per_device_train_batch_size", "4"], 2)
    assert "sample:\n    ab c\n    yes sir\n" in done.output(), "the sample is the answer, through the chat template"
    everything = train(tmp_path / "all", [*args, "--assistant_only_loss", "false"])
    assert done.held_out()[40] < 0.5 < 1.2 < everything.held_out()[40]
    assert "57 conversations, " in done.output() and " tokens are learned, 3 held out" in done.output()

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    shown = tokenizer.apply_chat_template(rows[0]["messages"][:1], tokenize=False, add_generation_prompt=True)
    assert shown.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"


def test_it_ends_early_and_goes_back_to_the_best(tmp_path: Path, base: Path):
    """A rate that grows without end: the first evaluation stays the best, its checkpoint is kept, its weights are the model."""
    args = [*BASE, "--model", str(base / "run" / "model"), "--dataset", str(base / "texts"), "--max_steps", "40"]
    args += shlex.split(
        "--learning_rate 200 --warmup_steps 1000 --max_grad_norm 0 --eval_strategy steps --eval_steps 2"
    )
    args += shlex.split("--load_best_model_at_end --early_stopping_patience 3 --save_steps 1 --save_total_limit 2")
    done = train(tmp_path / "run", args, 2)
    held = done.held_out()
    best = min((step for step in held if step), key=lambda step: held[step])
    end = max(done.losses())
    assert best == 2 and end == 8, held
    assert "3 evaluations in a row without improvement: stopping at step 8/40" in done.output()
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert kept == ["step-00000002.a1", "step-00000007.a1", "step-00000008.a1"]
    evaluations = [row["eval_loss"] for row in done.events("metric") if "eval_loss" in row]
    assert evaluations[-1] == evaluations[1] < evaluations[-2], "evaluated at its end, and again after going back"

    again = train(tmp_path / "run", args, 2, attempt=2)
    assert again.losses() == {} and "loaded the checkpoint with the best evaluation, step-00000002.a2" in again.output()


def test_a_stream_is_the_same_on_two_ranks_and_after_a_kill(tmp_path: Path):
    folder = texts(tmp_path / "texts", files=3, words=100)
    args = [
        *TINY,
        "--dataset",
        str(folder),
        "--streaming",
        "--eval_dataset",
        str(folder / "text1.txt"),
        "--max_steps",
        "30",
    ]
    args += ["--per_device_train_batch_size", "2", "--global_batch_size", "8", "--lr_scheduler_type", "constant"]
    args += ["--eval_strategy", "steps", "--eval_steps", "10"]
    one = train(tmp_path / "one", args)
    env = {"CLOUDTRAIN_CHECKPOINT_EVERY_STEPS": "7", "CLOUDTRAIN_CHECKPOINT_KEEP": "9"}
    two = train(tmp_path / "two", args, 2, **env)
    assert two.losses() == pytest.approx(one.losses(), abs=1e-5) and len(one.losses()) == 30
    assert two.held_out() == pytest.approx(one.held_out(), abs=1e-5)
    epochs = [row["epoch"] for row in two.events("metric") if "epoch" in row]
    assert epochs[0] == 0 and epochs[-1] >= 1, "the stream begins again where it ends"
    for step in (28, 30):
        (tmp_path / "two" / "checkpoints" / f"step-{step:08d}.a1" / "COMPLETE").unlink()
    resumed = train(tmp_path / "two", args, 2, attempt=2, **env)
    assert resumed.losses() == {step: loss for step, loss in two.losses().items() if step > 21}


def test_compiled_and_with_activations_computed_again_the_losses_are_the_same(tmp_path: Path):
    args = [*TINY, "--dataset", str(texts(tmp_path / "texts")), "--max_steps", "4", "--num_hidden_layers", "1"]
    args += ["--validation_split_percentage", "0"]
    compiled = train(tmp_path / "compiled", [*args, "--torch_compile", "--torch_compile_backend", "aot_eager"])
    again = train(tmp_path / "again", [*args, "--gradient_checkpointing", "--optim", "adamw_torch"])
    assert compiled.losses() == pytest.approx(again.losses(), abs=1e-4) and len(again.losses()) == 4
    compilation = "model compiled by torch.compile with aot_eager: "
    [graphs] = [line for line in compiled.output().splitlines() if line.startswith(compilation)]
    assert int(graphs.split()[-2]) >= 1
    assert "sample:" in compiled.output()


REFUSED = {
    "flash": ("--attn_implementation flash_attention_2 --bf16", "flash_attention_2 needs a GPU; on cpu use sdpa"),
    "held out": ("--streaming --max_steps 3 --eval_strategy steps", "with --streaming no documents are held out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_the_first_step(tmp_path: Path, case: str):
    more, sentence = REFUSED[case]
    args = [*TINY, "--dataset", str(texts(tmp_path / "texts")), *shlex.split(more)]
    with Trainer(tmp_path / "run", args) as refused:
        assert refused.codes() == [78], refused.output()
    [line] = [line for line in refused.output().splitlines() if line.startswith("train.py: ")]
    assert sentence in line and not refused.losses()
