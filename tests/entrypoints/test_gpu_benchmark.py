"""benchmarks/gpu.py in its CPU form: each contender trains the same model on the same tokens and is measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.timeout(2000)  # seven processes that import torch and compile
def test_the_cpu_form_of_the_gpu_benchmark_measures_every_contender() -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--cpu", "--json", "--rounds", "0", "--steps", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["contenders"]) == 7
    for name, figures in found["contenders"].items():
        assert {"start_s", "start_cpu_s", "step_s", "step_cpu_s", "peak_bytes", "tokens_per_s"} <= figures.keys(), name
        assert all(value > 0 for value in figures.values()), name
        assert figures["parameters"] == found["parameters"], f"{name} trains another model"
        assert "mfu" not in figures  # a CPU has no peak in the table
    assert found["forecast_bytes"] > 16 * found["parameters"]  # weights, gradients and AdamW's two moments
