"""`cloudtrain eval` of a run of a real Slurm: the model is read in the shared folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.backends.evaluated import check_evaluation
from tests.lab.slurm import Slurm

pytestmark = [pytest.mark.train, pytest.mark.timeout(900), pytest.mark.usefixtures("census")]


def configure(slurm: Slurm, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the target `cluster`."""
    config = folder / "configuration"
    config.mkdir()
    options = {"backend": "slurm", "folder": str(slurm.shared), "python": sys.executable}
    lines = ["[targets.cluster]", *(f"{name} = {json.dumps(value)}" for name, value in options.items())]
    (config / "cloudtrain.toml").write_text("\n".join(lines) + "\n")
    monkeypatch.setenv("CLOUDTRAIN_CONFIG_HOME", str(config))


def test_the_model_is_read_in_the_shared_folder(slurm: Slurm, home: Path, tmp_path: Path, monkeypatch) -> None:
    configure(slurm, tmp_path, monkeypatch)
    check_evaluation(tmp_path, home, "cluster", f"{slurm.shared}/runs/RUN/model")
