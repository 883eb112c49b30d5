"""Environments of clouds' own SDKs: sagemaker<3 cannot be installed beside this project's pins, azure-ai-ml is of tests only.

Where one is not there and CLOUDTRAIN_REQUIRE lacks its word, tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.lab.environments import folder_of, make_environment

ROOT = Path(__file__).parents[2]
SDK = "sagemaker==2.257.7"
AZURE_SDK = "azure-ai-ml==1.35.2"
NEEDED = ["click", "pydantic", "PyYAML", "pathspec", "isal", "platformdirs"]  # by cloudtrain itself
TESTING = ["moto[server,s3]>=5.2", "pytest>=9"]  # by the simulator and the driver of sequences


def interpreter() -> Path:
    """Return the interpreter of the environment with sagemaker<3, made if it is required."""
    return _made(SDK, "sagemaker-sdk", [SDK, *NEEDED, *TESTING])


def azure_interpreter() -> Path:
    """Return the interpreter of the environment with azure-ai-ml alone, made if it is required."""
    return _made(AZURE_SDK, "azure-ai-ml", [AZURE_SDK])


def _made(sdk: str, word: str, packages: list[str]) -> Path:
    name = sdk.replace("==", "-")
    folder = folder_of(name, packages)
    if not (folder / "COMPLETE").exists() and word not in os.environ.get("CLOUDTRAIN_REQUIRE", "").split(","):
        pytest.skip(f"{sdk} is not installed in {folder} (CLOUDTRAIN_REQUIRE={word} does)")
    return make_environment(name, packages)


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
