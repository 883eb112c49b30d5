"""Ills of this machine, seeded for real: what measure.py reports of them is named right, and nothing else is."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher.health import figures, measure
from launcher.health.verdict import judge

from tests.conftest import WAIT_S
from tests.entrypoints.launcher.health.test_verdict import FAULTS, UPTIME_S, XID, report

PROGRAM = measure.__file__
# As nvidia-smi answers: a table of GPUs, a table of memory rows.
SMI = """#!/bin/sh
case "$1" in
*clocks_event_reasons*) {old} ;;
--query-gpu*) cat "{folder}/gpus" ;;
--query-remapped-rows*) cat "{folder}/rows" ;;
esac
"""
OLD = """echo 'Field "clocks_event_reasons.active" is not a valid field to query.'; exit 2"""
# The faults that nvidia-smi and the kernel's log show.
SHOWN = [name for name, (seed, _, _) in FAULTS.items() if name != "no answer" and {"smi", "xid"} & {
    key for key, value in report().items() if (changed := copy.deepcopy(report()), seed(changed)) and changed[key] != value}
]  # fmt: skip


def measured(folder: Path, *prefix: str, torch: bool = False, **env: str) -> dict:
    """Return the figures of a node: what measure.py prints in an environment, as a process of its own."""
    modules = folder / "modules"
    modules.mkdir(parents=True, exist_ok=True)
    if not torch:
        (modules / "torch.py").write_text("raise ImportError('there is none')")
    env = {"PYTHONPATH": str(modules), "WORLD_SIZE": "1", "PATH": f"{folder}:/usr/bin:/bin:/usr/sbin:/sbin", **env}
    done = subprocess.run(
        [*prefix, sys.executable, PROGRAM, "60"], capture_output=True, env=env, cwd=folder, timeout=WAIT_S, check=False
    )
    found = figures.read(done.stdout)
    assert found, done
    return found


def with_programs(folder: Path, data: dict, old: bool = False) -> dict:
    """Return the figures of a node whose nvidia-smi and dmesg print what a report has."""
    folder.mkdir()
    for name, text in data["smi"].items():
        (folder / name).write_text(text + "\n")
    # The kernel's times count from the machine's start, and so does measure.py's clock.
    shift = time.monotonic() - UPTIME_S
    lines = [XID.format(UPTIME_S - 300 + shift, 79 if " 79," in line else 94) for line in data["xid"]]
    (folder / "kernel").write_text("".join(f"{line}\n" for line in ["[    0.000000] Linux version 6.1", *lines]))
    programs = {
        "nvidia-smi": SMI.format(folder=folder, old=OLD if old else f'cat "{folder}/gpus"'),
        "dmesg": f'#!/bin/sh\ncat "{folder}/kernel"\n',
    }
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return measured(folder)


@pytest.mark.parametrize("name", SHOWN)
def test_what_nvidia_smi_and_the_kernel_show_is_named(name, tmp_path):
    seed, broken, text = FAULTS[name]
    sick = report()
    seed(sick)
    healthy = with_programs(tmp_path / "healthy", report(), old=True)
    assert len(healthy["gpus"]) == 4 and judge(dict.fromkeys(range(3), healthy)) == []
    found = judge({0: healthy, 1: with_programs(tmp_path / "sick", sick), 2: healthy})
    assert [(finding.node, finding.broken) for finding in found] == [(1, broken)] and text in found[0].text, found


def test_the_programs_show_many_faults():
    assert len(SHOWN) >= 13 and {"Xid 79", "too hot", "row waits", "ECC, without remapping", "lost"} <= {*SHOWN}


def test_a_quota_of_processors_is_named(tmp_path):
    """By a real control group of version 1 or 2."""
    root = next(
        (each for each in ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup") if os.access(f"{each}/cgroup.procs", os.W_OK)), None
    )
    if root is None:
        pytest.skip("control groups of processors cannot be made here")
    group = Path(root, f"cloudtrain-quota-{os.getpid()}")
    group.mkdir()
    try:
        if (group / "cpu.cfs_quota_us").exists():
            (group / "cpu.cfs_quota_us").write_text("40000")
        else:
            (group / "cpu.max").write_text("40000 100000")
        join = ("sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh")
        slow = measured(tmp_path / "slow", *join)
    finally:
        group.rmdir()
    healthy = measured(tmp_path / "healthy")
    assert slow["cpus"] == 0.4 and healthy["cpus"] >= 1
    [finding] = judge({0: healthy, 1: slow, 2: healthy})
    assert finding.node == 1 and finding.text.startswith("processors 0.4, on other nodes")


WRONG = """
import importlib.util, sys
from pathlib import Path
here = Path(__file__).parent
sys.path.remove(str(here))
del sys.modules["torch"]
import torch
right = torch.Tensor.__matmul__
def product(first, second):
    made = right(first, second)
    if made.shape[1] > 8:
        made[17, 3] += 2
    return made
torch.Tensor.__matmul__ = product
"""


@pytest.mark.train
def test_a_wrong_matrix_product_is_named(tmp_path):
    (tmp_path / "sick" / "modules").mkdir(parents=True)
    (tmp_path / "sick" / "modules" / "torch.py").write_text(WRONG)
    sick, healthy = measured(tmp_path / "sick", torch=True), measured(tmp_path / "healthy", torch=True)
    assert judge(dict.fromkeys(range(3), healthy)) == []
    broken = [finding for finding in judge({0: healthy, 1: sick, 2: healthy}) if finding.broken]
    assert [(finding.node, finding.text) for finding in broken] == [(1, "CPU: a matrix product was wrong")]
