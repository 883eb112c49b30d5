"""Host memory of a rank while it loads its shard, and at the save: a Llama of 1 billion parameters, 8 ranks on CPUs, gloo.

    python benchmarks/model_start.py [--layers 16] [--ranks 8] [--only zero3] [--only fsdp]

Read from safetensors in bfloat16, and drawn from scratch: with fsdp, zero3, a pipeline, LoRA and a task of the source that
builds on the meta device. Measured is the anonymous memory (RssAnon) of each process from before the model is built until it
is sharded, above that after the imports and the process group, every 2 ms. Weights are kept in float32, as mixed precision
needs them; DeepSpeed, and LoRA with `dtype: bfloat16`, keep them in bfloat16. What DeepSpeed's engine then adds for training
(master weights, gradients) is not measured. Needs about 12 GB of memory.

Of the models read from files, except zero3's whole one, the save is measured too: what it adds at most, above the shard.
A whole model takes 4 GB of disk, an adapter 10 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from measure import HERE, ROOT, hardware, table

WIDTH, INNER, VOCABULARY = 2048, 5632, 32_000
RESULTS = HERE / "results" / "model_start.json"  # with `--only`, the other cases' figures stay
READ, DRAWN = "read from safetensors", "drawn"
CASES = [
    ("fsdp", READ), ("fsdp", DRAWN), ("zero3", READ), ("zero3", DRAWN), ("pp", READ), ("pp", DRAWN), ("fsdp, LoRA", READ),
    ("fsdp, LoRA, bfloat16", READ), ("zero3, LoRA", READ), ("fsdp, own task", READ), ("fsdp, own task", DRAWN),
]  # fmt: skip


def worker(folder: Path, layers: int, case: tuple[str, str]) -> None:
    sys.path[:0] = [str(ROOT / "entrypoints"), str(ROOT / "tests" / "entrypoints" / "trainer")]
    os.environ["CLOUDTRAIN_CHECKPOINT_DIR"] = str(folder)
    import torch
    import torch.distributed as dist
    from starting import Peak, Words, write_model
    from trainer import lora, meta_device, publish, strategies
    from trainer import model as models
    from trainer.arguments import Arguments
    from trainer.data.tasks import Task
    from trainer.strategies import mesh

    class Sized(Words):
        def __len__(self) -> int:
            return VOCABULARY

    kind, source = case
    ranks = int(os.environ["WORLD_SIZE"])
    plan = mesh.choose_plan({"pp_size": ranks} if kind == "pp" else {"strategy": kind.partition(",")[0]}, ranks)
    sizes = {"hidden_size": WIDTH, "num_attention_heads": 16, "intermediate_size": INNER, "block_size": 2048}
    arguments = Arguments(**sizes, num_hidden_layers=layers, per_device_train_batch_size=ranks, bf16=True)
    strategy = strategies.build_strategy(plan, arguments)
    strategy.task = Task(Sized(), None, None, None)  # type: ignore[arg-type]
    rank = dist.get_rank()
    # What is imported is not to be counted.
    first = models.outline(Arguments(hidden_size=32, num_hidden_layers=1, num_attention_heads=4), Sized(), [])
    if source == READ and rank == 0:
        write_model(folder, models.outline(arguments, Sized(), []), torch.bfloat16)
    if "LoRA" in kind:
        lora.adapted(first, Arguments(use_peft=True))
    del first
    dist.barrier()
    if source == READ:
        arguments.model = str(folder)
    arguments.use_peft = "LoRA" in kind
    if "bfloat16" in kind:
        arguments.dtype = "bfloat16"
    peak = Peak()
    peak.start()
    if "own" in kind:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(
            "llama", vocab_size=VOCABULARY, hidden_size=WIDTH, num_attention_heads=16, intermediate_size=INNER,
            num_hidden_layers=layers, tie_word_embeddings=True,
        )  # fmt: skip

        def build() -> Any:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(config)

        model: Any = meta_device.outlined(build(), build, 42, arguments.model)
    else:
        model = models.outline(arguments, Sized(), [])
    largest = max(each.numel() for each in model.parameters()) * 4
    count = sum(each.numel() for each in model.parameters())
    if kind == "zero3":
        from trainer import weights

        strategy._load_shards(model, weights.take(model), lambda each: models.optimizer(each, arguments))  # type: ignore[attr-defined]
    else:
        strategy.prepare(model, lambda each: models.optimizer(each, arguments))
    most = peak.stop()
    parameters = (model if kind == "zero3" else strategy.model).parameters()
    held = [getattr(each, "ds_tensor", each) for each in parameters]
    held = [each.to_local() if hasattr(each, "to_local") else each for each in held]
    shard = sum(each.numel() * each.element_size() for each in held)
    mine = {"peak": most, "shard": shard, "tensor": largest, "parameters": count, "imports": peak.first, "save": 0}
    if source == READ and kind != "zero3":
        saving = Peak()
        saving.start()
        publish.save_in_parts(strategy.bare, strategy.tensors, None, folder / "model", 1, lambda: None)
        mine["save"] = shard + saving.stop()
    found: list[dict[str, int]] = [{} for _ in range(ranks)]
    dist.all_gather_object(found, mine)
    if rank == 0:
        print("FOUND", json.dumps({"case": f"{kind}, {source}", "ranks": found}), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def started(case: tuple[str, str], layers: int, ranks: int) -> dict[str, Any]:
    """Let ranks load a model in processes of their own, and return what each of them found."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [__file__, "--worker", folder, "--layers", str(layers), "--case", *case]
        env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=folder)
    cases = [json.loads(text) for text in re.findall(r"^FOUND (.*)$", done.stdout, re.MULTILINE)]
    if done.returncode or not cases:
        sys.exit(f"the ranks did not come to their end:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    return cases[0]  # type: ignore[no-any-return]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--only", action="append", default=[], help="the cases whose name begins so")
    arguments = parser.parse_args()
    if arguments.worker:
        sys.path.remove(str(Path(__file__).parent))  # packaging.py here is not the library of that name
        worker(arguments.worker, arguments.layers, arguments.case)
    cases = [
        started(case, arguments.layers, arguments.ranks)
        for case in CASES
        if case[0].startswith(tuple(arguments.only or [""]))
    ]
    kept = {case["case"]: case for case in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
    measured = f"{datetime.now(UTC):%Y-%m-%d}, {hardware()}"
    kept |= {case["case"]: summary(case["ranks"]) | {"case": case["case"], "measured": measured} for case in cases}
    names = [f"{kind}, {source}" for kind, source in CASES]
    ordered = [kept[name] for name in names if name in kept]
    RESULTS.write_text(json.dumps(ordered, indent=2) + "\n")
    RESULTS.with_suffix(".md").write_text(page(ordered))
    print(page(ordered))
    return int(any(max(case["peak"], case["save"]) > limit(case) for case in ordered))


def limit(rank: dict[str, Any]) -> float:
    """Return how much memory a rank may take, in bytes."""
    return float(1.3 * rank["shard"] + rank["tensor"])


def summary(ranks: list[dict[str, int]]) -> dict[str, Any]:
    """Return the figures of the rank whose peak comes nearest to its limit, and the save of the one that comes nearest."""
    most = max(ranks, key=lambda each: each["peak"] / limit(each))
    return most | {"ranks": len(ranks), "save": max(ranks, key=lambda each: each["save"] / limit(each))["save"]}


def page(cases: list[dict[str, Any]]) -> str:
    """Return the results as a page."""
    head = ["", "parameters", "ranks", "shard, MB", "largest tensor, MB", "peak, MB", "at save, MB",
            "1.3 x shard + tensor, MB", "highest, of that", "imports, MB", "measured"]  # fmt: skip
    machines = list(dict.fromkeys(case["measured"] for case in cases))
    rows = []
    for case in cases:
        most = limit(case)
        sizes = [f"{value / 1e6:,.0f}" for value in (case["shard"], case["tensor"], case["peak"])]
        saved = f"{case['save'] / 1e6:,.0f}" if case["save"] else "-"
        share = max(case["peak"], case["save"]) / most
        rows.append((case["case"], f"{case['parameters']:,}", case["ranks"], *sizes, saved, f"{most / 1e6:,.0f}",
                     f"{share:.3f}{'' if share <= 1 else ' MISSED'}", f"{case['imports'] / 1e6:,.0f}",
                     machines.index(case["measured"]) + 1))  # fmt: skip
    lines = [
        "# Host memory while a rank loads its shard, and at save",
        "",
        table(rows, head),
        "",
        "Of each row that rank is shown whose peak comes nearest to its limit. The largest tensor is counted in float32.",
        "",
        *(f"{number}. {each}" for number, each in enumerate(machines, 1)),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
