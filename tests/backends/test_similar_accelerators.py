"""A mistyped GPU name gets a suggestion; a real one that no table has gets none."""

from __future__ import annotations

import pytest

from cloudtrain.backends.machines import similar_accelerator
from cloudtrain.runs.planning.plan import Planner


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("H1O0", "H100"),
        ("H10O", "H100"),
        ("A100-8OGB", "A100-80GB"),
        ("a10oo", "A100"),
        ("A1O", "A10"),
        ("L4S", "L40S"),
    ],
)
def test_a_mistyped_name(name: str, meant: str):
    assert similar_accelerator(name) == meant


@pytest.mark.parametrize(
    "name",
    ["H100", "h100", "A100", "A100-80GB", "A100-SXM4-80GB", "H100-SXM5", "NVIDIA-A100", "Tesla-T4", "V100-SXM2-32GB", "GH200",
     "H20", "H800", "A30", "RTX-A6000", "RTX-6000", "RTX4090", "RTX-5090", "MI300X", "T4", "any", "GPU"],
)  # fmt: skip
def test_a_real_name(name: str):
    assert similar_accelerator(name) == ""


def test_the_plan_says_it(tmp_path, home):
    (tmp_path / "train.py").write_text("print(1)")
    job = {"entrypoint": "train.py", "source": str(tmp_path), "resources": {"accelerators": "H1O0:2"}}
    assert any("did you mean H100?" in note for note in Planner("local").plan(job).notes)
