"""Host memory of a rank while it loads its shard: a Llama of 1 billion parameters, 8 ranks on CPUs with gloo, fsdp and bf16.

    python benchmarks/model_start.py [--layers 18] [--ranks 8]

Read from safetensors in bfloat16, and drawn from scratch. Measured is the anonymous memory (RssAnon) of each process from
before the model is built until FSDP has sharded it, above that after the imports and the process group, every 2 ms. Weights
are kept in float32, as mixed precision needs them. Needs about 12 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import ROOT, report, table

WIDTH, INNER, VOCABULARY = 2048, 5632, 32_000
READ, DRAWN = CASES = ("read from safetensors", "drawn")


def worker(folder: Path, layers: int, case: str) -> None:
    sys.path[:0] = [str(ROOT / "entrypoints"), str(ROOT / "tests" / "entrypoints" / "trainer")]
    import torch
    import torch.distributed as dist
    from starting import Peak, start
    from trainer import model as models
    from trainer import tensor_files
    from trainer.arguments import Arguments
    from trainer.strategies import fsdp, mesh

    class Words:
        bos_token_id = eos_token_id = pad_token_id = 1

        def __len__(self) -> int:
            return VOCABULARY

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    plan = mesh.ParallelismPlan("fsdp", shard=ranks)
    fsdp.mesh_of(plan, torch.device("cpu"))
    sizes = {"hidden_size": WIDTH, "num_attention_heads": 16, "intermediate_size": INNER, "block_size": 2048}
    drawn = Arguments(**sizes, num_hidden_layers=layers)
    models.outline(Arguments(hidden_size=32, num_hidden_layers=1, num_attention_heads=4), Words(), [])
    if rank == 0 and case == READ:
        model = models.outline(drawn, Words(), [])
        weights = model.initial_weights
        formats, wholes = {}, {}
        for name, parameter in model.named_parameters():
            formats[name] = tensor_files.TensorFormat(tuple(parameter.shape), torch.bfloat16)
            wholes[name] = tuple(slice(0, size) for size in parameter.shape)
        like = dict(model.named_parameters())
        tensors = ((name, weights.part(name, like[name], wholes[name]).bfloat16()) for name in formats)
        tensor_files.write(folder, formats, tensors)
        model.config.save_pretrained(folder)
        del model, weights, like, tensors
    dist.barrier()
    arguments = Arguments(**sizes, model=str(folder)) if case == READ else drawn
    peak = Peak()
    peak.start()
    model = models.outline(arguments, Words(), [])
    start(model, plan)
    most = peak.stop()
    shard = sum(each.to_local().numel() * each.element_size() for each in model.parameters())
    largest = max(each.numel() * each.element_size() for each in model.parameters())
    count = sum(each.numel() for each in model.parameters())
    mine = {"peak": most, "shard": shard, "tensor": largest, "parameters": count, "imports": peak.first}
    found: list[dict[str, int]] = [{} for _ in range(ranks)]
    dist.all_gather_object(found, mine)
    if rank == 0:
        print("FOUND", json.dumps({"case": case, "ranks": found}), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def started(case: str, layers: int, ranks: int) -> dict[str, Any]:
    """Let ranks load a model in processes of their own, and return what each of them found."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [__file__, "--worker", folder, "--layers", str(layers), "--case", case]
        env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=folder)
    cases = [json.loads(text) for text in re.findall(r"^FOUND (.*)$", done.stdout, re.MULTILINE)]
    if done.returncode or not cases:
        sys.exit(f"the ranks did not come to their end:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    return cases[0]  # type: ignore[no-any-return]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--case", default=DRAWN, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        sys.path.remove(str(Path(__file__).parent))  # packaging.py here is not the library of that name
        worker(arguments.worker, arguments.layers, arguments.case)
    cases = [started(case, arguments.layers, arguments.ranks) for case in CASES]
    rows, gates = [], []
    for case in cases:
        ranks = case["ranks"]
        most = max(ranks, key=lambda each: each["peak"])
        limit = 1.3 * most["shard"] + most["tensor"]
        rows.append(
            (
                case["case"], f"{most['parameters']:,}", len(ranks), *(
                    f"{value / 1e6:,.0f}"
                    for value in (most["shard"], most["tensor"], most["peak"], limit, most["imports"])
                )
            )
        )  # fmt: skip
        gates.append((f"{case['case']}: peak, of 1.3 x shard + one tensor", most["peak"] / limit, 1.0))
    head = [
        "",
        "parameters",
        "ranks",
        "shard, MB",
        "largest tensor, MB",
        "peak of any rank, MB",
        "1.3 x shard + tensor, MB",
    ]
    body = table(rows, [*head, "imports, MB"])
    body += "\n\nThe whole model in float32 is the shard times the ranks."
    return report("model_start", "Host memory while a rank loads its shard", body, gates)


if __name__ == "__main__":
    sys.exit(main())
