"""An environment with sagemaker<3, which cannot be installed beside this project's other pins.

It is made once, below $XDG_CACHE_HOME. Where it is not there and CLOUDTRAIN_REQUIRE lacks sagemaker-sdk, tests are skipped.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SDK = "sagemaker==2.257.7"
NEEDED = ["click", "pydantic", "PyYAML", "pathspec", "isal", "platformdirs"]  # by cloudtrain itself
TESTING = ["moto[server,s3]>=5.2", "pytest>=9"]  # by the simulator and the driver of sequences


def interpreter() -> Path:
    """Return the interpreter of the environment, made if it is required."""
    packages = [SDK, *NEEDED, *TESTING]
    digest = hashlib.sha256(" ".join(packages).encode()).hexdigest()[:8]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "cloudtrain-tests"
    folder = cache / f"{SDK.replace('==', '-')}-py{sys.version_info[0]}{sys.version_info[1]}-{digest}"
    ready = folder / "COMPLETE"
    if not ready.exists() and "sagemaker-sdk" not in os.environ.get("CLOUDTRAIN_REQUIRE", "").split(","):
        pytest.skip(f"{SDK} is not installed in {folder} (CLOUDTRAIN_REQUIRE=sagemaker-sdk does)")
    cache.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            pip = [folder / "bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            subprocess.run([*pip, *packages], check=True, timeout=900)
            ready.touch()
    return folder / "bin/python"


def run(python: Path, *words: object, timeout_s: float = 270.0, **env: str) -> str:
    """Run a command of the environment over this source tree; return the last line of its output."""
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [python, *map(str, words)],
        env={**os.environ, **keys, **env},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout.splitlines()[-1]
