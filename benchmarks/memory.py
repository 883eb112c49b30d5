"""Memory of each rank by strategy: what the shared trainer holds in mid-training, above what its imports take.

    python benchmarks/memory.py

Two ranks on this machine's CPU (one for `none`), a Llama of 26 million parameters, fp32, AdamW. Read at the last optimiser
step, after the allocator has given back what is free: weights, gradients, optimizer state and activations.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import ROOT, report, table

STEPS, WIDTH, LAYERS = 4, 512, 8
STRATEGIES: dict[str, dict[str, Any]] = {
    "none": {},
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "fsdp": {"strategy": "fsdp"},
    "tp": {"tp_size": 2},
    "pp": {"pp_size": 2},
}
RANK = """
import ctypes, json, os, runpy, sys
sys.path.insert(0, os.environ["ENTRYPOINTS"])

def held():
    ctypes.CDLL(None).malloc_trim(0)
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

import accelerate, torch, transformers, torch.distributed.checkpoint.state_dict
from transformers import AutoModelForCausalLM, LlamaForCausalLM
if "zero" in os.environ["CLOUDTRAIN_PARALLELISM"]:
    import deepspeed
empty, count = held(), 0

def stepped(*_):
    global count
    count += 1
    if count == int(os.environ["STEPS"]):
        print("HELD", json.dumps(held() - empty), flush=True)

from torch.optim.optimizer import register_optimizer_step_post_hook
register_optimizer_step_post_hook(stepped)
runpy.run_path(os.environ["ENTRYPOINTS"] + "/train.py", run_name="__main__")
"""


def held(parallelism: dict[str, Any], world: int) -> list[int]:
    """Train a few steps and return what each rank held, in bytes."""
    argv = [
        "--dataset", "python-stdlib", "--max_train_bytes", "500000", "--tokenizer", "bpe:1024", "--hidden_size", str(WIDTH),
        "--num_hidden_layers", str(LAYERS), "--num_attention_heads", "8", "--block_size", "64",
        "--per_device_train_batch_size", "2", "--max_steps", str(STEPS), "--eval_on_start", "false",
        "--validation_split_percentage", "0",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as name, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        ranks = []
        for rank in range(world):
            env = os.environ | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
                "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
                "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "STEPS": str(STEPS),
                "CLOUDTRAIN_PARALLELISM": json.dumps(parallelism), "ENTRYPOINTS": str(ROOT / "entrypoints"),
                **{f"CLOUDTRAIN_{kind}_DIR": f"{name}/{kind}" for kind in ("CHECKPOINT", "OUTPUT", "MODEL")},
            }  # fmt: skip
            path = Path(name, f"{rank}.log")
            with path.open("w") as log:
                command = [sys.executable, "-c", RANK, *argv]
                ranks.append((subprocess.Popen(command, env=env, cwd=name, stdout=log, stderr=subprocess.STDOUT), path))
        codes = [process.wait(600) for process, _ in ranks]
        found = []
        for _, path in ranks:
            text = path.read_text(errors="replace")
            said = [line for line in text.splitlines() if line.startswith("HELD ")]
            if any(codes) or not said:
                sys.exit(f"{parallelism} did not come to its end ({codes}):\n{text[-3000:]}")
            found.append(int(said[-1].split()[1]))
    return found


def main() -> int:
    found = {name: held(said, 1 if name == "none" else 2) for name, said in STRATEGIES.items()}
    rows = [(name, len(ranks), " and ".join(f"{one / 1e6:,.0f}" for one in ranks)) for name, ranks in found.items()]
    body = table(rows, ["strategy", "ranks", "MB held by each rank in mid-training"])
    body += "\n\nNo gate on zero3: at this size DeepSpeed's buffers outweigh on a CPU what it spares."
    gates = [(f"{name}, of ddp's", max(found[name]) / max(found["ddp"]), 0.9) for name in ("zero2", "fsdp", "tp")]
    return report("memory", "Memory of a rank by strategy", body, gates)


if __name__ == "__main__":
    sys.exit(main())
