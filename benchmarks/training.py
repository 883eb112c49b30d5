"""Tokens per second of the shared trainer, beside a bare torch loop, the Hugging Face Trainer and accelerate's own loop.

    python benchmarks/training.py [--rounds 7] [--steps 40]

One process, one thread, the same small Llama, batch, clipping and fused AdamW; each contender in a process of its own,
in turn. Measured is what lies between two optimiser steps in mid-training, by one hook that torch calls after every
step of any optimiser: the contenders' code is as they have it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import ROOT, interleaved, report, spread, table

BATCH, BLOCK, VOCABULARY, WIDTH, LAYERS = 8, 128, 1024, 256, 4
WARM = 10  # steps before the clock runs
FAIR = 1 / 0.97  # of the fastest's time for a step


class Clock:
    """Notes wall and CPU time after step WARM and after the last one."""

    def __init__(self, steps: int) -> None:
        self.steps, self.count = steps, 0
        self.marks: list[tuple[float, float]] = []

    def __call__(self, *_: object) -> None:
        import time

        self.count += 1
        if self.count in (WARM, WARM + self.steps):
            self.marks.append((time.perf_counter(), time.process_time()))
        if self.count == WARM + self.steps:
            (wall, cpu), (later, more) = self.marks
            print(json.dumps({"wall": (later - wall) / self.steps, "cpu": (more - cpu) / self.steps}), flush=True)
            os._exit(0)  # what follows (evaluation, saving) is not compared


def model() -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama", vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=4, intermediate_size=64 * round(WIDTH * 8 / 3 / 64), max_position_embeddings=BLOCK,
        tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def samples(steps: int) -> list[dict[str, Any]]:
    import torch

    ids = torch.randint(VOCABULARY, ((WARM + steps + 2) * BATCH, BLOCK), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def bare(steps: int) -> None:
    import torch

    net = model().train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    for batch in torch.utils.data.DataLoader(samples(steps), BATCH, shuffle=True):
        net(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def accelerate_loop(steps: int) -> None:
    """As accelerate's examples/nlp_example.py does it; clipping added, since the others clip."""
    import torch
    from accelerate import Accelerator
    from transformers import get_linear_schedule_with_warmup

    accelerator = Accelerator(cpu=True)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, WARM + steps + 2)
    batches = torch.utils.data.DataLoader(samples(steps), BATCH, shuffle=True)
    net, optimizer, batches, schedule = accelerator.prepare(net, optimizer, batches, schedule)
    net.train()
    for batch in batches:
        loss = net(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def trainer(steps: int) -> None:
    from transformers import Trainer, TrainingArguments

    told = TrainingArguments(
        output_dir=os.environ["TMPDIR"], per_device_train_batch_size=BATCH, max_steps=WARM + steps, learning_rate=1e-3,
        logging_steps=10, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    Trainer(model=model(), args=told, train_dataset=samples(steps)).train()


def ours(steps: int) -> None:
    import runpy

    folder = Path(os.environ["TMPDIR"])
    sys.argv = [
        "train.py", "--dataset", "python-stdlib", "--max_train_bytes", "2000000", "--tokenizer", f"bpe:{VOCABULARY}",
        "--hidden_size", str(WIDTH), "--num_hidden_layers", str(LAYERS), "--num_attention_heads", "4",
        "--block_size", str(BLOCK), "--per_device_train_batch_size", str(BATCH), "--max_steps", str(WARM + steps),
        "--learning_rate", "1e-3", "--logging_steps", "10", "--eval_on_start", "false",
        "--validation_split_percentage", "0",
    ]  # fmt: skip
    os.environ |= {f"CLOUDTRAIN_{name}_DIR": str(folder / name) for name in ("CHECKPOINT", "OUTPUT", "MODEL")}
    sys.path.insert(0, str(ROOT / "entrypoints"))
    runpy.run_path(str(ROOT / "entrypoints" / "train.py"), run_name="__main__")


CONTENDERS = {
    "cloudtrain": ours,
    "bare torch loop": bare,
    "accelerate's example loop": accelerate_loop,
    "Hugging Face Trainer": trainer,
}


def measured(name: str, steps: int) -> Any:
    """Run one contender in a process of its own and return its times of a step."""
    from measure import Sample

    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {
            "TMPDIR": folder, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
            "ACCELERATE_USE_CPU": "true", "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, __file__, "--only", name, "--steps", str(steps)], env=env, cwd=folder, text=True,
            capture_output=True,
        )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"wall"')]
    if not lines:
        sys.exit(f"{name} did not come to its end:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    found = json.loads(lines[-1])
    return Sample(found["wall"], found["cpu"])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", choices=CONTENDERS, help="train as this one and print its times")
    arguments = parser.parse_args()
    if arguments.only:
        sys.path.remove(str(Path(__file__).parent))  # packaging.py here is not the library of that name
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(Clock(arguments.steps))
        CONTENDERS[arguments.only](arguments.steps)
        return 1  # the clock ends the process; here it has not
    found = interleaved(
        {name: lambda name=name: measured(name, arguments.steps) for name in CONTENDERS}, arguments.rounds, warm=0
    )
    tokens = BATCH * BLOCK
    rows = [
        (
            name,
            f"{tokens / statistics.median(one.wall for one in times):,.0f}",
            spread(times, "wall"),
            f"{tokens / statistics.median(one.cpu for one in times):,.0f}",
            spread(times, "cpu"),
        )
        for name, times in found.items()
    ]
    body = table(
        rows,
        ["", "tokens/s", "wall s a step: median (min to max)", "tokens/CPU s", "CPU s a step: median (min to max)"],
    )
    body += (
        f"\n\n{arguments.rounds} rounds, interleaved, {arguments.steps} steps each after {WARM}; {BATCH} x {BLOCK} tokens "
        f"a step, Llama {WIDTH} x {LAYERS}, fp32, one process, one thread. The gate is on the median over rounds of our CPU "
        "time over the least of that round's others: neighbours on the machine move it little."
    )
    ratios = [
        mine.cpu / min(found[name][number].cpu for name in CONTENDERS if name != "cloudtrain")
        for number, mine in enumerate(found["cloudtrain"])
    ]
    body += f" Ratios: {min(ratios):.3f} to {max(ratios):.3f}."
    gates = [("time of a step, of the fastest's", statistics.median(ratios), FAIR)]
    return report("training", "Training, beside plain torch, accelerate and transformers", body, gates)


if __name__ == "__main__":
    sys.exit(main())
