"""How much longer a start on many simulated nodes takes with the check of nodes than without, and the comparison alone.

    python benchmarks/health.py [nodes]

All nodes share this machine, so the check has no torch here: what is measured is the program's start on each node, the
channel and node 0's comparison. The comparison is of nodes of eight GPUs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from measure import ROOT, report, table

sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "entrypoints"))

from launcher.health import figures
from launcher.health.verdict import judge

from tests.entrypoints.launching import Attempt

GPU = "{}, NVIDIA H100 80GB HBM3, 550.54.15, Enabled, 0, 16, 0x0000000000000001, 00000000:{:02X}:00.0"


def start(folder: Path, nodes: int, health: str) -> float:
    """Return the seconds from the first launcher's start until all have ended."""
    modules = folder / "modules"
    modules.mkdir(parents=True)
    (modules / "torch.py").write_text("raise ImportError('there is none')")
    with Attempt(folder, "pass", nodes=nodes, environ={"PYTHONPATH": str(modules)}, health=health) as attempt:
        began = time.monotonic()
        codes = attempt.run()
        assert codes == [0] * nodes, attempt.status()
        assert len(attempt.events("health")) == (health == "strict")
        return time.monotonic() - began


def compare(nodes: int) -> float:
    device = {"name": "NVIDIA H100 80GB HBM3", "wrong": False, "tflops": 620.0, "memory": 2900.0, "host": 52.0}
    data = {
        "smi": {"gpus": "\n".join(GPU.format(index, index + 27) for index in range(8)), "rows": ""},
        "devices": [device] * 8,
        "link": {"wrong": False, "all": 40.0, "pair": 45.0},
    }
    output = b"\n" + figures.MARK + json.dumps(data).encode() + b"\n"
    began = time.process_time()
    assert judge({node: figures.read(output) for node in range(nodes)}) == []
    return time.process_time() - began


def main() -> int:
    nodes = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    with tempfile.TemporaryDirectory() as name:
        without, with_check = (start(Path(name) / health, nodes, health) for health in ("off", "strict"))
    compared = compare(nodes)
    rows = [("without", f"{without:.1f} s"), ("with", f"{with_check:.1f} s"), ("comparison", f"{compared:.2f} CPU s")]
    gates = [("more with the check", with_check - without, 5.0), ("comparison", compared, 1.0)]
    return report("health", f"The check of {nodes} simulated nodes", table(rows, ["", ""]), gates)


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
