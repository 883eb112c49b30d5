"""nanoGPT's GPT-2 124M through the shared trainer, transformers.Trainer and a bare loop: tokens/s, MFU, memory, start.

    python benchmarks/gpu.py [--rounds 3] [--steps 50]          # on one GPU: bf16, torch.compile, flash attention
    python benchmarks/gpu.py --cpu [--json]                     # the same programs with a small model on one CPU core

Each contender is a process of its own, in turn, and reads the same tokens. A step is measured between two optimizer steps,
by a hook that torch calls after each one. The first round warms caches (tokens, compiled kernels) and does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import ROOT, report, table

ENTRYPOINTS = str(ROOT / "entrypoints")
WARM = 10  # steps before the clock starts; the first ones compile
SAVE_EVERY = 10  # steps, of the contender that saves
FAIR = 1 / 0.97  # of the fastest's time for a step
OURS, EAGER, SAVING, FSDP = "cloudtrain", "cloudtrain, not compiled", "cloudtrain, saving", "cloudtrain, fsdp"
TRAINER, BARE, BARE_EAGER = "Hugging Face Trainer", "bare torch loop", "bare torch loop, not compiled"


@dataclass(frozen=True)
class Setup:
    """Model and batch; the GPU's are those of nanoGPT's config/train_gpt2.py (github.com/karpathy/nanoGPT, 2026-11-25)."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    vocabulary: int = 50304
    block: int = 1024
    batch: int = 12
    backend: str = "inductor"
    cuda: bool = True


CPU = Setup(layers=2, heads=2, width=64, vocabulary=512, block=64, batch=4, backend="aot_eager", cuda=False)


class Clock:
    """Prints time to the first step, time of a step and peak memory when the last step is done, and ends the process."""

    def __init__(self, setup: Setup, steps: int) -> None:
        self.setup, self.steps, self.count = setup, steps, 0
        self.found: dict[str, float] = {}

    def now(self) -> tuple[float, float]:
        import torch

        if self.setup.cuda:
            torch.cuda.synchronize()
        return time.time(), time.process_time()

    def __call__(self, optimizer: Any, *_: object) -> None:
        self.count += 1
        if self.count not in (1, WARM, WARM + self.steps):
            return
        wall, cpu = self.now()
        if self.count == 1:
            self.found |= {"start_s": wall - float(os.environ["BENCH_BEGAN_S"]), "start_cpu_s": cpu}
            trained = [each for group in optimizer.param_groups for each in group["params"]]
            self.found["parameters"] = sum(each.numel() for each in trained)
        elif self.count == WARM:
            self.began = wall, cpu
        else:
            self.found |= {"step_s": (wall - self.began[0]) / self.steps}
            self.found |= {"step_cpu_s": (cpu - self.began[1]) / self.steps, "peak_bytes": self.peak_bytes()}
            print(f"FOUND {json.dumps(self.found)}", flush=True)
            os._exit(0)  # evaluation and saving are not compared

    def peak_bytes(self) -> int:
        """Return the most that torch allocated on the GPU, or that the process held on a CPU."""
        import resource

        import torch

        if self.setup.cuda:
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def prepare(folder: Path, setup: Setup, steps: int) -> None:
    """Write the tokenizer, the text for ours, and the same tokens for the others."""
    import numpy as np
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<end>": 0, **{f"w{number}": number for number in range(1, setup.vocabulary)}}
    bare = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<end>", unk_token="<end>").save_pretrained(
        folder / "tokenizer"
    )
    size = (WARM + steps + 2) * setup.batch * setup.block
    tokens = np.random.default_rng(0).integers(1, setup.vocabulary, size, dtype=np.int64)
    (folder / "text.txt").write_text(" ".join(f"w{number}" for number in tokens))
    np.save(folder / "tokens.npy", tokens.reshape(-1, setup.block))


def samples(folder: Path) -> Any:
    """Return the dataset of the others: blocks of a file that is memory-mapped."""
    import numpy as np
    import torch

    blocks = np.load(folder / "tokens.npy", mmap_mode="r")

    class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return len(blocks)

        def __getitem__(self, index: int) -> dict[str, Any]:
            row = torch.from_numpy(np.array(blocks[index]))
            return {"input_ids": row, "labels": row}

    return Samples()


def config(setup: Setup) -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=setup.vocabulary, n_positions=setup.block, n_embd=setup.width, n_layer=setup.layers,
        n_head=setup.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        use_cache=False,
    )  # fmt: skip


def model(setup: Setup) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config(setup), attn_implementation="sdpa")


def bare(setup: Setup, folder: Path, steps: int, compiled: bool = True) -> None:
    import torch

    device = "cuda" if setup.cuda else "cpu"
    net = model(setup).to(device).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=6e-4, fused=True)
    if compiled:
        net.compile(backend=setup.backend)
    batches = torch.utils.data.DataLoader(samples(folder), setup.batch, shuffle=True, pin_memory=setup.cuda)
    for batch in batches:
        batch = {name: each.to(device, non_blocking=True) for name, each in batch.items()}
        with torch.autocast(device, torch.bfloat16):
            loss = net(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def trainer(setup: Setup, folder: Path, steps: int) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), per_device_train_batch_size=setup.batch, max_steps=WARM + steps,
        learning_rate=6e-4, logging_steps=10, save_strategy="no", report_to="none", use_cpu=not setup.cuda, bf16=True,
        torch_compile=True, torch_compile_backend=setup.backend, disable_tqdm=True,
    )  # fmt: skip
    Trainer(model=model(setup), args=arguments, train_dataset=samples(folder)).train()


def ours(
    setup: Setup, folder: Path, steps: int, compiled: bool = True, strategy: str = "none", saves: bool = False
) -> None:
    import runpy

    sys.argv = [
        "train.py", "--dataset", str(folder / "text.txt"), "--tokenizer", str(folder / "tokenizer"),
        "--token_cache", str(folder / "cache"), "--validation_split_percentage", "0", "--eval_on_start", "false",
        "--model_type", "gpt2", "--dropout", "0", "--hidden_size", str(setup.width),
        "--num_hidden_layers", str(setup.layers), "--num_attention_heads", str(setup.heads),
        "--block_size", str(setup.block), "--per_device_train_batch_size", str(setup.batch), "--bf16",
        "--max_steps", str(WARM + steps), "--learning_rate", "6e-4", "--logging_steps", "10",
        "--save_steps", str(SAVE_EVERY if saves else 10**6), "--save_total_limit", "1",
        *(["--torch_compile", "--torch_compile_backend", setup.backend] if compiled else []),
    ]  # fmt: skip
    os.environ["CLOUDTRAIN_PARALLELISM"] = json.dumps({"strategy": strategy})
    if strategy != "none":  # a process group of one rank, as the launcher makes it
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {f"CLOUDTRAIN_{name}_DIR": str(folder / name) for name in ("CHECKPOINT", "OUTPUT", "MODEL")}
    sys.path.insert(0, ENTRYPOINTS)
    runpy.run_path(f"{ENTRYPOINTS}/train.py", run_name="__main__")


CONTENDERS: dict[str, Callable[[Setup, Path, int], None]] = {
    OURS: ours,
    EAGER: lambda *given: ours(*given, compiled=False),
    SAVING: lambda *given: ours(*given, saves=True),
    FSDP: lambda *given: ours(*given, compiled=False, strategy="fsdp"),
    TRAINER: trainer,
    BARE: bare,
    BARE_EAGER: lambda *given: bare(*given, compiled=False),
}


def contend(name: str, setup: Setup, folder: Path, steps: int) -> None:
    """Train as one contender; the clock ends the process."""
    from contextlib import nullcontext

    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(Clock(setup, steps))
    # On a GPU nothing but flash attention is allowed: another kernel would make the figures incomparable.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if setup.cuda else nullcontext():
        if setup.cuda:
            torch.set_float32_matmul_precision("high")
        CONTENDERS[name](setup, folder, steps)
    sys.exit("the training ended before the clock")


def measured(name: str, setup: Setup, folder: Path, steps: int) -> dict[str, float]:
    """Run a contender in a process of its own; return what its clock printed."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        for shared in ("tokenizer", "text.txt", "tokens.npy", "cache"):
            (folder / "cache").mkdir(exist_ok=True)
            Path(work, shared).symlink_to(folder / shared)
        env = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "BENCH_BEGAN_S": str(time.time())}
        if not setup.cuda:
            env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
        argv = [sys.executable, __file__, "--only", name, "--folder", work, "--steps", str(steps)]
        argv += [] if setup.cuda else ["--cpu"]
        done = subprocess.run(argv, env=env, cwd=work, text=True, capture_output=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    if not lines:
        sys.exit(f"{name} ended with exit code {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    return json.loads(lines[-1].removeprefix("FOUND "))  # type: ignore[no-any-return]


def mfu(setup: Setup, step_s: float) -> float | None:
    """Return the share of the GPU's peak; None on a CPU and on a GPU that trainer/peaks.py does not know."""
    sys.path.insert(0, ENTRYPOINTS)
    import torch
    from trainer import mfu as formula
    from trainer.peaks import peak

    if not setup.cuda or not (most := peak(torch.cuda.get_device_name(), "bf16")):
        return None
    with torch.device("meta"):
        work = formula.work(model(setup), setup.block)
    assert work is not None
    tokens = setup.batch * setup.block
    return formula.Use(work, most).share(tokens, tokens * setup.block, step_s)


def forecast_bytes(setup: Setup) -> int:
    """Return what `cloudtrain fit` computes for the contender that is not compiled."""
    from cloudtrain.forecast.memory import Step, estimate
    from cloudtrain.forecast.models import from_config

    shape = from_config(config(setup).to_dict())
    assert not isinstance(shape, str), shape
    return estimate(shape, Step(setup.batch, setup.block, precision="bf16")).total


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--cpu", action="store_true", help="a small model on one CPU core")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON and keep no result")
    parser.add_argument("--only", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path.remove(str(Path(__file__).parent))  # packaging.py here is not the library of that name
    setup, steps = CPU if arguments.cpu else Setup(), arguments.steps
    if arguments.only:
        contend(arguments.only, setup, arguments.folder, steps)
    import torch

    if setup.cuda and not torch.cuda.is_available():
        sys.exit("torch finds no GPU here; --cpu runs the same programs on a CPU")
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), setup, steps)
        for number in range(arguments.rounds + 1):
            for contender in CONTENDERS:
                figures = measured(contender, setup, Path(name), steps)
                if number or not arguments.rounds:  # with --rounds 0 the first one counts
                    rounds[contender].append(figures)
    found = {
        name: {key: statistics.median(each[key] for each in figures) for key in figures[0]}
        for name, figures in rounds.items()
    }
    for figures in found.values():
        figures["tokens_per_s"] = setup.batch * setup.block / figures["step_s"]
        if (share := mfu(setup, figures["step_s"])) is not None:
            figures["mfu"] = share
    cost_s = (found[SAVING]["step_s"] - found[OURS]["step_s"]) * SAVE_EVERY
    forecast = forecast_bytes(setup)
    if arguments.json:
        with torch.device("meta"):
            parameters = sum(each.numel() for each in model(setup).parameters())
        printed = {"contenders": found, "checkpoint_s": cost_s, "forecast_bytes": forecast, "parameters": parameters}
        print(json.dumps(printed))
        return 0
    return report_rounds(setup, rounds, found, cost_s, forecast)


def report_rounds(
    setup: Setup,
    rounds: dict[str, list[dict[str, float]]],
    found: dict[str, dict[str, float]],
    cost_s: float,
    forecast: int,
) -> int:
    """Print and keep the tables and the gates; return 1 where a gate fails."""
    import torch

    device = torch.cuda.get_device_name() if setup.cuda else "CPU"
    clock = "step_s" if setup.cuda else "step_cpu_s"  # on a shared CPU the time of the process says more
    start = "start_s" if setup.cuda else "start_cpu_s"

    def ratios(key: str, others: tuple[str, ...]) -> float:
        """Return the median over rounds of our time over the least of the others' in that round."""
        return statistics.median(
            mine[key] / min(rounds[other][number][key] for other in others) for number, mine in enumerate(rounds[OURS])
        )

    rows = [
        (
            name, f"{each['tokens_per_s']:,.0f}", f"{each['step_s']:.4f}", f"{each['step_cpu_s']:.4f}",
            f"{each['mfu']:.1%}" if "mfu" in each else "", f"{each['peak_bytes'] / 1e6:,.0f}",
            f"{each['start_s']:.1f}", f"{each['start_cpu_s']:.1f}",
        )
        for name, each in found.items()
    ]  # fmt: skip
    head = [
        "",
        "tokens/s",
        "wall s a step",
        "CPU s a step",
        "MFU",
        "peak MB",
        "wall s to the first step",
        "CPU s to it",
    ]
    body = f"{device}, torch {torch.__version__}, bf16, {setup}.\n\n{table(rows, head)}\n\n"
    body += f"Medians of {len(rounds[OURS])} rounds, interleaved. A checkpoint costs {cost_s:.3f} s of training."
    if setup.cuda:
        most = found[EAGER]["peak_bytes"]
        body += f" Forecast {forecast / 1e6:,.0f} MB, allocated {most / 1e6:,.0f} MB: {forecast / most:.2f}."
    gates = [
        ("time of a step, of the fastest's", ratios(clock, (TRAINER, BARE)), FAIR),
        ("start to the first step, of Trainer's", ratios(start, (TRAINER,)), 1.0),
    ]
    title = "GPT-2 through the shared trainer, transformers.Trainer and a bare loop"
    return report("gpu" if setup.cuda else "gpu_cpu", title, body, gates)


if __name__ == "__main__":
    sys.exit(main())
