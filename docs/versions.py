"""The versions that the shared trainer runs with, on CPU with gloo: the table in docs/tables-evidence.md.

python docs/versions.py --run    make the environments in build/versions (several GB each, one after the other), and train with every
                                 strategy in each: losses must be those of one process, within 1e-5
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import venv
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "docs" / "versions.json"
FOLDER = ROOT / "build" / "versions"
# What goes with transformers 4 is older than the newest.
OLD = ("huggingface_hub<1.0", "datasets<4.2", "numpy<2.4")
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "old": ("torch==2.8.0", "transformers==4.56.2", "accelerate==1.10.1", "deepspeed==0.19.8", *OLD),
    "middle": ("torch==2.9.0", "transformers==5.3.0", "accelerate==1.12.0", "deepspeed==0.19.8", "datasets==5.2.0"),
}
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "none": (1, {}),
    "ddp": (2, {"strategy": "ddp"}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "hsdp": (4, {"strategy": "hsdp", "dp_replicate_size": 2}),
    "zero1": (2, {"strategy": "zero1"}),
    "zero2": (2, {"strategy": "zero2"}),
    "zero3": (2, {"strategy": "zero3"}),
    "tp": (2, {"tp_size": 2}),
}
WORDS = [
    "--tokenizer",
    "bpe:300",
    "--hidden_size",
    "32",
    "--num_hidden_layers",
    "2",
    "--num_attention_heads",
    "2",
    "--block_size",
    "16",
    "--learning_rate",
    "5e-3",
    "--logging_steps",
    "1",
    "--dropout",
    "0",
    "--sample_tokens",
    "4",
    "--max_steps",
    "8",
    "--max_grad_norm",
    "0.5",
    "--max_eval_samples",
    "13",
    "--save_steps",
    "4",
    "--dataset",
    "python-stdlib",
    "--max_train_bytes",
    "30000",
    "--gradient_checkpointing",
]
CLOSE = 1e-5


def environment(name: str) -> Path:
    """Return the Python of an environment, made where it is not there yet."""
    folder, wanted = FOLDER / name, "\n".join(ENVIRONMENTS[name])
    python, made = folder / "bin" / "python", folder / "requirements"
    if not made.exists() or made.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "psutil", *ENVIRONMENTS[name]], check=True)
        made.write_text(wanted)
    return python


def train(python: Path, folder: Path, world: int, parallelism: dict[str, Any], *more: str) -> list[str]:
    """Train with so many ranks and return the log of each, its exit code last."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    ranks = []
    for rank in range(world):
        env = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
            "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
            "CLOUDTRAIN_PARALLELISM": json.dumps(parallelism),
            **{f"CLOUDTRAIN_{kind}_DIR": str(folder / kind) for kind in ("CHECKPOINT", "OUTPUT", "MODEL")},
        }  # fmt: skip
        script = str(ROOT / "entrypoints" / "train.py")
        command = [python, script, *WORDS, "--per_device_train_batch_size", str(4 // world), *more]
        log = (folder / f"{rank}.log").open("w")
        ranks.append((subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=subprocess.STDOUT), log.name))
    codes = [process.wait(600) for process, _ in ranks]
    return [
        f"{Path(log).read_text(errors='replace')}\nexit {code}" for (_, log), code in zip(ranks, codes, strict=True)
    ]


def losses(log: str) -> dict[int, float]:
    """Return the losses of each step."""
    rows = [json.loads(line[14:]) for line in log.splitlines() if line.startswith("::cloudtrain::")]
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "metric" and "loss" in row}


def outcome(python: Path, folder: Path, name: str, one: dict[int, float]) -> tuple[str, dict[int, float]]:
    """Train with a strategy, and again for more steps from its last checkpoint; return what came of it."""
    world, parallelism = STRATEGIES[name]
    logs = train(python, folder, world, parallelism)
    codes = {log.rpartition("exit ")[2] for log in logs}
    refusal = [line.removeprefix("train.py: ") for line in logs[0].splitlines() if line.startswith("train.py: ")]
    if codes == {"78"}:
        return f"refused: {refusal[0]}", {}
    found = losses(logs[0])
    if codes != {"0"} or len(found) != 8:
        return f"failed: {logs[0][-1500:]}", {}
    apart = max(abs(found[step] - loss) for step, loss in (one or found).items())
    (resumed, *_) = train(python, folder, world, parallelism, "--max_steps", "10")
    if "resumed from" not in resumed or not resumed.endswith("exit 0") or sorted(losses(resumed)) != [9, 10]:
        return f"failed to resume: {resumed[-1500:]}", found
    return ("ok" if apart <= CLOSE else "differs") + f", {apart:.1e}", found


def run() -> int:
    """Run all strategies in all environments, and note what came of them; returns 1 where one failed."""
    found: dict[str, Any] = {}
    for name in ENVIRONMENTS:
        python, one = environment(name), dict[int, float]()
        rows: dict[str, str] = {}
        for strategy in STRATEGIES:
            with tempfile.TemporaryDirectory() as folder:
                rows[strategy], loss = outcome(python, Path(folder), strategy, one)
            one = one or loss
            sys.stdout.write(f"{name}: {strategy}: {rows[strategy]}\n")
            sys.stdout.flush()
        libraries = dict(each.split("==") for each in ENVIRONMENTS[name] if "==" in each)
        found[name] = {"versions": libraries, "outcomes": rows, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    FIGURES.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    everything = [outcome for each in found.values() for outcome in each["outcomes"].values()]
    return int(any(outcome.startswith(("failed", "differs")) for outcome in everything))


def table() -> list[str]:
    """Return the table's lines."""
    found: dict[str, Any] = json.loads(FIGURES.read_text("utf-8"))
    rows = ["| versions | strategy: largest difference of a loss from one process | refused | on |"]
    rows.append("| --- | --- | --- | --- |")
    for each in found.values():
        versions = ", ".join(f"{name} {version}" for name, version in each["versions"].items())
        good = [f"{name} {text.partition(', ')[2]}" for name, text in each["outcomes"].items() if text.startswith("ok")]
        other = [f"{name}: {text.partition(': ')[2]}" for name, text in each["outcomes"].items() if text[:2] != "ok"]
        rows.append(f"| {versions} | {', '.join(good)} | {'; '.join(other)} | {each['date']} |")
    return rows


if __name__ == "__main__":
    if "--run" not in sys.argv:
        sys.exit(__doc__)
    sys.exit(run())
