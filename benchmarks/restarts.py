"""How long two nodes take from a rank's death until their world is up again, beside `torchrun --max-restarts`.

    python benchmarks/restarts.py [rounds]

Above the script's own start: what a new interpreter, torch and the rendezvous take is in it with either launcher.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import ROOT, report, table

sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "entrypoints"))

from tests.entrypoints.launching import CLEAN, Attempt

SCRIPT = """\
import json, os, signal, time
began = time.time()
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
again = os.path.exists(os.environ["TIMES"] + ".died")  # torchrun counts restarts only on the node of the death
def note(**what):
    with open(os.environ["TIMES"], "a") as file:
        file.write(json.dumps({"again": again, **what}) + "\\n")
note(began=began, up=time.time())
dist.barrier()
if not again:
    if os.environ["RANK"] == "1":
        open(os.environ["TIMES"] + ".died", "w").close()
        note(died=time.time())
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()
dist.destroy_process_group()
"""


def ours(folder: Path, times: Path) -> None:
    with Attempt(folder, SCRIPT, nodes=2, restarts=1, environ={"TIMES": str(times)}) as attempt:
        assert attempt.run() == [0, 0], attempt.status()


def torchrun(folder: Path, times: Path) -> None:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    # More than one: the agent of the rank that lives counts the lost connection as a failure of its own, at times twice.
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1", "train.py"]
    env = {**CLEAN, "TIMES": str(times), "OMP_NUM_THREADS": "1"}
    agents = [subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [agent.wait(300) for agent in agents] == [0, 0]


def measure(times: Path) -> tuple[float, float]:
    """Return the seconds from the death until the world is up, and of them the script's own."""
    notes = [json.loads(line) for line in times.read_text().splitlines()]
    [died] = [note["died"] for note in notes if "died" in note]
    again = [note for note in notes if note["again"] and "up" in note]
    up = max(note["up"] for note in again)
    return up - died, up - min(note["began"] for note in again)


def main() -> int:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    found: dict[str, list[tuple[float, float]]] = {"cloudtrain": [], "torchrun": []}
    with tempfile.TemporaryDirectory() as name:
        for number in range(rounds):
            for launcher, start in (("cloudtrain", ours), ("torchrun", torchrun)):
                folder = Path(name) / f"{launcher}-{number}"
                times = Path(name) / f"{launcher}-{number}.times"
                start(folder, times)
                found[launcher].append(measure(times))
    over = {launcher: [whole - own for whole, own in pairs] for launcher, pairs in found.items()}
    rows = [
        (launcher, *(f"{statistics.median(values):.2f} s" for values in (*zip(*pairs, strict=True), over[launcher])))
        for launcher, pairs in found.items()
    ]
    body = table(rows, ["", "death to world", "of it the script's start", "above it"])
    gates = [("above the script's start", statistics.median(over["cloudtrain"]), 3.0)]
    return report("restarts", "Recovery from a rank's death on two nodes", f"{rounds} rounds\n\n{body}", gates)


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
